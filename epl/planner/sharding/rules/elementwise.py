"""Ops that work element by element, with NumPy's broadcasting."""

from typing import Iterable, List, Optional

from epl.planner.sharding.op import Axis, Linear, Op, Saying, rule, same_dims

UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Bitcast Cast Ceil CheckNumerics Cos Cosh Digamma Elu Erf Erfc Exp Expm1 Floor Identity Inv "
    "Invert IsFinite IsInf IsNan LeakyRelu Lgamma Log Log1p LogicalNot Ndtri Neg OnesLike PlaceholderWithDefault PreventGradient "
    "Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Sqrt Square StopGradient Tan Tanh "
    "ZerosLike Erfinv"
).split()
LINEAR_UNARY = frozenset("Identity Neg PreventGradient Snapshot StopGradient PlaceholderWithDefault".split())

BINARY = (
    "Add AddV2 ApproximateEqual Atan2 BitwiseAnd BitwiseOr BitwiseXor Complex Div DivNoNan Equal FloorDiv FloorMod Greater GreaterEqual "
    "LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan NotEqual Pow RealDiv RightShift SquaredDifference "
    "Sub TruncateDiv TruncateMod Xdivy Xlog1py Xlogy NextAfter Igamma Igammac Zeta"
).split()
_SUMS = frozenset("Add AddV2 Sub".split())
_SCALES = frozenset("Mul".split())
_QUOTIENTS = frozenset("Div RealDiv".split())

GRADIENTS = (
    "EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad TanhGrad"
).split()
"""Of one shape; linear in the gradient, whose place is below."""
_GRADIENT_FIRST = frozenset("EluGrad LeakyReluGrad Relu6Grad ReluGrad SeluGrad SoftplusGrad SoftsignGrad".split())



def aligned(op: Op) -> Iterable[Axis]:
    """The axes of broadcasting: a dimension of length 1 meets all of the others', and is needed whole.

    Two unknown lengths are taken as equal: in training graphs both are the batch. Where that is
    wrong, the op fails when it runs; it does not compute something else.
    """
    if any(t.shape is None for t in op.inputs) or op.outputs[0].shape is None:
        return
    for dim, length in enumerate(op.outputs[0].shape):
        at: List[Optional[int]] = []
        for tensor in op.inputs:
            assert tensor.shape is not None
            own = dim - (op.outputs[0].rank - tensor.rank)
            if own < 0 or tensor.shape[own] == 1:
                at.append(None)
            elif tensor.shape[own] is None and length is not None or length is None and tensor.shape[own] is not None:
                break  # Whether it is broadcast is known only when it runs.
            else:
                at.append(own)
        else:
            if any(d is not None for d in at):
                yield Axis(tuple(at), (dim,) * len(op.outputs))


@rule(*UNARY)
def unary(op: Op) -> Iterable[Saying]:
    yield from same_dims(op, op.inputs[0].rank)
    if op.type in LINEAR_UNARY or op.type == "Cast" and _floats(op):
        yield Linear((0,))


@rule("IdentityN")
def identities(op: Op) -> Iterable[Saying]:
    """What a function with a gradient of its own gives, and its arguments. Any of them may be divided; it pays for those that look alike."""
    for dim in range(max((tensor.rank for tensor in op.inputs), default=0)):
        lengths = [tensor.shape[dim] if tensor.shape is not None and dim < tensor.rank else -1 for tensor in op.inputs]
        for length in dict.fromkeys(lengths):
            if length != -1:
                at = tuple(dim if own == length else None for own in lengths)
                yield Axis(at, at)


def _floats(op: Op) -> bool:
    return all(t.is_float for t in op.inputs + op.outputs)


@rule(*BINARY)
def binary(op: Op) -> Iterable[Saying]:
    yield from aligned(op)
    if op.type in _SUMS and op.inputs[0].shape == op.inputs[1].shape and None not in (op.inputs[0].shape or (None,)):
        yield Linear((0, 1))
    if op.type in _SCALES and _floats(op):
        yield Linear((0,))
        yield Linear((1,))
    if op.type in _QUOTIENTS and _floats(op):
        yield Linear((0,))


@rule(*GRADIENTS)
def gradient(op: Op) -> Iterable[Saying]:
    yield from aligned(op)
    yield Linear((0,) if op.type in _GRADIENT_FIRST else (1,))


@rule("SelectV2", "ClipByValue")
def select(op: Op) -> Iterable[Saying]:
    yield from aligned(op)


@rule("AddN", "AccumulateNV2")
def add_n(op: Op) -> Iterable[Saying]:
    yield from aligned(op)
    yield Linear(tuple(range(len(op.inputs))))


@rule("BiasAdd")
def bias_add(op: Op) -> Iterable[Saying]:
    channels = 1 if op.attrs.get("data_format") == "NCHW" else op.inputs[0].rank - 1
    for dim in range(op.inputs[0].rank):
        yield Axis((dim, 0 if dim == channels else None), (dim,))


@rule("BiasAddGrad")
def bias_add_grad(op: Op) -> Iterable[Saying]:
    channels = 1 if op.attrs.get("data_format") == "NCHW" else op.inputs[0].rank - 1
    for dim in range(op.inputs[0].rank):
        yield Axis((dim,), (0 if dim == channels else None,), sums=dim != channels)
    yield Linear((0,))
