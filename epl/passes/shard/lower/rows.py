"""Rows that are picked, and put back, along a divided dimension."""

from typing import List

import numpy as np

from epl.ir import attrs as A
from epl.ir.build import DT_INT32
from epl.ir.program import Ref
from epl.passes.shard.build import DT_BOOL, DT_INT64
from epl.passes.shard.lower.part import Part, integer, localised, lowering


@lowering("gather")
def _gather(part: Part) -> List[Ref]:
    """Rows of this lane, and zeros for others. An index that no lane has is left out of range, so that the op complains as ever."""
    build, itype = part.build, part.in_dtype(1)
    form, ids = part.way.inputs[0], part.node.inputs[1]
    length = part.op.inputs[0].dim(form.dim) or 0
    local, inside, _, _ = localised(part, ids, itype, form, length)
    zero = build.const(build.named("first_id"), 0, itype)
    valid_low = build.binary("GreaterEqual", "not_below", ids, zero, itype)
    valid_high = build.binary("Less", "not_above", ids, build.const(build.named("all_ids"), length, itype), itype)
    valid = build.op("LogicalAnd", build.named("valid"), [valid_low, valid_high])
    clipped = build.select("picked", inside, local, build.select("wrong", valid, zero, build.const(build.named("minus"), -1, itype), itype), itype)
    part.replace([part.node.inputs[0], clipped] + list(part.node.inputs[2:]))
    dtype = part.dtype()
    mask = build.cast(build.named("mask"), inside, DT_BOOL, dtype)
    for number in range(form.dim):
        mask = build.expand("mask_before_%d" % number, mask, 0, dtype)
    for number in range((part.op.inputs[0].rank or 1) - 1 - form.dim):
        mask = build.expand("mask_after_%d" % number, mask, -1, dtype)
    return [build.binary("Mul", "rows_here", (part.node.name, 0), mask, dtype)]


@lowering("one_hot")
def _one_hot(part: Part) -> List[Ref]:
    build, itype = part.build, part.in_dtype(0)
    form = part.way.outputs[0]
    begins, lengths = build.part(form, part.op.outputs[0].dim(form.dim) or 0)
    local = build.binary("Sub", "local", part.node.inputs[0], build.lanes("begin", [integer(b, itype) for b in begins], itype), itype)
    depth = build.lanes("depth", [np.int32(n) for n in lengths], DT_INT32)
    return part.replace([local, depth] + list(part.node.inputs[2:]))


@lowering("segment_sum")
def _segment_sum(part: Part) -> List[Ref]:
    build, itype = part.build, part.in_dtype(1)
    data, ids, number = part.node.inputs
    form = part.way.outputs[0]
    local, inside, _, lengths = localised(part, ids, itype, form, part.op.outputs[0].dim(0) or 0)
    dropped = build.select("dropped", inside, local, build.const(build.named("minus"), -1, itype), itype)
    ntype = part.in_dtype(2)
    return part.replace([data, dropped, build.lanes("segments", [integer(n, ntype) for n in lengths], ntype)])


@lowering("sparse_update")
def _sparse_update(part: Part) -> List[Ref]:
    """Of the rows that are updated, those of this lane."""
    build = part.build
    variable = part.op.inputs[0]
    form = next(form for form in part.way.inputs if form.is_sharded)
    ids_at = _indices_input(part)
    rows_at = [i for i, t in enumerate(part.op.inputs) if i > 0 and i != ids_at and t.rank >= 1 and not part.way.inputs[i].is_sharded]
    itype = part.in_dtype(ids_at)
    local, inside, _, _ = localised(part, part.node.inputs[ids_at], itype, form, variable.dim(0) or 0)
    where = build.op("Where", build.named("where"), [inside], T=A.of_type(DT_BOOL))
    one_dimension = build.const(build.named("flat"), [-1], DT_INT32)
    flat = build.op("Reshape", build.named("mine"), [where, one_dimension], T=A.of_type(DT_INT64), Tshape=A.of_type(DT_INT32))
    inputs = list(part.node.inputs)
    inputs[ids_at] = build.gather("ids", local, flat, 0, itype, DT_INT64)
    for i in rows_at:
        inputs[i] = build.gather("rows_%d" % i, part.node.inputs[i], flat, 0, part.in_dtype(i), DT_INT64)
    return part.replace(inputs)


def _indices_input(part: Part) -> int:
    """The position of the indices: the vector of whole numbers."""
    return next(i for i, t in enumerate(part.op.inputs) if t.dtype in ("int32", "int64") and t.rank == 1)
