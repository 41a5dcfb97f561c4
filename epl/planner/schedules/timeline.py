"""When the actions of a schedule run, how long devices idle, and what they hold meanwhile."""

from dataclasses import dataclass
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from epl.planner.schedules.base import Action, Costs, Schedule, ScheduleError, data_dependencies, durations, execution_order


class Span(NamedTuple):
    """An action and its times."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The times of all actions of a step."""

    devices: Tuple[Tuple[Span, ...], ...]
    peaks: Tuple[int, ...]
    """For each device, the most activations (of one stage and one micro-batch) it holds at one time."""

    @property
    def makespan(self) -> float:
        """The time at which the last device has finished."""
        return max(spans[-1].end for spans in self.devices)

    @property
    def period(self) -> float:
        """The longest time from the first start to the last end on a device.

        Each device works once in such a time, if the next step need not wait until all
        devices have finished this one. Bubbles of the zero-bubble paper are parts of it.
        """
        return max(spans[-1].end - spans[0].start for spans in self.devices)

    @property
    def busy(self) -> Tuple[float, ...]:
        """The time that each device computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.devices)

    @property
    def bubble(self) -> float:
        """The part of the period in which the average device idles."""
        return self.period - sum(self.busy) / len(self.busy)

    @property
    def bubble_share(self) -> float:
        """The bubble's share of the period, from 0 to 1."""
        return self.bubble / self.period if self.period else 0.0


def simulate(schedule: Schedule, cost: Optional[Costs] = None, transfer: Union[float, Sequence[float]] = 0.0, queued: bool = False) -> Timeline:
    """Let each device run its list in order, each action as early as its inputs allow.

    `cost` gives durations by kind or (kind, chunk), see `Costs`. `transfer` is the time
    from the end of an action until another device can use its result: one number, or
    one for each boundary between neighbouring stages. Transfers occupy no device. They
    pass each other freely, unless they are `queued`: then a link, that is one device to
    another in one direction, carries one at a time, in the order in which they are sent.
    """
    duration = durations(cost, schedule.split_backward)
    if not isinstance(transfer, (int, float)) and len(transfer) != schedule.stages - 1:
        raise ScheduleError(f"{schedule.stages} stages have {schedule.stages - 1} boundaries, but there are {len(transfer)} transfer times")
    last = schedule.stages - 1
    boundaries = [transfer] * last if isinstance(transfer, (int, float)) else transfer
    owner = [schedule.device_of(chunk) for chunk in range(schedule.stages)]
    ends: Dict[Action, float] = {}
    arrivals: Dict[Action, float] = {}
    free: Dict[Tuple[int, int], float] = {}
    lists: List[List[Span]] = [[] for _ in schedule.devices]
    for device, action in execution_order(schedule):
        kind, _, chunk = action
        start = lists[device][-1].end if lists[device] else 0
        for source in data_dependencies(action, schedule.stages):
            start = max(start, ends[source] if source.chunk == chunk else arrivals[source])
        end = ends[action] = start + duration(action)
        lists[device].append(Span(action, start, end))
        # What the next stage, or for a backward the one before, is given.
        target = chunk + 1 if kind == "F" else chunk - 1
        if kind != "W" and 0 <= target <= last:
            seconds = boundaries[min(chunk, target)] if owner[target] != device else 0
            if queued and seconds:
                end = max(end, free.get((device, owner[target]), end))
                free[device, owner[target]] = end + seconds
            arrivals[action] = end + seconds
    return Timeline(tuple(map(tuple, lists)), tuple(_peak(spans, schedule.release) for spans in lists))


def _peak(spans: Sequence[Span], release: str) -> int:
    """The most activations alive at one time: each from the start of its F to the end of its release."""
    changes = [(span.start, 1) for span in spans if span.action.kind == "F"]
    changes += [(span.end, -1) for span in spans if span.action.kind == release]
    alive = peak = 0
    for _, change in sorted(changes):  # what ends makes room for what starts at the same time
        alive += change
        peak = max(peak, alive)
    return peak


def peak_activations(schedule: Schedule, sizes: Optional[Sequence[float]] = None) -> Tuple[float, ...]:
    """What each device holds at most, whatever the costs and transfers are.

    Counts the activations of one stage and one micro-batch, or adds their `sizes`, one
    for each stage. A device runs its list in order, so the list alone tells. Where the
    backward is split, the whole activation counts until its W has ended; what B no
    longer needs can be freed earlier, so this is an upper bound.
    """
    if sizes is not None and len(sizes) != schedule.stages:
        raise ScheduleError(f"there are {schedule.stages} stages, but {len(sizes)} sizes of activations")
    peaks = []
    for actions in schedule.devices:
        alive: float = 0
        peak: float = 0
        for action in actions:
            size = 1 if sizes is None else sizes[action.chunk]
            if action.kind == "F":
                alive += size
                peak = max(peak, alive)
            elif action.kind == schedule.release:
                alive -= size
        peaks.append(peak)
    return tuple(peaks)


def render(schedule: Schedule, timeline: Timeline, unit: Optional[float] = None) -> str:
    """A text chart: a row for each device, a column for each `unit` of time.

    The unit is the shortest duration, unless given. An action shows its kind and
    micro-batch, and the stage behind a dot where a device holds several. A dash means
    that it goes on, a dot that the device idles.
    """
    spans = [span for row in timeline.devices for span in row]
    if unit is None:
        unit = min((span.end - span.start for span in spans if span.end > span.start), default=1)
    several = schedule.stages > len(schedule.devices)

    def label(action: Action) -> str:
        return f"{action.kind}{action.micro_batch}" + (f".{action.chunk}" if several else "")

    width = max(len(label(span.action)) for span in spans) + 1
    head = len(str(len(schedule.devices) - 1))
    lines = []
    for device, row in enumerate(timeline.devices):
        text = ""
        for span in row:
            start, end = (round(time / unit) * width for time in (span.start, span.end))
            text += ".".ljust(width) * ((start - len(text)) // width)
            if end > start:
                text += label(span.action).ljust(end - start - 1, "-" if end - start > width else " ") + " "
        lines.append(f"{device:>{head}} | {text.rstrip()}")
    return "\n".join(lines)
