"""Schedules that split the backward pass, so that weight gradients (W) fill the gaps.

Source of all: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241);
for the V also Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024
(arXiv 2405.15362).

In the formulas p is the number of devices, m that of micro-batches, i a device, counted
from 0, and tF, tB, tW the times that one stage takes for F, B and W. The bubble is that of
`Timeline.bubble`: the idle part of the longest time between a device's first start and
last end. Where H2 and V have none, devices start and end one after the other; to profit,
the next step must start on the first device before the last one has ended this step.
"""

from collections import deque
from typing import Deque, Dict, List, Optional, Sequence, Tuple

from epl.planner.schedules.base import Action, Costs, Schedule, data_dependencies, durations
from epl.planner.schedules.classic import alternate
from epl.planner.schedules.timeline import simulate


def zero_bubble_h1(stages: int, micro_batches: int, costs: Optional[Costs] = None) -> Schedule:
    """ZB-H1: 1F1B whose W wait, so that all devices hold as many activations as the first.

    Bubble: (p - 1)(tF + tB - min(tF, tW)) if m >= p. The paper has tW for the minimum, but
    a W longer than an F does not hide more. Equal times, fewer micro-batches:
    (2p - 1 - m) tF. Activations: min(m, p).

    Source: 2401.10241, section 2.1, figure 3 (top) and table 2.
    """
    leads = [stages - stage for stage in range(stages)]
    return _handcrafted("ZeroBubbleH1", micro_batches, leads, list(range(stages)), costs)


def zero_bubble_h2(stages: int, micro_batches: int, costs: Optional[Costs] = None) -> Schedule:
    """ZB-H2: more forwards ahead, so that no device waits for its first backward.

    Bubble: max(0, (p - 1)(tF + tB - 2 min(tF, tW))) if m >= 2p - 1, so none with equal
    times. Equal times, fewer micro-batches: (2p - 1 - m) tF. Activations: min(m, 2p - 1).

    Source: 2401.10241, section 2.2, figure 3 (bottom) and table 2.
    """
    leads = [2 * (stages - stage) - 1 for stage in range(stages)]
    return _handcrafted("ZeroBubbleH2", micro_batches, leads, [2 * stage for stage in range(stages)], costs)


def zero_bubble_v(devices: int, micro_batches: int, costs: Optional[Costs] = None) -> Schedule:
    """ZB-V: each device holds two stages, i and 2p - 1 - i, so the model runs there and back.

    The last stage is on the first device, which therefore starts backwards early: no
    bubble, and no more activations than 1F1B has on its first device, on any device.
    Bubble with equal times: max(0, 2p - 1 - m, 4(p - m) - 1) tF, so none if
    m >= 2p - 1. Activations: min(2m, 2p), each of half the size.

    The order of F and B is made by hand, in three parts: forwards until the first
    micro-batch is back; forwards and backwards of the upper stage; both stages in turn.
    The W then go where the device would wait.

    Source: 2401.10241, only in its arXiv version; 2405.15362 (V-shaped building blocks).
    """
    stages = 2 * devices
    lists = []
    for device in range(devices):
        lower, upper = device, stages - 1 - device
        ahead = devices - device
        kinds = [("F", lower)] * (2 * ahead - 1)
        kinds += [("F", upper), ("F", lower)] * device
        kinds += [("F", upper), ("B", upper)] * ahead
        kinds += [("F", lower), ("B", lower), ("F", upper), ("B", upper)] * micro_batches
        kinds += [("B", lower), ("B", upper)] * micro_batches
        lists.append(_number(kinds, micro_batches))
    orders = [_fill(lists, stages, stages, None)]
    if costs is not None:
        orders.append(_fill(lists, stages, stages, costs))
    return _best("ZeroBubbleV", stages, micro_batches, orders, costs)


def _number(kinds: Sequence[Tuple[str, int]], micro_batches: int) -> Tuple[Action, ...]:
    """Give each (kind, stage) the next micro-batch; those for which none is left fall out."""
    used: Dict[Tuple[str, int], int] = {}
    actions = []
    for kind, chunk in kinds:
        micro_batch = used.get((kind, chunk), 0)
        if micro_batch < micro_batches:
            actions.append(Action(kind, micro_batch, chunk))
            used[kind, chunk] = micro_batch + 1
    return tuple(actions)


def _handcrafted(name: str, micro_batches: int, leads: Sequence[int], lags: Sequence[int], costs: Optional[Costs]) -> Schedule:
    """The paper's order: stage s starts `leads[s]` forwards first, and each W comes `lags[s]` backwards late.

    If there are costs, a second order puts the W where a device waits under these costs,
    within the same memory, and the shorter of the two is taken.
    """
    stages = len(leads)
    lists = [alternate(stage, micro_batches, lead) for stage, lead in enumerate(leads)]
    orders = [tuple(_delay(actions, lag) for actions, lag in zip(lists, lags))]
    if costs is not None:
        orders.append(_fill(lists, stages, max(lead + lag for lead, lag in zip(leads, lags)), costs))
    return _best(name, stages, micro_batches, orders, costs)


def _delay(actions: Sequence[Action], lag: int) -> Tuple[Action, ...]:
    """Add a W behind each B but the first `lag`, always the oldest one, and the others at the end."""
    pending: Deque[Action] = deque()
    order = []
    for action in actions:
        order.append(action)
        if action.kind == "B":
            pending.append(action._replace(kind="W"))
            if len(pending) > lag:
                order.append(pending.popleft())
    return tuple(order) + tuple(pending)


def _fill(lists: Sequence[Sequence[Action]], stages: int, limit: int, costs: Optional[Costs]) -> Tuple[Tuple[Action, ...], ...]:
    """Add a W wherever a device would wait for the next F or B of its list.

    It waits for data, or because it holds `limit` activations. The oldest W goes first.
    A clock moves from one end of an action to the next, so the order depends on the
    costs, but it is always a right one.
    """
    duration = durations(costs, split_backward=True)
    ends: Dict[Action, float] = {}
    position = [0] * len(lists)
    pending: List[Deque[Action]] = [deque() for _ in lists]
    free: List[float] = [0] * len(lists)
    alive = [0] * len(lists)
    orders: List[List[Action]] = [[] for _ in lists]
    now: float = 0

    def choose(device: int) -> Optional[Action]:
        if position[device] < len(lists[device]):
            action = lists[device][position[device]]
            has_room = action.kind != "F" or alive[device] < limit
            if has_room and all(source in ends and ends[source] <= now for source in data_dependencies(action, stages)):
                position[device] += 1
                return action
        return pending[device].popleft() if pending[device] else None

    while True:
        moved = False
        for device in range(len(lists)):
            action = choose(device) if free[device] <= now else None
            if action is None:
                continue
            moved = True
            orders[device].append(action)
            ends[action] = free[device] = now + duration(action)
            alive[device] += {"F": 1, "B": 0, "W": -1}[action.kind]
            if action.kind == "B":
                pending[device].append(action._replace(kind="W"))
        if not moved:
            later = [time for time in free if time > now]
            if not later:
                return tuple(map(tuple, orders))
            now = min(later)


def _best(name: str, stages: int, micro_batches: int, orders: Sequence[Tuple[Tuple[Action, ...], ...]], costs: Optional[Costs]) -> Schedule:
    """The order with the shortest period under the costs; the first of equals."""
    schedules = [Schedule(name, stages, micro_batches, order, split_backward=True) for order in orders]
    return schedules[0] if len(schedules) == 1 else min(schedules, key=lambda schedule: simulate(schedule, costs).period)
