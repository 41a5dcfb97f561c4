"""Whole shares of a batch, or of a split dimension, for unequal devices: the fastest step, exactly.

The step takes as long as its slowest device, and then communicates. Against Whale's
algorithm 1 (`epl.planner.balance.whale`): seconds are measured or modelled for each device
and need not grow in proportion; only what grows with the share counts as growing in
memory; communication is part of the time; and the result is optimal, or there is none.
"""

import bisect
import dataclasses
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from epl.cluster.hardware.spec import Device
from epl.errors import PlanError
from epl.planner.cost.model import Layer, Model, distinct_parameters

Seconds = Callable[[int], float]
"""How long a device takes for so many samples."""


@dataclasses.dataclass(frozen=True)
class Linear:
    """fixed + each * samples."""

    fixed: float
    each: float

    def __call__(self, samples: int) -> float:
        return self.fixed + self.each * samples


@dataclasses.dataclass(frozen=True)
class Measured:
    """Straight lines through measured (samples, seconds). The last line goes on.

    So does the first line towards fewer samples, unless it is below the proportional part of the
    first point. A single point stands for a line through zero.
    """

    points: Tuple[Tuple[int, float], ...]

    def __post_init__(self) -> None:
        numbers = [samples for samples, _ in self.points]
        if not numbers or min(numbers) < 1 or any(a >= b for a, b in zip(numbers, numbers[1:])):
            raise PlanError("measured points need ascending numbers of samples from 1 on, not %s" % (numbers,))

    def __call__(self, samples: int) -> float:
        points = self.points if len(self.points) > 1 else ((0, 0.0),) + self.points
        right = min(max(bisect.bisect_left(points, (samples,)), 1), len(points) - 1)
        (a, at_a), (b, at_b) = points[right - 1 : right + 1]
        line = at_a + (at_b - at_a) * (samples - a) / (b - a)
        return line if samples >= a else max(line, at_a * samples / a)


@dataclasses.dataclass(frozen=True)
class Worker:
    """A device that takes a share.

    Attributes:
      seconds: of a share (in samples, or slices of a dimension).
      capacity: bytes of memory.
      fixed_bytes: what it needs for any share: weights, gradients, optimizer state.
      sample_bytes: what each sample needs besides: activations.
      least: the smallest share; 0 if the device may be left out. Then it costs neither time nor memory.
    """

    seconds: Seconds
    capacity: float = float("inf")
    fixed_bytes: float = 0.0
    sample_bytes: float = 0.0
    least: int = 1

    def most(self, total: int) -> int:
        """The largest share that fits its memory, at most `total`; -1 if not even an empty one does."""
        if self.fixed_bytes > self.capacity:
            return -1
        if self._fits(total):
            return total
        most = int((self.capacity - self.fixed_bytes) // self.sample_bytes)
        return most + 1 if self._fits(most + 1) else most  # divisions round

    def _fits(self, samples: int) -> bool:
        return self.fixed_bytes + self.sample_bytes * samples <= self.capacity


@dataclasses.dataclass(frozen=True)
class Shares:
    """A division of a total.

    Attributes:
      shares: of each worker.
      seconds: of the step.
      busy: seconds of each worker, without communication.
    """

    shares: Tuple[int, ...]
    seconds: float
    busy: Tuple[float, ...]


def replica(model: Model, device: Device, least: int = 1) -> Worker:
    """A device that trains a whole model on its share of the batch."""
    return layers_worker(model, model.layers, device, 1, least)


def layers_worker(model: Model, layers: Sequence[Layer], device: Device, in_flight: float, least: int = 1) -> Worker:
    """A device that runs some layers on its share of each micro-batch, and holds activations of `in_flight` of them."""

    def seconds(samples: int) -> float:
        return sum(layer.forward_seconds(device, samples, model.dtype) + layer.backward_seconds(device, samples, model.dtype) for layer in layers)

    # The seconds of a layer grow in a straight line: by the roofline as by measured seconds of a sample.
    each = max(seconds(2) - seconds(1), 0.0)
    line = Linear(max(seconds(1) - each, 0.0), each)
    kept = sum(layer.activation for layer in layers) * in_flight + max((layer.workspace for layer in layers), default=0.0)
    return Worker(line, device.memory, distinct_parameters(layers) * model.bytes_per_parameter, kept, least)


def even(total: int, count: int) -> Tuple[int, ...]:
    """Equal shares; the first ones one larger where the total can't be divided."""
    return tuple(total // count + (i < total % count) for i in range(count))


def step_seconds(
    shares: Sequence[int], workers: Sequence[Worker], sync: Optional[Callable[[int], float]] = None, gather: Optional[Callable[[int], float]] = None
) -> float:
    """The time of a step with given shares: see `divide`."""
    used = [(worker, share) for worker, share in zip(workers, shares) if share]
    slowest = max(worker.seconds(share) for worker, share in used)
    return slowest + (sync(len(used)) if sync else 0.0) + (gather(max(shares)) if gather else 0.0)


def divide(
    total: int,
    workers: Sequence[Worker],
    step: int = 1,
    sync: Optional[Callable[[int], float]] = None,
    gather: Optional[Callable[[int], float]] = None,
) -> Shares:
    """Whole shares with the smallest max over workers of seconds(share), plus communication, that fit all memories.

    Exact. Where the seconds of all workers grow with the share (or stay), a time limit T
    allows each worker a range of shares, and T is possible if the ends of the ranges add up to
    the total: bisection over all times that occur. Where they don't, what sums are possible
    is counted instead. Of equally good shares it takes those whose other workers finish
    earlier too, and among equal times the more even ones.

    Args:
      total: samples of the global batch, or the size of the split dimension.
      step: shares are multiples of this (slices per head, for instance).
      sync: seconds for a number of workers with a share; must not fall as they grow in number (a ring all-reduce).
      gather: seconds for the largest share; must not fall as it grows. Collectives of uneven shards wait for the
        largest one: HAP (Zhang et al., EuroSys 2024).

    Raises:
      PlanError: no shares fit.
    """
    if not workers or total < 1 or step < 1 or total % step:
        raise PlanError("a total of %d can't be shared in steps of %d by %d workers; use positive numbers that divide" % (total, step, len(workers)))
    problem = _Problem(total, workers, step)
    best: Optional[Shares] = None
    for members in problem.numbers_of_members() if sync else [len(workers)]:
        synced = sync(members) if sync else 0.0
        if best is not None and problem.floor(len(workers)) + synced >= best.seconds:
            break
        for largest in problem.largest_shares() if gather else [problem.units]:
            # What communicates costs no less for more members and larger shares, so nothing better can follow.
            if best is not None and gather and problem.floor(members) + gather(largest * step) >= best.seconds:
                break
            found = problem.solve(members, largest)
            if found is not None:
                shares = tuple(unit * step for unit in found)
                seconds = step_seconds(shares, workers, sync, gather)
                if best is None or seconds < best.seconds:
                    best = Shares(shares, seconds, tuple(w.seconds(share) if share else 0.0 for w, share in zip(workers, shares)))
    if best is None:
        raise PlanError(problem.why_not())
    return best


class _Problem:
    """Times of all shares, in units of a step. Workers that are alike share a row."""

    def __init__(self, total: int, workers: Sequence[Worker], step: int):
        self.units = total // step
        self._workers = workers
        self._step = step
        kinds: List[Worker] = []
        self._kind = []
        for worker in workers:
            if worker not in kinds:
                kinds.append(worker)
            self._kind.append(kinds.index(worker))
        self._most = [kind.most(total) // step for kind in kinds]
        self._low = [-(-kind.least // step) for kind in kinds]
        self._times = [self._row(kind, most) for kind, most in zip(kinds, self._most)]
        self._monotone = all(np.all(np.diff(times[1:]) >= 0) for times in self._times)
        self._levels = np.unique(np.concatenate([times[1:] for times in self._times] + [np.zeros(1)]))
        self._counts = [self._kind.count(kind) for kind in range(len(kinds))]
        self._floors: Dict[int, float] = {}

    def _row(self, kind: Worker, most: int) -> np.ndarray:
        """times[n] of n units, for all that fit; nothing costs nothing."""
        if isinstance(kind.seconds, Linear):
            times = kind.seconds.fixed + kind.seconds.each * self._step * np.arange(max(most, 0) + 1)
            times[0] = 0.0
            return times
        return np.array([0.0] + [kind.seconds(unit * self._step) for unit in range(1, most + 1)])

    def time(self, worker: int, units: int) -> float:
        return float(self._times[self._kind[worker]][units])

    def numbers_of_members(self) -> List[int]:
        needed = sum(self._low[kind] > 0 for kind in self._kind)
        return list(range(max(needed, 1), len(self._workers) + 1))

    def largest_shares(self) -> List[int]:
        return list(range(-(-self.units // len(self._workers)), max(self._most) + 1))

    def floor(self, members: int) -> float:
        """The time of the slowest worker if the largest share does not matter."""
        if members not in self._floors:
            found = self.solve(members, self.units)
            self._floors[members] = max(self.time(i, unit) for i, unit in enumerate(found)) if found else float("inf")
        return self._floors[members]

    def solve(self, members: int, largest: int) -> Optional[List[int]]:
        """The best units of each worker, of which at most `members` have any and none has more than `largest`."""
        high = [min(most, largest) for most in self._most]
        if any(low and low > most for low, most in zip(self._low, high)):
            return None
        return self._by_ranges(members, high) if self._monotone else self._by_sums(members, high)

    def _by_ranges(self, members: int, high: Sequence[int]) -> Optional[List[int]]:
        needed = sum(count for low, count in zip(self._low, self._counts) if low)
        if sum(low * count for low, count in zip(self._low, self._counts)) > self.units or needed > members:
            return None

        def ends(level: float, below: bool = False) -> List[int]:
            """For each kind, the largest share that takes at most `level` (less, with `below`), but no less than it has to take."""
            side: Any = "left" if below else "right"
            counts = [int(np.searchsorted(times[1 : max(most, 0) + 1], level, side)) for times, most in zip(self._times, high)]
            return [max(low, count) for low, count in zip(self._low, counts)]

        def chosen(largest: Sequence[int]) -> List[int]:
            """How many workers of each kind have a share: all that need one, and of the others those that take the most."""
            room = members - needed
            numbers = [count if low else 0 for low, count in zip(self._low, self._counts)]
            for kind in sorted(range(len(numbers)), key=lambda kind: (-largest[kind], kind)):
                if not self._low[kind] and largest[kind]:
                    numbers[kind] = min(room, self._counts[kind])
                    room -= numbers[kind]
            return numbers

        def possible(level: float) -> bool:
            largest = ends(level)
            return sum(number * units for number, units in zip(chosen(largest), largest)) >= self.units

        position = self._first(possible)
        if position is None:
            return None
        upper, lower = ends(self._levels[position]), ends(self._levels[position], True)
        left, members_now = chosen(upper), []
        for i, kind in enumerate(self._kind):
            if left[kind]:
                members_now.append(i)
                left[kind] -= 1
        filled = _fill([lower[self._kind[i]] for i in members_now], [upper[self._kind[i]] for i in members_now], self.units)
        shares = [0] * len(self._workers)
        for i, units in zip(members_now, filled):
            shares[i] = units
        return shares

    def _first(self, possible: Callable[[float], bool]) -> Optional[int]:
        """The first of the times that occur that is possible; all later ones are."""
        below, level = -1, len(self._levels) - 1
        if not possible(self._levels[level]):
            return None
        while level - below > 1:
            middle = (below + level) // 2
            below, level = (below, middle) if possible(self._levels[middle]) else (middle, level)
        return level

    def _by_sums(self, members: int, high: Sequence[int]) -> Optional[List[int]]:
        def sums(level: float) -> List[List[int]]:
            """For each number of first workers, for each number of members among them: the sums that are possible, as bits."""
            mask = (1 << (self.units + 1)) - 1
            rows = [[1] + [0] * members]
            for kind in self._kind:
                allowed = self._allowed(kind, high[kind], level)
                row = [0] * (members + 1)
                for used, bits in enumerate(rows[-1]):
                    if not bits:
                        continue
                    if not self._low[kind]:
                        row[used] |= bits
                    if used < members:
                        for units in allowed:
                            row[used + 1] |= bits << units & mask
                rows.append(row)
            return rows

        def possible(level: float) -> bool:
            return any(bits >> self.units & 1 for bits in sums(level)[-1])

        position = self._first(possible)
        if position is None:
            return None
        level = self._levels[position]
        rows = sums(level)
        rest = self.units
        used = next(number for number, bits in enumerate(rows[-1]) if bits >> rest & 1)
        shares = [0] * len(self._workers)
        for i in reversed(range(len(self._workers))):
            kind = self._kind[i]
            if not self._low[kind] and rows[i][used] >> rest & 1:
                continue
            allowed = self._allowed(kind, min(high[kind], rest), level)
            shares[i] = next(units for units in allowed if rows[i][used - 1] >> (rest - units) & 1)
            rest, used = rest - shares[i], used - 1
        return shares

    def _allowed(self, kind: int, most: int, level: float) -> List[int]:
        """The shares of one unit or more that take at most `level`."""
        return [units for units in range(max(self._low[kind], 1), most + 1) if self._times[kind][units] <= level]

    def why_not(self) -> str:
        rooms = [max(self._most[kind], 0) * self._step for kind in self._kind]
        least = sum(self._low[kind] for kind in self._kind) * self._step
        tight = [i for i, kind in enumerate(self._kind) if self._most[kind] < self._low[kind]]
        if tight:
            text = "worker %d has no memory for its smallest share; give it more memory or allow it to be left out (least=0)" % tight[0]
        elif least > self.units * self._step:
            text = "the smallest shares alone are %d; allow workers to be left out (least=0) or use fewer" % least
        else:
            text = "the memory of all workers has room for %d; use more or larger devices, or keep fewer activations" % sum(rooms)
        return "a total of %d can't be shared: %s" % (self.units * self._step, text)


def _fill(lower: Sequence[int], upper: Sequence[int], total: int) -> List[int]:
    """Raise the smallest of some numbers until they add up to a total, each within its bounds."""
    low, high = np.array(lower), np.array(upper)
    below, level = 0, int(high.max())
    while level - below > 1:
        middle = (below + level) // 2
        below, level = (middle, level) if np.clip(middle, low, high).sum() <= total else (below, middle)
    numbers, next_ones = np.clip(below, low, high), np.clip(level, low, high)
    for i in np.flatnonzero(next_ones > numbers)[: total - int(numbers.sum())]:
        numbers[i] = next_ones[i]
    return [int(number) for number in numbers]
