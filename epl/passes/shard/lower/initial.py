"""Parts of random numbers and of constants.

TensorFlow's generator gives groups of numbers by a counter (Philox, Salmon et al., SC 2011), so
that a kernel can begin anywhere. An op with a seed draws from the counter 0 on when it first
runs in a session, and leaves a fixed distance for each run; an op of the same generator
without state draws the same numbers from any place on.
"""

from typing import List, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.framework.tensor_pb2 import TensorProto

from epl.ir import attrs as A
from epl.ir.build import DT_INT32
from epl.ir.program import Ref
from epl.passes.shard.build import DT_INT64
from epl.passes.shard.lower.part import Part, lowering
from epl.planner.sharding.rules.initial import WITHOUT_STATE

_DT_UINT64 = 23
_PHILOX = 1
_CHUNK = 1 << 20
"""Elements that are drawn at a time where the part is not contiguous."""
_VALUES = "half_val float_val double_val int_val int64_val uint32_val uint64_val bool_val string_val scomplex_val dcomplex_val".split()
"""Where a constant has values that are not packed into bytes."""
_APART = 256
"""How far an op moves its counter in a run for each number that it draws."""


@lowering("draw")
def _draw(part: Part) -> List[Ref]:
    build, form, dtype = part.build, part.way.outputs[0], part.dtype()
    shape = [int(d or 0) for d in part.op.outputs[0].shape or ()]
    before = int(np.prod(shape[: form.dim], dtype=np.int64))
    inner = int(np.prod(shape[form.dim + 1 :], dtype=np.int64))
    begins, lengths = build.part(form, shape[form.dim])
    shapes = [shape[: form.dim] + [n] + shape[form.dim + 1 :] for n in lengths]
    if not any(_seeds(part)):
        # Nobody can tell which numbers these are: each device has its own.
        itype = part.in_dtype(0)
        return part.replace([build.lanes("shape", [np.array(s, tf.as_dtype(itype).as_numpy_dtype) for s in shapes], itype)])
    own = build.lanes("shape", [np.array(s, np.int64) for s in shapes], DT_INT64)
    if before == 1:
        flat = _numbers(part, "drawn", [b * inner for b in begins], [n * inner for n in lengths])
        return [_reshaped(part, "part", flat, own)]
    row = shape[form.dim] * inner
    at_once = max(1, _CHUNK // row)
    pieces: List[Ref] = []
    for first in range(0, before, at_once):
        count = min(at_once, before - first)
        name = "rows_%d" % first
        lanes = build.group.size
        rows = _numbers(part, name, [first * row] * lanes, [count * row] * lanes, pieces[-1:])
        table = _reshaped(part, name + "/table", rows, build.const(build.named(name + "/shape"), np.array([count, row]), DT_INT64))
        begin = build.lanes(name + "/begin", [np.array([0, b * inner]) for b in begins], DT_INT64)
        size = build.lanes(name + "/columns", [np.array([count, n * inner]) for n in lengths], DT_INT64)
        pieces.append(build.op("Slice", build.named(name + "/part"), [table, begin, size], T=A.of_type(dtype), Index=A.of_type(DT_INT64)))
    return [_reshaped(part, "part", build.concat(build.named("rows"), pieces, dtype), own)]


@lowering("constant")
def _constant(part: Part) -> List[Ref]:
    build, form, dtype = part.build, part.way.outputs[0], part.dtype()
    shape = [int(d or 0) for d in part.op.outputs[0].shape or ()]
    begins, lengths = build.part(form, shape[form.dim])
    tensor = part.node.attr("value").tensor  # type: ignore[union-attr]
    if not tensor.tensor_content and sum(len(getattr(tensor, name)) for name in _VALUES) == 1:
        # One value for all elements, as initializers have it.
        one = TensorProto()
        one.CopyFrom(tensor)
        one.tensor_shape.Clear()
        shapes = [np.array(shape[: form.dim] + [n] + shape[form.dim + 1 :], np.int32) for n in lengths]
        own = part.unfolded(build.lanes("shape", shapes, DT_INT32), DT_INT32)
        inputs = [own, build.const(build.named("value"), tf.make_ndarray(one), dtype)]
        return [build.op("Fill", build.named("part"), inputs, T=A.of_type(dtype), index_type=A.of_type(DT_INT32))]
    whole = tf.make_ndarray(tensor)
    parts = [np.take(whole, range(begin, begin + length), form.dim) for begin, length in zip(begins, lengths)]
    return [build.lanes("part", parts, dtype)]


def _reshaped(part: Part, what: str, value: Ref, shape: Ref) -> Ref:
    return part.build.op("Reshape", part.build.named(what), [value, shape], T=A.of_type(part.dtype()), Tshape=A.of_type(DT_INT64))


def _numbers(part: Part, what: str, begins: Sequence[int], counts: Sequence[int], after: Sequence[Ref] = ()) -> Ref:
    """For each lane, so many of the numbers that the op draws, from a place on. `after`: what is computed before."""
    build, dtype = part.build, part.dtype()
    group, skip = _groups(part)
    key, high = _seeds(part)
    shape = build.lanes(what + "/count", [np.array([count + begin % group]) for begin, count in zip(begins, counts)], DT_INT64)
    inputs = [
        shape,
        build.const(build.named("key"), np.array([key], np.uint64), _DT_UINT64),
        _counter(part, what, [begin // group * skip for begin in begins], high),
        build.const(build.named("philox"), _PHILOX, DT_INT32),
    ]
    kind = WITHOUT_STATE[part.op.type]
    drawn = build.op(kind, build.named(what), inputs, [name for name, _ in after], dtype=A.of_type(dtype), Tshape=A.of_type(DT_INT64))
    if not any(begin % group for begin in begins):
        return drawn
    begin = build.lanes(what + "/skipped", [np.array([b % group]) for b in begins], DT_INT64)
    size = build.lanes(what + "/size", [np.array([n]) for n in counts], DT_INT64)
    return build.op("Slice", build.named(what + "/numbers"), [drawn, begin, size], T=A.of_type(dtype), Index=A.of_type(DT_INT64))


def _counter(part: Part, what: str, begins: Sequence[int], high: int) -> Ref:
    """Where each lane begins, in the run that this is."""
    build = part.build
    low = build.binary("AddV2", what + "/low", build.lanes(what + "/begin_at", [np.int64(b) for b in begins], DT_INT64), _moved(part), DT_INT64)
    high_ref = build.const(build.named("high"), np.uint64(high), _DT_UINT64)
    return build.pack(build.named(what + "/counter"), [build.cast(build.named(what + "/low_bits"), low, DT_INT64, _DT_UINT64), high_ref], _DT_UINT64)


def _moved(part: Part) -> Ref:
    """How far earlier runs have moved the counter: each run leaves a mark in the session, in every program that has the op."""
    build, size = part.build, int(np.prod([d or 0 for d in part.op.outputs[0].shape or ()], dtype=np.int64))
    if build.named("moved") in build.nodes:
        return build.named("moved"), 0
    marks = {"dtypes": A.of_types([DT_INT32]), "shared_name": A.of_str("epl_draws/" + part.node.name)}
    mark, _ = build.op("Stage", build.named("mark"), [build.const(build.named("run"), 1, DT_INT32)], **marks)
    runs = build.cast(build.named("runs"), build.op("StageSize", build.named("marks"), [], [mark], **marks), DT_INT32, DT_INT64)
    before = build.binary("Sub", "before", runs, build.const(build.named("this"), np.int64(1), DT_INT64), DT_INT64)
    return build.binary("Mul", "moved", before, build.const(build.named("apart"), np.int64(size * _APART), DT_INT64), DT_INT64)


def _seeds(part: Part) -> Tuple[int, int]:
    first, second = (int(part.op.attrs.get(name) or 0) & (1 << 64) - 1 for name in ("seed", "seed2"))
    return first, second


def _groups(part: Part) -> Tuple[int, int]:
    """(numbers of a group, how far the counter moves for one): a truncated distribution may draw again, up to 256 times."""
    group = 4 if part.op.outputs[0].dtype == "float32" else 2
    return group, group * 256 // 4 if part.op.type == "TruncatedNormal" else 1
