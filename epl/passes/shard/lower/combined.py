"""What combines the results of all lanes."""

from typing import List

import numpy as np

from epl.ir import attrs as A
from epl.ir.build import DT_INT32
from epl.ir.program import Ref
from epl.passes.shard.lower.part import Part, integer, lowering
from epl.planner.sharding.op import Tensor
from epl.planner.sharding.spec import R, S
from epl.planner.sharding.strategy import BATCH, SAME, Lane


def _gathered(part: Part, what: str, value: Ref, tensor: Tensor, lane: Lane, dim: int) -> Ref:
    """The parts of all lanes, one after the other, on every lane."""
    return part.build.reshard(what, value, S(dim), R, _without(lane, dim), tensor)


def _without(lane: Lane, dim: int) -> Lane:
    return lane if lane.kind != BATCH or lane.dim != dim else SAME


def _stacked(part: Part, what: str, value: Ref, tensor: Tensor, lane: Lane, dtype: int) -> Ref:
    """One more dimension in front: the lanes."""
    expanded = part.build.expand(what + "/expanded", value, 0, dtype)
    moved = lane if lane.kind != BATCH else lane._replace(dim=lane.dim + 1)
    return _gathered(part, what, expanded, Tensor((part.build.group.size,) + (tensor.shape or ()), tensor.dtype), moved, 0)


@lowering("combine_max", "combine_min", "combine_all", "combine_any", "combine_prod")
def _combine(part: Part) -> List[Ref]:
    build = part.build
    out = part.op.outputs[0]
    stacked = _stacked(part, "stacked", (part.node.name, 0), out, part.out_lanes[0], part.dtype())
    at = build.const(build.named("combined/axis"), [0], DT_INT32)
    attrs = {"Tidx": A.of_type(DT_INT32), "keep_dims": A.of_bool(False)}
    if part.op.type not in ("All", "Any"):
        attrs["T"] = A.of_type(part.dtype())
    return [build.op(part.op.type, build.named("combined"), [stacked, at], **attrs)]


@lowering("arg_max", "arg_min")
def _arg_max(part: Part) -> List[Ref]:
    """The best of each lane and where it is; of equal ones the first, as the op has it."""
    build, dtype, otype = part.build, part.in_dtype(0), part.dtype()
    form, value, out, lane = part.way.inputs[0], part.node.inputs[0], part.op.outputs[0], part.out_lanes[0]
    best = build.reduce("Max" if part.op.type == "ArgMax" else "Min", "best", value, form.dim, dtype)
    begins, _ = build.part(form, part.op.inputs[0].dim(form.dim) or 0)
    where = build.binary("Add", "where", (part.node.name, 0), build.lanes("begin", [integer(b, otype) for b in begins], otype), otype)
    bests = _stacked(part, "bests", best, Tensor(out.shape, part.op.inputs[0].dtype), lane, dtype)
    wheres = _stacked(part, "wheres", where, out, lane, otype)
    zero = build.const(build.named("lane_axis"), 0, DT_INT32)
    attrs = {"T": A.of_type(dtype), "Tidx": A.of_type(DT_INT32), "output_type": A.of_type(DT_INT32)}
    which = build.op(part.op.type, build.named("which"), [bests, zero], **attrs)
    depth = build.const(build.named("lanes"), build.group.size, DT_INT32)
    one, none = build.const(build.named("one"), 1, otype), build.const(build.named("none"), 0, otype)
    hot = build.op("OneHot", build.named("hot"), [which, depth, one, none], axis=A.of_int(0), T=A.of_type(otype), TI=A.of_type(DT_INT32))
    return [build.reduce("Sum", "found", build.binary("Mul", "masked", hot, wheres, otype), 0, otype)]


@lowering("top_k")
def _top_k(part: Part) -> List[Ref]:
    """The best of each lane's best; equal ones in the order of their positions, as the op has it."""
    build, dtype = part.build, part.in_dtype(0)
    form, lane = part.way.inputs[0], part.lanes[0]
    length = part.op.inputs[0].dim(form.dim) or 0
    begins, lengths = build.part(form, length)
    wanted = part.node.inputs[1] if len(part.node.inputs) > 1 else build.const(build.named("k"), int(part.op.attrs.get("k") or 0), DT_INT32)
    own = build.binary("Minimum", "own_k", wanted, build.lanes("most", [np.int32(n) for n in lengths], DT_INT32), DT_INT32)
    values = build.op("TopKV2", build.named("own"), [part.node.inputs[0], own], T=A.of_type(dtype), sorted=A.of_bool(True))
    indices = build.binary("Add", "positions", (values[0], 1), build.lanes("begin", [np.int32(b) for b in begins], DT_INT32), DT_INT32)
    shape = (part.op.inputs[0].shape or ())[:-1] + (None,)
    every = _gathered(part, "every", values, Tensor(shape, part.op.inputs[0].dtype), lane, form.dim)
    places = _gathered(part, "places", indices, Tensor(shape, "int32"), lane, form.dim)
    best = build.op("TopKV2", build.named("best"), [every, wanted], T=A.of_type(dtype), sorted=part.node.attr("sorted") or A.of_bool(True))
    rank = part.op.inputs[0].rank
    return [best, build.gather("found", places, (best[0], 1), rank - 1, DT_INT32, DT_INT32, batch_dims=rank - 1)]
