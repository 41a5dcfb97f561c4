"""Schedule: the order in which a stage takes the micro-batches of a pipeline.

A schedule is a list of actions for each device (`epl.planner.schedules`). Where a replica
has one stage, it goes forward and backward with one micro-batch after the other, so that
it holds the activations of one. Gates, one between two actions, make the order: an action's nodes wait for the gate before it, the
gate after it waits for them. Neither sends nor receives are gated: a receive that waits
for its turn, and a send that the next action waits for, can wait for each other.
"""

from typing import Any, Container, Dict, List, Mapping, Optional, Set, Tuple

from absl import logging

from epl.errors import ProgramError
from epl.ir import op_table
from epl.ir.build import Builder
from epl.ir.endings import Endings
from epl.ir.program import BACKWARD, FORWARD, Node, Program
from epl.passes.base import Pass
from epl.passes.cut import TRANSFERS
from epl.passes.instances import instances_at
from epl.passes.rewire import add_controls
from epl.planner.plan import Task
from epl.planner.schedules import Action, Schedule, make_schedule

GATE = "epl_schedule"


def slots_of(program: Program, order: List[Node], batch: Container[str], frames: Mapping[str, str], endings: Endings) -> Dict[str, str]:
    """Which kind of action ("F", "B" or "W") a node of the user's program belongs to; nodes of none are left out.

    B is what leads to the gradients that an earlier stage needs, W the rest of the
    backward part. A forward node that needs a later stage, and a backward node that needs
    an earlier one, belong to no action: they run as soon as they can. The same holds for
    all of a loop that needs such a value, and for a branch that ends where one does: a
    gate waits for where they end.

    Args:
      order: the nodes of a classified program, sources first.
      batch: what exists per micro-batch.
      frames: node -> the loop that it is in. endings: after which nodes a node is done.
    """
    phases = _phases(program, order, batch, frames)
    furthest = _furthest(order, phases, frames)
    found: Dict[str, str] = {}
    fed = {feed.node for feed in program.feeds}
    for node in order:
        if node.name in fed or op_table.draws(program, node):
            continue  # all batches of a step are there first: the ranks agree that there is data for all, and how much
        if node.taskgraph is not None and all(furthest.get(end) == node.taskgraph for end in (node.name,) + endings.done(node.name)):
            found[node.name] = "F" if phases[node.name] == FORWARD else "W"
    while True:
        for node in reversed(order):
            if found.get(node.name) == "W" and not _groups(node) and _leads_on(program, node, found, batch):
                found[node.name] = "B"
        # A loop runs as a whole, and what ends a branch when the branch does.
        loops = {frames[name] for name, kind in found.items() if kind == "B" and name in frames}
        more = [name for name, frame in frames.items() if frame in loops and found.get(name) == "W"]
        more += [end for name, kind in found.items() if kind == "B" for end in endings.done(name) if found.get(end) == "W"]
        if not more:
            return found
        found.update(dict.fromkeys(more, "B"))


def _leads_on(program: Program, node: Node, found: Mapping[str, str], batch: Container[str]) -> bool:
    """Whether an earlier stage, or a node that one needs, waits for a backward node."""
    for consumer, index in program.consumers.get(node.name, ()):
        other = program.nodes[consumer]
        leaves = other.phase == BACKWARD and other.taskgraph is not None and other.taskgraph != node.taskgraph and consumer in batch
        # TensorFlow groups the gradients of one op: that orders nothing that matters.
        ordered = index >= 0 or not _groups(other)
        if ordered and (index >= 0 and leaves or found.get(consumer) == "B"):
            return True
    return False


def _phases(program: Program, order: List[Node], batch: Container[str], frames: Mapping[str, str]) -> Dict[str, str]:
    """The phase in which each node of a micro-batch runs.

    The backward part adds to the loops of the forward part: counters, stacks of values.
    They run when the loop does; a loop that waits for them goes no further than its
    parallel iterations.
    """
    found = {n.name: n.phase for n in order if n.name in batch and n.phase in (FORWARD, BACKWARD)}
    loops = {frames[n.name] for n in order if n.name in frames and n.phase == FORWARD}
    stack = [n.name for n in order if n.phase == BACKWARD and frames.get(n.name) in loops]
    while stack:
        name = stack.pop()
        if found.get(name) == BACKWARD:
            found[name] = FORWARD
            stack.extend(s for s, _ in program.nodes[name].inputs)
            stack.extend(program.nodes[name].controls)
    return found


def _furthest(order: List[Node], phases: Mapping[str, str], frames: Mapping[str, str]) -> Dict[str, int]:
    """For each node the last stage that it needs in the forward part, the first one in the backward part."""
    whole: Dict[str, int] = {}
    while True:
        found: Dict[str, int] = {}
        loops: Dict[str, int] = {}
        for node in order:
            phase = phases.get(node.name)
            if phase is None:
                continue
            pick = max if phase == FORWARD else min
            # What it waits for counts as much as what it is given, also through a node that belongs to no stage.
            before = [s for s, _ in node.inputs] + list(node.controls)
            stages = [found[s] for s in before if s in found and phases[s] == phase]
            frame = frames.get(node.name, "")
            stages += [stage for stage in (node.taskgraph, whole.get(frame)) if stage is not None]
            if stages:
                found[node.name] = pick(stages)
                if frame:
                    loops[frame] = pick(loops.get(frame, found[node.name]), found[node.name])
        if loops == whole:
            return found
        whole = loops


def _groups(node: Node) -> bool:
    """Whether a node only makes others wait for each other, as `tf.tuple` does in gradients."""
    return node.op == "NoOp" and node.phase == BACKWARD


def _split(program: Program, nodes: Dict[str, Node]) -> None:
    """Let B not wait for W: with `gate_gradients` TensorFlow makes the gradients of one op wait for each other."""
    for name, node in program.nodes.items():
        if program.facts.slots.get(node.origin) != "B" or not any(_groups(nodes[c]) for c in node.controls):
            continue
        kept: Dict[str, None] = {}
        stack = list(reversed(node.controls))
        while stack:
            control = stack.pop()
            if _groups(nodes[control]) and program.facts.slots.get(nodes[control].origin) == "W":
                stack.extend(reversed(nodes[control].controls))
            elif program.facts.slots.get(nodes[control].origin) != "W":
                kept[control] = None
        nodes[name] = node.replace(controls=tuple(kept))


def schedule_of(task: Task) -> Optional[Schedule]:
    """The schedule of a program with several micro-batches, else None."""
    stages = len(task.stages[0]) if task.stages else 1
    if not task.parallel or task.micro_batches == 1:
        return None
    if stages == 1:
        return make_schedule("PreferBackward", 1, task.micro_batches, 1)
    return make_schedule(task.plan.schedule, stages, task.micro_batches, task.plan.pipeline_devices or stages)


class Scheduling(Pass):
    """Add the gates."""

    name = "schedule"

    def run(self, program: Program, task: Task) -> Program:
        schedule = schedule_of(task) if program.facts.gradients else None
        if schedule is None:
            return program
        members = _members(program, task, schedule)
        nodes = dict(program.nodes)
        if schedule.split_backward:
            _split(program, nodes)
        for replica in range(task.local_replicas):
            for device, actions in enumerate(schedule.devices):
                if task.has(replica, schedule.chunks_of(device)[0]):
                    _gate(program, task, nodes, members, replica, device, actions)
        result = program.replace(nodes=nodes)
        try:
            result.topological()
        except ProgramError:
            logging.warning(
                "Schedule %s does not fit this program: a micro-batch waits for what comes later in it. The stages run as their inputs come",
                schedule.name,
            )
            return program
        return result


Members = Dict[Tuple[int, Action], List[Node]]


def _members(program: Program, task: Task, schedule: Schedule) -> Members:
    """The nodes of each action of each local replica."""
    found: Members = {}
    for node in program.nodes.values():
        kind = program.facts.slots.get(node.origin)
        stage = node.taskgraph if task.stages else 0
        if kind is None or node.micro_batch is None or stage is None or node.op in TRANSFERS:
            continue
        if kind == "W" and not schedule.split_backward:
            kind = "B"
        found.setdefault((node.replica, Action(kind, node.micro_batch, stage)), []).append(node)
    return found


def _gate(
    program: Program, task: Task, nodes: Dict[str, Node], members: Members, replica: int, device: int, actions: Tuple[Action, ...]
) -> None:
    gate: Optional[str] = None
    pending: List[str] = []
    for number, action in enumerate(actions):
        slot = members.get((replica, action), [])
        if not slot:
            continue
        inside = {node.name for node in slot}
        if pending:
            build = Builder(nodes, slot[0].device, FORWARD)
            gate = build.no_op("%s/%d_%d_%d" % (GATE, replica, device, number), pending + ([gate] if gate else []))
            nodes[gate] = nodes[gate].replace(replica=replica, info={"action": str(action)})
        if gate is not None:
            for node in slot:
                if _begins(program, node, inside) or task.stages and _takes(program, node, inside):
                    add_controls(nodes, node.name, [gate])
        pending = _ends(program, task, slot, inside)


def _begins(program: Program, node: Node, inside: Set[str]) -> bool:
    """Whether a node waits for nothing of its own action."""
    if any(s in inside for s, _ in node.inputs) or any(s in inside for s in node.controls):
        return False
    return node.origin not in program.facts.frames or node.op in op_table.ENTERS


def _takes(program: Program, node: Node, inside: Set[str]) -> bool:
    """Whether a node is given something of another stage.

    It waits for the gate through the nodes before it; but TensorFlow may rearrange a sum, so
    that what another stage has sent is used before they run.
    """
    if node.origin in program.facts.frames and node.op not in op_table.ENTERS:
        return False
    sources = [program.nodes[s] for s, _ in node.inputs if s not in inside]
    return any(s.op in TRANSFERS or (s.micro_batch is not None and s.taskgraph != node.taskgraph) for s in sources)


def _ends(program: Program, task: Task, slot: List[Node], inside: Set[str]) -> List[str]:
    """The nodes after which an action is done."""
    last = [n for n in slot if not any(c in inside for c, _ in program.consumers.get(n.name, ()))]
    found: Dict[str, Any] = {}
    for node in last:
        found.update(dict.fromkeys(instances_at(program, task, node, program.facts.endings.done(node.origin))))
    return [name for name in found if name in program.nodes]
