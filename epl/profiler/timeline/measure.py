"""What a trace says about the schedule: the order of the actions, their durations, the bubbles."""

import statistics
from typing import Dict, List, Optional, Tuple

from epl.planner.schedules import Action, Schedule, Span, Timeline, make_schedule, simulate
from epl.profiler.timeline.trace import ACTION, STEP, TRANSFER, Event, Trace, TraceError

_NS = 1e-9


def schedule_of(trace: Trace) -> Schedule:
    """The schedule of the traced program. Where nothing is ordered, one whose devices do all forwards first."""
    header = trace.header
    return make_schedule(header["schedule"], header["stages"], header["micro_batches"], header["devices"] or None)


def replicas_of(trace: Trace) -> List[int]:
    """The replicas with actions."""
    return sorted({e.replica for e in trace.events if e.kind == ACTION and e.replica is not None})


def rows_of(trace: Trace, step: Optional[int] = None, replica: int = 0) -> Tuple[Tuple[Event, ...], ...]:
    """The actions of one step and replica, by their start, for each device of the pipeline.

    Args:
      step: None for the last one that all ranks have.
    """
    if step is None:
        step = last_step(trace)
    schedule = schedule_of(trace)
    rows: List[List[Event]] = [[] for _ in schedule.devices]
    for event in trace.of(ACTION):
        if event.step == step and event.replica == replica and event.stage is not None:
            rows[schedule.device_of(event.stage)].append(event)
    return tuple(map(tuple, rows))


def last_step(trace: Trace) -> int:
    steps = trace.steps
    if not steps:
        raise TraceError("the trace has no complete training step")
    return steps[-1]


def actions_of(trace: Trace, step: Optional[int] = None, replica: int = 0) -> Tuple[Tuple[Action, ...], ...]:
    """The measured order of actions on each device, to be compared with `Schedule.devices`."""
    return tuple(tuple(_action(event) for event in row) for row in rows_of(trace, step, replica))


def expected_of(trace: Trace) -> Tuple[Tuple[Action, ...], ...]:
    """What `actions_of` should be: the lists of the schedule, without what is no work.

    The first stage has no gradients of inputs to compute, for instance, so where the
    backward is split it has no B.
    """
    there = {(e.phase, e.stage) for e in trace.events if e.kind == ACTION}
    return tuple(tuple(a for a in row if (a.kind, a.chunk) in there) for row in schedule_of(trace).devices)


def measured(trace: Trace, step: Optional[int] = None, replica: int = 0) -> Timeline:
    """The measured times of a step, in seconds from the begin of its first action.

    Bubbles follow as they do for `simulate`. Where actions of a device overlap, as
    nothing but a schedule with gates forbids, the later one counts from the end of the earlier.
    """
    rows = rows_of(trace, step, replica)
    begin = min((row[0].start for row in rows if row), default=0)
    devices = []
    for row in rows:
        if not row:
            raise TraceError("the trace lacks the actions of a device")
        spans: List[Span] = []
        for event in row:
            start, end = (event.start - begin) * _NS, (event.end - begin) * _NS
            if spans:
                start, end = max(start, spans[-1].end), max(end, spans[-1].end)
            spans.append(Span(_action(event), start, end))
        devices.append(tuple(spans))
    return Timeline(tuple(devices), ())


def bubble_shares(timeline: Timeline) -> Tuple[float, ...]:
    """For each device the share of the period in which it idles; their mean is `Timeline.bubble_share`."""
    return tuple(1 - busy / timeline.period if timeline.period else 0.0 for busy in timeline.busy)


def costs_of(trace: Trace) -> Dict[Tuple[str, int], float]:
    """Mean durations in seconds by kind and stage, over all steps, micro-batches and replicas."""
    found: Dict[Tuple[str, int], List[int]] = {}
    for event in trace.of(ACTION):
        if event.stage is not None:
            found.setdefault((event.phase, event.stage), []).append(event.end - event.start)
    return {key: statistics.mean(values) * _NS for key, values in found.items()}


def transfers_of(trace: Trace) -> Tuple[float, ...]:
    """For each boundary between stages the median seconds from the end of an action until its result is there.

    0 where nothing is known: TensorFlow does not trace copies between devices of one process
    on CPUs, where there are none.
    """
    ends = {_key(e): e.end for e in trace.of(ACTION)}
    arrivals: Dict[Tuple[int, Optional[int], str, Optional[int], Optional[int]], int] = {}
    for event in trace.of(TRANSFER):
        if (event.info or {}).get("direction") == "receive" and event.phase in ("F", "B") and event.stage is not None:
            source = _key(event._replace(stage=event.stage + (-1 if event.phase == "F" else 1)))
            arrivals[source] = max(event.end, arrivals.get(source, 0))
    found: List[List[int]] = [[] for _ in range(trace.header["stages"] - 1)]
    for source, arrival in arrivals.items():
        if source in ends:
            stage = source[4]
            assert stage is not None
            found[stage if source[2] == "F" else stage - 1].append(max(0, arrival - ends[source]))
    return tuple(statistics.median(values) * _NS if values else 0.0 for values in found)


def predicted(trace: Trace, transfer: Optional[Tuple[float, ...]] = None) -> Timeline:
    """The same schedule, simulated with the measured mean durations.

    Args:
      transfer: seconds for each boundary between stages; None for those of `transfers_of`.
    """
    schedule = schedule_of(trace)
    costs = costs_of(trace)
    for key in {(a.kind, a.chunk) for row in schedule.devices for a in row}:
        costs.setdefault(key, 0.0)  # see `expected_of`
    return simulate(schedule, costs, transfers_of(trace) if transfer is None else transfer)


def step_seconds(trace: Trace) -> Dict[int, float]:
    """For each step the time from the begin of the first `session.run` of a rank to the end of the last one."""
    found = {}
    for step in trace.steps:
        events = [e for e in trace.events if e.kind == STEP and e.step == step]
        found[step] = (max(e.end for e in events) - min(e.start for e in events)) * _NS
    return found


def _action(event: Event) -> Action:
    assert event.micro_batch is not None and event.stage is not None
    return Action(event.phase, event.micro_batch, event.stage)


def _key(event: Event) -> Tuple[int, Optional[int], str, Optional[int], Optional[int]]:
    return event.step, event.replica, event.phase, event.micro_batch, event.stage
