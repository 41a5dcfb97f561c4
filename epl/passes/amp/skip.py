"""Skip: a step whose gradients are not finite leaves every variable as it was."""

from typing import Dict, List, Set

from tensorflow.core.framework import types_pb2

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import Builder
from epl.ir.endings import FENCE
from epl.ir.program import APPLY, FORWARD, Node, Program, Ref
from epl.passes.amp.casts import PREFIX
from epl.passes.amp.scale import FINITE
from epl.passes.base import Pass
from epl.passes.effects import assign_variable, read_variable
from epl.passes.instances import instance_name, instances_at
from epl.passes.rewire import add_controls
from epl.planner.plan import Task


class Skip(Pass):
    """Let what is after the gradients write only where the flag of its replica is set.

    The writers are given a reference or handle that is there only then (Switch), and what
    waits for one waits for a node that runs in both cases (Merge). What was written before
    the gradients were known, such as batch statistics, is written back.

    Runs after the passes that make nodes wait for writers.
    """

    name = "skip"

    def run(self, program: Program, task: Task) -> Program:
        flags = {node.replica: node.name for node in program.nodes.values() if node.origin == FINITE}
        if not flags:
            return program
        return _Skip(program, task, flags).run()


class _Skip:
    def __init__(self, program: Program, task: Task, flags: Dict[int, str]):
        self._program = program
        self._task = task
        self._flags = flags
        self._nodes = dict(program.nodes)
        self._ends: Dict[str, str] = {}
        self._values: Dict[Ref, Ref] = {}
        self._made: Set[str] = set()

    def run(self) -> Program:
        program, facts = self._program, self._program.facts
        earlier: Dict[str, List[Node]] = {}
        for node in program.nodes.values():
            if node.origin not in facts.writes or node.op.startswith(op_table.PSEUDO):
                continue
            if node.phase == APPLY:
                self._guard(node)
            else:
                for variable in facts.writes[node.origin]:
                    earlier.setdefault(instance_name(variable, node.replica, None), []).append(node)
        for name, node in list(self._nodes.items()):
            if name not in self._made:
                inputs = [self._values.get(ref, ref) for ref in node.inputs]
                self._nodes[name] = node.replace(inputs=inputs, controls=tuple(dict.fromkeys(self._ends.get(c, c) for c in node.controls)))
        targets = [self._ends.get(target, target) for target in program.targets]
        targets += [self._restore(variable, writers) for variable, writers in earlier.items()]
        fetches = [self._values.get(ref, ref) for ref in program.fetches]
        return program.replace(nodes=self._nodes, targets=targets, fetches=fetches)

    def _guard(self, node: Node) -> None:
        name = PREFIX + "skip/" + node.name
        build = Builder(self._nodes, node.device, APPLY)
        flag = self._flag(node)
        before = set(self._nodes)
        position = op_table.written_inputs(self._program, node)[0]
        state = node.inputs[position]
        kind = op_table.dtype_of(self._program, *state)
        reference, dtype = kind != types_pb2.DT_RESOURCE, A.of_type(kind)
        switch = build.op("RefSwitch" if reference else "Switch", name + "/state", [state, (flag, 0)], T=dtype)[0]
        inputs = list(node.inputs)
        inputs[position] = switch, 1
        self._nodes[node.name] = node.replace(inputs=inputs)
        # Both are of the branch that the writer is in: where that is not taken, nothing that waits for it runs either.
        done = build.op("Identity", name + "/done", [(switch, 1)], [node.name], T=dtype)
        skipped = build.op("Identity", name + "/skipped", [(switch, 0)], T=dtype)
        end = build.op("Merge", name + "/end", [skipped, done], T=dtype, N=A.of_int(2))[0]
        self._ends[node.name] = self._ends[node.name + FENCE] = end
        if reference and op_table.is_handle(node, 0, self._program):
            self._values[node.name, 0] = build.op("RefMerge", name + "/value", [(switch, 0), (node.name, 0)], T=dtype, N=A.of_int(2))
        self._made |= self._nodes.keys() - before

    def _restore(self, variable: str, writers: List[Node]) -> str:
        """Write a variable back after all that writes it before the gradients are known; returns the last node."""
        program, task = self._program, self._task
        held = self._nodes[variable]
        name = PREFIX + "restore/" + variable
        build = Builder(self._nodes, held.device, FORWARD)
        before = read_variable(build, name + "/before", held, [])
        ends: Dict[str, None] = {}
        for node in writers:
            for entry in self._entries(node):
                add_controls(self._nodes, entry, [before[0]])
            ends.update(dict.fromkeys(instances_at(program, task, node, program.facts.endings.done(node.origin))))
        for node in program.nodes.values():
            # The mean of the replicas is assigned by a node of EPL's.
            if not node.origin and any(node.inputs[i] == (variable, 0) for i in op_table.written_inputs(program, node)):
                add_controls(self._nodes, node.name, [before[0]])
                ends[node.name] = None
        reference = held.op in op_table.REF_VARIABLES
        dtype = A.of_type(op_table.dtype_of(program, variable, 0))
        flag = self._flag(held)
        switch = build.op("RefSwitch" if reference else "Switch", name + "/state", [(variable, 0), (flag, 0)], T=dtype)[0]
        back = assign_variable(build, name + "/assign", held.replace(name=switch), before, list(ends))
        skipped = build.op("Identity", name + "/done", [(switch, 0)], [back], T=dtype)
        kept = build.op("Identity", name + "/kept", [(switch, 1)], list(ends), T=dtype)
        return build.op("Merge", name + "/end", [kept, skipped], T=dtype, N=A.of_int(2))[0]

    def _flag(self, node: Node) -> str:
        """All replicas find the same; where one is fetched, one alone is computed."""
        return self._flags.get(node.replica) or self._flags[min(self._flags)]

    def _entries(self, node: Node) -> List[str]:
        """Where a writer can be made to wait: itself, or the entries of the loop that it is in."""
        frames = self._program.facts.frames
        if node.origin not in frames:
            return [node.name]
        key = (frames[node.origin], node.replica, node.micro_batch)
        inside = [n for n in self._program.nodes.values() if n.origin in frames and (frames[n.origin], n.replica, n.micro_batch) == key]
        names = {n.name for n in inside}
        return [n.name for n in inside if n.op in op_table.ENTERS and all(source not in names for source, _ in n.inputs)]


