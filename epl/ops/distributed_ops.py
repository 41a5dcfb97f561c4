"""Decisions over classes that the devices of a `split` scope hold together."""

from typing import Any, Optional

import tensorflow.compat.v1 as tf

from epl.errors import ConfigError


def distributed_argmax(
    inputs: Any, axis: Optional[int] = None, name: Optional[str] = None, dimension: Optional[int] = None, output_type: Any = tf.int64
) -> tf.Tensor:
    """Where the largest value lies along a dimension, the first of equal ones: `tf.argmax`.

    It builds a plain op. In a `split` scope, along a divided dimension, devices exchange
    their largest value and its place for each row.

    Args:
      inputs: numbers, of any rank from 1.
      axis: the dimension; None is 0. `dimension` is its older name.
      output_type: int32 or int64.

    Returns:
      Positions in the whole dimension; of the shape of `inputs` without it.

    Raises ConfigError for two names of the dimension, one that is not there, or another output type.
    """
    if axis is not None and dimension is not None:
        raise ConfigError("axis=%r and dimension=%r: they are two names of one argument; give one" % (axis, dimension))
    along = axis if axis is not None else dimension if dimension is not None else 0
    if tf.as_dtype(output_type) not in (tf.int32, tf.int64):
        raise ConfigError("output_type=%r: expected int32 or int64" % (output_type,))
    tensor = tf.convert_to_tensor(inputs)
    if tensor.shape.rank is not None and not -tensor.shape.rank <= along < tensor.shape.rank:
        raise ConfigError("axis=%r: %s has %d dimensions" % (along, tensor.name, tensor.shape.rank))
    return tf.argmax(tensor, along, name=name, output_type=output_type)


def distributed_equal(predictions: Any, labels: Any, name: Optional[str] = None) -> tf.Tensor:
    """Which predictions are their labels: `tf.equal` of both, in the dtype of the labels.

    Args:
      predictions, labels: of one shape.

    Returns:
      bool, of that shape.

    Raises ConfigError if one is missing, or the shapes do not fit.
    """
    if predictions is None or labels is None:
        raise ConfigError("predictions=%r, labels=%r: expected two tensors" % (predictions, labels))
    labels = tf.convert_to_tensor(labels)
    predictions = tf.convert_to_tensor(predictions)
    if not predictions.shape.is_compatible_with(labels.shape):
        raise ConfigError("predictions of shape %s and labels of shape %s: expected one shape" % (predictions.shape, labels.shape))
    return tf.equal(tf.cast(predictions, labels.dtype), labels, name=name)
