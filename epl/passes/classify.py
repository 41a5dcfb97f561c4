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
from epl.ir.endings import FENCE, Endings, fenced
from epl.ir.frames import outer_frames
from epl.ir.program import APPLY, BACKWARD, FORWARD, Node, Program, Ref
from epl.ir.tags import GradientTag, data_ancestors
from epl.passes.assign import assign
from epl.passes.base import Pass
from epl.passes.schedule import slots_of
from epl.passes.stages import check_mirrors, join_sparse, settle
from epl.planner.plan import WHOLE, Task
from epl.planner.sharding.spec import Spec


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
      writes: node that may change variables -> those variables.
      endings: after which nodes a node of a loop or conditional is done.
      draws: whether elements of inputs are taken, by whatever process.
      seeds: the gradient calls that start from a seed of each micro-batch, here or in another process.
      slots: the kind of action of a pipeline's schedule that a node belongs to.
      summed: gradients that are sums over the lanes of a group already.
      once: in a program that is not parallel, what exists once although some of its nodes exist on each lane.
      first: what exists on the first lane of each group alone, which gives it to the others.
      forms: the tensors of which each lane has a part.
    """

    gradients: Dict[Ref, GradientTag]
    batch: FrozenSet[str]
    shared: FrozenSet[str]
    outputs: FrozenSet[str]
    frames: Dict[str, str]
    variables_of: Dict[str, Tuple[str, ...]]
    writes: Dict[str, Tuple[str, ...]]
    endings: Endings
    draws: bool = False
    seeds: FrozenSet[int] = frozenset()
    slots: Dict[str, str] = dataclasses.field(default_factory=dict)
    summed: FrozenSet[Ref] = frozenset()
    once: FrozenSet[str] = frozenset()
    first: FrozenSet[str] = frozenset()
    forms: Dict[Ref, Spec] = dataclasses.field(default_factory=dict)

    def written(self, program: Program) -> List[str]:
        """Variables that a program with the user's names writes, in node order."""
        return list(dict.fromkeys(v for name, variables in self.writes.items() if name in program.nodes for v in variables))


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
        if task.parallel:
            program = fenced(program)
        order = program.topological()
        frames = outer_frames(program, order)
        touched, writes = _touched_variables(program)
        gradients = training_gradients(program, task)
        above = program.ancestors({r[0] for r in gradients})
        apply = _after(program, gradients, above, writes)
        forward = _forward(program, above, apply)
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
        if task.plan.ranks > 1 and not gradients:
            _refuse_hidden(program)
        if task.parallel and task.part != WHOLE:
            _refuse_updates_between(program, above, apply, touched, writes)
        shared = {n.name for n in order if n.op in op_table.SHARED_HANDLES or n.op in op_table.SHARED_WRITES}
        outputs = {n.name for n in order if n.op in op_table.SUMMARIES and n.name not in frames}
        batch: Set[str] = set()
        if task.parallel or task.spread:
            batch = _batch_nodes(program, gradients, phases, frames, shared, outputs, touched, writes, task.plan.lanes)
        taskgraphs = _taskgraphs(program, task)
        if task.stages:
            taskgraphs = settle(program, task, order, taskgraphs, batch, shared | outputs, frames)
        draws = any(n.name in batch and op_table.draws(program, n) for n in order)
        if not task.parallel:
            batch = set()
        nodes = {name: _stamp(node, phases[name], taskgraphs[name]) for name, node in program.nodes.items()}
        program = program.replace(nodes=nodes)
        if task.spread:
            check_mirrors(program, writes)
            program, gradients = join_sparse(program, gradients, batch)
        endings = Endings(program, order, ignored=apply)
        seeds = frozenset(n.int_attr(A.SEED) or 0 for n in order if n.name in batch and n.attr(A.SEED) is not None)
        slots: Dict[str, str] = {}
        if batch and (task.stages or task.micro_batches > 1):
            placed = [program.nodes[n.name] for n in order]
            slots = slots_of(program, placed if task.stages else [n.replace(taskgraph=0) for n in placed], batch, frames, endings)
        facts = Facts(gradients, frozenset(batch), frozenset(shared), frozenset(outputs), frames, touched, writes, endings, draws, seeds, slots)
        return program.replace(facts=facts)


def _taskgraphs(program: Program, task: Task) -> Dict[str, Optional[int]]:
    """The taskgraph of every node; what the whole graph says comes before what this part of it says."""
    assignment = program.assignment
    if assignment is None and task.stages:
        assignment = assign(program)
    if assignment is None:
        return {name: node.taskgraph for name, node in program.nodes.items()}
    # A fed tensor is a node of this run alone; it has the taskgraph of the user's node. So is the fence of a call.
    of = {name: name[: -len(FENCE)] if name.endswith(FENCE) else node.origin for name, node in program.nodes.items()}
    names = {name: name if name in assignment else of[name] for name in program.nodes}
    return {name: assignment[known].taskgraph if known in assignment else None for name, known in names.items()}


def _stamp(node: Node, phase: str, taskgraph: Optional[int]) -> Node:
    if node.phase == phase and node.taskgraph == taskgraph:
        return node
    return node.replace(phase=phase, taskgraph=taskgraph)


def _touched_variables(program: Program) -> Tuple[Dict[str, Tuple[str, ...]], Dict[str, Tuple[str, ...]]]:
    """Node -> the variables it is given, and node -> those it may change."""
    touched: Dict[str, Tuple[str, ...]] = {}
    writes: Dict[str, Tuple[str, ...]] = {}
    behind: Dict[str, Optional[str]] = {}
    for node in program.nodes.values():
        for source, index in node.inputs:
            if source not in behind:
                behind[source] = op_table.variable_of(program, source, index)
        found = dict.fromkeys(v for v in (behind[source] for source, _ in node.inputs) if v is not None)
        if found:
            touched[node.name] = tuple(found)
            changed = (behind[node.inputs[position][0]] for position in op_table.written_inputs(program, node))
            written = tuple(dict.fromkeys(v for v in changed if v is not None))
            if written:
                writes[node.name] = written
    return touched, writes


def _after(program: Program, gradients: Dict[Ref, GradientTag], above: Dict[str, None], writes: Dict[str, Tuple[str, ...]]) -> Set[str]:
    """What depends on the gradients and is not needed for them, and other updates of the same state.

    A later gradient may wait for an earlier update by a control edge: the update is no
    part of that gradient's computation.
    """
    needed = data_ancestors(program, {r[0] for r in gradients})
    needed.update(n for n in above if program.nodes[n].attr(A.BACKWARD) is not None)
    stack: List[str] = []
    for name in {r[0] for r in gradients}:
        for consumer, index in program.consumers.get(name, ()):
            if consumer not in needed and (index < 0 or (name, index) in gradients):
                stack.append(consumer)
    found: Set[str] = set()
    writers = {n: vs for n, vs in writes.items() if n not in above}
    while stack:
        while stack:
            name = stack.pop()
            if name not in found:
                found.add(name)
                stack.extend(c for c, _ in program.consumers.get(name, ()) if c not in needed)
        # Adam decays its moments before the sparse gradient is added: that is part of the update.
        updated = {v for name in found for v in writes.get(name, ())}
        stack.extend(n for n, variables in writers.items() if n not in found and not updated.isdisjoint(variables))
    return found


def _forward(program: Program, above: Dict[str, None], apply: Set[str]) -> Set[str]:
    """The ancestors, as far as the updates, of all that no gradient call made and no gradient steers."""
    ends = [n for n in program.nodes.values() if n.name not in apply and (n.name not in above or n.attr(A.BACKWARD) is None)]
    seen = {n.name for n in ends}
    while ends:
        node = ends.pop()
        for source in [s for s, _ in node.inputs] + list(node.controls):
            if source not in seen and source not in apply:
                seen.add(source)
                ends.append(program.nodes[source])
    return seen


def _refuse_updates_between(
    program: Program, above: Dict[str, None], apply: Set[str], touched: Dict[str, Tuple[str, ...]], writes: Dict[str, Tuple[str, ...]]
) -> None:
    """Refuse a step of several runs in which a gradient is computed from what an earlier gradient updates."""
    updated = {v for name in apply for v in writes.get(name, ())}
    stack = [name for name in apply if name in above]
    seen = set(stack)
    while stack:
        for consumer, _ in program.consumers.get(stack.pop(), ()):
            if consumer in seen or consumer not in above:
                continue
            seen.add(consumer)
            stack.append(consumer)
            if consumer not in apply and not updated.isdisjoint(touched.get(consumer, ())):
                raise ProgramError(
                    "Node '%s' reads a variable after its update, and a later gradient of the same program depends on it. With "
                    "pipeline.num_micro_batch consecutive runs make one step and update once, at its end. Set pipeline.accumulate_in_run, "
                    "or run the two training ops by two calls" % consumer
                )


def _refuse_unrecorded(program: Program, gradients: Dict[Ref, GradientTag]) -> None:
    if gradients:
        return
    for node in program.nodes.values():
        if op_table.is_apply(node.op):
            raise ProgramError(
                "Node '%s' updates a variable, but EPL did not see the gradients it applies being built. "
                "Call epl.init() before the model and its gradients are built, and build them with tf.gradients or an optimizer" % node.name
            )


def _refuse_hidden(program: Program) -> None:
    """Refuse updates that each rank would make on its own."""
    for node in program.nodes.values():
        if any(op_table.function_contains(program, f, op_table.APPLY_OPS) for f in op_table.called_functions(program, node)):
            raise ProgramError(
                "Node '%s' updates variables inside a function, where EPL does not see the gradients: every process would train alone. "
                "Build the optimizer outside of tf.cond, tf.while_loop and tf.function" % node.name
            )


def _batch_nodes(
    program: Program,
    gradients: Dict[Ref, GradientTag],
    phases: Dict[str, str],
    frames: Dict[str, str],
    shared: Set[str],
    outputs: Set[str],
    touched: Dict[str, Tuple[str, ...]],
    writes: Dict[str, Tuple[str, ...]],
    lanes: int,
) -> Set[str]:
    members: Dict[str, List[str]] = {}
    for name, frame in frames.items():
        members.setdefault(frame, []).append(name)
    batch: Set[str] = set()
    stack: List[str] = []
    waiting: Set[str] = set()
    """What waits for nodes of a micro-batch and is given none of their values."""

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
                if index < 0:
                    waiting.add(consumer)
                else:
                    mark(consumer)

    def spread_to_steering() -> None:
        """What only waits runs once per step, after all instances, unless a micro-batch needs it in turn."""
        while True:
            spread()
            needed = program.ancestors(batch)
            found = [name for name in waiting if name in needed and name not in batch and not updates(name)]
            if not found:
                return
            for name in sorted(found):
                mark(name)

    def updates(name: str) -> bool:
        return program.nodes[name].attr(A.UPDATE) is not None or op_table.writes(program, program.nodes[name])

    fed = {f.node for f in program.feeds if f.is_batch}
    # Gradients that are summed over lanes have no parts that could be weighed later.
    ragged = any(ref[0] in program.nodes for ref in program.ragged) or bool(fed) and lanes > 1
    for node in program.nodes.values():
        weighed = ragged and node.attr(A.SEED) is not None  # each instance's gradient starts from its own weight
        if node.name in fed or weighed or op_table.is_source(program, node):
            mark(node.name)
    spread_to_steering()
    while True:
        # State written per micro-batch is read anew by each micro-batch.
        written = {v for n, vs in writes.items() if n in batch for v in vs}
        before = len(batch)
        for name, variables in touched.items():
            if phases[name] != APPLY and not written.isdisjoint(variables):
                mark(name)
        spread_to_steering()
        if len(batch) == before:
            return batch
