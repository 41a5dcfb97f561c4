"""Small programs around one op each, whose parts are compared with plain TensorFlow."""

import numpy as np
import tensorflow.compat.v1 as tf

B, H, C = 6, 5, 7
"""Samples of a step, columns, classes: 5 and 7 leave remainders."""


def weight(name, *shape):
    return tf.get_variable(name, shape, initializer=tf.random_normal_initializer(stddev=0.5, seed=len(shape) + sum(shape)))


def unary(op):
    return lambda x, ids: op(x)


def _conv(x, ids):
    image = tf.reshape(tf.matmul(x, weight("to_image", H, 3 * 3 * 4)), [-1, 3, 3, 4])
    return tf.nn.conv2d(image, weight("kernel", 2, 2, 4, 5), strides=[1, 1, 1, 1], padding="SAME")


def _depthwise(x, ids):
    image = tf.reshape(tf.matmul(x, weight("to_image", H, 3 * 3 * 4)), [-1, 3, 3, 4])
    return tf.nn.depthwise_conv2d(image, weight("kernel", 2, 2, 4, 2), strides=[1, 1, 1, 1], padding="SAME")


def _pool(kind):
    def build(x, ids):
        image = tf.reshape(tf.matmul(x, weight("to_image", H, 4 * 4 * 4)), [-1, 4, 4, 4])
        return kind(image, [1, 2, 2, 1], [1, 2, 2, 1], "VALID")

    return build


def _batch_norm(x, ids):
    image = tf.reshape(tf.matmul(x, weight("to_image", H, 2 * 2 * 4)), [-1, 2, 2, 4])
    return tf.nn.fused_batch_norm(image, weight("scale", 4), weight("offset", 4), mean=tf.zeros([4]), variance=tf.ones([4]), is_training=False)[0]


def _heads(x, ids):
    """Attention of 4 heads over 3 positions."""
    h = tf.reshape(tf.matmul(x, weight("to_h", H, 3 * 8)), [-1, 3, 8])

    def project(name):
        return tf.transpose(tf.reshape(tf.tensordot(h, weight(name, 8, 8), 1), [-1, 3, 4, 2]), [0, 2, 1, 3])

    scores = tf.nn.softmax(tf.matmul(project("q"), project("k"), transpose_b=True))
    joined = tf.reshape(tf.transpose(tf.matmul(scores, project("v")), [0, 2, 1, 3]), [-1, 3, 8])
    return tf.tensordot(joined, weight("o", 8, 6), 1)


def _layer_norm(x, ids):
    h = tf.matmul(x, weight("w", H, 8))
    mean, variance = tf.nn.moments(h, [-1], keepdims=True)
    return (h - mean) * tf.rsqrt(variance + 1e-3) * weight("gamma", 8) + weight("beta", 8)


def _columns(x):
    """A product whose columns may be divided."""
    return tf.matmul(x, weight("w", H, 8))


FORWARD = {
    "matmul": lambda x, ids: tf.matmul(x, weight("w", H, C)),
    "matmul_transposed": lambda x, ids: tf.matmul(x, weight("w", C, H), transpose_b=True),
    "matmul_twice": lambda x, ids: tf.matmul(tf.nn.relu(tf.matmul(x, weight("w", H, 8))), weight("v", 8, C)),
    "batch_matmul": lambda x, ids: tf.matmul(tf.reshape(_columns(x), [-1, 2, 4]), tf.tile(weight("v", 1, 4, 3), [1, 1, 1])),
    "einsum": lambda x, ids: tf.einsum("bth,hc->btc", tf.reshape(_columns(x), [-1, 2, 4]), weight("v", 4, C)),
    "einsum_heads": lambda x, ids: tf.einsum("bnd,ndc->bc", tf.reshape(_columns(x), [-1, 4, 2]), weight("v", 4, 2, C)),
    "bias_add": lambda x, ids: tf.nn.bias_add(_columns(x), weight("b", 8)),
    "broadcast_add": lambda x, ids: _columns(x) + weight("b", 8),
    "broadcast_multiply": lambda x, ids: _columns(x) * weight("b", 1, 8),
    "relu": lambda x, ids: tf.nn.relu(_columns(x)),
    "tanh": lambda x, ids: tf.tanh(_columns(x)),
    "erf": lambda x, ids: tf.math.erf(_columns(x)) * tf.nn.softplus(_columns_again(x)),
    "swish": lambda x, ids: tf.nn.swish(_columns(x)),
    "own_gradient": lambda x, ids: _scaled(tf.reshape(_columns(x), [-1, 2, 4]), weight("b", 4), x),
    "square_difference": lambda x, ids: tf.math.squared_difference(_columns(x), weight("b", 8)),
    "maximum": lambda x, ids: tf.maximum(_columns(x), 0.3 * _columns_again(x)),
    "fill": lambda x, ids: _columns(x) * tf.fill([1, 8], tf.reduce_mean(weight("b", 4))),
    "divide": lambda x, ids: _columns(x) / (2.0 + tf.square(weight("b", 8))),
    "cast": lambda x, ids: tf.cast(tf.cast(_columns(x), tf.float64), tf.float32),
    "sum_columns": lambda x, ids: tf.reduce_sum(_columns(x), 1),
    "mean_columns": lambda x, ids: tf.reduce_mean(_columns(x), 1, keepdims=True),
    "max_columns": lambda x, ids: tf.reduce_max(_columns(x), 1),
    "min_columns": lambda x, ids: tf.reduce_min(_columns(x), 1, keepdims=True),
    "prod_columns": lambda x, ids: tf.reduce_prod(_columns(x) + 1.0, 1),
    "l2_loss": lambda x, ids: tf.nn.l2_loss(weight("b", 8, 3)) + tf.reduce_sum(x, 1),
    "softmax": lambda x, ids: tf.nn.softmax(tf.matmul(x, weight("w", H, C))),
    "log_softmax": lambda x, ids: tf.nn.log_softmax(tf.matmul(x, weight("w", H, C))),
    "sparse_cross_entropy": lambda x, ids: tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=tf.matmul(x, weight("w", H, C))),
    "cross_entropy": lambda x, ids: tf.nn.softmax_cross_entropy_with_logits_v2(labels=tf.one_hot(ids, C), logits=tf.matmul(x, weight("w", H, C))),
    "sigmoid_cross_entropy": lambda x, ids: tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.one_hot(ids, C), logits=_logits(x)),
    "embedding": lambda x, ids: tf.nn.embedding_lookup(weight("table", C, 4), ids),
    "embedding_of_pairs": lambda x, ids: tf.nn.embedding_lookup(weight("table", C, 4), tf.stack([ids, (ids + 1) % C], 1)),
    "gather_columns": lambda x, ids: tf.gather(_columns(x), [1, 5, 2, 2], axis=1),
    "one_hot": lambda x, ids: tf.matmul(tf.one_hot(ids, C), weight("table", C, 4)),
    "one_hot_first": lambda x, ids: tf.matmul(tf.one_hot(ids, C, axis=0), weight("table", C, 4), transpose_a=True),
    "arg_max": lambda x, ids: tf.cast(tf.argmax(_columns(x), 1), tf.float32) + tf.reduce_sum(_columns_again(x), 1),
    "top_k": lambda x, ids: tf.nn.top_k(_columns(x), 3)[0],
    "top_k_positions": lambda x, ids: tf.cast(tf.nn.top_k(_columns(x), 3)[1], tf.float32) + tf.reduce_sum(_columns_again(x), 1, keepdims=True),
    "equal": lambda x, ids: tf.cast(tf.equal(tf.cast(tf.argmax(_columns(x), 1), ids.dtype), ids), tf.float32) + tf.reduce_sum(_columns_again(x), 1),
    "reshape_heads": lambda x, ids: tf.reshape(_columns(x), [-1, 4, 2]) * weight("by_head", 4, 2),
    "reshape_joined": lambda x, ids: tf.reshape(tf.reshape(_columns(x), [-1, 4, 2]) * weight("by_head", 4, 1), [-1, 8]),
    "reshape_rows": lambda x, ids: tf.reshape(_columns(x), [-1, 4]),
    "reshape_of_shape": lambda x, ids: tf.reshape(_columns(x), [tf.shape(x)[0], 2, 4]),
    "transpose": lambda x, ids: tf.transpose(tf.reshape(_columns(x), [-1, 4, 2]), [0, 2, 1]),
    "transpose_first": lambda x, ids: tf.matmul(tf.transpose(_columns(x)), x, transpose_a=True),
    "expand_dims": lambda x, ids: tf.expand_dims(_columns(x), 1) * weight("b", 3, 1),
    "squeeze": lambda x, ids: tf.squeeze(tf.reshape(_columns(x), [-1, 1, 8]), [1]),
    "concat": lambda x, ids: tf.concat([_columns(x), x], 1),
    "concat_rows": lambda x, ids: tf.concat([tf.expand_dims(_columns(x), 1), tf.expand_dims(_columns_again(x), 1)], 1),
    "split": lambda x, ids: tf.split(_columns(x), 2, 1)[0] * tf.split(_columns_again(x), 2, 1)[1],
    "stack": lambda x, ids: tf.stack([_columns(x), _columns_again(x)], 1),
    "unstack": lambda x, ids: tf.unstack(tf.reshape(_columns(x), [-1, 2, 4]), axis=1)[1],
    "slice": lambda x, ids: tf.slice(_columns(x), [0, 2], [-1, 5]),
    "strided_slice": lambda x, ids: tf.reshape(_columns(x), [-1, 2, 4])[:, 1, :],
    "strided_columns": lambda x, ids: _columns(x)[:, 1:7:2],
    "pad": lambda x, ids: tf.pad(tf.reshape(_columns(x), [-1, 2, 4]), [[0, 0], [1, 0], [0, 0]]),
    "tile": lambda x, ids: tf.tile(tf.expand_dims(_columns(x), 1), [1, 3, 1]),
    "broadcast_to": lambda x, ids: tf.broadcast_to(tf.expand_dims(_columns(x), 1), tf.stack([tf.shape(x)[0], 3, 8])),
    "cumsum": lambda x, ids: tf.cumsum(tf.reshape(_columns(x), [-1, 2, 4]), 1),
    "where": lambda x, ids: tf.where_v2(_columns(x) > 0.0, _columns_again(x), tf.zeros([8])),
    "clip": lambda x, ids: tf.clip_by_value(_columns(x), -0.5, 0.5),
    "add_n": lambda x, ids: tf.add_n([_columns(x), _columns_again(x), tf.ones([8]) * tf.ones([tf.shape(x)[0], 1])]),
    "segment_sum": lambda x, ids: tf.reduce_sum(tf.math.unsorted_segment_sum(_columns(x), ids, C), 1)[:1] + tf.reduce_sum(x, 1),
    "convolution": _conv,
    "depthwise_convolution": _depthwise,
    "max_pool": _pool(tf.nn.max_pool2d),
    "average_pool": _pool(tf.nn.avg_pool2d),
    "fused_batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "attention": _heads,
}
"""name -> function of the batch's columns [B, H] and classes [B], giving a tensor whose dimension 0 is the batch."""


def _logits(x):
    return tf.matmul(x, weight("w", H, C))


@tf.custom_gradient
def _scaled(h, scale, x):
    """A function with a gradient of its own; its arguments have several shapes."""

    def gradient(upstream):
        return upstream * scale, tf.reduce_sum(upstream * h, [0, 1]), x * tf.reduce_sum(upstream, [1, 2])[:, tf.newaxis]

    return h * scale, gradient


def _columns_again(x):
    return tf.matmul(x, weight("u", H, 8))


def batch(step=0, rows=B):
    random = np.random.RandomState(step)
    return {"x:0": random.randn(rows, H).astype(np.float32), "ids:0": random.randint(0, C, rows).astype(np.int64)}
