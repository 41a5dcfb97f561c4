"""Matrix products, einsum and convolutions: axes that are mapped, and axes that are summed over."""

from typing import Dict, Iterable, List, Optional, Tuple

from epl.planner.sharding.op import Axis, Linear, Op, Saying, rule


def from_labels(inputs: List[str], output: str) -> Iterable[Axis]:
    """The axes of an einsum; a label that a tensor has twice is its diagonal and can't be divided."""
    for label in dict.fromkeys("".join(inputs)):
        if label == "?" or any(labels.count(label) > 1 for labels in inputs + [output]):
            continue
        at = tuple(labels.index(label) if label in labels else None for labels in inputs)
        yield Axis(at, (output.index(label) if label in output else None,), sums=label not in output)


def _products(op: Op, inputs: List[str], output: str) -> Iterable[Saying]:
    yield from from_labels(inputs, output)
    for position in range(len(inputs)):
        yield Linear((position,))


@rule("MatMul")
def matmul(op: Op) -> Iterable[Saying]:
    left = "ki" if op.attrs.get("transpose_a") else "ik"
    right = "jk" if op.attrs.get("transpose_b") else "kj"
    yield from _products(op, [left, right], "ij")


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matmul(op: Op) -> Iterable[Saying]:
    out = op.outputs[0].shape
    if any(t.shape is None for t in op.inputs) or out is None:
        return
    labels = [chr(ord("A") + d) for d in range(len(out) - 2)]
    inputs = []
    for tensor, adjoint, own in zip(op.inputs, (op.attrs.get("adj_x"), op.attrs.get("adj_y")), ("ik", "kj")):
        skipped = len(labels) - (tensor.rank - 2)
        # A batch dimension of length 1 that meets a longer one is needed whole.
        batch = ["?" if tensor.dim(d) == 1 and out[skipped + d] != 1 else label for d, label in enumerate(labels[skipped:])]
        inputs.append("".join(batch) + (own[::-1] if adjoint else own))
    yield from _products(op, inputs, "".join(labels) + "ij")


@rule("Einsum")
def einsum(op: Op) -> Iterable[Saying]:
    labels = equation_labels(op)
    if labels is not None:
        yield from _products(op, *labels)


def equation_labels(op: Op) -> Optional[Tuple[List[str], str]]:
    """The labels of an einsum's inputs and output, an ellipsis spelled out with capital Greek letters; None if a rank is unknown."""
    equation = str(op.attrs.get("equation", "")).replace(" ", "")
    left, _, output = equation.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(op.inputs) or any(t.shape is None for t in op.inputs):
        return None
    widths: Dict[int, int] = {}
    for position, (text, tensor) in enumerate(zip(inputs, op.inputs)):
        if "..." in text:
            widths[position] = len(tensor.shape or ()) - (len(text) - 3)
    most = max(widths.values(), default=0)
    greek = "".join(chr(0x391 + i) for i in range(most))
    spelled = [text.replace("...", greek[most - widths[i] :] if i in widths else "") for i, text in enumerate(inputs)]
    # Dimensions behind an ellipsis may be broadcast: only where all inputs have them at full length are they axes.
    for label in greek:
        lengths = {(tensor.shape or ())[text.index(label)] for text, tensor in zip(spelled, op.inputs) if label in text}
        if len(lengths) > 1 or lengths == {1}:
            spelled = [text.replace(label, "?") for text in spelled]
    result = output.replace("...", greek)
    return spelled, "".join(c if any(c in text for text in spelled) else "?" for c in result)


@rule("Conv2D", "DepthwiseConv2dNative")
def convolution(op: Op) -> Iterable[Saying]:
    """Batch, and channels: those of the output are mapped, those of the input summed over.

    Depth-wise, an input channel has output channels of its own. Height and width are not
    divided: neighbours would need each other's borders.
    """
    c = _channel(op)
    if op.type == "Conv2D":
        if _whole_channels(op.inputs[0].shape, op.inputs[1].shape, c):
            yield Axis((c, 2), (None,), sums=True)
            yield Axis((None, 3), (c,))
        yield Axis((0, None), (0,))
    else:
        multiplier = (op.inputs[1].shape or (None,) * 4)[3]
        yield Axis((0, None), (0,))
        if multiplier is not None:
            yield Axis((c, 2), (c,), units=(1, 1, multiplier))
    yield Linear((0,))
    yield Linear((1,))


@rule("Conv2DBackpropInput")
def convolution_input(op: Op) -> Iterable[Saying]:
    """Inputs: shape of the input, filter, gradient of the output."""
    c = _channel(op)
    if _whole_channels(op.outputs[0].shape, op.inputs[1].shape, c):
        yield Axis((None, 2, None), (c,), how="input_sizes")
        yield Axis((None, 3, c), (None,), sums=True)
    yield Axis((None, None, 0), (0,), how="input_sizes")
    yield Linear((1,))
    yield Linear((2,))


@rule("Conv2DBackpropFilter")
def convolution_filter(op: Op) -> Iterable[Saying]:
    """Inputs: the input, shape of the filter, gradient of the output."""
    c = _channel(op)
    if _whole_channels(op.inputs[0].shape, op.outputs[0].shape, c):
        yield Axis((c, None, None), (2,), how="filter_sizes")
        yield Axis((None, None, c), (3,), how="filter_sizes")
    yield Axis((0, None, 0), (None,), sums=True)
    yield Linear((0,))
    yield Linear((2,))


def _channel(op: Op) -> int:
    return 1 if op.attrs.get("data_format") == "NCHW" else 3


def _whole_channels(image: Optional[tuple], kernel: Optional[tuple], channel: int) -> bool:
    """Whether the filter takes all channels of the image at once: a grouped convolution does not."""
    return image is not None and kernel is not None and image[channel] is not None and image[channel] == kernel[2]


@rule("MaxPool", "AvgPool")
def pool(op: Op) -> Iterable[Saying]:
    for dim in (0, _channel(op)):
        yield Axis((dim,), (dim,))


@rule("MaxPoolGrad")
def pool_gradient(op: Op) -> Iterable[Saying]:
    for dim in (0, _channel(op)):
        yield Axis((dim, dim, dim), (dim,))
