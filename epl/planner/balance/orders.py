"""A good order of unequal groups where there are too many orders to try all."""

from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from epl.planner.balance.row import Found, Option, Row

_TRIES = 120
"""Orders that are tried from each start. A limit in their number, not in time: every rank must find the same."""


def search_orders(
    options: Sequence[Option],
    supply: Sequence[int],
    layers: int,
    hops: np.ndarray,
    starts: Sequence[Tuple[int, ...]],
    micro_batches: int,
    bottleneck: bool,
    work: float,
) -> Optional[Found]:
    """The best of a beam search, and of exchanges of two groups from the beam's order and from the best of some others.

    Neither is always better: a beam's order is good, and hard to improve.

    Args:
      options: each uses one of one kind of the supply, in their order.
      starts: the option of each stage.
      work: sums in one sweep of the beam.
    """
    stages = len(starts[0])
    size = int(work / stages / Row.work_of_state(len(options), stages, layers, hops.ndim == 3))
    each = np.array([np.diagonal(option.seconds[-1], 1) for option in options])
    rests = np.concatenate([np.cumsum(each[:, ::-1], axis=1)[:, ::-1], np.zeros((len(options), 1))], axis=1)
    row = Row(options, supply, stages, layers, hops, beam=max(size, 1), rests=rests)
    found: List[Found] = []

    def add(one: Optional[Found]) -> None:
        if one is not None:
            found.append(one)

    add(row.best(micro_batches, bottleneck))
    for some in ([tuple(pick.option for pick in one.picks) for one in found], starts):
        if some:
            order = _climbed(some, options, supply, layers, hops, micro_batches)
            add(Row(options, supply, stages, layers, hops, order).best(micro_batches, bottleneck))
    return min(found, key=lambda one: (row.slowest(one.picks) if bottleneck else 0.0, row.time(one.picks, micro_batches))) if found else None


def _climbed(
    orders: Sequence[Tuple[int, ...]], options: Sequence[Option], supply: Sequence[int], layers: int, hops: np.ndarray, micro_batches: int
) -> Tuple[int, ...]:
    """The best of some orders, until no tried exchange of two groups improves it."""
    seen: Dict[Tuple[int, ...], float] = {}

    def time(order: Tuple[int, ...]) -> float:
        """With the cuts whose slowest stage is fastest: an upper bound of the best time, and quick to find."""
        if order not in seen:
            row = Row(options, supply, len(order), layers, hops, order)
            found = row.best(micro_batches, True)
            seen[order] = float("inf") if found is None else row.time(found.picks, micro_batches)
        return seen[order]

    best = min(orders, key=time)
    count = len(best)
    pairs = [(i, i + gap) for gap in range(1, count) for i in range(count - gap)]
    improved = True
    while improved and len(seen) < _TRIES:
        improved = False
        for i, j in pairs:
            if best[i] != best[j] and len(seen) < _TRIES:
                order = list(best)
                order[i], order[j] = order[j], order[i]
                if time(tuple(order)) < time(best):
                    best, improved = tuple(order), True
    return best
