"""Values that a graph computes from constants alone: permutations, axes, and axes that follow from shapes."""

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.framework.tensor_pb2 import TensorProto

from epl.ir.program import Node, Program, Ref
from epl.planner.sharding.strategy import BATCH, Lane

FOLDED = "BroadcastGradientArgs"
"""What depends on shapes at run time, but in nothing that counts: its value is taken from what is known of the shapes."""
_SMALL = 64
"""Elements up to which something is computed."""
_MOST = 1 << 16
"""Elements of a constant that may matter: beyond are values of variables, not axes, lengths or rows."""

Length = Union[None, int, Tuple[Ref, int]]
"""Of a dimension: unknown, known, or so many rows for each sample of an input: (input, rows)."""


class Constants:
    """What is known of the values of a program's tensors.

    Args:
      lanes: how tensors differ between lanes; those before a tensor are there when its value is asked for.
    """

    def __init__(self, program: Program, lanes: Mapping[Ref, Lane]):
        self._program = program
        self._lanes = lanes
        self._found: Dict[Ref, Optional[Any]] = {}

    def of(self, ref: Ref) -> Optional[Any]:
        """The value of a tensor that is a constant, or follows from small ones; None for any other."""
        stack = [ref]
        while stack:
            current = stack[-1]
            if current in self._found:
                stack.pop()
                continue
            node = self._program.nodes[current[0]]
            sources = node.inputs if node.op in _COMPUTED and node.name not in self._program.facts.frames else ()
            missing = [source for source in sources if source not in self._found]
            if missing:
                stack.extend(missing)
                continue
            self._found[current] = self._value(node, current[1], sources)
        return self._found[ref]

    def _value(self, node: Node, output: int, sources: Sequence[Ref]) -> Optional[Any]:
        if node.op == "Const":
            value = node.attr("value")
            return None if value is None or _elements(value.tensor) > _MOST else tf.make_ndarray(value.tensor)
        if node.op == FOLDED and node.name not in self._program.facts.frames:
            axes = broadcast_axes(*map(self._described, node.inputs))
            return None if axes is None else np.array(axes[output], np.int32)
        found = [self._found[source] for source in sources]
        values = [np.asarray(value) for value in found if value is not None]
        if not values or len(values) < len(found):
            return None
        if node.op == "Identity":
            return found[0]
        if any(value.size > _SMALL or value.dtype.kind != "i" for value in values):
            return None
        with np.errstate(all="ignore"):
            return _COMPUTED[node.op](values, node.int_attr("axis") or 0)

    def _described(self, ref: Ref) -> Optional[Sequence[Length]]:
        """The lengths that a shape vector says, as far as they are known; None if even its rank is not."""
        node = self._program.nodes[ref[0]]
        while node.op == "Identity":
            node = self._program.nodes[node.inputs[0][0]]
        if node.op != "Shape":
            value = self.of(ref)
            return None if value is None else [int(v) for v in np.ravel(value)]
        source = node.inputs[0]
        shape, lane = self._program.shape_of(source), self._lanes.get(source)
        if shape is None:
            return None
        found: List[Length] = list(shape)
        if lane is not None and lane.kind == BATCH and lane.unit and lane.origin is not None and lane.dim < len(found) and found[lane.dim] is None:
            found[lane.dim] = (lane.origin, lane.unit)
        return found


def _elements(tensor: TensorProto) -> int:
    size = 1
    for dim in tensor.tensor_shape.dim:
        size *= dim.size
    return size


def broadcast_axes(left: Optional[Sequence[Length]], right: Optional[Sequence[Length]]) -> Optional[Tuple[List[int], List[int]]]:
    """Over which dimensions of a broadcast result the gradient of each side is summed; None if that is known only when it runs.

    A length that is not known is taken as longer than 1 where it meets 1: if it is not, the sum over it changes nothing.
    """
    if left is None or right is None:
        return None
    rank = max(len(left), len(right))
    both = [(1,) * (rank - len(shape)) + tuple(shape) for shape in (left, right)]
    found: Tuple[List[int], List[int]] = ([], [])
    for dim, lengths in enumerate(zip(*both)):
        if 1 not in lengths and (None in lengths or lengths[0] != lengths[1]):
            return None
        for side, length in enumerate(lengths):
            if length == 1:
                found[side].append(dim)
    return found


def _range(values: Sequence[np.ndarray], _: int) -> Optional[np.ndarray]:
    start, limit, step = (int(value) for value in values)
    numbers = range(start, limit, step) if step else range(0)
    return np.array(numbers, values[0].dtype) if step and len(numbers) <= _SMALL else None


_COMPUTED: Dict[str, Callable[[Sequence[np.ndarray], int], Optional[Any]]] = {
    "Identity": lambda values, _: values[0],
    "InvertPermutation": lambda values, _: np.argsort(values[0]).astype(values[0].dtype),  # of a transposition's gradient
    "Range": _range,
    "Add": lambda values, _: values[0] + values[1],
    "AddV2": lambda values, _: values[0] + values[1],
    "Sub": lambda values, _: values[0] - values[1],
    "Mul": lambda values, _: values[0] * values[1],
    "FloorMod": lambda values, _: np.mod(values[0], values[1]),
    "Pack": lambda values, axis: np.stack(values, axis),
    "ConcatV2": lambda values, _: np.concatenate(values[:-1], int(values[-1])),
    "ExpandDims": lambda values, _: np.expand_dims(values[0], int(values[1])),
}
"""op -> value, given those of its inputs, which are small whole numbers, and its axis."""
