"""What computes the part of a divided op where that is not simply the op itself."""

from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from epl.ir import attrs as A
from epl.ir.build import DT_INT32
from epl.ir.program import Node, Ref
from epl.passes.shard.build import DT_BOOL, DT_INT64, LaneBuilder
from epl.planner.sharding.graph import Sharding
from epl.planner.sharding.op import Tensor
from epl.planner.sharding.solve import Item
from epl.planner.sharding.spec import P, R, S, Spec
from epl.planner.sharding.strategy import BATCH, SAME, L, Lane, Strategy


class Part:
    """One op that is being lowered; `node` has the inputs in their forms."""

    def __init__(self, build: LaneBuilder, node: Node, item: Item, way: Strategy, sharding: Sharding):
        self.build = build
        self.node = node
        self.item = item
        self.op = item.op
        self.way = way
        self.lanes = item.lanes
        self.out_lanes = item.analysis.lanes
        self.sharding = sharding

    def dtype(self, index: int = 0) -> int:
        """Of an output."""
        return _dtype(self.op.outputs[index])

    def in_dtype(self, index: int) -> int:
        return _dtype(self.op.inputs[index])

    def replace(self, inputs: Sequence[Ref], **attrs: object) -> List[Ref]:
        """The op itself with other inputs or attributes."""
        build = self.build
        build.nodes[self.node.name] = build.nodes[self.node.name].replace(inputs=list(inputs), attrs=dict(self.node.attrs, **attrs))
        return [(self.node.name, i) for i in range(len(self.op.outputs))]

    def reduced(self, what: str, value: Ref, how: str, tensor: Tensor, lane: Lane) -> Ref:
        """Terms of all lanes combined, on every lane."""
        return self.build.reshard(what, value, P, R, lane, tensor, how)


Lowering = Callable[[Part], List[Ref]]
_LOWERINGS: Dict[str, Lowering] = {}


def lower(build: LaneBuilder, node: Node, item: Item, way: Strategy, sharding: Sharding) -> List[Ref]:
    """Replace an op by what computes its part; returns its outputs."""
    return _LOWERINGS[way.how](Part(build, node, item, way, sharding))


def lowering(*names: str) -> Callable[[Lowering], Lowering]:
    def register(function: Lowering) -> Lowering:
        for name in names:
            _LOWERINGS[name] = function
        return function

    return register


def _dtype(tensor: Tensor) -> int:
    return tf.as_dtype(tensor.dtype).as_datatype_enum


# Shapes.


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
    from epl.passes.shard.build import lane_sizes

    build = part.build
    samples = build.reduce("Sum", "samples", lane_sizes(build, lane), 0, DT_INT32)
    return samples if lane.unit == 1 else build.binary("Mul", "rows", samples, build.const(build.named("unit"), lane.unit, DT_INT32), DT_INT32)


@lowering("reshape", "broadcast_to")
def _reshape(part: Part) -> List[Ref]:
    value, given = part.node.inputs
    itype = part.in_dtype(1)
    return part.replace([value, _lengths(part, part.op.outputs[0], part.way.outputs[0], part.out_lanes[0], given, itype)])


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
            rows = build.rows(lane)
            unit = build.const(build.named("unit"), lane.unit, DT_INT32)
            dynamic[dim] = rows if lane.unit == 1 else build.binary("Mul", "rows", rows, unit, DT_INT32)
        else:
            dynamic[dim] = build.shape_element("length_%d" % dim, part.node.inputs[0], dim, _dtype(tensor))
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


# Softmax and cross-entropies along divided classes.


def _row_tensor(part: Part, index: int = 0) -> Tensor:
    """Of one number for each row."""
    shape = part.op.inputs[index].shape or ()
    return Tensor(shape[:-1] + (1,), part.op.inputs[index].dtype)


def _log_softmax(part: Part) -> Tuple[Ref, Ref]:
    """(shifted logits, logarithm of the sum of their exponentials of all lanes)."""
    build, logits, dtype = part.build, part.node.inputs[0], part.in_dtype(0)
    row, lane = _row_tensor(part), part.lanes[0]
    peak = part.reduced("peak", build.reduce("Max", "own_peak", logits, -1, dtype, keep=True), "max", row, lane)
    shifted = build.binary("Sub", "shifted", logits, peak, dtype)
    own = build.reduce("Sum", "own_sum", build.unary("Exp", "exp", shifted, dtype), -1, dtype, keep=True)
    return shifted, build.unary("Log", "log", part.reduced("sum", own, "sum", row, lane), dtype)


@lowering("softmax")
def _softmax(part: Part) -> List[Ref]:
    shifted, log = _log_softmax(part)
    result = part.build.binary("Sub", "log_softmax", shifted, log, part.dtype())
    return [result if part.op.type == "LogSoftmax" else part.build.unary("Exp", "softmax", result, part.dtype())]


@lowering("cross_entropy")
def _cross_entropy(part: Part) -> List[Ref]:
    build, dtype = part.build, part.dtype()
    shifted, log = _log_softmax(part)
    log_softmax = build.binary("Sub", "log_softmax", shifted, log, dtype)
    labels = part.node.inputs[1]
    term = build.unary("Neg", "term", build.reduce("Sum", "own_loss", build.binary("Mul", "product", labels, log_softmax, dtype), -1, dtype), dtype)
    return [term, build.binary("Sub", "backprop", build.unary("Exp", "softmax", log_softmax, dtype), labels, dtype)]


@lowering("sparse_cross_entropy")
def _sparse_cross_entropy(part: Part) -> List[Ref]:
    """A row's loss is a term of the lane that has its class; a label that no lane has gives NaN, as on a GPU."""
    build, dtype, itype = part.build, part.dtype(), part.in_dtype(1)
    shifted, log = _log_softmax(part)
    labels, classes = part.node.inputs[1], part.op.inputs[0].dim(1) or 0
    local, inside, begins, lengths = _localised(part, labels, itype, part.way.inputs[0], classes)
    depth = build.lanes("depth", [np.int32(n) for n in lengths], DT_INT32)
    one, zero = build.const(build.named("one"), 1.0, dtype), build.const(build.named("zero"), 0.0, dtype)
    hot = build.op(
        "OneHot", build.named("hot"), [local, depth, one, zero], axis=A.of_int(-1), T=A.of_type(dtype), TI=A.of_type(itype)
    )  # fmt: skip
    minus = build.unary("Neg", "minus", build.binary("Sub", "log_softmax", shifted, log, dtype), dtype)
    term = build.reduce("Sum", "term", build.select("picked", build.expand("inside_rows", inside, -1, DT_BOOL), build.binary("Mul", "hot_rows", minus, hot, dtype), zero, dtype), -1, dtype)  # fmt: skip
    low = build.const(build.named("first"), 0, itype)
    high = build.const(build.named("classes"), classes, itype)
    valid = build.binary("GreaterEqual", "not_below", labels, low, itype)
    below = build.binary("Less", "not_above", labels, high, itype)
    both = build.op("LogicalAnd", build.named("valid"), [valid, below])
    wrong = build.const(build.named("nan"), float("nan"), dtype)
    term = build.select("checked", both, term, wrong, dtype)
    return [term, build.binary("Sub", "backprop", build.unary("Exp", "softmax", build.unary("Neg", "again", minus, dtype), dtype), hot, dtype)]


def _localised(part: Part, ids: Ref, itype: int, form: Spec, length: int) -> Tuple[Ref, Ref, List[int], List[int]]:
    """Positions in a divided dimension: (those in this lane's part, which of them lie in it, where parts begin, how long they are)."""
    build = part.build
    begins, lengths = build.part(form, length)
    local = build.binary("Sub", "local", ids, build.lanes("begin", [_integer(b, itype) for b in begins], itype), itype)
    zero = build.const(build.named("zero_id"), 0, itype)
    above = build.binary("GreaterEqual", "from_begin", local, zero, itype)
    below = build.binary("Less", "before_end", local, build.lanes("length", [_integer(n, itype) for n in lengths], itype), itype)
    return local, build.op("LogicalAnd", build.named("inside"), [above, below]), begins, lengths


def _integer(value: int, itype: int) -> np.generic:
    return tf.as_dtype(itype).as_numpy_dtype(value)


# Rows that are picked.


@lowering("gather")
def _gather(part: Part) -> List[Ref]:
    """Rows of this lane, and zeros for others. An index that no lane has is left out of range, so that the op complains as ever."""
    build, itype = part.build, part.in_dtype(1)
    form, ids = part.way.inputs[0], part.node.inputs[1]
    length = part.op.inputs[0].dim(form.dim) or 0
    local, inside, _, _ = _localised(part, ids, itype, form, length)
    zero = build.const(build.named("first_id"), 0, itype)
    valid_low = build.binary("GreaterEqual", "not_below", ids, zero, itype)
    valid_high = build.binary("Less", "not_above", ids, build.const(build.named("all_ids"), length, itype), itype)
    valid = build.op("LogicalAnd", build.named("valid"), [valid_low, valid_high])
    clipped = build.select("picked", inside, local, build.select("wrong", valid, zero, build.const(build.named("minus"), -1, itype), itype), itype)
    part.replace([part.node.inputs[0], clipped] + list(part.node.inputs[2:]))
    dtype = part.dtype()
    mask = build.cast(build.named("mask"), inside, DT_BOOL, dtype)
    rank = part.op.inputs[1].rank
    for _ in range(form.dim):
        mask = build.expand("mask_before_%d" % len(build.nodes), mask, 0, dtype)
    for _ in range((part.op.inputs[0].rank or 1) - 1 - form.dim):
        mask = build.expand("mask_after_%d" % len(build.nodes), mask, -1, dtype)
    assert rank is not None
    return [build.binary("Mul", "rows_here", (part.node.name, 0), mask, dtype)]


@lowering("one_hot")
def _one_hot(part: Part) -> List[Ref]:
    build, itype = part.build, part.in_dtype(0)
    form = part.way.outputs[0]
    begins, lengths = build.part(form, part.op.outputs[0].dim(form.dim) or 0)
    local = build.binary("Sub", "local", part.node.inputs[0], build.lanes("begin", [_integer(b, itype) for b in begins], itype), itype)
    depth = build.lanes("depth", [np.int32(n) for n in lengths], DT_INT32)
    return part.replace([local, depth] + list(part.node.inputs[2:]))


@lowering("segment_sum")
def _segment_sum(part: Part) -> List[Ref]:
    build, itype = part.build, part.in_dtype(1)
    data, ids, number = part.node.inputs
    form = part.way.outputs[0]
    local, inside, _, lengths = _localised(part, ids, itype, form, part.op.outputs[0].dim(0) or 0)
    dropped = build.select("dropped", inside, local, build.const(build.named("minus"), -1, itype), itype)
    ntype = part.in_dtype(2)
    return part.replace([data, dropped, build.lanes("segments", [_integer(n, ntype) for n in lengths], ntype)])


@lowering("sparse_update")
def _sparse_update(part: Part) -> List[Ref]:
    """Of the rows that are updated, those of this lane."""
    build = part.build
    variable = part.op.inputs[0]
    form = next(form for form in part.way.inputs if form.is_sharded)
    ids_at = _indices_input(part)
    rows_at = [i for i, t in enumerate(part.op.inputs) if i > 0 and i != ids_at and t.rank >= 1 and not part.way.inputs[i].is_sharded]
    itype = part.in_dtype(ids_at)
    local, inside, _, _ = _localised(part, part.node.inputs[ids_at], itype, form, variable.dim(0) or 0)
    where = build.op("Where", build.named("where"), [inside], T=A.of_type(DT_BOOL))
    flat = build.op("Reshape", build.named("mine"), [where, build.const(build.named("flat"), [-1], DT_INT32)], T=A.of_type(DT_INT64), Tshape=A.of_type(DT_INT32))
    inputs = list(part.node.inputs)
    inputs[ids_at] = build.gather("ids", local, flat, 0, itype, DT_INT64)
    for i in rows_at:
        inputs[i] = build.gather("rows_%d" % i, part.node.inputs[i], flat, 0, part.in_dtype(i), DT_INT64)
    return part.replace(inputs)


def _indices_input(part: Part) -> int:
    """The position of the indices: the vector of whole numbers."""
    return next(i for i, t in enumerate(part.op.inputs) if t.dtype in ("int32", "int64") and t.rank == 1)


# What combines the results of all lanes.


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
    where = build.binary("Add", "where", (part.node.name, 0), build.lanes("begin", [_integer(b, otype) for b in begins], otype), otype)
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


