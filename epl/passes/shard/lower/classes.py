"""Softmax and cross-entropies along divided classes."""

from typing import List, Tuple

import numpy as np

from epl.ir import attrs as A
from epl.ir.build import DT_INT32
from epl.ir.program import Ref
from epl.passes.shard.build import DT_BOOL
from epl.passes.shard.lower.part import Part, localised, lowering
from epl.planner.sharding.op import Tensor


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
    local, _, _, lengths = localised(part, labels, itype, part.way.inputs[0], classes)
    depth = build.lanes("depth", [np.int32(n) for n in lengths], DT_INT32)
    yes, no = build.const(build.named("yes"), True, DT_BOOL), build.const(build.named("no"), False, DT_BOOL)
    is_label = build.op("OneHot", build.named("is_label"), [local, depth, yes, no], axis=A.of_int(-1), T=A.of_type(DT_BOOL), TI=A.of_type(itype))
    log_softmax = build.binary("Sub", "log_softmax", shifted, log, dtype)
    picked = build.select("picked", is_label, build.unary("Neg", "minus", log_softmax, dtype), build.const(build.named("zero"), 0.0, dtype), dtype)
    term = build.reduce("Sum", "term", picked, -1, dtype)
    low = build.const(build.named("first"), 0, itype)
    high = build.const(build.named("classes"), classes, itype)
    valid = build.binary("GreaterEqual", "not_below", labels, low, itype)
    below = build.binary("Less", "not_above", labels, high, itype)
    both = build.op("LogicalAnd", build.named("valid"), [valid, below])
    wrong = build.const(build.named("nan"), float("nan"), dtype)
    term = build.select("checked", both, term, wrong, dtype)
    hot = build.cast(build.named("hot"), is_label, DT_BOOL, dtype)
    return [term, build.binary("Sub", "backprop", build.unary("Exp", "softmax", log_softmax, dtype), hot, dtype)]
