"""Losses over classes that the devices of a `split` scope hold together."""

from typing import Any, Optional

import tensorflow.compat.v1 as tf

from epl.errors import ConfigError


def distributed_sparse_softmax_cross_entropy_with_logits(
    labels: Any,
    logits: Any,
    weights: Any = 1.0,
    strategy: Optional[str] = None,
    loss_collection: Optional[str] = tf.GraphKeys.LOSSES,
    reduction: str = tf.losses.Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> tf.Tensor:
    """The cross-entropy of softmax and labels: `tf.losses.sparse_softmax_cross_entropy`.

    It builds plain ops. In a `split` scope the logits are never brought together: devices
    exchange a maximum and a sum for each row. With weights, the mean of a lane is taken over
    its own samples whose weight is not 0.

    Args:
      labels: [d_0, ..., d_r], int32 or int64, each from 0 to classes - 1.
      logits: [d_0, ..., d_r, classes], floating point.
      weights: a factor, or one for each label; None is 1.
      strategy: the name scope of the ops; the argument has its name from EPL 0.6.
      loss_collection: the collection of the graph that the loss joins; None for no one.
      reduction: one of `tf.losses.Reduction`.

    Returns:
      A number of the dtype of the logits; one for each label if the reduction is NONE.

    Raises ConfigError for labels or logits that are missing, or whose dtypes or shapes do not fit.
    """
    labels, logits = _tensor("labels", labels), _tensor("logits", logits)
    if not logits.dtype.is_floating:
        raise ConfigError("logits %s of type %s: expected floating point" % (logits.name, logits.dtype.name))
    if labels.dtype not in (tf.int32, tf.int64):
        raise ConfigError("labels %s of type %s: expected the numbers of classes as int32 or int64" % (labels.name, labels.dtype.name))
    if not logits.shape[:-1].is_compatible_with(labels.shape):
        raise ConfigError("labels of shape %s and logits of shape %s: expected one label for each row of logits" % (labels.shape, logits.shape))
    return tf.losses.sparse_softmax_cross_entropy(labels, logits, 1.0 if weights is None else weights, strategy, loss_collection, reduction)


def _tensor(name: str, value: Any) -> tf.Tensor:
    if value is None:
        raise ConfigError("%s=None: expected a tensor" % name)
    return tf.convert_to_tensor(value)
