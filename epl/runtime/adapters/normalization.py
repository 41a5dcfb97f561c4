"""Adapter of batch normalisation: with `communication.sync_batch_norm` its moments are those of all replicas."""

import functools
from typing import Any, Callable, Optional, Sequence

import tensorflow.compat.v1 as tf

from epl import compat
from epl.env import Env
from epl.ops.synchronised import sync_mean, sync_sum
from epl.runtime.adapters import Patches


def install(patches: Patches) -> None:
    for owner in compat.modules_with("moments", compat.moments_function()):
        patches.replace(owner, "moments", _moments)
    for owner in compat.modules_with("fused_batch_norm", compat.fused_batch_norm_function()):
        patches.replace(owner, "fused_batch_norm", _fused)


def _active() -> bool:
    env = Env.get()
    return env.initialized and env.config.communication.sync_batch_norm and not tf.executing_eagerly()


def _moments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def moments(x: Any, axes: Any, shift: Any = None, name: Optional[str] = None, keep_dims: Any = None, keepdims: Any = None) -> Any:
        keep = bool(keepdims or keep_dims)
        if not _active() or not _over_batch(x, axes):
            return original(x, axes, shift=shift, name=name, keepdims=keep)
        return synchronised_moments(x, list(axes), keep, name or "moments")

    return moments


def _over_batch(x: Any, axes: Any) -> bool:
    """True when dimension 0, the batch, is averaged over: the moments of a batch normalisation."""
    if not isinstance(axes, (list, tuple)) or not all(isinstance(a, int) for a in axes):
        return False
    rank = tf.convert_to_tensor(x).shape.ndims
    return 0 in axes or (rank is not None and -rank in axes)


def synchronised_moments(x: Any, axes: Sequence[int], keepdims: bool, name: str) -> Any:
    """Mean and variance of `x` over `axes` and over the replicas.

    Half-precision inputs are accumulated in float32, as the plain op does.
    """
    with tf.name_scope(name):
        x = tf.convert_to_tensor(x)
        wide = tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x
        mean = sync_mean(tf.reduce_mean(wide, axes, keepdims=True, name="mean"))
        variance = sync_mean(tf.reduce_mean(tf.squared_difference(wide, mean), axes, keepdims=True, name="variance"))
        if not keepdims:
            mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
        return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)


def _fused(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fused_batch_norm(
        x: Any,
        scale: Any,
        offset: Any,
        mean: Any = None,
        variance: Any = None,
        epsilon: float = 0.001,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: Optional[str] = None,
        exponential_avg_factor: Optional[float] = 1.0,
    ) -> Any:
        if not _active() or not is_training:
            return original(x, scale, offset, mean, variance, epsilon, data_format, is_training, name, exponential_avg_factor)
        return _normalise(x, scale, offset, mean, variance, max(epsilon, 1.001e-5), data_format, name or "FusedBatchNorm", exponential_avg_factor)

    return fused_batch_norm


def _normalise(
    x: Any, scale: Any, offset: Any, mean: Any, variance: Any, epsilon: float, data_format: str, name: str, factor: Optional[float]
) -> Any:
    """What the fused op computes, from the moments of all replicas: (y, running mean, running unbiased variance)."""
    with tf.name_scope(name):
        x = tf.convert_to_tensor(x)
        channel = x.shape.ndims - 1 if data_format.endswith("C") else 1
        axes = [a for a in range(x.shape.ndims) if a != channel]
        batch_mean, batch_variance = synchronised_moments(tf.cast(x, tf.float32), axes, True, "moments")
        wide = (tf.cast(x, tf.float32) - batch_mean) * tf.rsqrt(batch_variance + epsilon)
        shape = [-1 if a == channel else 1 for a in range(x.shape.ndims)]
        y = tf.cast(wide * tf.reshape(scale, shape) + tf.reshape(offset, shape), x.dtype)
        count = sync_sum(tf.cast(tf.size(x) / tf.shape(x)[channel], tf.float32))
        batch_mean = tf.reshape(batch_mean, [-1])
        unbiased = tf.reshape(batch_variance, [-1]) * (count / tf.maximum(count - 1.0, 1.0))
        if factor is None or factor == 1.0:
            return y, batch_mean, unbiased
        return y, mean * (1 - factor) + batch_mean * factor, variance * (1 - factor) + unbiased * factor
