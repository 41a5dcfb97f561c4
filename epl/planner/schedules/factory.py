"""Schedules by name."""

from typing import Dict, List, Optional, Tuple

from epl.errors import ConfigError
from epl.planner.schedules import classic, zero_bubble
from epl.planner.schedules.base import Costs, Schedule, ScheduleError

_ALIASES: Dict[str, Tuple[str, ...]] = {
    "PreferForward": ("GPipe",),
    "PreferBackward": ("1F1B",),
    "PreferBackwardOptimizer": (),
    "Interleaved": ("Interleaved1F1B",),
    "ZeroBubbleH1": ("ZBH1",),
    "ZeroBubbleH2": ("ZBH2",),
    "ZeroBubbleV": ("ZBV",),
}

NAMES = tuple(_ALIASES)
"""The canonical names of all schedules."""


def _key(name: str) -> str:
    """A name as it is compared: without case, hyphens, underscores and blanks."""
    return "".join(letter for letter in name.lower() if letter not in "-_ ")


_BY_KEY = {_key(alias): name for name, aliases in _ALIASES.items() for alias in (name,) + aliases}


def canonical_name(name: str) -> str:
    """The canonical name of a schedule, from any spelling or alias.

    >>> canonical_name("zb-h1")
    'ZeroBubbleH1'
    """
    if not isinstance(name, str) or _key(name) not in _BY_KEY:
        names = ", ".join(known + "".join(f" (or {alias})" for alias in aliases) for known, aliases in _ALIASES.items())
        raise ConfigError(f"there is no pipeline schedule {name!r}; choose one of {names}")
    return _BY_KEY[_key(name)]


def make_schedule(name: str, stages: int, micro_batches: int, devices: Optional[int] = None, costs: Optional[Costs] = None) -> Schedule:
    """The schedule of that name for a pipeline of `stages` stages.

    `devices` is their number. Absent, each device holds one stage, or two if the schedule
    needs several on each ("Interleaved", "ZeroBubbleV"). `costs` matter to the zero-bubble
    schedules only: they place the W where these costs leave gaps. Absent, F, B and W take
    equal times. Any number of micro-batches is possible; few make large bubbles.
    """
    name = canonical_name(name)
    for what, number in (("stages", stages), ("micro-batches", micro_batches), ("devices", devices)):
        if number is not None and number < 1:
            raise ScheduleError(f"the number of {what} of a pipeline must be at least 1, not {number}")
    if name == "Interleaved":
        if devices is None and stages > 1:
            devices = _divide(name, stages, 2, "puts two on each device unless `devices` says otherwise")
        chunks = _divide(name, stages, devices or 1, f"puts equally many on each of {devices or 1} devices")
        return classic.interleaved(stages // chunks, chunks, micro_batches)
    if name == "ZeroBubbleV":
        half = _divide(name, stages, 2, "puts two on each device")
        _expect(name, stages, devices, half)
        return zero_bubble.zero_bubble_v(half, micro_batches, costs)
    _expect(name, stages, devices, stages)
    if name == "ZeroBubbleH1":
        return zero_bubble.zero_bubble_h1(stages, micro_batches, costs)
    if name == "ZeroBubbleH2":
        return zero_bubble.zero_bubble_h2(stages, micro_batches, costs)
    if name == "PreferForward":
        return classic.prefer_forward(stages, micro_batches)
    if name == "PreferBackwardOptimizer":
        return classic.prefer_backward_optimizer(stages, micro_batches)
    return classic.prefer_backward(stages, micro_batches)


def chunk_devices(stages: int, devices: int, folded: bool) -> List[int]:
    """The device of each stage when devices hold several: one after the other, or `folded` back and forth, as in a V."""
    return [stage % devices if not folded or stage // devices % 2 == 0 else devices - 1 - stage % devices for stage in range(stages)]


def chunks_of_stages(name: str, stages: int, per_device: int, devices: int) -> List[int]:
    """The device of a replica that each stage is on; empty when each stage has a device of its own.

    Args:
      name: of the schedule. per_device: stages that a device shall hold.
      devices: all devices that there are.
    """
    name = canonical_name(name)
    if name == "ZeroBubbleV":
        per_device = 2
    elif name != "Interleaved" and per_device > 1:
        raise ScheduleError(f"pipeline.stages_per_device = {per_device} needs the schedule Interleaved or ZeroBubbleV, not {name}")
    elif per_device == 1 and stages > devices:
        per_device = stages // devices if name == "Interleaved" and stages % devices == 0 else 1
    if per_device == 1:
        return []
    return chunk_devices(stages, _divide(name, stages, per_device, f"puts {per_device} on each device"), name == "ZeroBubbleV")


def _divide(name: str, stages: int, parts: int, how: str) -> int:
    """The number of stages divided by `parts`, which must be whole."""
    if stages % parts:
        below, above = stages // parts * parts, -(-stages // parts) * parts
        advice = f"{below} or {above}" if below else str(above)
        raise ScheduleError(f"schedule {name} can't divide {stages} stages: it {how}; use {advice} stages or another schedule")
    return stages // parts


def _expect(name: str, stages: int, devices: Optional[int], expected: int) -> None:
    """Refuse a number of devices that the schedule can't use."""
    if devices not in (None, expected):
        raise ScheduleError(
            f"schedule {name} runs {stages} stages on {expected} devices, not on {devices}; "
            f"use {expected} devices, or Interleaved for several stages on each"
        )
