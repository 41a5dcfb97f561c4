"""What a pipeline schedule is, and when it is right."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from epl.errors import EplError


class ScheduleError(EplError, ValueError):
    """A schedule does not fit the number of stages, devices or micro-batches, or it can't run."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    The kind is "F" (forward), "B" (backward) or "W". Where the backward is split, B
    computes the gradients of the inputs only, and W those of the weights. `chunk` is
    the index of the stage in the model; a device may hold several.
    """

    kind: str
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} of stage {self.chunk}"


Costs = Mapping[Any, float]
"""Durations by kind or by (kind, chunk); the latter wins. B is the input-gradient part: a
whole backward takes B + W. W may be absent where no backward is split."""

DEFAULT_COSTS: Costs = {"F": 1, "B": 1, "W": 1}
"""The usual rule of thumb: the two halves of the backward take as long as the forward."""


@dataclass(frozen=True)
class Schedule:
    """An order of actions for each device of a pipeline.

    A device runs its list in order, and starts an action once its inputs are there.
    That alone fixes the step: times follow from the costs.
    """

    name: str
    stages: int
    """The number of stages in the model. A device may hold several."""
    micro_batches: int
    devices: Tuple[Tuple[Action, ...], ...]
    split_backward: bool = False
    """Whether W is an action of its own. Otherwise B is the whole backward."""
    _placement: Dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        placement = {action.chunk: device for device, actions in enumerate(self.devices) for action in actions}
        object.__setattr__(self, "_placement", placement)

    @property
    def kinds(self) -> Tuple[str, ...]:
        """The kinds of actions that each micro-batch needs on each stage."""
        return ("F", "B", "W") if self.split_backward else ("F", "B")

    @property
    def release(self) -> str:
        """The kind of action after which an activation may be forgotten."""
        return self.kinds[-1]

    def chunks_of(self, device: int) -> Tuple[int, ...]:
        """The stages that a device holds, in the order of the model."""
        return tuple(sorted(chunk for chunk, owner in self._placement.items() if owner == device))

    def device_of(self, chunk: int) -> int:
        """The device that holds a stage."""
        if chunk not in self._placement:
            raise ScheduleError(f"schedule {self.name} has no stage {chunk}: its stages are 0 to {self.stages - 1}")
        return self._placement[chunk]


def data_dependencies(action: Action, stages: int) -> List[Action]:
    """The actions whose results an action reads.

    A forward reads that of the stage before. A backward reads the activation of its own
    stage, and the gradient from the stage behind. W reads what B left.
    """
    kind, micro_batch, chunk = action
    if kind == "F":
        return [Action("F", micro_batch, chunk - 1)] if chunk > 0 else []
    if kind == "B":
        behind = [Action("B", micro_batch, chunk + 1)] if chunk < stages - 1 else []
        return [Action("F", micro_batch, chunk)] + behind
    return [Action("B", micro_batch, chunk)]


def execution_order(schedule: Schedule) -> Iterator[Tuple[int, Action]]:
    """Run a schedule without a clock: yields (device, action), inputs always before their readers.

    Raises ScheduleError when no device can go on.
    """
    done: Set[Action] = set()
    position = [0] * len(schedule.devices)

    def missing(action: Action) -> Optional[Action]:
        return next((source for source in data_dependencies(action, schedule.stages) if source not in done), None)

    moved = True
    while moved:
        moved = False
        for device, actions in enumerate(schedule.devices):
            while position[device] < len(actions) and missing(actions[position[device]]) is None:
                action = actions[position[device]]
                done.add(action)
                position[device] += 1
                moved = True
                yield device, action
    waiting = [(device, actions[at]) for device, (actions, at) in enumerate(zip(schedule.devices, position)) if at < len(actions)]
    if waiting:
        text = "; ".join(f"device {device} stands before {action}, which reads {missing(action)}" for device, action in waiting)
        raise ScheduleError(f"schedule {schedule.name} is a deadlock: {text}. Change the order of the actions on one of these devices")


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError unless the schedule is complete and runs to its end.

    Complete: each stage is on one device, and has each of its actions exactly once for
    each micro-batch.
    """
    owners: Dict[int, int] = {}
    for device, actions in enumerate(schedule.devices):
        for action in actions:
            if owners.setdefault(action.chunk, device) != device:
                places = f"devices {owners[action.chunk]} and {device}"
                raise ScheduleError(f"schedule {schedule.name} has stage {action.chunk} on {places}; keep it on one")
    found = Counter(action for actions in schedule.devices for action in actions)
    wanted = {
        Action(kind, micro_batch, chunk)
        for kind in schedule.kinds
        for micro_batch in range(schedule.micro_batches)
        for chunk in range(schedule.stages)
    }
    faults = {
        "lacks": sorted(wanted - set(found)),
        "has unknown": sorted(set(found) - wanted),
        "repeats": sorted(action for action, count in found.items() if count > 1),
    }
    for fault, culprits in faults.items():
        if culprits:
            size = f"{schedule.stages} stages and {schedule.micro_batches} micro-batches need each of {', '.join(schedule.kinds)} once"
            more = f" and {len(culprits) - 1} more" if len(culprits) > 1 else ""
            raise ScheduleError(f"schedule {schedule.name} {fault} {culprits[0]}{more}: {size}")
    for _ in execution_order(schedule):
        pass


def durations(costs: Optional[Costs], split_backward: bool) -> Callable[[Action], float]:
    """A function that returns how long an action takes."""
    table = DEFAULT_COSTS if costs is None else costs

    def cost(kind: str, chunk: int, default: Optional[float] = None) -> float:
        value = table.get((kind, chunk), table.get(kind, default))
        if value is None:
            raise ScheduleError(f"there is no cost for {kind} of stage {chunk}; give one as {kind!r} or {(kind, chunk)!r}")
        if value < 0:
            raise ScheduleError(f"the cost for {kind} of stage {chunk} must not be negative: {value}")
        return value

    def duration(action: Action) -> float:
        if action.kind == "B" and not split_backward:
            return cost("B", action.chunk) + cost("W", action.chunk, 0)
        return cost(action.kind, action.chunk)

    return duration
