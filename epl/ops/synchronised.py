"""Values shared by the replicas in the middle of the forward pass."""

import tensorflow.compat.v1 as tf

from epl import compat
from epl.ir import attrs as A

_GRADIENT = "EplSynchronisedMean"


def sync_mean(x: tf.Tensor, name: str = "epl_sync_mean") -> tf.Tensor:
    """The mean of `x` over the replicas; of the shape of `x`, which must not depend on the batch.

    In a program on one replica it is `x` itself. Each replica's loss depends on the
    mean through all replicas' values, so the gradient is the mean of the replicas'
    gradients.
    """
    graph = tf.get_default_graph()
    with compat.attr_scope(graph, {A.SYNC: A.of_str("mean")}), graph.gradient_override_map({"Identity": _GRADIENT}):
        return tf.identity(x, name=name)


def sync_sum(x: tf.Tensor, name: str = "epl_sync_sum") -> tf.Tensor:
    """The sum of `x` over the replicas; no gradient flows through it."""
    with compat.attr_scope(tf.get_default_graph(), {A.SYNC: A.of_str("sum")}):
        total = tf.identity(x, name=name)
    return tf.stop_gradient(total)


@tf.RegisterGradient(_GRADIENT)
def _sync_mean_gradient(op: tf.Operation, gradient: tf.Tensor) -> tf.Tensor:
    del op
    return sync_mean(gradient, "epl_sync_mean_grad")
