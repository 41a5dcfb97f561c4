"""Feeding: how a fed value is used, and whether it fits."""

import itertools
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from epl.errors import FeedError
from epl.ir.program import DIVIDE, EACH, SAME, Shape


class FeedSpec(NamedTuple):
    """A fed tensor: its name, numpy dtype (object for strings) and static shape."""

    name: str
    dtype: Any
    shape: Shape


def as_array(spec: FeedSpec, value: Any) -> np.ndarray:
    """The value as an array of the tensor's dtype."""
    if isinstance(value, np.ndarray) and value.dtype == spec.dtype:
        return value
    if hasattr(value, "graph") and hasattr(value, "op"):
        raise TypeError("The value of a feed can't be a tf.Tensor; feed '%s' a Python or numpy value" % spec.name)
    try:
        return np.asarray(value, dtype=spec.dtype)
    except (TypeError, ValueError) as error:
        raise FeedError("The value fed to '%s' can't be converted to %s: %s" % (spec.name, np.dtype(spec.dtype).name, error)) from error


def modes_of(specs: Sequence[FeedSpec], arrays: Sequence[np.ndarray], parts: int) -> Tuple[str, ...]:
    """How each value of a training program is used.

    A placeholder whose dimension 0 is unknown takes this process's batch, which is
    divided. One with a static dimension 0 takes either `parts` times as much, which is
    divided, or exactly that, which every instance gets whole. A placeholder of unknown
    rank follows the others. Scalars are the same for all.
    """
    rows = {a.shape[0] for s, a in zip(specs, arrays) if s.shape is not None and s.shape and s.shape[0] is None and a.ndim}
    modes: List[str] = []
    for spec, array in zip(specs, arrays):
        if array.ndim == 0 or spec.shape == ():
            modes.append(SAME)
        elif spec.shape is None:
            modes.append(DIVIDE if array.shape[0] in rows or (not rows and array.shape[0] % parts == 0) else EACH)
        elif spec.shape[0] is None or parts == 1:
            modes.append(DIVIDE)
        else:
            modes.append(EACH if array.shape[0] == spec.shape[0] else DIVIDE)
    return tuple(modes)


def check(spec: FeedSpec, array: np.ndarray, mode: str, parts: int, shares: Sequence[int] = ()) -> None:
    """Raise `FeedError` unless the value fits its placeholder and can be divided.

    Args:
      parts: equal parts that make up the shares of all instances.
      shares: of the replicas here, if they are not equal.
    """
    shape = spec.shape
    divided = mode == DIVIDE and parts > 1
    if divided and shares and shape is not None and shape and shape[0] is not None:
        raise FeedError(
            "The %d rows fed to '%s' are to be divided in the ratio %s (cluster.batch_shares), but the placeholder has a fixed batch of %d rows. "
            "Leave the number of rows of its shape open (None)" % (array.shape[0], spec.name, ":".join(map(str, shares)), shape[0])
        )
    if shape is not None:
        wanted: Tuple[Optional[int], ...] = tuple(shape)
        if divided and wanted and wanted[0] is not None:
            wanted = (wanted[0] * parts,) + wanted[1:]
        fits = len(wanted) == array.ndim and all(w is None or w == d for w, d in zip(wanted, array.shape))
        if not fits:
            note = (
                " (%d times the placeholder's %d rows, for %d replicas x micro-batches)" % (parts, shape[0] or 0, parts)
                if divided and shape[0]
                else ""
            )
            raise FeedError("Cannot feed a value of shape %s for placeholder '%s', which needs %s%s" % (array.shape, spec.name, _text(wanted), note))
    if divided and shares:
        _check_shares(spec, array.shape[0], parts // sum(shares), shares)
        return
    if divided and array.shape[0] % parts:
        raise FeedError(
            "The %d rows fed to '%s' can't be divided evenly over %d replicas x micro-batches of this process; feed a multiple of %d rows"
            % (array.shape[0], spec.name, parts, parts)
        )
    if divided and array.shape[0] == 0:
        raise FeedError(
            "An empty batch is fed to '%s'; a training step needs at least one row for each of %d replicas x micro-batches" % (spec.name, parts)
        )


def _check_shares(spec: FeedSpec, rows: int, micro_batches: int, shares: Sequence[int]) -> None:
    """Raise `FeedError` if some instance would get no row."""
    bounds = list(itertools.accumulate([0] + [share for share in shares for _ in range(micro_batches)]))
    ends = [rows * bound // bounds[-1] for bound in bounds]
    if any(end == begin for begin, end in zip(ends, ends[1:])):
        raise FeedError(
            "The %d rows fed to '%s' are too few to be divided in the ratio %s over the replicas of this process (cluster.batch_shares) with %d "
            "micro-batches each: some would get none. Feed more rows" % (rows, spec.name, ":".join(map(str, shares)), micro_batches)
        )


def _text(shape: Sequence[Optional[int]]) -> str:
    return "(%s)" % ", ".join("?" if d is None else str(d) for d in shape)


__all__ = ["FeedSpec", "as_array", "check", "modes_of", "DIVIDE", "EACH", "SAME"]
