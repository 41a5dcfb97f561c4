"""Classify: phase, taskgraph and multiplicity of every node.

Multiplicity says how often a node exists in a training program:

* batch: once per replica and micro-batch. It depends on a divided feed, an input
  element, a random op, or state that such nodes write.
* shared: once per process. Host resources (iterators, queues, tables) and what sets
  them up.
* single: once per replica: variables and their reads, constants, and everything that
  runs once per step after the gradients (the apply phase).
"""

import dataclasses
from typing import Dict, FrozenSet, List, Optional, Set, Tuple

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.frames import outer_frames
from epl.ir.program import APPLY, BACKWARD, FORWARD, Node, Program, Ref
from epl.ir.tags import GradientTag
from epl.passes.assign import assign
from epl.passes.base import Pass
from epl.planner.plan import Task


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the classify pass found.

    Attributes:
      gradients: the tensors at which gradients are aggregated, with their tags.
      batch: names of nodes that exist per replica and micro-batch.
      shared: names of nodes that exist once per process.
      outputs: names of summary nodes: they exist once and read merged values.
      frames: node -> name of the outermost while frame it is in.
      variables_of: node that is given handles or references of variables -> those variables.
    """

    gradients: Dict[Ref, GradientTag]
    batch: FrozenSet[str]
    shared: FrozenSet[str]
    outputs: FrozenSet[str]
    frames: Dict[str, str]
    variables_of: Dict[str, Tuple[str, ...]]

    def written(self, program: Program, phase: Optional[str] = None) -> List[str]:
        """Variables that the program writes (in one phase, or at all), in node order."""
        found: Dict[str, None] = {}
        for name, variables in self.variables_of.items():
            node = program.nodes.get(name)
            if node is None or (phase is not None and node.phase != phase):
                continue
            if op_table.writes_state(node.op):
                found[variables[0]] = None
            elif op_table.writes(program, node):
                found.update(dict.fromkeys(variables))
        return list(found)


def training_gradients(program: Program, task: Task) -> Dict[Ref, GradientTag]:
    """The aggregation points of this program under the plan's `aggregate_at`."""
    raw = {r: t for r, t in program.raw_gradients.items() if r[0] in program.nodes}
    if task.plan.aggregate_at != "apply":
        return raw
    given = {r: t for r, t in program.apply_gradients.items() if r[0] in program.nodes}
    return given or raw


class Classify(Pass):
    """Set `phase` and `taskgraph` on nodes and collect `Facts`."""

    name = "classify"

    def run(self, program: Program, task: Task) -> Program:
        order = program.topological()
        frames = outer_frames(program, order)
        touched = _touched_variables(program)
        gradients = training_gradients(program, task)
        above = program.ancestors({r[0] for r in gradients})
        apply = _after(program, gradients, above, touched)
        forward = program.ancestors([n.name for n in order if n.name not in above and n.name not in apply] + _losses(program, above))
        phases = {}
        for node in order:
            if node.name in apply:
                phases[node.name] = APPLY
            elif node.name in above and node.name not in forward:
                phases[node.name] = BACKWARD
            else:
                phases[node.name] = FORWARD
        if task.parallel and task.plan.replicas * task.plan.micro_batches > 1:
            _refuse_unrecorded(program, gradients)
        shared = {n.name for n in order if n.op in op_table.SHARED_HANDLES or n.op in op_table.SHARED_WRITES}
        outputs = {n.name for n in order if n.op in op_table.SUMMARIES and n.name not in frames}
        batch = _batch_nodes(program, gradients, phases, frames, shared, outputs, touched) if task.parallel else set()
        taskgraphs = _taskgraphs(program, task)
        nodes = {name: _stamp(node, phases[name], taskgraphs[name]) for name, node in program.nodes.items()}
        facts = Facts(gradients, frozenset(batch), frozenset(shared), frozenset(outputs), frames, touched)
        return program.replace(nodes=nodes, facts=facts)


def _taskgraphs(program: Program, task: Task) -> Dict[str, Optional[int]]:
    """The taskgraph of every node; what the whole graph says comes before what this part of it says."""
    assignment = program.assignment
    if assignment is None and task.stages:
        assignment = assign(program)
    if assignment is None:
        return {name: node.taskgraph for name, node in program.nodes.items()}
    # A fed tensor is a node of this run alone; it has the taskgraph of the user's node.
    names = {name: name if name in assignment else node.origin for name, node in program.nodes.items()}
    return {name: assignment[known].taskgraph if known in assignment else None for name, known in names.items()}


def _stamp(node: Node, phase: str, taskgraph: Optional[int]) -> Node:
    if node.phase == phase and node.taskgraph == taskgraph:
        return node
    return node.replace(phase=phase, taskgraph=taskgraph)


def _losses(program: Program, above: Dict[str, None]) -> List[str]:
    """Forward ends inside the ancestors of the gradients: consumers exist only in the backward by name."""
    return [n for n in above if program.nodes[n].int_attr(A.BACKWARD) is None]


def _touched_variables(program: Program) -> Dict[str, Tuple[str, ...]]:
    touched: Dict[str, Tuple[str, ...]] = {}
    behind: Dict[str, Optional[str]] = {}
    for node in program.nodes.values():
        found: Dict[str, None] = {}
        for source, index in node.inputs:
            if source not in behind:
                behind[source] = op_table.variable_of(program, source, index)
            variable = behind[source]
            if variable is not None:
                found[variable] = None
        if found:
            touched[node.name] = tuple(found)
    return touched


def _after(program: Program, gradients: Dict[Ref, GradientTag], above: Dict[str, None], touched: Dict[str, Tuple[str, ...]]) -> Set[str]:
    """What depends on the gradients and is not needed for them, and other updates of the same state."""
    stack: List[str] = []
    for name in {r[0] for r in gradients}:
        for consumer, index in program.consumers.get(name, ()):
            if consumer not in above and (index < 0 or (name, index) in gradients):
                stack.append(consumer)
    found: Set[str] = set()
    writers = {n: vs[0] for n, vs in touched.items() if op_table.writes_state(program.nodes[n].op) and n not in above}
    while stack:
        while stack:
            name = stack.pop()
            if name not in found:
                found.add(name)
                stack.extend(c for c, _ in program.consumers.get(name, ()) if c not in above)
        # Adam decays its moments before the sparse gradient is added: that is part of the update.
        updated = {variable for name, variable in writers.items() if name in found}
        stack.extend(n for n, variable in writers.items() if variable in updated and n not in found)
    return found


def _refuse_unrecorded(program: Program, gradients: Dict[Ref, GradientTag]) -> None:
    if gradients:
        return
    for node in program.nodes.values():
        if op_table.is_apply(node.op):
            raise ProgramError(
                "Node '%s' updates a variable, but EPL did not see the gradients it applies being built. "
                "Call epl.init() before the model and its gradients are built, and build them with tf.gradients or an optimizer" % node.name
            )


def _batch_nodes(
    program: Program,
    gradients: Dict[Ref, GradientTag],
    phases: Dict[str, str],
    frames: Dict[str, str],
    shared: Set[str],
    outputs: Set[str],
    touched: Dict[str, Tuple[str, ...]],
) -> Set[str]:
    members: Dict[str, List[str]] = {}
    for name, frame in frames.items():
        members.setdefault(frame, []).append(name)
    batch: Set[str] = set()
    stack: List[str] = []

    def mark(name: str) -> None:
        if name in batch or name in shared or name in outputs or phases[name] == APPLY:
            return
        # A while loop is atomic: its frame exists once per instance or not at all.
        for item in members.get(frames.get(name, ""), (name,)):
            if item not in batch:
                batch.add(item)
                stack.append(item)

    def spread() -> None:
        while stack:
            name = stack.pop()
            for consumer, index in program.consumers.get(name, ()):
                if index < 0 and op_table.writes(program, program.nodes[consumer]):
                    continue  # it only waits: it runs once per step, after all instances
                mark(consumer)

    ragged = any(ref[0] in program.nodes for ref in program.ragged)
    fed = {f.node for f in program.feeds if f.is_batch}
    for node in program.nodes.values():
        weighed = ragged and node.attr(A.SEED) is not None  # each instance's gradient starts from its own weight
        if node.name in fed or weighed or op_table.is_source(program, node):
            mark(node.name)
    spread()
    while True:
        # State written per micro-batch is read anew by each micro-batch.
        written = {v for n, vs in touched.items() if n in batch and op_table.writes(program, program.nodes[n]) for v in vs}
        before = len(batch)
        for name, variables in touched.items():
            if phases[name] != APPLY and not written.isdisjoint(variables):
                mark(name)
        spread()
        if len(batch) == before:
            return batch
