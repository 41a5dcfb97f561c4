"""From TensorFlow's step statistics of a program to events."""

import re
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

from epl.ir.program import APPLY, BACKWARD, FORWARD, Node, Program
from epl.passes.alarm import ALARM
from epl.passes.schedule import schedule_of
from epl.planner.plan import Task
from epl.profiler.timeline.trace import ACTION, BUBBLE, COLLECTIVE, COMPUTE, OPTIMIZER, TRANSFER, Event

OPTIMIZING = "optimizer"
SMALL_SHARE = 0.1
"""The part of its work that an action may do before its last input arrives, and that does not count as its begin."""

_JOINED_NS = 200000
"""Ops of the optimizer that are nearer to each other are shown as one piece."""

_SHORTEST_NS = 1000
"""Ops that take less are left out; they still count where an action begins and ends."""

_IDLE = frozenset(("Const", "NoOp", "VariableV2", "VarHandleOp", "Placeholder", "_Arg", "_Retval", "_Recv", "_Send", "_HostRecv", "_HostSend"))
"""Ops that do no work. TensorFlow's optimizers may let them run at any time."""

_COMMUNICATION = "epl_comm/"
_HELPERS = ("epl_nothing", "epl_anchor", ALARM)
_REWRITTEN = re.compile(r"^(.*?)/?ArithmeticOptimizer/[A-Za-z]+_([^/]*)$")
_COPIED = re.compile(r"/_\d+$")
_OP = re.compile(r" = (\w+)\(")


class Where(NamedTuple):
    """Which run the statistics are of: the step, and the position of the run among those of the step."""

    step: int
    position: int = 0


class Ran(NamedTuple):
    """An execution of a node; `node` is None for what TensorFlow added and nobody knows."""

    node: Optional[Node]
    name: str
    op: str
    device: str
    start: int
    end: int


def events_of(stats: Any, program: Program, names: Mapping[str, str], task: Task, where: Where) -> List[Event]:
    """The events of one run, without bubbles.

    Args:
      stats: the `StepStats` of the run.
      program: the compiled program.
      names: for each of its nodes the name in TensorFlow's graph.
    """
    return _Collector(program, task, where, executions(stats, program, names)).run()


def executions(stats: Any, program: Program, names: Mapping[str, str]) -> List[Ran]:
    """What has run, with GPU times where the kernels' are known."""
    known = {final: program.nodes[name] for name, final in names.items()}
    kernels: Dict[Tuple[str, str], Tuple[int, int]] = {}
    found: List[Ran] = []
    for device_stats in stats.dev_stats:
        device, _, stream = device_stats.device.partition("/device:")[2].partition("/")
        if not device or stream not in ("", "stream:all", "memcpy"):
            continue
        for one in device_stats.node_stats:
            start, end = _times(one)
            if stream == "stream:all":
                first, last = kernels.get((device, one.node_name), (start, end))
                kernels[device, one.node_name] = min(first, start), max(last, end)
                continue
            op = "Memcpy" if stream else "".join(_OP.findall(one.timeline_label)[:1])
            found.append(Ran(_node(one.node_name, known), one.node_name, op, device, start, end))
    # A GPU's op ends for the executor when its kernels are in the queue.
    return [r._replace(start=kernels[r.device, r.name][0], end=kernels[r.device, r.name][1]) if (r.device, r.name) in kernels else r for r in found]


def _times(stats: Any) -> Tuple[int, int]:
    if stats.all_start_nanos:
        return stats.all_start_nanos + stats.op_start_rel_nanos, stats.all_start_nanos + stats.op_end_rel_nanos
    begin = stats.all_start_micros
    return 1000 * (begin + stats.op_start_rel_micros), 1000 * (begin + stats.op_end_rel_micros)


def _node(name: str, known: Mapping[str, Node]) -> Optional[Node]:
    """The node behind an executed one: TensorFlow's optimizers make new names from old ones."""
    if name in known:
        return known[name]
    rewritten = _REWRITTEN.match(name)
    if rewritten:
        return known.get("/".join(part for part in rewritten.groups() if part))
    return known.get(_COPIED.sub("", name))


class _Collector:
    def __init__(self, program: Program, task: Task, where: Where, ran: List[Ran]):
        self.program = program
        self.task = task
        self.where = where
        self.ran = ran
        self.slots: Mapping[str, str] = program.facts.slots
        schedule = schedule_of(task)
        self.split = schedule is not None and schedule.split_backward
        self.stages = len(task.stages[0]) if task.stages else 1
        self.ends: Dict[str, int] = {}
        for one in ran:
            if one.node is not None:
                self.ends[one.node.name] = max(one.end, self.ends.get(one.node.name, 0))

    def run(self) -> List[Event]:
        events: List[Event] = []
        actions: Dict[Tuple[int, int, str, int], List[Ran]] = {}
        optimizing: Dict[Tuple[str, Optional[int]], List[Ran]] = {}
        for one in self.ran:
            node = one.node
            if node is None or one.op in _IDLE or node.name.startswith(ALARM):
                continue
            if node.op.startswith("Horovod"):
                events.append(self._communication(one, node))
                continue
            kind, stage = self.kind(node), self.stage(node)
            if one.op == "Memcpy":
                events.append(self._event(TRANSFER, one.name, one, node, {"bytes": None}))
                continue
            if one.end - one.start >= _SHORTEST_NS:
                events.append(self._event(COMPUTE, one.name, one, node, {"op": one.op}))
            micro_batch = self.micro_batch(node)
            if kind in ("F", "B", "W") and stage is not None and micro_batch is not None:
                actions.setdefault((node.replica, stage, kind, micro_batch), []).append(one)
            elif kind == OPTIMIZING and not self._is_helper(node.name):
                optimizing.setdefault((one.device, stage), []).append(one)
        for (replica, stage, kind, micro_batch), members in actions.items():
            events.append(self._action(replica, stage, kind, micro_batch, members))
        for (device, stage), members in optimizing.items():
            for start, end in joined(((r.start, r.end) for r in members), _JOINED_NS):
                events.append(Event(OPTIMIZER, OPTIMIZING, self.task.rank, device, start, end, self.where.step, stage, OPTIMIZING))
        return events

    # What a node belongs to.

    def kind(self, node: Node) -> str:
        """The kind of a node's action, `OPTIMIZING`, or "" for neither."""
        if self.slots:
            kind = self.slots.get(node.origin, "")
            if kind:
                return "B" if kind == "W" and not self.split else kind
        elif node.micro_batch is not None:
            return {FORWARD: "F", BACKWARD: "B"}.get(node.phase, "")
        return OPTIMIZING if node.phase == APPLY else ""

    def stage(self, node: Node) -> Optional[int]:
        return node.taskgraph if self.stages > 1 else 0

    def micro_batch(self, node: Node) -> Optional[int]:
        return node.micro_batch if node.micro_batch is None or self.task.micro_batches > 1 else self.where.position

    @staticmethod
    def _is_helper(name: str) -> bool:
        return name.startswith(_COMMUNICATION) or name.startswith(_HELPERS)

    def _event(self, kind: str, name: str, one: Ran, node: Node, info: Dict[str, Any]) -> Event:
        info = {key: value for key, value in info.items() if value is not None}
        return Event(
            kind, name, self.task.rank, one.device, one.start, one.end, self.where.step, self.stage(node), self.kind(node), self.micro_batch(node),
            self.task.replica_id(node.replica), info or None,
        )  # fmt: skip

    # Actions.

    def _action(self, replica: int, stage: int, kind: str, micro_batch: int, members: List[Ran]) -> Event:
        start = self._begin(members)
        work: Dict[str, int] = {}
        for one in members:
            work[one.device] = work.get(one.device, 0) + one.end - one.start
        device = max(work, key=lambda d: (work[d], d))
        end = max(one.end for one in members)
        return Event(
            ACTION, "%s%d" % (kind, micro_batch), self.task.rank, device, start, end, self.where.step, stage, kind, micro_batch,
            self.task.replica_id(replica),
        )  # fmt: skip

    def _begin(self, members: List[Ran]) -> int:
        """When an action has begun: what little it does before its last inputs arrive is no begin."""
        inside = {one.node.name for one in members if one.node is not None}
        arrivals: Set[int] = set()
        for one in members:
            for source, _ in one.node.inputs if one.node is not None else ():
                node = self.program.nodes[source]
                if source not in inside and source in self.ends and self._comes_from_elsewhere(node, one.node):
                    arrivals.add(self.ends[source])
        total = sum(one.end - one.start for one in members)
        for arrival in sorted(arrivals, reverse=True):
            after = [one for one in members if one.start >= arrival]
            before = total - sum(one.end - one.start for one in after)
            if after and before <= SMALL_SHARE * total:
                return min(one.start for one in after)
        return min(one.start for one in members)

    def _comes_from_elsewhere(self, source: Node, reader: Optional[Node]) -> bool:
        if self._is_helper(source.name):
            return True
        return reader is not None and source.taskgraph is not None and source.taskgraph != reader.taskgraph

    # Communication.

    def _communication(self, one: Ran, node: Node) -> Event:
        """A transfer between stages, or a collective."""
        label = node.name.rpartition("/")[2].partition(".")[2]
        parts = label.split(".")
        to = next((int(p[2:]) for p in parts if re.match(r"to\d+$", p)), None)
        kind = TRANSFER if node.op == "HorovodAlltoall" and to is not None else COLLECTIVE
        replica = next((int(p[1:]) for p in parts if re.match(r"r\d+$", p)), None)
        micro_batch = next((int(p[1:]) for p in parts if re.match(r"m\d+$", p)), None)
        if micro_batch is not None and self.task.micro_batches == 1:
            micro_batch = self.where.position
        ends = self._ends_of(node, forwards=kind == TRANSFER and to == self.task.rank)
        kinds = [self.kind(n) for n in ends]
        phase = next((k for k in ("F", "B", "W", OPTIMIZING) if k in kinds), "")
        stage = next((self.stage(n) for n, k in zip(ends, kinds) if k == phase), None)
        info: Dict[str, Any] = {"op": node.op[len("Horovod") :].lower()}
        if kind == TRANSFER:
            info["direction"] = "receive" if to == self.task.rank else "send"
        return Event(
            kind, node.name, self.task.rank, one.device, one.start, one.end, self.where.step, stage, phase, micro_batch, replica, info
        )  # fmt: skip

    def _ends_of(self, node: Node, forwards: bool) -> List[Node]:
        """The nodes that give a transfer its value, or those that read it."""
        found: Dict[str, Node] = {}
        seen, waiting = {node.name}, [node.name]
        while waiting:
            name = waiting.pop()
            near = [c for c, _ in self.program.consumers.get(name, ())] if forwards else [s for s, _ in self.program.nodes[name].inputs]
            for other in near:
                if other in seen or other.startswith(_HELPERS):
                    continue
                seen.add(other)
                if other.startswith(_COMMUNICATION):
                    if not self.program.nodes[other].op.startswith("Horovod"):
                        waiting.append(other)
                elif self.program.nodes[other].op not in _IDLE:
                    found[other] = self.program.nodes[other]
        return list(found.values())


def joined(intervals: Iterable[Tuple[int, int]], gap: int = 0) -> List[Tuple[int, int]]:
    """The union of intervals; those that are at most `gap` apart become one."""
    found: List[Tuple[int, int]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def bubbles_of(events: Iterable[Event]) -> List[Event]:
    """The gaps between the first and the last action of each device and step."""
    rows: Dict[Tuple[int, str, int], List[Tuple[int, int]]] = {}
    for event in events:
        if event.kind == ACTION:
            rows.setdefault((event.rank, event.device, event.step), []).append((event.start, event.end))
    found = []
    for (rank, device, step), intervals in rows.items():
        busy = joined(intervals)
        for (_, start), (end, _) in zip(busy, busy[1:]):
            found.append(Event(BUBBLE, BUBBLE, rank, device, start, end, step))
    return found
