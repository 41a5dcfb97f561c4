"""Effects: in which order variables are read and written, and how replicas stay equal."""

from typing import Any, Dict, List, Sequence, Set, Tuple

from tensorflow.core.framework import types_pb2

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import Builder
from epl.ir.program import APPLY, FORWARD, Node, Program, Ref
from epl.passes.base import Pass
from epl.passes.cut import TRANSFERS
from epl.passes.instances import instance_name, instances_at
from epl.passes.rewire import add_controls
from epl.planner.plan import Task


class Order(Pass):
    """An update waits until the step's forward and backward reads of the variable are done.

    Plain TensorFlow races there with reference variables, and can return a loss that was
    computed from updated weights.

    What is assigned once in a step without a gradient, such as a script's own step counter,
    waits for what reads it once and does not ask for the new value, such as a learning rate:
    plain TensorFlow leaves that open too, but reads first in practice.
    """

    name = "order"

    def run(self, program: Program, task: Task) -> Program:
        if not task.parallel:
            return program
        writers: Dict[str, List[str]] = {}
        readers: Dict[str, List[str]] = {}
        earlier: Dict[str, List[str]] = {}
        once: Dict[str, List[str]] = {}
        for node in program.nodes.values():
            if not _is_instance(node):
                continue
            single = node.origin not in program.facts.batch and node.origin not in program.facts.frames
            if node.phase != APPLY:
                for variable in program.facts.variables_of.get(node.origin, ()):
                    name = instance_name(variable, node.replica, None)
                    readers.setdefault(name, []).append(node.name)
                    if single and variable in program.facts.writes.get(node.origin, ()):
                        earlier.setdefault(name, []).append(node.name)
                    elif single:
                        once.setdefault(name, []).append(node.name)
            elif node.origin in program.facts.writes:
                for variable in program.facts.writes[node.origin]:
                    writers.setdefault(instance_name(variable, node.replica, None), []).append(node.name)
        program = self._read_first(program, task, earlier, once) if earlier else program
        if not writers:
            return program
        after = _descendants(program, [w for names in writers.values() for w in names])
        nodes = dict(program.nodes)
        fetches = _copied_fetches(program, nodes, set(writers), after, readers)
        for variable, names in writers.items():
            waits: Dict[str, None] = {}
            for reader in readers.get(variable, ()):
                waits.update(dict.fromkeys(self._ends(program, task, reader)))
            free = [w for w in waits if w not in after]
            if free:
                for name in names:
                    if program.nodes[name].origin not in program.facts.frames:
                        add_controls(nodes, name, free)
        return program.replace(nodes=nodes, fetches=fetches)

    def _read_first(self, program: Program, task: Task, writers: Dict[str, List[str]], readers: Dict[str, List[str]]) -> Program:
        """Let what is assigned before the gradients are known wait for the single reads that do not ask for it."""
        after = _descendants(program, [name for names in writers.values() for name in names])
        nodes = dict(program.nodes)
        for variable, names in writers.items():
            waits = [end for reader in readers.get(variable, ()) if reader not in after for end in self._ends(program, task, reader)]
            free = [end for end in dict.fromkeys(waits) if end not in after and program.nodes[end].phase != APPLY]
            for name in names:
                add_controls(nodes, name, free)
        return program.replace(nodes=nodes)

    @staticmethod
    def _ends(program: Program, task: Task, reader: str) -> List[str]:
        """The nodes after which a read has no more claim on the variable's buffer."""
        node = program.nodes.get(reader)
        if node is None:
            return [reader]  # the copy of a fetched value
        ends = instances_at(program, task, node, program.facts.endings.released(node.origin))
        # A merge of instances reads the buffers that they return.
        merges = [c for c, _ in program.consumers.get(reader, ()) if program.nodes[c].op.startswith(op_table.PSEUDO)]
        return ends + merges if node.op in op_table.ALIASES else ends


class Guard(Pass):
    """Hang every change of state in a training program behind the gate of the step."""

    name = "guard"

    def run(self, program: Program, task: Task) -> Program:
        gate = program.agreement.gate if program.agreement else None
        if gate is None:
            return program
        nodes = dict(program.nodes)
        for node in program.nodes.values():
            # The other side of a transfer does not take part in a step for which some input has ended.
            if node.op in TRANSFERS:
                add_controls(nodes, node.name, [gate])
        earlier = program.ancestors([gate])
        loops = _written_loops(program)
        for node in program.nodes.values():
            if not node.origin or node.name in earlier:
                continue
            frame = _frame(program, node)
            if frame is None:
                waits = op_table.writes(program, node)
            else:
                # Nothing outside a loop may be waited for inside it: the loop is not entered before.
                waits = frame in loops and node.op in op_table.ENTERS and all(_frame(program, program.nodes[s]) != frame for s, _ in node.inputs)
            if waits:
                add_controls(nodes, node.name, [gate])
        return program.replace(nodes=nodes)


def _written_loops(program: Program) -> Set[object]:
    """The loops in which variables are written."""
    return {_frame(program, n) for n in program.nodes.values() if n.origin in program.facts.frames and op_table.writes(program, n)}


class Statistics(Pass):
    """Variables written in the forward pass are equal on all replicas after the step."""

    name = "statistics"

    def run(self, program: Program, task: Task) -> Program:
        if not task.parallel or task.plan.replicas == 1:
            return program
        nodes = dict(program.nodes)
        facts = program.facts
        writers: Dict[str, List[Node]] = {}
        for node in program.nodes.values():
            if _is_instance(node) and node.phase != APPLY:
                for variable in facts.writes.get(node.origin, ()):
                    writers.setdefault(variable, []).append(node)
        readers: Dict[str, List[Node]] = {}
        updates: Dict[str, List[Node]] = {}
        for node in program.nodes.values():
            if _is_instance(node):
                for variable in writers.keys() & facts.variables_of.get(node.origin, ()):
                    if node.phase != APPLY:
                        readers.setdefault(variable, []).append(node)
                    elif variable in facts.writes.get(node.origin, ()):
                        updates.setdefault(variable, []).append(node)
        effects: List[str] = []
        for variable in writers:
            assigned = self._average(program, task, nodes, variable, writers[variable], readers[variable])
            effects.extend(assigned)
            after = _descendants(program, [n.name for n in updates.get(variable, ())])
            if after.isdisjoint(n.name for n in readers[variable]):
                for node in updates.get(variable, ()):
                    add_controls(nodes, node.name, assigned)
        return program.replace(nodes=nodes, targets=program.targets + tuple(effects))

    @staticmethod
    def _average(program: Program, task: Task, nodes: Dict[str, Node], variable: str, writers: List[Node], readers: List[Node]) -> List[str]:
        """Average a variable over all replicas; what lanes hold parts of, lane by lane."""
        dtype = variable_dtype(program.nodes[instance_name(variable, writers[0].replica, None)])
        if dtype not in op_table.FLOATS:
            return []
        taskgraph, plan = writers[0].taskgraph, task.plan
        form = (program.held or {}).get(variable)
        if form is None:
            info: Dict[str, Any] = {"dtype": dtype, "taskgraph": taskgraph}
            root = task.first_holder(taskgraph)
            return _averaged(program, task, nodes, variable, (writers, readers), task.holding(taskgraph), task.group(taskgraph), root, info)
        effects: List[str] = []
        for lane in range(plan.lanes if form.is_sharded else 1):
            replicas, group = task.lanes_here(taskgraph, lane), plan.peers(lane, taskgraph)
            if replicas:
                info = {"dtype": dtype, "taskgraph": taskgraph, "ranks": group}
                root = plan.process(lane, taskgraph)
                effects += _averaged(program, task, nodes, variable, (writers, readers), replicas, group, root, info)
        return effects


def _averaged(
    program: Program,
    task: Task,
    nodes: Dict[str, Node],
    variable: str,
    accesses: Tuple[List[Node], List[Node]],
    replicas: List[int],
    group: Sequence[int],
    root: int,
    info: Dict[str, Any],
) -> List[str]:
    """Give copies of a variable their mean, or the first one's value.

    Args:
      accesses: what writes it, and what reads it.
      replicas: the local ones with a copy. group: the processes with copies; root: the one with the first.
      info: for collectives among them.
    """
    writers, readers = accesses
    endings, dtype, taskgraph = program.facts.endings, info["dtype"], info["taskgraph"]
    lane = "/lane_%d" % task.lane(replicas[0]) if "ranks" in info else ""
    base = "epl_statistics/" + variable + lane
    values: List[Ref] = []
    waits: List[List[str]] = []
    for replica in replicas:
        name = instance_name(variable, replica, None)
        done = [e for w in writers if w.replica == replica for e in instances_at(program, task, w, endings.done(w.origin))]
        build = Builder(nodes, task.device_of(replica, taskgraph), FORWARD)
        values.append(read_variable(build, "%s/read_%d" % (base, replica), program.nodes[name], list(dict.fromkeys(done))))
        # Reads of the step must see the replica's own value, not the average.
        ends = [e for r in readers if r.replica == replica for e in instances_at(program, task, r, endings.released(r.origin))]
        waits.append(list(dict.fromkeys([values[-1][0]] + ends)))
    build = Builder(nodes, task.device_of(replicas[0], taskgraph), FORWARD)
    gate = [program.agreement.gate] if program.agreement and program.agreement.gate else []
    several = len(group) > 1
    if task.plan.statistics_reduce == "first":
        value = values[0]
        if several:
            value = build.op("EplBroadcast", base + "/first", [value], gate, info=dict(info, root=root))
    else:
        value = build.add_n(base + "/sum", values, dtype)
        factor = (task.plan.lanes if lane else 1.0) / task.plan.replicas
        if several:
            value = build.op("EplAllReduce", base + "/mean", [value], gate, info=dict(info, scale=factor))
        else:
            value = build.scale(base + "/mean", value, factor, dtype)
    effects = []
    for place, replica in enumerate(replicas):
        name = instance_name(variable, replica, None)
        build = Builder(nodes, task.device_of(replica, taskgraph), FORWARD)
        effects.append(assign_variable(build, "%s/assign_%d" % (base, replica), program.nodes[name], value, waits[place]))
    return effects


def read_variable(build: Builder, name: str, variable: Node, controls: List[str]) -> Ref:
    """The value of a variable node, reference or resource, after the given nodes; read on its device."""
    dtype = variable_dtype(variable)
    build = build.at(variable.device)
    if variable.op == "VarHandleOp":
        return build.read(name, (variable.name, 0), dtype, controls)
    # A reference shares the buffer, which may be written later: it is copied.
    return build.op("Snapshot", name, [(variable.name, 0)], controls, T=A.of_type(dtype))


def assign_variable(build: Builder, name: str, variable: Node, value: Ref, controls: List[str]) -> str:
    """Assign to a variable node, reference or resource, on its device; returns the new node."""
    dtype = variable_dtype(variable)
    build = build.at(variable.device)
    if variable.op == "VarHandleOp":
        return build.assign(name, (variable.name, 0), value, dtype, controls)
    build.op(
        "Assign", name, [(variable.name, 0), value], controls, T=A.of_type(dtype), validate_shape=A.of_bool(False), use_locking=A.of_bool(True)
    )
    return name


def variable_dtype(variable: Node) -> int:
    """The dtype of a variable node's value."""
    found = variable.attr("dtype")
    return int(found.type) if found is not None else types_pb2.DT_FLOAT


def _copied_fetches(program: Program, nodes: Dict[str, Node], written: Set[str], after: Set[str], readers: Dict[str, List[str]]) -> List[Ref]:
    """Fetches with the values that reference variables have before the update.

    What a fetch of such a variable returns is its buffer, which may have been written by
    the time it is looked at: it is copied first. The copies are added to the readers.
    """
    fetches: List[Ref] = []
    for ref in program.fetches:
        node = program.nodes[ref[0]]
        source = node
        while source.op in op_table.ALIASES and source.inputs:
            source = program.nodes[source.inputs[0][0]]
        name = op_table.variable_of(program, source.name)
        variable = program.nodes.get(name) if name in written and ref[0] not in after else None
        if variable is None or variable.op not in op_table.REF_VARIABLES or variable_dtype(variable) in op_table.OPAQUE or node.phase == APPLY:
            fetches.append(ref)
            continue
        copy = "epl_fetch/%s_%d" % ref
        if copy not in nodes:
            Builder(nodes, node.device, FORWARD).op("Snapshot", copy, [ref], T=A.of_type(op_table.dtype_of(program, *ref)))
            readers.setdefault(variable.name, []).append(copy)
        fetches.append((copy, 0))
    return fetches


def _is_instance(node: Node) -> bool:
    """False for what EPL added, for example a merge of the instances of a node."""
    return bool(node.origin) and not node.op.startswith(op_table.PSEUDO)


def _frame(program: Program, node: Node) -> object:
    frame = program.facts.frames.get(node.origin) if node.origin else None
    return None if frame is None else (frame, node.replica, node.micro_batch)


def _descendants(program: Program, names: List[str]) -> Set[str]:
    seen = set(names)
    stack = list(names)
    while stack:
        for consumer, _ in program.consumers.get(stack.pop(), ()):
            if consumer not in seen:
                seen.add(consumer)
                stack.append(consumer)
    return seen
