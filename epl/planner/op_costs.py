"""What one operation costs: floating-point operations and bytes moved.

Pure functions of (op type, attributes, input tensors, output tensors); no graph, no
device, no TensorFlow import. A multiplication and an addition are two FLOPs; one
comparison, division, exponential or root is one. Integer and boolean arithmetic and
the generation of random bits count no FLOPs. Bytes are what the kernel must move
when it runs alone: every input once, every output once, less for the ops that touch
only a part (gathers, slices) and nothing for those that forward a buffer.
"""

import dataclasses
from typing import Any, Callable, Dict, Iterable, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

Attrs = Mapping[str, Any]
Dims = Optional[Tuple[Optional[int], ...]]

DTYPE_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "qint8": 1, "quint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "qint16": 2, "quint16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "qint32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes per element. A dtype that is not listed (resource, variant, string) has no size of its own."""

FLOATING = frozenset(("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"))


class TensorSpec(NamedTuple):
    """One tensor. `shape` is None when the rank is unknown; a dimension may be None too."""

    shape: Dims
    dtype: str = "float32"


Specs = Sequence[TensorSpec]


@dataclasses.dataclass(frozen=True)
class OpCost:
    """FLOPs and bytes of an op or of a set of ops; costs add up and scale."""

    flops: float = 0
    """Floating-point operations."""
    bytes_read: float = 0
    bytes_written: float = 0

    @property
    def bytes(self) -> float:
        """All bytes moved."""
        return self.bytes_read + self.bytes_written

    def __add__(self, other: "OpCost") -> "OpCost":
        if not isinstance(other, OpCost):
            return NotImplemented
        return OpCost(self.flops + other.flops, self.bytes_read + other.bytes_read, self.bytes_written + other.bytes_written)

    def __mul__(self, factor: Union[int, float]) -> "OpCost":
        if not isinstance(factor, (int, float)):
            return NotImplemented
        return OpCost(self.flops * factor, self.bytes_read * factor, self.bytes_written * factor)

    __rmul__ = __mul__


def total(costs: Iterable[OpCost]) -> OpCost:
    """The sum of costs; of none, the zero cost."""
    return sum(costs, OpCost())


class _UnknownShape(Exception):
    """A rule needs a dimension that is not known."""


def op_flops(op_type: str, attrs: Attrs, inputs: Specs, outputs: Specs) -> Optional[int]:
    """FLOPs of one execution; 0 for an op without arithmetic, None when a shape it needs is unknown.

    Args:
      op_type: TensorFlow op type, for example "MatMul".
      attrs: attributes as plain Python values (`plain_attrs`).
      inputs: data inputs in order. outputs: outputs in order.
    """
    rule = FLOP_RULES.get(op_type)
    if rule is None or not any(spec.dtype in FLOATING for spec in inputs):
        return 0
    try:
        return int(rule(attrs, inputs, outputs))
    except _UnknownShape:
        return None


def op_cost(op_type: str, attrs: Attrs, inputs: Specs, outputs: Specs) -> Optional[OpCost]:
    """FLOPs and bytes of one execution, or None when a shape they need is unknown."""
    flops = op_flops(op_type, attrs, inputs, outputs)
    if flops is None:
        return None
    try:
        read, written = BYTE_RULES.get(op_type, _all_bytes)(inputs, outputs)
    except _UnknownShape:
        return None
    return OpCost(flops, read, written)


def plain_attrs(attrs: Mapping[str, Any]) -> Dict[str, Any]:
    """The attributes of a NodeDef as plain values; shapes, tensors, types and functions are left out."""
    plain: Dict[str, Any] = {}
    for name, value in attrs.items():
        kind = value.WhichOneof("value")
        if kind in ("i", "f", "b"):
            plain[name] = getattr(value, kind)
        elif kind == "s":
            plain[name] = value.s.decode("utf-8", "replace")
        elif kind == "list" and value.list.i:
            plain[name] = list(value.list.i)
    return plain


def _dims(spec: TensorSpec) -> Tuple[int, ...]:
    if spec.shape is None or any(d is None for d in spec.shape):
        raise _UnknownShape()
    return tuple(d for d in spec.shape if d is not None)


def _product(dims: Iterable[int]) -> int:
    result = 1
    for d in dims:
        result *= d
    return result


def _size(spec: TensorSpec) -> int:
    return _product(_dims(spec))


def tensor_bytes(spec: TensorSpec) -> Optional[int]:
    """Bytes of a tensor's buffer; 0 for a resource, variant or string, None for an unknown shape."""
    try:
        return _bytes(spec)
    except _UnknownShape:
        return None


def _bytes(spec: TensorSpec) -> int:
    size = DTYPE_BYTES.get(spec.dtype, 0)
    return size * _size(spec) if size else 0


# Rules for FLOPs -------------------------------------------------------------------------------

FlopRule = Callable[[Attrs, Specs, Specs], float]


def _per_output(count: int) -> FlopRule:
    """`count` FLOPs per element of the first output."""
    return lambda attrs, ins, outs: count * _size(outs[0])


def _per_input(count: int, index: int = 0) -> FlopRule:
    """`count` FLOPs per element of an input; a negative index counts from the end."""
    return lambda attrs, ins, outs: count * _size(ins[index])


def _reduction(attrs: Attrs, ins: Specs, outs: Specs) -> float:
    """Folding k values takes k - 1 operations: in - out over all of them."""
    return max(0, _size(ins[0]) - _size(outs[0]))


def _matmul(attrs: Attrs, ins: Specs, outs: Specs) -> float:
    rows, inner = _dims(ins[0])[-2:]
    return 2 * _size(outs[0]) * (rows if attrs.get("transpose_a") else inner)


def _batch_matmul(attrs: Attrs, ins: Specs, outs: Specs) -> float:
    rows, inner = _dims(ins[0])[-2:]
    return 2 * _size(outs[0]) * (rows if attrs.get("adj_x") else inner)


def _einsum(attrs: Attrs, ins: Specs, outs: Specs) -> float:
    """Two FLOPs per point of the loop nest over all labels; one when nothing is summed over."""
    left, _, right = attrs["equation"].replace(" ", "").partition("->")
    sizes: Dict[str, int] = {}
    ellipsis = 1
    for term, spec in zip(left.split(","), ins):
        dims = _dims(spec)
        head, dots, tail = term.partition("...")
        if dots:
            middle = dims[len(head) : len(dims) - len(tail)]
            dims = dims[: len(head)] + dims[len(dims) - len(tail) :]
            ellipsis = max(ellipsis, _product(middle))
        for label, size in zip(head + tail, dims):
            sizes[label] = max(size, sizes.get(label, 1))
    points = ellipsis * _product(sizes.values())
    if len(ins) == 1:
        return max(0, points - _size(outs[0]))
    return points * (2 if set(sizes) - set(right) else 1)


def _convolution(out: Tuple[str, int], kernel: Tuple[str, int], kernel_dims: slice) -> FlopRule:
    """Two FLOPs per kernel tap and element of the forward output.

    A convolution and both its gradients run the same loop nest, so that one formula
    serves them: `2 * |out| * (taps * input channels per group)`. `out` and `kernel`
    say where the forward output (or its gradient) and the kernel's shape are found.
    """

    def pick(where: Tuple[str, int], ins: Specs, outs: Specs) -> TensorSpec:
        return (ins if where[0] == "in" else outs)[where[1]]

    return lambda attrs, ins, outs: 2 * _size(pick(out, ins, outs)) * _product(_dims(pick(kernel, ins, outs))[kernel_dims])


def _pooling(of_input: Optional[int], extra: int) -> FlopRule:
    """One FLOP per element of the window and pooled element, and `extra` more per pooled element."""

    def rule(attrs: Attrs, ins: Specs, outs: Specs) -> float:
        pooled = outs[0] if of_input is None else ins[of_input]
        return _size(pooled) * (_product(attrs.get("ksize") or [1]) + extra)

    return rule


def _batch_norm(attrs: Attrs, ins: Specs, outs: Specs) -> float:
    """Training: mean 1, variance 3, normalise 2, scale and shift 2. Inference: 4 with given statistics."""
    return (8 if attrs.get("is_training", True) else 4) * _size(ins[0])


def _sparse_cross_entropy(attrs: Attrs, ins: Specs, outs: Specs) -> float:
    """Per class: max, subtract, exp, sum, divide. Per row: log, subtract, and one off the label's class."""
    return 5 * _size(ins[0]) + 3 * _size(outs[0])


def _momentum(attrs: Attrs, ins: Specs, outs: Specs) -> float:
    """accum = accum * m + g; var -= lr * accum, with Nesterov var -= lr * g + lr * m * accum."""
    return (7 if attrs.get("use_nesterov") else 4) * _size(ins[3])


def _rows(ins: Specs) -> TensorSpec:
    """The rows of input 0 that the indices of input 1 pick, as one tensor."""
    return TensorSpec(_dims(ins[1]) + _dims(ins[0])[1:], ins[0].dtype)


def _sparse_segment(attrs: Attrs, ins: Specs, outs: Specs) -> float:
    """One addition per picked element."""
    return _size(_rows(ins))


def _add_n(attrs: Attrs, ins: Specs, outs: Specs) -> float:
    return (len(ins) - 1) * _size(outs[0])


def _table(*groups: Tuple[str, FlopRule]) -> Dict[str, FlopRule]:
    return {name: rule for names, rule in groups for name in names.split()}


_OUT, _KERNEL = ("out", 0), ("in", 1)
_TAPS = slice(None, -1)  # [h, w, channels per group, filters] without the filters
_DEPTH_TAPS = slice(None, -2)  # a depthwise kernel is [h, w, channels, multiplier]

FLOP_RULES = _table(
    ("MatMul SparseMatMul", _matmul),
    ("BatchMatMul BatchMatMulV2 BatchMatMulV3", _batch_matmul),
    ("Einsum", _einsum),
    ("Conv2D Conv3D", _convolution(_OUT, _KERNEL, _TAPS)),
    ("Conv2DBackpropInput Conv3DBackpropInputV2", _convolution(("in", 2), _KERNEL, _TAPS)),
    ("Conv2DBackpropFilter Conv3DBackpropFilterV2", _convolution(("in", 2), _OUT, _TAPS)),
    ("DepthwiseConv2dNative", _convolution(_OUT, _KERNEL, _DEPTH_TAPS)),
    ("DepthwiseConv2dNativeBackpropInput", _convolution(("in", 2), _KERNEL, _DEPTH_TAPS)),
    ("DepthwiseConv2dNativeBackpropFilter", _convolution(("in", 2), _OUT, _DEPTH_TAPS)),
    # The bias has the size of one row, so that BiasAddGrad is a sum over rows.
    ("BiasAdd BiasAddV1", _per_output(1)),
    ("BiasAddGrad Sum Prod Max Min ArgMax ArgMin", _reduction),
    ("Mean", _per_input(1)),  # in - out additions and one division per output
    ("Cumsum Cumprod UnsortedSegmentSum SegmentSum", _per_input(1)),
    ("SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN", _sparse_segment),
    ("L2Loss EuclideanNorm", _per_input(2)),
    ("AddN AccumulateNV2", _add_n),
    (
        "Add AddV2 Sub Mul Div RealDiv FloorDiv FloorMod Mod TruncateDiv Maximum Minimum Pow MulNoNan DivNoNan Xdivy Atan2 "
        "Neg Abs Sign Exp Expm1 Log Log1p Sqrt Rsqrt Square Reciprocal Inv Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh "
        "Tanh Sigmoid Erf Erfc Erfinv Ndtri Lgamma Digamma Floor Ceil Round Rint Relu "
        "Less LessEqual Greater GreaterEqual Equal NotEqual ReluGrad AssignAdd AssignSub InplaceAdd",
        _per_output(1),
    ),
    ("SquaredDifference Relu6 LeakyRelu LeakyReluGrad Relu6Grad SqrtGrad ClipByValue Xlogy Xlog1py", _per_output(2)),
    ("TanhGrad SigmoidGrad InvGrad ReciprocalGrad Elu EluGrad Softplus Softsign SoftsignGrad", _per_output(3)),
    ("RsqrtGrad SoftplusGrad Selu SeluGrad", _per_output(4)),
    ("AssignAddVariableOp AssignSubVariableOp", _per_input(1, 1)),
    ("ScatterAdd ScatterSub ResourceScatterAdd ResourceScatterSub ScatterNdAdd ScatterNdSub ResourceScatterNdAdd TensorScatterAdd", _per_input(1, 2)),
    ("Softmax LogSoftmax", _per_output(5)),  # max, subtract, exp (or the log's subtraction), sum, divide
    # As sparse, and the product with a whole row of labels: 3 more, subtract the labels 1 more.
    ("SoftmaxCrossEntropyWithLogits", _per_input(9)),
    ("SparseSoftmaxCrossEntropyWithLogits", _sparse_cross_entropy),
    ("MaxPool MaxPoolV2 MaxPool3D", _pooling(None, 0)),
    ("AvgPool AvgPool3D", _pooling(None, 1)),
    ("MaxPoolGrad MaxPool3DGrad", _per_input(1, 2)),
    ("AvgPoolGrad AvgPool3DGrad", _pooling(1, 1)),
    ("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3", _batch_norm),
    # Sums of dy and dy * x_hat (x_hat itself is 2), and dx: 3 to centre, 2 to scale.
    ("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3", _per_input(10)),
    ("ApplyGradientDescent ResourceApplyGradientDescent", _per_input(2, 2)),
    ("ApplyMomentum ResourceApplyMomentum ResourceApplyKerasMomentum", _momentum),
    ("SparseApplyMomentum ResourceSparseApplyMomentum", _momentum),
    # m: 3, v: 4, the update: sqrt, + epsilon, * rate, /, subtract.
    ("ApplyAdam ResourceApplyAdam", _per_input(12, 9)),
    # accum += g * g; var -= rate * g * rsqrt(accum)
    ("ApplyAdagrad ResourceApplyAdagrad SparseApplyAdagrad ResourceSparseApplyAdagrad", _per_input(6, 3)),
    ("ApplyAdagradV2 ResourceApplyAdagradV2 SparseApplyAdagradV2 ResourceSparseApplyAdagradV2", _per_input(6, 4)),
    # ms: 4; mom: + epsilon, rsqrt, two products, momentum, add; var: 1.
    ("ApplyRMSProp ResourceApplyRMSProp", _per_input(11, 7)),
)
"""Op type -> rule. An op type that is not here does no floating-point arithmetic worth counting."""

# Rules for bytes -------------------------------------------------------------------------------

ByteRule = Callable[[Specs, Specs], Tuple[int, int]]


def _all_bytes(ins: Specs, outs: Specs) -> Tuple[int, int]:
    """Every input is read once and every output written once."""
    return sum(map(_bytes, ins)), sum(map(_bytes, outs))


def _nothing(ins: Specs, outs: Specs) -> Tuple[int, int]:
    """The output is an input's buffer, a stored one, or a handful of dimensions."""
    return 0, 0


def _write_only(ins: Specs, outs: Specs) -> Tuple[int, int]:
    return 0, sum(map(_bytes, outs))


def _part(ins: Specs, outs: Specs) -> Tuple[int, int]:
    """Only what is copied out of the first input is read; the other inputs are read whole."""
    written = sum(map(_bytes, outs))
    return written + sum(map(_bytes, ins[1:])), written


def _folded(ins: Specs, outs: Specs) -> Tuple[int, int]:
    """The handful of axes of a reduction is left out; how many there are may be known only when it runs."""
    return _bytes(ins[0]), sum(map(_bytes, outs))


def _without_reserve(ins: Specs, outs: Specs) -> Tuple[int, int]:
    """All but the sixth tensor, a batch norm's reserve space, whose shape is known only when it runs."""
    return sum(map(_bytes, ins[:5])), sum(map(_bytes, outs[:5]))


def _picked_rows(ins: Specs, outs: Specs) -> Tuple[int, int]:
    return _bytes(_rows(ins)) + sum(map(_bytes, ins[1:])), sum(map(_bytes, outs))


def _update(num_slots: int, grad: int) -> ByteRule:
    """An optimizer's update reads the gradient and reads and writes the variable and its slots.

    Sizes are taken from the gradient, because a resource handle has none.
    """

    def rule(ins: Specs, outs: Specs) -> Tuple[int, int]:
        state = (1 + num_slots) * _bytes(ins[grad])
        return state + _bytes(ins[grad]), state

    return rule


def _byte_table(*groups: Tuple[str, ByteRule]) -> Dict[str, ByteRule]:
    return {name: rule for names, rule in groups for name in names.split()}


BYTE_RULES = _byte_table(
    (
        "Identity IdentityN RefIdentity StopGradient PreventGradient Snapshot Reshape ExpandDims Squeeze Bitcast Shape ShapeN Rank Size "
        "Const Placeholder PlaceholderWithDefault Variable VariableV2 VarHandleOp ReadVariableOp NoOp ControlTrigger "
        "Enter RefEnter Exit RefExit Switch RefSwitch Merge RefMerge NextIteration RefNextIteration LoopCond "
        "BroadcastGradientArgs VarIsInitializedOp IsVariableInitialized IteratorGetNext _Arg _Retval EnsureShape",
        _nothing,
    ),
    (
        "Fill ZerosLike OnesLike Range RandomUniform RandomStandardNormal TruncatedNormal StatelessRandomUniformV2 StatelessRandomNormalV2",
        _write_only,
    ),
    ("Gather GatherV2 GatherNd ResourceGather ResourceGatherNd Slice StridedSlice", _part),
    ("SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN", _picked_rows),
    ("Sum Prod Max Min Mean All Any ArgMax ArgMin EuclideanNorm", _folded),
    ("FusedBatchNormV3 FusedBatchNormGradV3", _without_reserve),
    ("Assign AssignVariableOp", lambda ins, outs: (_bytes(ins[1]), _bytes(ins[1]))),
    ("AssignAdd AssignSub AssignAddVariableOp AssignSubVariableOp", _update(0, 1)),
    ("ScatterAdd ScatterSub ResourceScatterAdd ResourceScatterSub", _update(0, 2)),
    ("ApplyGradientDescent ResourceApplyGradientDescent", _update(0, 2)),
    ("ApplyMomentum ResourceApplyMomentum ResourceApplyKerasMomentum SparseApplyMomentum ResourceSparseApplyMomentum", _update(1, 3)),
    ("ApplyAdam ResourceApplyAdam", _update(2, 9)),
    ("ApplyAdagrad ResourceApplyAdagrad SparseApplyAdagrad ResourceSparseApplyAdagrad", _update(1, 3)),
    ("ApplyAdagradV2 ResourceApplyAdagradV2 SparseApplyAdagradV2 ResourceSparseApplyAdagradV2", _update(1, 4)),
    ("ApplyRMSProp ResourceApplyRMSProp", _update(2, 7)),
)
"""Op type -> (bytes read, bytes written). An op type that is not here moves all its tensors once."""
