"""Uneven shards of a program that gathers them: the ratios, by a linear program.

Source: Zhang et al., HAP: SPMD DNN Training on Heterogeneous GPU Clusters with Automated
Program Synthesis, EuroSys 2024 (its linear program for sharding ratios). An all-gather or
reduce-scatter of uneven shards takes as long as the largest shard makes it, so shares in
proportion to speed are wrong where it matters, and even ones are wrong where computing does.
"""

import dataclasses
from typing import List, Optional, Sequence, Tuple

import numpy as np

from epl.errors import PlanError

Line = Tuple[float, float]
"""(fixed, each): seconds of a share B of the whole are fixed + each * B."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of a program: each device computes on its shard, then shards are exchanged.

    Attributes:
      compute: of each device.
      exchange: of the collective, for the largest share; for an all-gather of S bytes by n devices,
        `each` is n times the time of S / n bytes.
    """

    compute: Tuple[Line, ...]
    exchange: Line = (0.0, 0.0)


def shard_seconds(shares: Sequence[float], segments: Sequence[Segment]) -> float:
    """sum over segments of comm(max_j B_j) + max_j comp_j(B_j).

    Args:
      shares: B of each device, which add up to 1.
    """
    largest = max(shares)
    total = 0.0
    for segment in segments:
        total += segment.exchange[0] + segment.exchange[1] * largest
        total += max(fixed + each * share for (fixed, each), share in zip(segment.compute, shares))
    return total


def shard_ratios(segments: Sequence[Segment], limits: Optional[Sequence[float]] = None) -> List[float]:
    """The shares B with the smallest `shard_seconds`, for all segments the same.

    Args:
      limits: the largest share that fits the memory of each device.

    Raises:
      PlanError: the limits add up to less than 1.
    """
    return [float(share) for share in _solved(segments, limits, None)]


def whole_shards(total: int, segments: Sequence[Segment], limits: Optional[Sequence[int]] = None) -> List[int]:
    """`shard_ratios` in whole slices of a dimension, optimal among these: an integer program, not rounded ratios.

    Args:
      total: size of the dimension.
      limits: the most slices that fit each device.

    Raises:
      PlanError: the limits add up to less than the total.
    """
    if total < 1:
        raise PlanError("a dimension of %d can't be sharded; it needs at least one slice" % total)
    scaled = None if limits is None else [limit / total for limit in limits]
    return [int(round(share * total)) for share in _solved(segments, scaled, total)]


def _solved(segments: Sequence[Segment], limits: Optional[Sequence[float]], total: Optional[int]) -> np.ndarray:
    """Shares as parts of 1; with a total, whole numbers of slices."""
    from scipy import optimize

    count = len(segments[0].compute) if segments else 0
    if not count or any(len(segment.compute) != count for segment in segments):
        raise PlanError("each segment needs the times of the same devices, at least one; found %s" % [len(s.compute) for s in segments])
    limits = [1.0] * count if limits is None else list(limits)
    if sum(limits) < 1 - 1e-9:
        raise PlanError("the devices have memory for %.3g of the whole; use more devices or a larger memory" % sum(limits))
    # Variables: B of each device in slices (or as parts of 1), the largest of them, and the computing time of each segment.
    slices = float(total or 1)
    times = [t for segment in segments for line in segment.compute for t in line] + [t for segment in segments for t in segment.exchange]
    unit = max(times) or 1.0  # the solver's tolerances are absolute
    rows, lower = [], []
    for i in range(count):
        row = np.zeros(count + 1 + len(segments))
        row[i], row[count] = -1.0, 1.0
        rows.append(row)
        lower.append(0.0)
    for number, segment in enumerate(segments):
        for i, (fixed, each) in enumerate(segment.compute):
            row = np.zeros(count + 1 + len(segments))
            row[i], row[count + 1 + number] = -each / unit / slices, 1.0
            rows.append(row)
            lower.append(fixed / unit)
    whole = np.zeros(count + 1 + len(segments))
    whole[:count] = 1.0
    costs = np.zeros(count + 1 + len(segments))
    costs[count] = sum(segment.exchange[1] for segment in segments) / unit / slices
    costs[count + 1 :] = 1.0
    upper = np.array([limit * slices for limit in limits] + [slices] + [np.inf] * len(segments))
    if total is not None:
        upper[:count] = np.floor(upper[:count] + 1e-9)
    found = optimize.milp(
        costs,
        integrality=whole if total is not None else None,
        bounds=optimize.Bounds(np.zeros(len(costs)), upper),
        constraints=[optimize.LinearConstraint(np.array(rows), np.array(lower), np.inf), optimize.LinearConstraint(whole, slices, slices)],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise PlanError("no shares of %d devices were found: %s" % (count, found.message))
    return np.maximum(found.x[:count], 0.0) / slices
