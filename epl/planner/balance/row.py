"""A row of layers cut into stages, each given to one of several groups: an exact search.

The step takes T = sum_i t_i + sum of transfers + (m - 1) max_j t_j + max_i s_i, where t_i is
the time of a micro-batch on stage i, m the number of micro-batches and s_i the time in which
the stage synchronizes its gradients. The general form of Alpa, Metis and AMP; AMP adds
transfers to the sum. A transfer in one direction is also a candidate for the maximum (DAPPLE,
PPoPP 2021: communication as a stage of its own).

For given limits of max t and max s, a dynamic program over (what is used up, layers done)
finds the smallest sum over all cuts and all orders. A branch and bound over the two limits
finds T: in a box of limits, the smallest sum at its upper corner plus its lower corner is a
bound. (Alpa, OSDI 2022, section 5.2, tries all limits in turn, for one kind of device.)
"""

import dataclasses
import heapq
import itertools
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from epl.planner.balance import lattice

INFINITE = float("inf")
_CHUNK = 1 << 21
_ENOUGH = 1 - 1e-9
"""What could be faster by less than this is not looked for: sums that differ in their order alone would be."""


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """A group that may hold a stage.

    Attributes:
      uses: what it takes of each kind of the supply.
      seconds: for each stage, a matrix [L + 1, L + 1]: seconds of a micro-batch on layers a to b - 1; infinity where they don't fit.
      sync: such a matrix for the gradients; None for no time.
    """

    uses: Tuple[int, ...]
    seconds: Sequence[np.ndarray]
    sync: Optional[np.ndarray] = None


class Pick(NamedTuple):
    """A stage: the number of its option, and its layers from `first` to `last - 1`."""

    option: int
    first: int
    last: int


class Found(NamedTuple):
    """The best picks. `proven` is false if the search ended at its limit of sweeps."""

    picks: List[Pick]
    proven: bool


class _Sweep(NamedTuple):
    """A smallest sum, and what it comes with."""

    total: float
    slowest: float
    sync: float
    picks: List[Pick]


class Row:
    """The problem of one row of layers.

    Args:
      options: the groups to choose from.
      supply: how much there is of each kind; all of it is used.
      stages, layers: their numbers.
      hops: [L + 1] seconds of one transfer at each cut in one direction; or [options, options, L + 1], by the options before and behind it.
      order: the option of each stage, if that is fixed; `supply` does not matter then.
      beam: keep so many states after each stage, instead of all.
      rests: for a beam, [kinds of the supply, L + 1]: seconds of all layers from one on.
    """

    def __init__(
        self,
        options: Sequence[Option],
        supply: Sequence[int],
        stages: int,
        layers: int,
        hops: np.ndarray,
        order: Optional[Sequence[int]] = None,
        beam: Optional[int] = None,
        rests: Optional[np.ndarray] = None,
    ):
        self._options, self._stages, self._hops = options, stages, hops
        self._pairs = hops.ndim == 3
        # Stage i begins at one of the layers i to i + width - 1: each stage before and behind it has at least one.
        self._width = layers - stages + 1
        uses = [option.uses for option in options]
        if order is not None:
            self._lattice = lattice.fixed(order)
        elif beam is None or rests is None:
            self._lattice = lattice.free(uses, supply, stages)
        else:

            def cost(stage: int, option: int) -> np.ndarray:
                return self._window(options[option].seconds[stage], stage)

            self._lattice = lattice.narrow(uses, supply, stages, cost, rests, beam)
        self._states = [1] + [1 + max((int(move.to.max()) for move in moves), default=0) for moves in self._lattice]
        self._costs = [{move.option: self._window(options[move.option].seconds[i], i) for move in moves} for i, moves in enumerate(self._lattice)]
        syncs = [option.sync for option in options]
        self._synced = any(sync is not None for sync in syncs)
        self._syncs: List[Dict[int, np.ndarray]] = []
        if self._synced:
            zero = np.zeros((layers + 1, layers + 1))
            for i, moves in enumerate(self._lattice):
                self._syncs.append({move.option: self._window(zero if syncs[move.option] is None else syncs[move.option], i) for move in moves})

    @staticmethod
    def work(uses: Sequence[Tuple[int, ...]], supply: Sequence[int], stages: int, layers: int, pairs: bool = False) -> float:
        """About how many sums one sweep takes, without building anything."""
        states = float(np.prod([float(count + 1) for count in supply]))
        return states * Row.work_of_state(len(uses), stages, layers, pairs)

    @staticmethod
    def work_of_state(options: int, stages: int, layers: int, pairs: bool = False) -> float:
        """That of each state."""
        return float(options * (layers - stages + 2) ** 2 * (2 if pairs else 1))

    def best(self, micro_batches: int, bottleneck: bool = False, sweeps: int = 1000) -> Optional[Found]:
        """The picks with the smallest step time, or with the smallest maximum and among these the smallest sum; None if nothing fits.

        Args:
          sweeps: how many dynamic programs to run at most. A limit in their number, not in time: every rank must find the same.
        """
        least = self._sweep(INFINITE, INFINITE, np.maximum)
        if least is None:
            return None
        floor = least.slowest
        found = self._sweep(floor, INFINITE, np.add)
        assert found is not None
        if bottleneck:
            return Found(found.picks, True)
        lowest_sync = 0.0
        if self._synced:
            synced = self._sweep(INFINITE, INFINITE, np.maximum, by_sync=True)
            assert synced is not None
            lowest_sync = synced.sync
        factor = micro_batches - 1
        best, result = found.total + factor * found.slowest + found.sync, found.picks
        number = itertools.count()
        boxes: List[Any] = [(0.0, next(number), floor, INFINITE, lowest_sync, INFINITE)]
        runs = 0
        while boxes and runs < sweeps:
            bound, _, low, high, low_sync, high_sync = heapq.heappop(boxes)
            if bound >= best * _ENOUGH:
                return Found(result, True)
            found = self._sweep(high, high_sync, np.add)
            runs += 1
            if found is None:
                continue
            time = found.total + factor * found.slowest + found.sync
            if time < best:
                best, result = time, found.picks
            # What is left is faster than this in its slowest stage, or in its sync. Halves, so that bounds rise quickly.
            parts = [(t, end, low_sync, high_sync) for t, end in _halves(low, found.slowest)]
            if self._synced:
                parts += [(max(low, found.slowest), high, t, end) for t, end in _halves(low_sync, found.sync)]
            for part in parts:
                bound = found.total + factor * part[0] + part[2]
                if bound < best * _ENOUGH:
                    heapq.heappush(boxes, (bound, next(number), *part))
        return Found(result, not boxes)

    def time(self, picks: Sequence[Pick], micro_batches: int) -> float:
        """T of some picks."""
        seconds = [float(self._options[pick.option].seconds[i][pick.first, pick.last]) for i, pick in enumerate(picks)]
        return step_time(seconds, self._between(picks), self._syncs_of(picks), micro_batches)

    def slowest(self, picks: Sequence[Pick]) -> float:
        """The longest time of a stage or a transfer."""
        return max([float(self._options[pick.option].seconds[i][pick.first, pick.last]) for i, pick in enumerate(picks)] + self._between(picks))

    def _between(self, picks: Sequence[Pick]) -> List[float]:
        pairs = zip(picks, picks[1:])
        return [float(self._hops[a.option, b.option, b.first] if self._pairs else self._hops[b.first]) for a, b in pairs]

    def _syncs_of(self, picks: Sequence[Pick]) -> List[float]:
        matrices = [self._options[pick.option].sync for pick in picks]
        return [0.0 if matrix is None else float(matrix[pick.first, pick.last]) for matrix, pick in zip(matrices, picks)]

    def _window(self, matrix: Any, stage: int) -> np.ndarray:
        return np.ascontiguousarray(matrix[stage : stage + self._width, stage + 1 : stage + 1 + self._width])

    def _arrivals(self, reached: np.ndarray, stage: int, option: int, limit: float, plus: np.ufunc) -> np.ndarray:
        """[states, last option, cut]: what it takes to begin a stage on an option, the transfer included."""
        if stage == 0:
            return reached
        hops = self._hops[:, option] if self._pairs else self._hops[None]
        hops = hops[:, stage : stage + self._width]
        cost = np.where(hops > limit, INFINITE, hops if plus is np.maximum else 2 * hops)
        return plus(reached, cost[None])

    def _sweep(self, limit: float, sync_limit: float, plus: np.ufunc, by_sync: bool = False) -> Optional[_Sweep]:
        """The smallest sum (or maximum) over all that stays within the limits.

        `reached[stage]` is [states, last option (one row if it does not matter), layers done - stage].
        """
        width, rows = self._width, len(self._options) if self._pairs else 1
        start = np.full((1, rows, width), INFINITE)
        start[0, 0, 0] = 0.0
        reached = [start]
        costs = []
        for stage, moves in enumerate(self._lattice):
            after = np.full((self._states[stage + 1], rows, width), INFINITE)
            masked = {}
            for option, source, to in moves:
                cost = self._syncs[stage][option] if by_sync else self._costs[stage][option]
                if by_sync:
                    cost = np.where(np.isfinite(self._costs[stage][option]), cost, INFINITE)
                else:
                    cost = np.where(cost > limit, INFINITE, cost)
                    if sync_limit < INFINITE:
                        cost = np.where(self._syncs[stage][option] > sync_limit, INFINITE, cost)
                masked[option] = cost
                row = option if self._pairs else 0
                size = max(1, _CHUNK // (width * width))
                for begin in range(0, len(source), size):
                    part = slice(begin, begin + size)
                    arrived = reached[stage][source[part]]
                    if not by_sync:
                        arrived = self._arrivals(arrived, stage, option, limit, plus)
                    values = plus(arrived.min(axis=1)[:, :, None], cost).min(axis=1)
                    after[to[part], row] = np.minimum(after[to[part], row], values)
            costs.append(masked)
            reached.append(after)
        total = float(reached[-1][0, :, -1].min())
        if total == INFINITE:
            return None
        picks = self._traced(reached, costs, limit, plus, by_sync)
        return _Sweep(total, self.slowest(picks), max(self._syncs_of(picks)), picks)

    def _traced(self, reached: List[np.ndarray], costs: List[Dict[int, np.ndarray]], limit: float, plus: np.ufunc, by_sync: bool) -> List[Pick]:
        """The picks behind the last value, from back to front; the first of equals."""
        state, last = 0, self._width - 1
        row = int(reached[-1][0, :, last].argmin())
        picks: List[Pick] = []
        for stage in reversed(range(self._stages)):
            best: Tuple[float, Any] = (INFINITE, None)
            for option, source, to in self._lattice[stage]:
                if self._pairs and option != row:
                    continue
                for at in np.flatnonzero(to == state):
                    arrived = reached[stage][source[at]][None]
                    if not by_sync:
                        arrived = self._arrivals(arrived, stage, option, limit, plus)
                    values = plus(arrived[0].min(axis=0), costs[stage][option][:, last])
                    first = int(values.argmin())
                    if values[first] < best[0]:
                        best = (values[first], (option, int(source[at]), first, int(arrived[0][:, first].argmin())))
            option, source_state, first, row = best[1]
            picks.append(Pick(option, first + stage, last + stage + 1))
            state, last = source_state, first
        picks.reverse()
        return picks


def step_time(seconds: Sequence[float], hops: Sequence[float], syncs: Sequence[float], micro_batches: int) -> float:
    """T = sum_i t_i + sum of transfers, there and back, + (m - 1) max(t, transfer) + max sync."""
    return sum(seconds) + 2 * sum(hops) + (micro_batches - 1) * max([*seconds, *hops]) + max(syncs)


def _halves(low: float, end: float) -> List[Tuple[float, float]]:
    """The two halves of all numbers from `low` to below `end`, the upper one first."""
    middle = (low + end) / 2
    halves = [(middle, float(np.nextafter(end, 0.0))), (low, float(np.nextafter(middle, 0.0)))]
    return [half for half in halves if half[0] <= half[1]]
