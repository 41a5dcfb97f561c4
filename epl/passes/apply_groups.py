"""Apply groups: the optimizer updates the variables in groups, one group after the other.

What an update computes on the way (LAMB's ratios, a float32 copy of a gradient) is freed
before the next group begins, so that the peak of temporary memory falls with the number
of groups. Values do not change.
"""

from typing import Dict, List, Optional, Tuple

from epl.ir import op_table
from epl.ir.build import Builder
from epl.ir.program import APPLY, Node, Program
from epl.passes.base import Pass
from epl.passes.rewire import add_controls
from epl.planner.partition import partition_stages
from epl.planner.plan import Task

SHARED = -1
"""Belongs to what several groups need."""


class ApplyGroups(Pass):
    """Make each group wait for the one before it."""

    name = "apply_groups"

    def run(self, program: Program, task: Task) -> Program:
        count = task.plan.apply_groups
        if count == 1 or not program.facts.gradients:
            return program
        nodes = dict(program.nodes)
        for replica in range(task.local_replicas):
            updates = _updates(program, replica)
            variables = list(updates)
            groups = partition_stages(variables, [_size(program, variable) for variable in variables], count) if variables else []
            number = {name: g for g, group in enumerate(groups) for variable in group for name in updates[variable]}
            _chain(program, task, nodes, replica, number)
        return program.replace(nodes=nodes)


def _updates(program: Program, replica: int) -> Dict[str, List[str]]:
    """Variable with a gradient -> the instances in one replica that write it once per step, in the order of the variables."""
    trained = dict.fromkeys(tag.variable for tag in program.facts.gradients.values())
    found: Dict[str, List[str]] = {}
    for node in program.nodes.values():
        if node.phase == APPLY and node.replica == replica and node.origin and node.origin not in program.facts.frames:
            for variable in program.facts.writes.get(node.origin, ()):
                if variable in trained:
                    found.setdefault(variable, []).append(node.name)
    return {variable: found[variable] for variable in trained if variable in found}


def _size(program: Program, variable: str) -> float:
    """Elements of a variable as far as its shape is known."""
    node = program.nodes.get(variable)
    shape = node.attr("shape") if node is not None else None
    size = 1.0
    for dim in shape.shape.dim if shape is not None else ():
        size *= max(1, dim.size)
    return size


def _chain(program: Program, task: Task, nodes: Dict[str, Node], replica: int, number: Dict[str, int]) -> None:
    """Add the gates between the groups of one replica.

    number: update -> its group. What only one group needs, that group computes behind its gate.
    """
    needed = _needed(program, number)
    ends: Dict[int, List[str]] = {}
    for name, group in number.items():
        if needed[name] == group:
            ends.setdefault(group, []).append(name)
    label = "epl_apply_grad_ga_group" if task.plan.runs_per_step > 1 else "epl_apply_grad_group"
    gate: Optional[str] = None
    gates: Dict[int, str] = {}
    for group in sorted(ends):
        if gate is not None:
            gates[group] = gate
        build = Builder(nodes, program.nodes[ends[group][0]].device, APPLY)
        gate = build.no_op("%s/%d_%d" % (label, replica, group), ends[group] + ([gate] if gate else []))
    for name, group in needed.items():
        node = program.nodes[name]
        if group in gates and node.origin not in program.facts.frames and not any(needed.get(source) == group for source in _sources(node)):
            add_controls(nodes, name, [gates[group]])


def _sources(node: Node) -> Tuple[str, ...]:
    return tuple(source for source, _ in node.inputs) + node.controls


def _needed(program: Program, number: Dict[str, int]) -> Dict[str, int]:
    """Node of the user's program behind the gradients -> the only group that needs it, or SHARED.

    What EPL adds, collectives above all, belongs to no group: it does not wait for updates.
    """
    found: Dict[str, int] = dict(number)
    for node in reversed(program.topological()):
        if not node.origin or node.op.startswith(op_table.PSEUDO) or (node.phase != APPLY and node.name not in number):
            continue
        consumers = [consumer for consumer, _ in program.consumers.get(node.name, ())]
        groups = {found[consumer] for consumer in consumers if consumer in found}
        # What lanes exchange is needed by other replicas' groups too.
        if any(not program.nodes[c].origin and program.nodes[c].phase == APPLY for c in consumers):
            groups.add(SHARED)
        if node.name in number:
            groups.add(number[node.name])
        if groups:
            found[node.name] = groups.pop() if len(groups) == 1 else SHARED
    return found
