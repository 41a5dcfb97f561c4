"""Functions of one, two or more tensors for random programs; all are near 1 where their arguments are, and far from jumps."""

import tensorflow.compat.v1 as tf


def _half(v):
    return 0.5 * tf.tanh(v)


def _above(v):
    return 1.5 + tf.square(tf.tanh(v))


def _steps(function):
    """A function without a slope, which carries no gradient."""
    return lambda v: function(2.0 * v) * 0.1 + tf.sin(v)


def _bits(function):
    def on_bits(a, b):
        one, other = (tf.cast(tf.stop_gradient(v) * 8.0, tf.int32) for v in (a, b))
        return a + 0.01 * tf.cast(function(one, other), tf.float32) + tf.sin(b)

    return on_bits


def _truth(function):
    def of_signs(a, b):
        return tf.cast(function(a > 0.05, b > -0.05), tf.float32) * tf.tanh(b) + tf.sin(a)

    return of_signs


UNARY = (
    tf.tanh,
    tf.nn.relu,
    tf.sigmoid,
    tf.nn.elu,
    tf.nn.selu,
    tf.nn.relu6,
    tf.nn.softplus,
    tf.nn.softsign,
    lambda v: tf.nn.leaky_relu(v, 0.3),
    tf.math.erf,
    tf.math.erfc,
    lambda v: tf.square(tf.tanh(v)),
    lambda v: tf.exp(tf.tanh(v)),
    lambda v: tf.math.expm1(tf.tanh(v)),
    lambda v: tf.sqrt(_above(v)),
    lambda v: tf.rsqrt(_above(v)),
    lambda v: tf.reciprocal(_above(v)),
    lambda v: tf.log(_above(v)),
    lambda v: tf.log1p(tf.square(v)),
    lambda v: tf.abs(v) - tf.sign(v) * 0.1,
    tf.sin,
    tf.cos,
    lambda v: tf.tan(_half(v)),
    lambda v: tf.asin(_half(v)),
    lambda v: tf.acos(_half(v)),
    tf.atan,
    lambda v: tf.sinh(tf.tanh(v)),
    lambda v: tf.cosh(tf.tanh(v)),
    tf.asinh,
    lambda v: tf.acosh(_above(v)),
    lambda v: tf.atanh(_half(v)),
    lambda v: tf.lgamma(_above(v)),
    lambda v: tf.digamma(_above(v)) * 0.3,
    lambda v: tf.math.ndtri(0.5 + 0.3 * tf.tanh(v)),
    lambda v: tf.math.erfinv(_half(v)),
    lambda v: tf.clip_by_value(v, -0.7, 0.7),
    lambda v: tf.check_numerics(tf.negative(v), "here"),
    lambda v: tf.where_v2(v > 0.0, v, 0.2 * tf.stop_gradient(v)),
    lambda v: tf.cast(tf.sin(tf.cast(v, tf.float64)), tf.float32),
    lambda v: v + tf.ones_like(v) - tf.zeros_like(v),
    lambda v: v * tf.cast(tf.logical_not(tf.math.is_nan(v) | tf.math.is_inf(v)) & tf.math.is_finite(v), tf.float32),
    lambda v: tf.raw_ops.Snapshot(input=tf.raw_ops.PreventGradient(input=tf.stop_gradient(v))) + tf.tanh(v),
    lambda v: tf.bitcast(tf.bitcast(tf.stop_gradient(v), tf.int32), tf.float32) + v,
    _steps(tf.floor),
    _steps(tf.ceil),
    _steps(tf.round),
    _steps(tf.rint),
)
ONCE = frozenset(i for i, function in enumerate(UNARY) if function is tf.nn.softsign)
"""Places in `UNARY` of what TensorFlow can't differentiate twice."""
BINARY = (
    tf.add,
    tf.subtract,
    lambda a, b: tf.tanh(a) * tf.tanh(b),
    tf.maximum,
    tf.minimum,
    lambda a, b: tf.math.squared_difference(tf.tanh(a), tf.tanh(b)),
    lambda a, b: a / _above(b),
    lambda a, b: tf.math.divide_no_nan(a, _above(b)),
    lambda a, b: tf.math.multiply_no_nan(tf.tanh(a), tf.tanh(b)),
    lambda a, b: tf.pow(_above(a), _half(b)),
    lambda a, b: tf.atan2(a, _above(b)),
    lambda a, b: tf.math.xlogy(_above(a), _above(b)),
    lambda a, b: tf.math.xlog1py(_above(a), _above(b)),
    lambda a, b: tf.math.xdivy(_above(a), _above(b)),
    lambda a, b: tf.where_v2(a > b, tf.sin(a), b),
    lambda a, b: tf.where_v2(tf.less_equal(a, b), a, 0.3 * b),
    lambda a, b: tf.add_n([a, a * b, a * 0.5]),
    _truth(tf.logical_and),
    _truth(tf.logical_or),
    _truth(tf.not_equal),
    _truth(tf.equal),
    _bits(lambda a, b: tf.floordiv(a, 1 + tf.abs(b))),
    _bits(tf.bitwise.bitwise_and),
    _bits(tf.bitwise.bitwise_xor),
    _bits(lambda a, b: tf.bitwise.left_shift(a, tf.abs(b) % 4)),
    _bits(lambda a, b: tf.truncatemod(a, 1 + tf.abs(b))),
    _bits(lambda a, b: tf.floormod(a, 1 + tf.abs(b))),
)


def _of_truths(function):
    def reduced(v, axes, keepdims):
        return tf.reduce_sum(tf.sin(v), axes, keepdims=keepdims) + tf.cast(function(v > 0.1, axes, keepdims=keepdims), tf.float32)

    return reduced


def _product(v, axes, keepdims):
    return tf.reduce_prod(tf.tanh(v) + 0.8, axes, keepdims=keepdims)


REDUCE = (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min, _product, _of_truths(tf.reduce_any), _of_truths(tf.reduce_all))
