"""Ops that move elements: reshape, transpose, concatenation, slices, paddings."""

from typing import Any, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from epl.planner.sharding.op import Axis, Described, Dims, Linear, Op, Saying, rule


@rule("Shape", "Size")
def shape(op: Op) -> Iterable[Saying]:
    if op.inputs[0].shape is not None:
        yield Described()


@rule("Reshape")
def reshape(op: Op) -> Iterable[Saying]:
    """The leading dimension of each block of dimensions that become others: a block of neighbours moves as one."""
    yield Linear((0,))
    for before, after in blocks(op.inputs[0].shape, op.outputs[0].shape):
        at, to = _leading(op.inputs[0].shape, before), _leading(op.outputs[0].shape, after)
        if at is None or to is None:
            continue
        inner, outer = _product(op.inputs[0].shape, at + 1, before[1]), _product(op.outputs[0].shape, to + 1, after[1])
        if inner is None or outer is None:
            continue
        # Both divide the same elements: in steps of the larger of the two inner products, if the smaller one divides it.
        step = max(inner, outer)
        if step % inner == 0 and step % outer == 0:
            yield Axis((at, None), (to,), units=(step // inner, 1, step // outer), how="reshape", shapes=(1,))


def blocks(before: Dims, after: Dims) -> List[Tuple[Tuple[int, int], Tuple[int, int]]]:
    """The smallest runs of dimensions [begin, end) that hold the same elements before and after a reshape.

    What is left between the runs that match from both ends is one block: an unknown length
    is in it on either side.
    """
    if before is None or after is None:
        return []
    left = _matched(before, after)
    right = [((len(before) - e, len(before) - b), (len(after) - f, len(after) - c)) for (b, e), (c, f) in _matched(before[::-1], after[::-1])]
    begin = left[-1] if left else ((0, 0), (0, 0))
    end = right[-1] if right else ((len(before), len(before)), (len(after), len(after)))
    if begin[0][1] >= len(before) and begin[1][1] >= len(after):
        return left
    middle = ((begin[0][1], end[0][0]), (begin[1][1], end[1][0]))
    if middle[0][0] >= middle[0][1] or middle[1][0] >= middle[1][1]:
        return left
    return left + [middle] + right[::-1]


def _matched(before: Sequence[Optional[int]], after: Sequence[Optional[int]]) -> List[Tuple[Tuple[int, int], Tuple[int, int]]]:
    """From the left, runs of known lengths with equal products, up to the first unknown length."""
    found: List[Tuple[Tuple[int, int], Tuple[int, int]]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        start = i, j
        a, b = before[i], after[j]
        i, j = i + 1, j + 1
        while a is not None and b is not None and a != b:
            if a < b and i < len(before):
                nxt, i = before[i], i + 1
                a = None if nxt is None else a * nxt
            elif b < a and j < len(after):
                nxt, j = after[j], j + 1
                b = None if nxt is None else b * nxt
            else:
                return found
        if a is None or b is None:
            return found
        found.append(((start[0], i), (start[1], j)))
    return found


def _leading(shape: Dims, block: Tuple[int, int]) -> Optional[int]:
    """The first dimension of a block that is longer than 1."""
    assert shape is not None
    return next((d for d in range(*block) if shape[d] != 1), None)


def _product(shape: Dims, begin: int, end: int) -> Optional[int]:
    assert shape is not None
    total = 1
    for length in shape[begin:end]:
        if length is None:
            return None
        total *= length
    return total


@rule("ExpandDims")
def expand_dims(op: Op) -> Iterable[Saying]:
    at = _known_axis(op, 1, op.inputs[0].rank + 1)
    yield Linear((0,))
    if at is not None:
        for dim in range(op.inputs[0].rank):
            yield Axis((dim, None), (dim + (dim >= at),))


@rule("Squeeze")
def squeeze(op: Op) -> Iterable[Saying]:
    yield Linear((0,))
    shape = op.inputs[0].shape
    if shape is None:
        return
    gone = [d % len(shape) for d in op.attrs.get("squeeze_dims") or ()]
    if not gone and None in shape:
        return
    gone = gone or [d for d, length in enumerate(shape) if length == 1]
    kept = [d for d in range(len(shape)) if d not in gone]
    for new, old in enumerate(kept):
        yield Axis((old,), (new,))


@rule("Transpose")
def transpose(op: Op) -> Iterable[Saying]:
    yield Linear((0,))
    if 1 in op.constants:
        for new, old in enumerate(np.ravel(op.constants[1])):
            yield Axis((int(old), None), (new,))


def _known_axis(op: Op, position: int, rank: int) -> Optional[int]:
    value = op.constants.get(position)
    return None if value is None or np.size(value) != 1 else int(np.ravel(value)[0]) % max(rank, 1)


@rule("ConcatV2")
def concat(op: Op) -> Iterable[Saying]:
    parts = len(op.inputs) - 1
    yield Linear(tuple(range(parts)))
    along = _known_axis(op, parts, op.outputs[0].rank)
    if along is not None:
        for dim in range(op.outputs[0].rank):
            if dim != along:
                yield Axis((dim,) * parts + (None,), (dim,))


@rule("Pack")
def pack(op: Op) -> Iterable[Saying]:
    yield Linear(tuple(range(len(op.inputs))))
    along = int(op.attrs.get("axis") or 0) % max(op.outputs[0].rank, 1)
    for dim in range(op.inputs[0].rank):
        yield Axis((dim,) * len(op.inputs), (dim + (dim >= along),))


@rule("Unpack")
def unpack(op: Op) -> Iterable[Saying]:
    yield Linear((0,))
    along = int(op.attrs.get("axis") or 0) % max(op.inputs[0].rank, 1)
    for dim in range(op.inputs[0].rank):
        if dim != along:
            yield Axis((dim,), (dim - (dim > along),) * len(op.outputs))


@rule("Split")
def split(op: Op) -> Iterable[Saying]:
    yield Linear((1,))
    yield from _split(op, 0, 1)


@rule("SplitV")
def split_v(op: Op) -> Iterable[Saying]:
    yield Linear((0,))
    yield from _split(op, 2, 0)


def _split(op: Op, position: int, value: int) -> Iterable[Saying]:
    along = _known_axis(op, position, op.inputs[value].rank)
    if along is not None:
        for dim in range(op.inputs[value].rank):
            if dim != along:
                yield Axis(tuple(dim if i == value else None for i in range(len(op.inputs))), (dim,) * len(op.outputs))


@rule("Slice")
def slice_(op: Op) -> Iterable[Saying]:
    """Dimensions that are taken whole: the size -1 in place of a length that is divided."""
    yield Linear((0,))
    begin, size = op.constants.get(1), op.constants.get(2)
    if begin is None or size is None:
        return
    for dim, (at, length) in enumerate(zip(np.ravel(begin), np.ravel(size))):
        if at == 0 and (length == -1 or length == op.inputs[0].dim(dim)):
            yield Axis((dim, None, None), (dim,), how="" if length == -1 else "slice")


@rule("StridedSlice")
def strided_slice(op: Op) -> Iterable[Saying]:
    yield Linear((0,))
    kept = _whole_dims(op)
    if kept is not None:
        for old, new in kept:
            yield Axis((old, None, None, None), (new,), how="strided_slice")


@rule("StridedSliceGrad")
def strided_slice_gradient(op: Op) -> Iterable[Saying]:
    """Inputs: shape of what was sliced, begin, end, strides, gradient."""
    yield Linear((4,))


def _whole_dims(op: Op) -> Optional[List[Tuple[int, int]]]:
    """(dimension before, dimension after) of those that a strided slice takes whole."""
    begin, end, strides = (op.constants.get(i) for i in (1, 2, 3))
    if begin is None or end is None or strides is None:
        return None
    masks = {name: int(op.attrs.get(name) or 0) for name in ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")}
    found, old, new = [], 0, 0
    count = np.size(begin)
    for i in range(count):
        bit = 1 << i
        if masks["ellipsis_mask"] & bit:
            later = sum(1 for j in range(i + 1, count) if not masks["new_axis_mask"] & 1 << j)
            for _ in range(op.inputs[0].rank - old - later):
                found.append((old, new))
                old, new = old + 1, new + 1
        elif masks["new_axis_mask"] & bit:
            new += 1
        elif masks["shrink_axis_mask"] & bit:
            old += 1
        else:
            starts = masks["begin_mask"] & bit or np.ravel(begin)[i] == 0
            if starts and masks["end_mask"] & bit and np.ravel(strides)[i] == 1:
                found.append((old, new))
            old, new = old + 1, new + 1
    while old < op.inputs[0].rank:
        found.append((old, new))
        old, new = old + 1, new + 1
    return found


@rule("Pad", "PadV2", "MirrorPad")
def pad(op: Op) -> Iterable[Saying]:
    paddings: Any = op.constants.get(1)
    if op.type == "Pad":
        yield Linear((0,))
    if paddings is not None:
        for dim, (before, after) in enumerate(np.reshape(paddings, [-1, 2])):
            if before == after == 0:
                yield Axis((dim,) + (None,) * (len(op.inputs) - 1), (dim,))


@rule("Tile")
def tile(op: Op) -> Iterable[Saying]:
    yield Linear((0,))
    multiples = op.constants.get(1)
    if multiples is not None:
        for dim, times in enumerate(np.ravel(multiples)):
            if times == 1:
                yield Axis((dim, None), (dim,))


@rule("BroadcastTo")
def broadcast_to(op: Op) -> Iterable[Saying]:
    yield Linear((0,))
    offset = op.outputs[0].rank - op.inputs[0].rank
    for dim in range(op.outputs[0].rank):
        own = dim - offset
        if op.outputs[0].dim(dim) is None:
            continue
        whole = own < 0 or op.inputs[0].dim(own) == 1
        if whole or op.inputs[0].dim(own) == op.outputs[0].dim(dim):
            yield Axis((None if whole else own, None), (dim,), how="broadcast_to", shapes=(1,))


@rule("Fill")
def fill(op: Op) -> Iterable[Saying]:
    """A shape, and the value of all elements."""
    for dim in range(op.outputs[0].rank):
        if op.outputs[0].dim(dim) is not None:
            yield Axis((None, None), (dim,), how="fill", shapes=(0,))
