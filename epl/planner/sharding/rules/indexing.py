"""Ops that pick rows, or put them back: gathers, one-hot vectors, segment sums, scatters."""

from typing import Iterable

import numpy as np

from epl.planner.sharding.op import Axis, Linear, Op, Saying, Special, rule
from epl.planner.sharding.spec import P, R, S


@rule("Gather", "GatherV2", "ResourceGather")
def gather(op: Op) -> Iterable[Saying]:
    """Params, indices, and for GatherV2 the axis.

    A divided vocabulary: each device gives the rows that it has, and zeros for the others.
    """
    more = len(op.inputs) - 2
    if int(op.attrs.get("batch_dims") or 0):
        return
    axis = op.constants.get(2) if more else 0
    if axis is None or op.inputs[0].shape is None or op.inputs[1].shape is None:
        return
    at = int(np.ravel(axis)[0]) % max(op.inputs[0].rank, 1)
    width = op.inputs[1].rank
    for dim in range(width):
        yield Axis((None, dim) + (None,) * more, (at + dim,))
    for dim in range(op.inputs[0].rank):
        if dim != at:
            yield Axis((dim, None) + (None,) * more, (dim if dim < at else dim + width - 1,))
    if op.outputs[0].is_float:
        yield Special((S(at), R) + (R,) * more, (P,), "gather")
    yield Linear((0,))


@rule("GatherNd")
def gather_nd(op: Op) -> Iterable[Saying]:
    """Dimensions of the indices, and those of the params that are not indexed."""
    yield Linear((0,))
    picked = op.inputs[1].dim(op.inputs[1].rank - 1) if op.inputs[1].rank else None
    if picked is None or op.inputs[0].shape is None:
        return
    outer = op.inputs[1].rank - 1
    for dim in range(outer):
        yield Axis((None, dim), (dim,))
    for dim in range(picked, op.inputs[0].rank):
        yield Axis((dim, None), (outer + dim - picked,))


@rule("OneHot")
def one_hot(op: Op) -> Iterable[Saying]:
    """Indices, depth, on and off values. A divided depth: the indices move, and fall outside elsewhere."""
    at = int(op.attrs.get("axis", -1))
    at = op.inputs[0].rank if at == -1 else at
    for dim in range(op.inputs[0].rank):
        yield Axis((dim, None, None, None), (dim + (dim >= at),))
    yield Special((R, R, R, R), (S(at),), "one_hot")


@rule("UnsortedSegmentSum")
def unsorted_segment_sum(op: Op) -> Iterable[Saying]:
    """Data, segment ids, number of segments: rows are summed over, columns mapped, segments picked."""
    yield Linear((0,))
    rows = op.inputs[1].rank
    for dim in range(rows):
        yield Axis((dim, dim, None), (None,), sums=True)
    for dim in range(rows, op.inputs[0].rank):
        yield Axis((dim, None, None), (dim - rows + 1,))
    if op.inputs[1].shape is not None:
        yield Special((R, R, R), (S(0),), "segment_sum")


@rule("UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
def unsorted_segment(op: Op) -> Iterable[Saying]:
    rows = op.inputs[1].rank
    if op.inputs[1].shape is not None:
        for dim in range(rows, op.inputs[0].rank):
            yield Axis((dim, None, None), (dim - rows + 1,))


@rule("ScatterNd")
def scatter_nd(op: Op) -> Iterable[Saying]:
    """Indices, updates, shape: the updates are summed over, dimensions that are not indexed are mapped."""
    yield Linear((1,))
    outer = op.inputs[0].rank - 1
    for dim in range(outer):
        yield Axis((dim, dim, None), (None,), sums=True)


@rule("Where", "Unique", "UniqueV2")
def counted(op: Op) -> Iterable[Saying]:
    """How many there are is known only to who has all of it."""
    return ()
