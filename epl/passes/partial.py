"""Partial: a run of a training step that only accumulates.

When a step spans several consecutive runs, all but the last change no variable of the
user's: what is after the gradients is taken away. A fetch that depends on it still
gets a value, computed from this run's own gradients and the unchanged variables.
"""

from typing import Dict, List, Set

from epl.ir import op_table
from epl.ir.effectless import Effectless
from epl.ir.program import APPLY, Node, Program, Ref
from epl.passes.base import Pass
from epl.passes.clone import AGGREGATE
from epl.planner.plan import FIRST, MIDDLE, Task


class Partial(Pass):
    """Take the updates out of a run that is not the last one of its step.

    Runs before the gradients pass. The aggregates of the apply phase stay as targets
    so that they are accumulated.
    """

    name = "partial"

    def run(self, program: Program, task: Task) -> Program:
        if task.part not in (FIRST, MIDDLE):
            return program
        nodes = dict(program.nodes)
        aggregates = [n.name for n in program.nodes.values() if n.op == AGGREGATE]
        needed = program.ancestors(aggregates)
        updates = [n for n in program.nodes.values() if n.name not in needed and self._once_per_step(program, n)]
        writers = [n for n in updates if op_table.writes(program, n)]
        removed = {n.name for n in writers if not op_table.is_call(program, n)}
        calls = Effectless(program)
        changed = {n.name: calls.call(n) for n in writers if n.name not in removed}
        targets: Dict[str, None] = {}
        for target in program.targets:
            if program.nodes[target].phase == APPLY or target in removed:
                targets.update((t, None) for t in self._before(program, removed, target))
            else:
                targets[target] = None
        for name, node in program.nodes.items():
            if name in removed:
                continue
            node = changed.get(name, node)
            inputs = [self._unchanged(program, removed, ref) for ref in node.inputs]
            if node.phase == APPLY or removed.intersection(node.controls) or inputs != list(node.inputs):
                controls = [c for c in node.controls if c not in removed]
                nodes[name] = node.replace(inputs=inputs, controls=controls)
        fetches = [self._unchanged(program, removed, ref) for ref in program.fetches]
        for name in removed:
            del nodes[name]
        library = calls.library if changed else program.library
        result = program.replace(nodes=nodes, targets=list(targets) + aggregates, fetches=fetches, library=library)
        return result.pruned()

    @staticmethod
    def _once_per_step(program: Program, node: Node) -> bool:
        """True in the apply phase, and for what depends on neither gradients nor the batch: a step counter that the script sets."""
        return node.phase == APPLY or bool(node.origin and node.origin not in program.facts.batch)

    @staticmethod
    def _unchanged(program: Program, removed: Set[str], ref: Ref) -> Ref:
        """The value a reference output of an assignment has when nothing is assigned."""
        while ref[0] in removed and program.nodes[ref[0]].inputs:
            ref = program.nodes[ref[0]].inputs[0]
        return ref

    @staticmethod
    def _before(program: Program, removed: Set[str], target: str) -> List[str]:
        """What ran before an update by control edge and is not part of it (forward updates)."""
        found: List[str] = []
        seen = {target}
        stack = [target]
        while stack:
            node = program.nodes[stack.pop()]
            for source in [s for s, _ in node.inputs] + list(node.controls):
                if source in seen:
                    continue
                seen.add(source)
                other = program.nodes[source]
                if other.phase == APPLY or source in removed:
                    stack.append(source)
                elif source in node.controls:
                    found.append(source)
        return found
