"""Layers and data together: stages of mixed groups, unequal between groups and unequal within each.

The idea is Metis's (Um et al., USENIX ATC 2024): stages may be groups of any devices, each
device of a group takes its own part of a micro-batch, and each group its own part of the
layers. Metis balances both in proportion to profiled capacity; here shares and cuts are
optimal together where that is proven, and searched otherwise.
"""

import dataclasses
import itertools
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from epl.cluster.hardware.spec import Device, Link
from epl.errors import PlanError
from epl.planner.balance.costs import Schedule, Tables, check_stages, held_by
from epl.planner.balance.row import Option, Pick, Row
from epl.planner.balance.shares import Linear, Worker, divide
from epl.planner.balance.stages import EXACT_WORK, Group, StagePlan, plan_of, sync_of, too_large
from epl.planner.cost.model import Model

Counts = Tuple[int, ...]
"""How many devices of each kind a group has."""

_MOST_CELLS = 1e8
"""Numbers that may be summed to price all possible groups."""
_EFFORT = 1e6
"""The sums in all divisions of the devices that are tried from each start, where not all can be tried."""
_TRIES = (20, 200)
"""Their least and their largest number. A limit in numbers, not in time: every rank must find the same."""
_COARSE = 2e7
"""The sums in one sweep over divisions of blocks of devices."""


def balance_jointly(
    model: Model,
    devices: Sequence[Device],
    stages: int,
    batch: int,
    micro_batches: int,
    schedule: Schedule = "PreferBackward",
    link: Optional[Link] = None,
    group_link: Optional[Link] = None,
) -> StagePlan:
    """Divide devices into one group per stage, each micro-batch within the groups, and the layers among the groups.

    Small problems are solved exactly: a dynamic program over all divisions of the devices by
    kind and all cuts, with the best shares for each group and each run of layers. In larger
    ones, divisions are improved step by step: from equal mixtures, and from runs of devices
    sorted by memory and by speed. Each has its best shares and cuts; `proven` is false then.

    A device that would only slow its group down gets no samples; it is `idle` in the plan. With a
    `group_link`, the search counts it as part of the all-reduce still, and the plan does not.

    Args:
      batch: samples of a step; a micro-batch has batch / micro_batches.
      link: from each group to the next; it carries the whole micro-batch.
      group_link: between the devices of a group, for gradients.

    Raises:
      PlanError: numbers that don't divide, or nothing fits.
    """
    search = _Search(model, devices, stages, batch, micro_batches, schedule, link, group_link)
    choices = search.all_counts()
    if choices is None:
        return search.arranged(search.climbed(), False)
    row = Row([search.option(counts) for counts in choices], search.supply, stages, search.tables.layers, search.hops)
    found = row.best(micro_batches)
    if found is None:
        raise PlanError(too_large(model, devices, stages))
    return search.plan([choices[pick.option] for pick in found.picks], found.picks, found.proven)


def balance_groups(
    model: Model,
    groups: Sequence[Sequence[Device]],
    batch: int,
    micro_batches: int,
    schedule: Schedule = "PreferBackward",
    link: Optional[Link] = None,
    group_link: Optional[Link] = None,
) -> StagePlan:
    """As `balance_jointly`, for given groups in their order: unequal shares within them, unequal layers between them. Exact."""
    devices = [device for group in groups for device in group]
    search = _Search(model, devices, len(groups), batch, micro_batches, schedule, link, group_link)
    return search.arranged([search.counts(group) for group in groups], True)


def share_layers(model: Model, first: int, last: int, devices: Sequence[Device], samples: int, held: float, link: Optional[Link] = None) -> Group:
    """The group in which some devices run layers `first` to `last - 1` fastest, by the best shares of each micro-batch.

    Devices that would only slow it down are not in it.

    Args:
      samples: of a micro-batch.
      held: micro-batches in flight.
      link: between the devices.

    Raises:
      PlanError: the layers don't fit.
    """
    return _shared(Tables(model), first, last, devices, samples, held, link)


def _shared(tables: Tables, first: int, last: int, devices: Sequence[Device], samples: int, held: float, link: Optional[Link]) -> Group:
    workers: Dict[int, Worker] = {}
    for device in devices:
        kind = tables.kind(device)
        if kind not in workers:
            fixed, each = (float(matrix[first, last]) for matrix in tables.line(device))
            # Memory is counted in samples, as in the search.
            most = int(tables.most_samples(device, held, samples)[first, last])
            workers[kind] = Worker(Linear(fixed, each), most, 0.0, 1.0, 0)
    shares = divide(samples, [workers[tables.kind(device)] for device in devices]).shares
    used = [(device, share) for device, share in zip(devices, shares) if share]
    return Group(tuple(device for device, _ in used), tuple(share for _, share in used), link)


class _Search:
    """One problem: kinds of devices, and what any group of them costs."""

    def __init__(
        self,
        model: Model,
        devices: Sequence[Device],
        stages: int,
        batch: int,
        micro_batches: int,
        schedule: Schedule,
        link: Optional[Link],
        group_link: Optional[Link],
    ):
        check_stages(model, stages, micro_batches)
        if len(devices) < stages:
            raise PlanError("%d stages need at least as many devices, not %d; use fewer stages" % (stages, len(devices)))
        if batch < 1 or batch % micro_batches:
            raise PlanError("a batch of %d samples can't be cut into %d micro-batches; choose a number that divides it" % (batch, micro_batches))
        self.tables = Tables(model)
        self._stages, self._samples, self._micro_batches = stages, batch // micro_batches, micro_batches
        self._held, self._link, self._group_link = held_by(schedule, stages, micro_batches), link, group_link
        self._devices = list(devices)
        self._kinds: List[Device] = []
        for device in devices:
            if self.tables.kind(device) == len(self._kinds):
                self._kinds.append(device)
        self.supply = self.counts(devices)
        self.hops = self.tables.hops(self._samples, link)
        # Only runs that leave a layer for each other stage.
        count = self.tables.layers
        first, last = np.triu_indices(count + 1, 1)
        possible = last - first <= count - stages + 1
        self._runs = first[possible], last[possible]
        self._by_held: Dict[float, Tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._matrices: Dict[Tuple[Counts, float], np.ndarray] = {}

    def counts(self, devices: Sequence[Device]) -> Counts:
        found = [0] * len(self._kinds)
        for device in devices:
            found[self.tables.kind(device)] += 1
        return tuple(found)

    def all_counts(self) -> Optional[List[Counts]]:
        """All groups that leave a device for each other stage; None if they are too many."""
        most = len(self._devices) - self._stages + 1
        number = float(np.prod([float(count + 1) for count in self.supply]))
        cells = number * len(self._runs[0]) * 2 * len(self._kinds) ** 2 * len({self._held(i) for i in range(self._stages)})
        if cells > _MOST_CELLS or Row.work([()] * int(number), self.supply, self._stages, self.tables.layers) > EXACT_WORK:
            return None
        every = itertools.product(*(range(count + 1) for count in self.supply))
        return [counts for counts in every if 0 < sum(counts) <= most]

    def option(self, counts: Counts) -> Option:
        """What a group costs with the best shares for each run of layers."""
        seconds = [self._matrix(counts, self._held(stage)) for stage in range(self._stages)]
        return Option(counts, seconds, sync_of(self.tables, sum(counts), self._group_link))

    def _matrix(self, counts: Counts, held: float) -> np.ndarray:
        """[L + 1, L + 1]: the smallest time in which shares that fit add up to a micro-batch.

        The time at which parts of samples would add up comes first: their sum is made of straight
        pieces, between the times at which a kind of device begins and is full. Rounded down, each
        kind lacks less than one sample for each of its devices, so the kinds get one more in the
        order of the times that it takes, until there are enough.
        """
        key = counts, held
        if key not in self._matrices:
            lines = self._lines(held)
            fixed, each, most, count = (row[np.array(counts) > 0] for row in (*lines, np.array(counts)[:, None]))
            possible = (count * most).sum(axis=0) >= self._samples
            corners = np.sort(np.concatenate([fixed, fixed + most * each]), axis=0)
            sums = (count * np.clip((corners[:, None] - fixed) / each, 0, most)).sum(axis=1)
            after = np.argmax(sums >= self._samples * (1 - 1e-12), axis=0)
            runs = np.arange(len(after))
            before = np.maximum(after - 1, 0)
            rise = sums[after, runs] - sums[before, runs]
            part = (self._samples - sums[before, runs]) / np.where(rise > 0, rise, 1.0)
            level = corners[before, runs] + part * (corners[after, runs] - corners[before, runs])
            shares = np.floor(np.clip((level - fixed) / each, 0, most))
            for _ in range(2 * len(shares)):  # once for each kind is enough; rounding may cost another
                lacking = possible & ((count * shares).sum(axis=0) < self._samples)
                if not lacking.any():
                    break
                kind = np.argmin(np.where(shares < most, fixed + (shares + 1) * each, np.inf), axis=0)
                shares[kind, runs] += lacking
            found = np.full((self.tables.layers + 1, self.tables.layers + 1), np.inf)
            found[self._runs] = np.where(possible, np.where(shares > 0, fixed + shares * each, 0.0).max(axis=0), np.inf)
            self._matrices[key] = found
        return self._matrices[key]

    def _lines(self, held: float) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[kinds, runs]: the seconds of each kind of device, fixed and for each sample, and how many samples fit."""
        if held not in self._by_held:
            lines = [self.tables.line(kind) for kind in self._kinds]
            fixed, each = (np.stack([line[i][self._runs] for line in lines]) for i in (0, 1))
            most = np.stack([self.tables.most_samples(kind, held, self._samples)[self._runs] for kind in self._kinds])
            # A layer without work takes no time, and can still be divided by.
            self._by_held[held] = fixed, np.maximum(each, 1e-15 * (fixed + each).max() + 1e-100), most
        return self._by_held[held]

    def arranged(self, groups: Sequence[Counts], proven: bool) -> StagePlan:
        """The best plan with given groups in their order."""
        options = [self.option(counts) for counts in groups]
        found = Row(options, self.supply, len(groups), self.tables.layers, self.hops, range(len(groups))).best(self._micro_batches)
        if found is None:
            raise PlanError(too_large(self.tables.model, self._devices, len(groups)))
        return self.plan(groups, found.picks, proven and found.proven)

    def plan(self, groups: Sequence[Counts], picks: Sequence[Pick], proven: bool) -> StagePlan:
        """With devices instead of counts, and their shares."""
        left: List[List[Device]] = [[] for _ in self._kinds]
        for device in self._devices:
            left[self.tables.kind(device)].append(device)
        made, used = [], []
        for place, (counts, pick) in enumerate(zip(groups, picks)):
            members = [left[kind].pop(0) for kind, count in enumerate(counts) for _ in range(count)]
            made.append(_shared(self.tables, pick.first, pick.last, members, self._samples, self._held(place), self._group_link))
            used.append((members, made[-1]))
        idle = tuple(device for members, group in used for device in _missing(self.tables, members, group.devices))
        numbered = [Pick(place, pick.first, pick.last) for place, pick in enumerate(picks)]
        proven = proven and (self._group_link is None or not idle)
        return plan_of(self.tables, made, numbered, self._micro_batches, self._held, self._link, proven, idle)

    def climbed(self) -> List[Counts]:
        """The best division of the devices that moves of devices between groups reach from several starts."""
        found = [self._climbed(start) for start in self._starts() + self._coarse()]
        return min(found, key=lambda one: one[0])[1]

    def _coarse(self) -> List[Tuple[Counts, ...]]:
        """The best division of blocks of devices of a kind, if there is one: all divisions, or as many as a beam keeps."""
        layers, stages = self.tables.layers, self._stages
        cells = 2 * len(self._kinds) ** 2 * len(self._runs[0]) * len({self._held(i) for i in range(stages)})
        for most in range(max(self.supply), 0, -1):
            blocks = tuple(max(n for n in range(1, most + 1) if count % n == 0) for count in self.supply)
            number = int(np.prod([float(count + 1) for count in blocks]))
            if number * max(cells, stages * (layers - stages + 2) ** 2) <= _COARSE:
                break
        else:
            return []
        uses = [counts for counts in itertools.product(*(range(count + 1) for count in blocks)) if any(counts)]
        size = [count // number for count, number in zip(self.supply, blocks)]
        options = [dataclasses.replace(self.option(tuple(n * s for n, s in zip(counts, size))), uses=counts) for counts in uses]
        rests = np.stack([self.tables.seconds(kind, self._samples)[:, -1] / s for kind, s in zip(self._kinds, size)])
        beam = int(_COARSE / stages / Row.work_of_state(len(options), stages, layers))
        row = Row(options, blocks, stages, layers, self.hops, beam=max(beam, 1), rests=np.where(np.isfinite(rests), rests, 0.0))
        found = row.best(self._micro_batches, sweeps=10)
        return [] if found is None else [tuple(tuple(n * s for n, s in zip(uses[pick.option], size)) for pick in found.picks)]

    def _climbed(self, start: Tuple[Counts, ...]) -> Tuple[float, List[Counts]]:
        """(time, division) that no tried move improves."""
        seen: Dict[Tuple[Counts, ...], float] = {}

        def time(groups: Tuple[Counts, ...]) -> float:
            """With good cuts: an upper bound of the best time, and quick to find."""
            if groups not in seen:
                options = [self.option(counts) for counts in groups]
                row = Row(options, self.supply, self._stages, self.tables.layers, self.hops, range(self._stages))
                found = row.best(self._micro_batches, sweeps=1)
                seen[groups] = np.inf if found is None else row.time(found.picks, self._micro_batches)
            return seen[groups]

        best = start
        cells = self._stages * (self.tables.layers - self._stages + 2) ** 2 + 2 * len(self._kinds) ** 2 * len(self._runs[0])
        tries = min(max(int(_EFFORT / cells), _TRIES[0]), _TRIES[1])
        size = 1 << max(self.supply).bit_length()
        while size:
            moved = True
            while moved and len(seen) < tries:
                moved = False
                for other in self._moves(best, size):
                    if len(seen) < tries and time(other) < time(best):
                        best, moved = other, True
                        break
            size //= 2
        return time(best), list(best)

    def _moves(self, groups: Tuple[Counts, ...], size: int) -> List[Tuple[Counts, ...]]:
        """All ways to give so many devices of a kind to another group, or to exchange them for as many of another kind."""
        found = []
        kinds = range(len(self._kinds))
        if size == 1:
            for i, j in itertools.combinations(range(len(groups)), 2):
                if groups[i] != groups[j]:
                    changed = list(groups)
                    changed[i], changed[j] = groups[j], groups[i]
                    found.append(tuple(changed))
        for i, j in itertools.permutations(range(len(groups)), 2):
            for gives, takes in itertools.product(kinds, [None, *kinds]):
                if gives == takes or groups[i][gives] < size or (takes is not None and (groups[j][takes] < size or i > j)):
                    continue
                one, other = list(groups[i]), list(groups[j])
                one[gives] -= size
                other[gives] += size
                if takes is not None:
                    one[takes] += size
                    other[takes] -= size
                if sum(one):
                    changed = list(groups)
                    changed[i], changed[j] = tuple(one), tuple(other)
                    found.append(tuple(changed))
        return found

    def _starts(self) -> List[Tuple[Counts, ...]]:
        stages, starts = self._stages, []
        mixed = [[0] * len(self._kinds) for _ in range(stages)]
        at = 0
        for kind, count in enumerate(self.supply):
            for group in mixed:
                group[kind] = count // stages
            for _ in range(count % stages):  # what is left over goes on where the kind before has ended
                mixed[at % stages][kind] += 1
                at += 1
        starts.append(tuple(map(tuple, mixed)))
        speed = [float(self.tables.seconds(kind, self._samples)[0, -1]) for kind in self._kinds]
        room = [kind.memory for kind in self._kinds]
        for rank in (room, speed):
            rising = sorted(self._devices, key=lambda device: rank[self.tables.kind(device)])  # noqa: B023
            for row in (rising[::-1], rising):
                ends = [len(row) * i // stages for i in range(stages + 1)]
                starts.append(tuple(self.counts(row[a:b]) for a, b in zip(ends, ends[1:])))
                # One device for each stage, and all others for one: the best where there are few micro-batches.
                starts.append(tuple(self.counts([device]) for device in row[: stages - 1]) + (self.counts(row[stages - 1 :]),))
        return [start for start in starts if all(map(sum, start))]


def _missing(tables: Tables, members: Sequence[Device], used: Sequence[Device]) -> List[Device]:
    """The members that are not used, by kind and number."""
    left = [tables.kind(device) for device in used]
    found = []
    for device in members:
        if tables.kind(device) in left:
            left.remove(tables.kind(device))
        else:
            found.append(device)
    return found
