"""Reductions, softmax and cross-entropies."""

from typing import Iterable, List, Optional

import numpy as np

from epl.planner.sharding.op import Axis, Linear, Op, Saying, Special, rule
from epl.planner.sharding.spec import P, R, S

_COMBINED = {"Max": "max", "Min": "min", "All": "all", "Any": "any", "Prod": "prod"}


def reduced_dims(op: Op) -> Optional[List[int]]:
    """The dimensions that a reduction takes away, or None where that is not known."""
    axes = op.constants.get(1)
    if axes is None or op.inputs[0].shape is None:
        return None
    return sorted({int(a) % op.inputs[0].rank for a in np.ravel(axes)}) if op.inputs[0].rank else []


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any")
def reduction(op: Op) -> Iterable[Saying]:
    """Divided along what stays, it is the op itself. Divided along what goes, a sum gives terms; others combine their results."""
    if op.type in ("Sum", "Mean"):
        yield Linear((0,))
    gone = reduced_dims(op)
    if gone is None:
        return
    keep, new = bool(op.attrs.get("keep_dims")), 0
    for dim in range(op.inputs[0].rank):
        if dim not in gone:
            yield Axis((dim, None), (new,))
        elif op.type == "Sum":
            yield Axis((dim, None), (None,), sums=True)
        elif op.type == "Mean":
            yield Axis((dim, None), (None,), sums=True, how="mean")
        else:
            yield Special((S(dim), R), (R,), "combine_" + _COMBINED[op.type], (2.0,))
        new += dim not in gone or keep


@rule("L2Loss")
def l2_loss(op: Op) -> Iterable[Saying]:
    for dim in range(op.inputs[0].rank):
        yield Axis((dim,), (None,), sums=True)


@rule("Cumsum", "Cumprod")
def cumulative(op: Op) -> Iterable[Saying]:
    if op.type == "Cumsum":
        yield Linear((0,))
    along = op.constants.get(1)
    if along is not None:
        for dim in range(op.inputs[0].rank):
            if dim != int(np.ravel(along)[0]) % op.inputs[0].rank:
                yield Axis((dim, None), (dim,))


@rule("Softmax", "LogSoftmax")
def softmax(op: Op) -> Iterable[Saying]:
    """Along the classes: the maximum and the sum of exponentials, one number a row each, are combined."""
    last = op.inputs[0].rank - 1
    for dim in range(last):
        yield Axis((dim,), (dim,))
    if last >= 0:
        yield Special((S(last),), (S(last),), "softmax", (4.0 / max(1, op.inputs[0].dim(last) or 1),))


@rule("SoftmaxCrossEntropyWithLogits")
def cross_entropy(op: Op) -> Iterable[Saying]:
    """Inputs: features, labels. Outputs: a loss a row, and its gradient."""
    yield Axis((0, 0), (0, 0))
    yield Special((S(1), S(1)), (P, S(1)), "cross_entropy", (4.0, 0.0))


@rule("SparseSoftmaxCrossEntropyWithLogits")
def sparse_cross_entropy(op: Op) -> Iterable[Saying]:
    yield Axis((0, 0), (0, 0))
    yield Special((S(1), R), (P, S(1)), "sparse_cross_entropy", (4.0, 0.0))


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def batch_norm(op: Op) -> Iterable[Saying]:
    """By channels only: the statistics are over all the rest."""
    c = 1 if op.attrs.get("data_format") == "NCHW" else 3
    if all(t.rank == 1 for t in op.outputs[1:5]):
        yield Axis((c, 0, 0, 0, 0), (c,) + (0,) * 4 + (None,) * (len(op.outputs) - 5))


@rule("ArgMax", "ArgMin")
def arg_max(op: Op) -> Iterable[Saying]:
    """Along the dimension itself: of each part the best and where it is, of all parts the first best."""
    along = op.constants.get(1)
    if along is None or not op.inputs[0].rank:
        return
    at = int(np.ravel(along)[0]) % op.inputs[0].rank
    for dim in range(op.inputs[0].rank):
        if dim == at:
            yield Special((S(dim), R), (R,), "arg_max" if op.type == "ArgMax" else "arg_min", (3.0,))
        else:
            yield Axis((dim, None), (dim - (dim > at),))


@rule("TopK", "TopKV2")
def top_k(op: Op) -> Iterable[Saying]:
    last = op.inputs[0].rank - 1
    for dim in range(last):
        yield Axis((dim,) + (None,) * (len(op.inputs) - 1), (dim, dim))
    if last >= 0:
        yield Special((S(last),) + (R,) * (len(op.inputs) - 1), (R, R), "top_k", (2.0, 2.0))


@rule("InTopK", "InTopKV2")
def in_top_k(op: Op) -> Iterable[Saying]:
    yield Axis((0, 0) + (None,) * (len(op.inputs) - 2), (0,))
