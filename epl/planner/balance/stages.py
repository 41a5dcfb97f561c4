"""Unequal stages for unequal groups of devices: where to cut the layers, and which group gets which part.

Source of the objective: see `epl.planner.balance.row`. Unlike Whale's inter-taskgraph step
(`epl.planner.balance.whale.balance_pipeline`), memory is counted for each cut, transfers
take time, the order of the groups is searched, and the result is optimal where it says so.
"""

import dataclasses
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from epl.cluster.hardware.spec import Device, Link
from epl.errors import PlanError
from epl.planner.balance.costs import InFlight, Schedule, Tables, all_reduce_seconds, check_stages, held_by
from epl.planner.balance.orders import search_orders
from epl.planner.balance.row import Option, Pick, Row, step_time
from epl.planner.cost.model import Model

EXACT_WORK = 2e7
"""The sums in one sweep up to which all orders are searched; a plan takes less than a second then."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices that hold one stage together and share each of its micro-batches.

    Attributes:
      shares: samples of a micro-batch for each device.
      link: between them, for the all-reduce of the gradients; None if that takes no time.
    """

    devices: Tuple[Device, ...]
    shares: Tuple[int, ...]
    link: Optional[Link] = None

    def __post_init__(self) -> None:
        if not self.devices or len(self.devices) != len(self.shares) or min(self.shares) < 1:
            text = "each of the %d devices of a group needs a share of at least 1 sample; the shares are %s"
            raise PlanError(text % (len(self.devices), self.shares))

    @property
    def samples(self) -> int:
        """Of a micro-batch."""
        return sum(self.shares)


Boundary = Union[None, Link, Callable[[Group, Group], Link]]
"""The link over which a micro-batch goes from one group to the next: none that takes time, the same for all, or by the two."""


class Stage(NamedTuple):
    """One stage of a plan.

    Attributes:
      group: its number in the list that the plan was made for.
      first, last: its layers are `first` to `last - 1`.
      seconds: of a micro-batch, forward and backward.
      sync: seconds of the all-reduce of its gradients.
      memory: bytes that each device of the group needs.
    """

    group: int
    first: int
    last: int
    seconds: float
    sync: float
    memory: Tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """Stages in their order.

    Attributes:
      groups: of each stage.
      hops: seconds of one transfer in one direction, between neighbouring stages.
      seconds: T of the step.
      proven: no other plan of the same form is faster by more than 1e-9 of it.
      idle: devices that would only slow it down.
    """

    stages: Tuple[Stage, ...]
    groups: Tuple[Group, ...]
    hops: Tuple[float, ...]
    seconds: float
    proven: bool = False
    idle: Tuple[Device, ...] = ()

    @property
    def cuts(self) -> Tuple[int, ...]:
        """The first layer of each stage, and the number of layers."""
        return tuple(stage.first for stage in self.stages) + (self.stages[-1].last,)

    @property
    def bottleneck(self) -> float:
        """Seconds between two micro-batches of the slowest stage or transfer."""
        return max([stage.seconds for stage in self.stages] + list(self.hops))

    @property
    def fits(self) -> bool:
        """Whether each device has the memory that it needs."""
        pairs = ((need, device.memory) for stage, group in zip(self.stages, self.groups) for need, device in zip(stage.memory, group.devices))
        return all(need <= capacity for need, capacity in pairs)


def price_stages(
    model: Model,
    groups: Sequence[Group],
    cuts: Sequence[int],
    micro_batches: int,
    schedule: Schedule = "PreferBackward",
    link: Boundary = None,
) -> StagePlan:
    """A plan with given cuts and groups in their order; whether it fits the memory is for the caller to ask."""
    check_stages(model, len(groups), micro_batches)
    if len(cuts) != len(groups) + 1 or cuts[0] != 0 or cuts[-1] != len(model.layers) or any(a >= b for a, b in zip(cuts, cuts[1:])):
        text = "the cuts of %d layers into %d stages are %d ascending numbers from 0 to %d, not %s"
        raise PlanError(text % (len(model.layers), len(groups), len(groups) + 1, len(model.layers), list(cuts)))
    picks = [Pick(i, first, last) for i, (first, last) in enumerate(zip(cuts, cuts[1:]))]
    return plan_of(Tables(model), list(groups), picks, micro_batches, held_by(schedule, len(groups), micro_batches), link, False)


def balance_stages(
    model: Model,
    groups: Sequence[Group],
    micro_batches: int,
    schedule: Schedule = "PreferBackward",
    link: Boundary = None,
    bottleneck: bool = False,
    keep_order: bool = False,
) -> StagePlan:
    """One stage for each group: the cuts and the order with the smallest step time, within the memory of each device.

    Groups that are alike count as one kind. A dynamic program over how many of each kind
    are used up covers all distinct orders at once, and memory may depend on the place. That is
    exact up to `EXACT_WORK`: for 48 layers, 4 kinds of 8 groups each, or 5 of 4. Beyond it, the
    program keeps only the most promising states (a beam), and the best of its order, the given
    one, and those by memory (Whale) and by speed is improved by exchanging two groups as long as
    that helps; `proven` is false then.

    Args:
      schedule: name of a pipeline schedule, or the micro-batches in flight for each stage.
      bottleneck: minimise the slowest stage alone (and among equals the sum): endless pipelines.
      keep_order: the first group gets the first stage, and so on.

    Raises:
      PlanError: no cut and order fit.
    """
    check_stages(model, len(groups), micro_batches)
    if len({group.samples for group in groups}) > 1:
        raise PlanError("all groups take the same micro-batches, but their shares add up to %s" % [group.samples for group in groups])
    tables, held = Tables(model), held_by(schedule, len(groups), micro_batches)
    kinds, kind_of = _kinds(tables, groups)
    options = [option_of(tables, kinds[k], tuple(int(k == i) for i in range(len(kinds))), held, len(groups)) for k in range(len(kinds))]
    hops = _hops(tables, kinds, link)
    supply = [kind_of.count(kind) for kind in range(len(kinds))]
    order = list(kind_of) if keep_order or len(kinds) == 1 else None
    exact = order is not None or Row.work([option.uses for option in options], supply, len(groups), tables.layers, hops.ndim == 3) <= EXACT_WORK
    if exact:
        found = Row(options, supply, len(groups), tables.layers, hops, order).best(micro_batches, bottleneck)
    else:
        found = search_orders(options, supply, tables.layers, hops, _orders(tables, kinds, kind_of), micro_batches, bottleneck, EXACT_WORK)
    if found is None:
        raise PlanError(too_large(model, [device for group in groups for device in group.devices], len(groups)))
    left: Dict[int, List[int]] = {}
    for number, kind in enumerate(kind_of):
        left.setdefault(kind, []).append(number)
    picks = [Pick(left[pick.option].pop(0), pick.first, pick.last) for pick in found.picks]
    return plan_of(tables, list(groups), picks, micro_batches, held, link, exact and found.proven)


def option_of(tables: Tables, group: Group, uses: Tuple[int, ...], held: InFlight, stages: int) -> Option:
    """The costs of a group at each stage; infinite where a device lacks memory."""
    parts: Dict[Tuple[int, int], Device] = {}
    for device, share in zip(group.devices, group.shares):
        parts[tables.kind(device), share] = device
    seconds = np.maximum.reduce([tables.seconds(device, share) for (_, share), device in parts.items()])
    by_held: Dict[float, np.ndarray] = {}
    matrices = []
    for stage in range(stages):
        number = held(stage)
        if number not in by_held:
            fits = np.logical_and.reduce([tables.memory(share, number) <= device.memory for (_, share), device in parts.items()])
            by_held[number] = np.where(fits, seconds, np.inf)
        matrices.append(by_held[number])
    return Option(uses, matrices, sync_of(tables, len(group.devices), group.link))


def sync_of(tables: Tables, devices: int, link: Optional[Link]) -> Optional[np.ndarray]:
    """Seconds of the all-reduce of the gradients of each run of layers."""
    if link is None or devices < 2:
        return None
    bytes_of = tables.parameters * tables.model.gradient_bytes
    return all_reduce_seconds(0.0, devices, link) + 2 * (devices - 1) * bytes_of / devices / link.rate


def too_large(model: Model, devices: Sequence[Device], stages: int) -> str:
    """Why nothing fits."""
    largest = max(model.layers, key=lambda layer: layer.parameters)
    need, have = model.parameters * model.bytes_per_parameter, sum(device.memory for device in devices)
    text = "no cut of %d layers into %d stages fits: weights, gradients and optimizer state are %.3g bytes (layer %s: %.3g) before activations, "
    text += "and the devices have %.3g bytes together, at most %.3g each; use more or larger devices, smaller micro-batches, recomputation or ZeRO"
    own = largest.parameters * model.bytes_per_parameter
    return text % (len(model.layers), stages, need, largest.name, own, have, max(device.memory for device in devices))


def _kinds(tables: Tables, groups: Sequence[Group]) -> Tuple[List[Group], List[int]]:
    """Groups that differ in what they cost, and the kind of each group."""
    kinds: List[Group] = []
    keys: List[Tuple[object, ...]] = []
    found = []
    for group in groups:
        key = tuple(sorted((tables.kind(device), share) for device, share in zip(group.devices, group.shares))), group.link
        if key not in keys:
            keys.append(key)
            kinds.append(group)
        found.append(keys.index(key))
    return kinds, found


def _orders(tables: Tables, kinds: Sequence[Group], kind_of: Sequence[int]) -> List[Tuple[int, ...]]:
    """Orders to begin with: the given one, by memory for a sample, and by speed, both ways."""
    speed = [max(float(tables.seconds(d, s)[0, -1]) for d, s in zip(kind.devices, kind.shares)) for kind in kinds]
    room = [min(device.memory / share for device, share in zip(kind.devices, kind.shares)) for kind in kinds]
    orders = [tuple(kind_of)]
    for rank in (room, speed):
        rising = tuple(sorted(kind_of, key=rank.__getitem__))
        orders += [rising, rising[::-1]]
    return orders


def _hops(tables: Tables, kinds: Sequence[Group], link: Boundary) -> np.ndarray:
    samples = kinds[0].samples
    if link is None or isinstance(link, Link):
        return tables.hops(samples, link)
    return np.array([[tables.hops(samples, link(a, b)) for b in kinds] for a in kinds])


def plan_of(
    tables: Tables,
    groups: Sequence[Group],
    picks: Sequence[Pick],
    micro_batches: int,
    held: InFlight,
    link: Boundary,
    proven: bool,
    idle: Sequence[Device] = (),
) -> StagePlan:
    """The plan of picks whose options are numbers of groups."""
    stages, hops = [], []
    for place, (number, first, last) in enumerate(picks):
        group = groups[number]
        seconds = max(float(tables.seconds(device, share)[first, last]) for device, share in zip(group.devices, group.shares))
        memory = tuple(tables.memory_of(first, last, share, held(place)) for share in group.shares)
        sync = sync_of(tables, len(group.devices), group.link)
        stages.append(Stage(number, first, last, seconds, 0.0 if sync is None else float(sync[first, last]), memory))
        if place:
            before = groups[picks[place - 1].option]
            way = link if link is None or isinstance(link, Link) else link(before, group)
            hops.append(0.0 if way is None else way.seconds(tables.model.crossing(first) * group.samples))
    time = step_time([stage.seconds for stage in stages], hops, [stage.sync for stage in stages], micro_batches)
    return StagePlan(tuple(stages), tuple(groups[pick.option] for pick in picks), tuple(hops), time, proven, tuple(idle))
