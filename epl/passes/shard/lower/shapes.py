"""Shapes that say how long a part is, and parts that count by their length."""

from typing import Dict, List, Optional

import numpy as np

from epl.ir.build import DT_INT32
from epl.ir.program import Ref
from epl.passes.shard.build import lane_sizes
from epl.passes.shard.lower.part import Part, dtype_of, lowering
from epl.planner.sharding.op import Tensor
from epl.planner.sharding.spec import Spec
from epl.planner.sharding.strategy import BATCH, L, Lane


def _lengths(part: Part, tensor: Tensor, form: Spec, lane: Lane, given: Optional[Ref], itype: int) -> Ref:
    """The shape of a tensor as this lane holds it.

    Args:
      given: a vector with the shape that it has in the lane's own form, for lengths that are not known.
      itype: dtype of the vector.
    """
    build = part.build
    static: List[List[int]] = [[] for _ in range(build.group.size)]
    dynamic: Dict[int, Ref] = {}
    for dim, length in enumerate(tensor.shape or ()):
        gathered = lane.kind == BATCH and dim == lane.dim
        if form.is_sharded and dim == form.dim:
            values = list(build.group.lengths(length or 0, form.unit))
        elif gathered and form != L:
            values = [-1] * build.group.size
            if length is not None and not _is_fed(part, lane):
                values = [length * build.group.size] * build.group.size
            else:
                dynamic[dim] = _total(part, lane)
        elif length is not None and not (gathered and _is_fed(part, lane)):
            values = [length] * build.group.size
        else:
            assert given is not None
            values = [-1] * build.group.size
            dynamic[dim] = build.element(build.named("given_%d" % dim), given, dim, itype)
            if itype != DT_INT32:
                dynamic[dim] = build.cast(build.named("given_%d/cast" % dim), dynamic[dim], itype, DT_INT32)
        for row, value in zip(static, values):
            row.append(value)
    vector = build.lanes("lengths", [np.array(row, np.int32) for row in static], DT_INT32)
    if dynamic:
        parts = [dynamic[d] if d in dynamic else build.element(build.named("length_%d" % d), vector, d, DT_INT32) for d in range(len(static[0]))]
        vector = build.pack(build.named("shape"), parts, DT_INT32)
    return build.cast(build.named("shape/cast"), vector, DT_INT32, itype)


def _is_fed(part: Part, lane: Lane) -> bool:
    """Whether the static size of the batch is not that of an instance: a fed batch is divided."""
    return lane.origin is None or any(f.node == lane.origin[0] and f.is_batch for f in part.build.program.feeds)


def _total(part: Part, lane: Lane) -> Ref:
    """The rows of all lanes together (int32 scalar)."""
    build = part.build
    samples = build.reduce("Sum", "samples", lane_sizes(build, lane), 0, DT_INT32)
    return samples if lane.unit == 1 else build.binary("Mul", "rows", samples, build.const(build.named("unit"), lane.unit, DT_INT32), DT_INT32)


@lowering("reshape", "broadcast_to")
def _reshape(part: Part) -> List[Ref]:
    value, given = part.node.inputs
    itype = part.in_dtype(1)
    return part.replace([value, _lengths(part, part.op.outputs[0], part.way.outputs[0], part.out_lanes[0], given, itype)])


@lowering("fill")
def _fill(part: Part) -> List[Ref]:
    given, value = part.node.inputs
    lengths = _lengths(part, part.op.outputs[0], part.way.outputs[0], part.out_lanes[0], given, part.in_dtype(0))
    return part.replace([part.unfolded(lengths, part.in_dtype(0)), value])


@lowering("input_sizes")
def _input_sizes(part: Part) -> List[Ref]:
    given, kernel, gradient = part.node.inputs
    return part.replace([_lengths(part, part.op.outputs[0], part.way.outputs[0], part.out_lanes[0], given, DT_INT32), kernel, gradient])


@lowering("filter_sizes")
def _filter_sizes(part: Part) -> List[Ref]:
    image, given, gradient = part.node.inputs
    return part.replace([image, _lengths(part, part.op.outputs[0], part.way.outputs[0], part.out_lanes[0], given, DT_INT32), gradient])


@lowering("shape")
def _shape(part: Part) -> List[Ref]:
    """What the op says of the lane's own tensor, without it."""
    build, tensor, lane = part.build, part.op.inputs[0], part.lanes[0]
    static: List[int] = []
    dynamic: Dict[int, Ref] = {}
    for dim, length in enumerate(tensor.shape or ()):
        own = lane.kind == BATCH and dim == lane.dim
        if length is not None and not (own and _is_fed(part, lane)):
            static.append(length)
            continue
        static.append(-1)
        if own:
            rows = build.lane_rows(lane)
            unit = build.const(build.named("unit"), lane.unit, DT_INT32)
            dynamic[dim] = rows if lane.unit == 1 else build.binary("Mul", "rows", rows, unit, DT_INT32)
        else:
            dynamic[dim] = build.shape_element("length_%d" % dim, part.node.inputs[0], dim, dtype_of(tensor))
    if dynamic:
        parts = [dynamic[d] if d in dynamic else build.const(build.named("length_%d" % d), n, DT_INT32) for d, n in enumerate(static)]
        vector = build.pack(build.named("vector"), parts, DT_INT32)
    else:
        vector = build.const(build.named("vector"), np.array(static, np.int32), DT_INT32)
    if part.op.type == "Size":
        vector = build.reduce("Prod", "size", vector, 0, DT_INT32)
    return [build.cast(build.named("cast"), vector, DT_INT32, part.dtype())]


@lowering("slice")
def _slice(part: Part) -> List[Ref]:
    """A dimension that is taken whole: all of the part."""
    value, begin, size = part.node.inputs
    sizes = np.ravel(part.op.constants[2]).astype(np.int32)
    sizes[part.way.inputs[0].dim if part.way.inputs[0].is_sharded else part.lanes[0].dim] = -1
    itype = part.in_dtype(2)
    return part.replace([value, begin, part.build.const(part.build.named("size"), sizes, itype)])


@lowering("strided_slice")
def _strided_slice(part: Part) -> List[Ref]:
    return part.replace(part.node.inputs)


@lowering("mean")
def _mean(part: Part) -> List[Ref]:
    """The mean of a part counts as much as the part is long."""
    form = part.way.inputs[0]
    length = part.op.inputs[0].dim(form.dim) or 1
    build, dtype = part.build, part.dtype()
    weights = build.lanes("weight", [n / length for n in build.group.lengths(length, form.unit)], dtype)
    return [build.binary("Mul", "term", (part.node.name, 0), weights, dtype)]
