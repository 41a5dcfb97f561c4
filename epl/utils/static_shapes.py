"""Static shapes as plain tuples, and what several of them have in common."""

from typing import Any, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

Dims = Optional[Tuple[Optional[int], ...]]
"""A shape: None when the rank is unknown, with None for each unknown dimension."""


def as_dims(shape: Any) -> Dims:
    """A `tf.TensorShape` or TensorShapeProto as a tuple."""
    shape = tf.TensorShape(shape)
    if shape.ndims is None:
        return None
    return tuple(tf.dimension_value(d) for d in shape.dims)


def is_known(shape: Dims) -> bool:
    """True when the rank and every dimension are known."""
    return shape is not None and all(d is not None for d in shape)


def agree(shapes: Sequence[Dims]) -> Dims:
    """What all shapes have in common: a dimension in which two differ, or one is unknown, is unknown."""
    if not shapes or any(s is None for s in shapes) or len({len(s) for s in shapes if s is not None}) != 1:
        return None
    columns = zip(*[s for s in shapes if s is not None])
    return tuple(c[0] if all(d == c[0] for d in c) else None for c in columns)


def refine(shape: Dims, more: Dims) -> Dims:
    """`shape` with its unknown dimensions taken from `more`, if the ranks allow it."""
    if shape is None:
        return more
    if more is None or len(more) != len(shape):
        return shape
    return tuple(b if a is None else a for a, b in zip(shape, more))
