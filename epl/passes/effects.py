"""Effects: in which order variables are read and written, and how replicas stay equal."""

from typing import Dict, List, Set

from tensorflow.core.framework import types_pb2

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import Builder
from epl.ir.program import APPLY, FORWARD, Node, Program, Ref
from epl.passes.base import Pass
from epl.passes.clone import instance_name
from epl.passes.rewire import add_controls
from epl.planner.plan import Task


class Order(Pass):
    """An update waits until the step's forward and backward reads of the variable are done.

    Plain TensorFlow races there with reference variables, and can return a loss that was
    computed from updated weights.
    """

    name = "order"

    def run(self, program: Program, task: Task) -> Program:
        if not task.parallel:
            return program
        variables = _instance_variables(program)
        writers: Dict[str, List[str]] = {}
        readers: Dict[str, List[str]] = {}
        for name, touched in variables.items():
            node = program.nodes[name]
            for variable in touched:
                if node.phase == APPLY and op_table.writes(program, node):
                    writers.setdefault(variable, []).append(name)
                elif node.phase != APPLY:
                    readers.setdefault(variable, []).append(name)
        if not writers:
            return program
        after = _descendants(program, [w for names in writers.values() for w in names])
        exits = _frame_exits(program)
        nodes = dict(program.nodes)
        for variable, names in writers.items():
            waits: Dict[str, None] = {}
            for reader in readers.get(variable, ()):
                waits.update((r, None) for r in self._ends(program, reader, exits))
            free = [w for w in waits if w not in after]
            if free:
                for name in names:
                    if program.nodes[name].origin not in program.facts.frames:
                        add_controls(nodes, name, free)
        return program.replace(nodes=nodes)

    def _ends(self, program: Program, reader: str, exits: Dict[str, List[str]]) -> List[str]:
        """The nodes after which a read has no more claim on the variable's buffer."""
        node = program.nodes[reader]
        frame = _frame(program, node)
        if frame is not None and node.op not in op_table.EXITS:
            return exits.get(frame, [])
        if node.op in op_table.PASS_THROUGH and node.inputs:
            # The output of such an op is the buffer itself: its users must be done.
            ends: List[str] = []
            for consumer, index in program.consumers.get(reader, ()):
                other = program.nodes[consumer]
                if index < 0 or other.phase == APPLY:
                    continue
                inner = _frame(program, other)
                ends.extend(exits.get(inner, []) if inner is not None and other.op not in op_table.EXITS else [consumer])
            return ends
        return [reader]


class Guard(Pass):
    """Hang every change of state in a training program behind the gate of the step."""

    name = "guard"

    def run(self, program: Program, task: Task) -> Program:
        gate = program.agreement.gate if program.agreement else None
        if gate is None:
            return program
        nodes = dict(program.nodes)
        for node in program.nodes.values():
            if node.origin and op_table.writes(program, node) and node.origin not in program.facts.frames:
                add_controls(nodes, node.name, [gate])
        return program.replace(nodes=nodes)


class Statistics(Pass):
    """Variables written in the forward pass are equal on all replicas after the step."""

    name = "statistics"

    def run(self, program: Program, task: Task) -> Program:
        if not task.parallel or task.plan.replicas == 1:
            return program
        nodes = dict(program.nodes)
        written = self._written(program)
        effects: List[str] = []
        for variable, writers in written.items():
            effects.extend(self._average(program, task, nodes, variable, writers))
        return program.replace(nodes=nodes, targets=program.targets + tuple(effects))

    @staticmethod
    def _written(program: Program) -> Dict[str, List[str]]:
        written: Dict[str, List[str]] = {}
        for node in program.nodes.values():
            if node.phase == APPLY or not node.origin or node.origin not in program.facts.variables_of:
                continue
            if op_table.writes_state(node.op):
                written.setdefault(program.facts.variables_of[node.origin][0], []).append(node.name)
        return written

    def _average(self, program: Program, task: Task, nodes: Dict[str, Node], variable: str, writers: List[str]) -> List[str]:
        handle = program.nodes[instance_name(variable, 0, None)]
        dtype = _variable_dtype(handle)
        if dtype not in op_table.FLOATS or any(program.nodes[w].origin in program.facts.frames for w in writers):
            return []
        base = "epl_statistics/" + variable
        values: List[Ref] = []
        readers: Dict[int, List[str]] = {}
        for replica in range(task.local_replicas):
            name = instance_name(variable, replica, None)
            own = [w for w in writers if program.nodes[w].replica == replica]
            build = Builder(nodes, task.devices[replica], FORWARD)
            values.append(read_variable(build, "%s/read_%d" % (base, replica), program.nodes[name], own))
            readers[replica] = [values[-1][0]] + self._readers(program, variable, replica, writers)
        build = Builder(nodes, task.devices[0], FORWARD)
        gate = [program.agreement.gate] if program.agreement and program.agreement.gate else []
        if task.plan.statistics_reduce == "first":
            value = values[0]
            if task.ranks > 1:
                value = build.op("EplBroadcast", base + "/first", [value], gate, info={"dtype": dtype, "root": 0})
        else:
            value = build.add_n(base + "/sum", values, dtype)
            factor = 1.0 / task.plan.replicas
            if task.ranks > 1:
                value = build.op("EplAllReduce", base + "/mean", [value], gate, info={"dtype": dtype, "scale": factor})
            else:
                value = build.scale(base + "/mean", value, factor, dtype)
        effects = []
        for replica in range(task.local_replicas):
            name = instance_name(variable, replica, None)
            build = Builder(nodes, task.devices[replica], FORWARD)
            effects.append(assign_variable(build, "%s/assign_%d" % (base, replica), program.nodes[name], value, readers[replica]))
        return effects

    @staticmethod
    def _readers(program: Program, variable: str, replica: int, writers: List[str]) -> List[str]:
        """Reads of the step must see the replica's own value, not the average."""
        found: List[str] = []
        after = _descendants(program, writers)
        for node in program.nodes.values():
            if node.origin in program.facts.frames or node.phase == APPLY or node.replica != replica:
                continue
            if variable in program.facts.variables_of.get(node.origin, ()) and node.name not in after:
                found.append(node.name)
        return found


def read_variable(build: Builder, name: str, variable: Node, controls: List[str]) -> Ref:
    """The value of a variable node, reference or resource, after the given nodes; read on its device."""
    dtype = _variable_dtype(variable)
    build = build.at(variable.device)
    if variable.op == "VarHandleOp":
        return build.read(name, (variable.name, 0), dtype, controls)
    # A reference shares the buffer; adding zero copies what it holds now.
    zero = build.const(name + "/zero", 0, dtype)
    return build.op("AddV2", name, [(variable.name, 0), zero], controls, T=A.of_type(dtype))


def assign_variable(build: Builder, name: str, variable: Node, value: Ref, controls: List[str]) -> str:
    """Assign to a variable node, reference or resource, on its device; returns the new node."""
    dtype = _variable_dtype(variable)
    build = build.at(variable.device)
    if variable.op == "VarHandleOp":
        return build.assign(name, (variable.name, 0), value, dtype, controls)
    build.op(
        "Assign", name, [(variable.name, 0), value], controls, T=A.of_type(dtype), validate_shape=A.of_bool(False), use_locking=A.of_bool(True)
    )
    return name


def _variable_dtype(variable: Node) -> int:
    found = variable.attr("dtype")
    return int(found.type) if found is not None else types_pb2.DT_FLOAT


def _instance_variables(program: Program) -> Dict[str, List[str]]:
    """Instance that is given variables -> those variables' instances."""
    found: Dict[str, List[str]] = {}
    for node in program.nodes.values():
        variables = program.facts.variables_of.get(node.origin, ()) if node.origin else ()
        if variables:
            found[node.name] = [instance_name(v, node.replica, None) for v in variables]
    return found


def _frame(program: Program, node: Node) -> object:
    frame = program.facts.frames.get(node.origin) if node.origin else None
    return None if frame is None else (frame, node.replica, node.micro_batch)


def _frame_exits(program: Program) -> Dict[object, List[str]]:
    exits: Dict[object, List[str]] = {}
    for node in program.nodes.values():
        if node.op in op_table.EXITS:
            exits.setdefault(_frame(program, node), []).append(node.name)
    return exits


def _descendants(program: Program, names: List[str]) -> Set[str]:
    seen = set(names)
    stack = list(names)
    while stack:
        for consumer, _ in program.consumers.get(stack.pop(), ()):
            if consumer not in seen:
                seen.add(consumer)
                stack.append(consumer)
    return seen
