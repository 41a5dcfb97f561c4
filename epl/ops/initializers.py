"""Initializers that keep the scale of a whole weight when only a shard of it is drawn."""

from typing import Any, Dict, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from epl.errors import ConfigError


def get(initializer: Any, fan_in: Optional[int] = None, fan_out: Optional[int] = None) -> Any:
    """An initializer whose scale follows from the given fans, not from the shape it is called with.

    A variance-scaling initializer (Glorot, He, LeCun, ...) derives the spread of a
    weight from its number of inputs and outputs. For a shard these must be the whole
    weight's.

    Args:
      initializer: an initializer of TensorFlow 1 or Keras, its class, its Keras name or
        configuration, or None for Glorot uniform, which `tf.get_variable` takes.
      fan_in: inputs of the whole weight; None takes the shard's.
      fan_out: outputs of the whole weight; None takes the shard's.

    Returns:
      A `FixedFanInitializer`, or the initializer itself if its values do not depend on fans.

    Raises:
      ConfigError: a fan below 1. ValueError: a name that Keras does not know.
    """
    for name, fan in (("fan_in", fan_in), ("fan_out", fan_out)):
        if fan is not None and fan < 1:
            raise ConfigError("%s=%r: expected the number of units of the whole weight, 1 or more" % (name, fan))
    if initializer is None:
        initializer = tf.glorot_uniform_initializer()
    elif isinstance(initializer, (str, dict)):
        initializer = tf.keras.initializers.get(initializer)
    elif isinstance(initializer, type):
        initializer = initializer()
    if not all(hasattr(initializer, a) for a in ("scale", "mode", "distribution")):
        return initializer
    return FixedFanInitializer(initializer, fan_in, fan_out)


class FixedFanInitializer:
    """A variance-scaling initializer with the fans of the whole weight.

    Attributes:
      scale, mode, distribution, seed, dtype: those of the source.
      fan_in, fan_out: units of the whole weight; None for those of the shape drawn.
    """

    def __init__(self, source: Any, fan_in: Optional[int], fan_out: Optional[int]):
        self.scale = source.scale
        self.mode = source.mode
        self.distribution = source.distribution
        self.seed = getattr(source, "seed", None)
        self.dtype = tf.as_dtype(getattr(source, "dtype", tf.float32))
        self.fan_in = fan_in
        self.fan_out = fan_out
        self._source = source
        # The two families draw other numbers for the same seed: stay in the source's.
        self._is_version_1 = isinstance(source, tf.variance_scaling_initializer)

    def __call__(self, shape: Any, dtype: Any = None, partition_info: Any = None, **kwargs: Any) -> Any:
        """Values of the given shape; `partition_info` is not needed, as the fans are those of the whole."""
        dims = [int(d) for d in tf.TensorShape(shape).as_list()]
        dtype = self.dtype if dtype is None else dtype
        # The source divides `scale` by the units of the shape; undo that and divide by the right ones.
        scale = self.scale * self._units(*_fans(dims)) / self._units(*self._whole_fans(dims))
        arguments: Dict[str, Any] = {"scale": scale, "mode": self.mode, "distribution": self.distribution, "seed": self.seed}
        if self._is_version_1:
            return tf.variance_scaling_initializer(dtype=self.dtype, **arguments)(dims, dtype=dtype)
        return tf2.keras.initializers.VarianceScaling(**arguments)(dims, dtype=dtype, **kwargs)

    def get_config(self) -> Dict[str, Any]:
        """What Keras stores of the initializer."""
        return {
            "scale": self.scale,
            "mode": self.mode,
            "distribution": self.distribution,
            "seed": self.seed,
            "dtype": self.dtype.name,
            "fan_in": self.fan_in,
            "fan_out": self.fan_out,
        }

    def _whole_fans(self, dims: Sequence[int]) -> Tuple[int, int]:
        fan_in, fan_out = _fans(dims)
        return self.fan_in or fan_in, self.fan_out or fan_out

    def _units(self, fan_in: int, fan_out: int) -> float:
        by_mode = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2.0}
        return max(1.0, by_mode[self.mode])


def _fans(dims: Sequence[int]) -> Tuple[int, int]:
    """Inputs and outputs of a weight of a shape: [..., in, out], each times the window before them."""
    if len(dims) < 2:
        size = dims[0] if dims else 1
        return size, size
    window = 1
    for d in dims[:-2]:
        window *= d
    return dims[-2] * window, dims[-1] * window
