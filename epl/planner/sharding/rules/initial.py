"""Values that variables start with: random numbers and constants."""

from typing import Iterable

from epl import compat
from epl.planner.sharding.op import Op, Saying, Special, rule
from epl.planner.sharding.spec import R, S

LARGE = 1 << 24
"""Elements from which on a device draws only its part of random numbers."""
LONG = 1 << 16
"""The same for constants."""
WITHOUT_STATE = {
    "RandomUniform": "StatelessRandomUniformV2",
    "RandomStandardNormal": "StatelessRandomNormalV2",
    "TruncatedNormal": "StatelessTruncatedNormalV2",
}
"""What draws the same numbers from any place on; older versions of TensorFlow do not have it."""


@rule(*WITHOUT_STATE)
def draw(op: Op) -> Iterable[Saying]:
    """The numbers of a part are those that the whole has there: a counter says which ones come next. For ops that start variables only."""
    if op.outputs[0].dtype in ("float32", "float64") and _size(op) >= LARGE and compat.op_def(WITHOUT_STATE[op.type]) is not None:
        for dim in range(op.outputs[0].rank):
            yield Special((R,), (S(dim),), "draw")


@rule("Const")
def constant(op: Op) -> Iterable[Saying]:
    """Small ones are everywhere."""
    if _size(op) >= LONG:
        for dim in range(op.outputs[0].rank):
            yield Special((), (S(dim),), "constant")


def _size(op: Op) -> int:
    """Elements of the result; 0 if that is not known."""
    size = 1
    for length in op.outputs[0].shape or (0,):
        size *= length or 0
    return size
