"""Models for the benchmarks, in plain TF1-style code; each returns (feeds, loss)."""

import numpy as np
import tensorflow.compat.v1 as tf


def dense(x, units, name, activation=None):
    size = int(x.shape[-1])
    with tf.variable_scope(name):
        w = tf.get_variable("kernel", [size, units], initializer=tf.glorot_uniform_initializer(seed=1))
        b = tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
    y = tf.tensordot(x, w, 1) + b if x.shape.ndims > 2 else tf.nn.bias_add(tf.matmul(x, w), b)
    return activation(y) if activation else y


def mlp(batch, width=512, depth=3, inputs=128, classes=10):
    """A perceptron; feeds: x [batch, inputs], y [batch]."""
    x = tf.placeholder(tf.float32, [None, inputs], "x")
    y = tf.placeholder(tf.int64, [None], "y")
    h = x
    for i in range(depth):
        h = dense(h, width, "layer%d" % i, tf.nn.relu)
    logits = dense(h, classes, "logits")
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    rng = np.random.RandomState(0)
    return {x: rng.randn(batch, inputs).astype(np.float32), y: rng.randint(0, classes, batch)}, loss


def cnn(batch, classes=10):
    """A small convolutional network on 32 x 32 x 3 images."""
    x = tf.placeholder(tf.float32, [None, 32, 32, 3], "x")
    y = tf.placeholder(tf.int64, [None], "y")
    h = x
    for i, (filters, stride) in enumerate(((32, 1), (64, 2), (128, 2))):
        with tf.variable_scope("conv%d" % i):
            k = tf.get_variable("kernel", [3, 3, int(h.shape[-1]), filters], initializer=tf.glorot_uniform_initializer(seed=1))
            b = tf.get_variable("bias", [filters], initializer=tf.zeros_initializer())
        h = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(h, k, strides=[1, stride, stride, 1], padding="SAME"), b))
    h = tf.reduce_mean(h, [1, 2])
    logits = dense(h, classes, "logits")
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    rng = np.random.RandomState(0)
    return {x: rng.randn(batch, 32, 32, 3).astype(np.float32), y: rng.randint(0, classes, batch)}, loss


def transformer(batch, layers=2, width=128, heads=4, length=32, vocabulary=1000):
    """A decoder-only transformer language model; feeds: ids [batch, length + 1]."""
    ids = tf.placeholder(tf.int32, [None, length + 1], "ids")
    table = tf.get_variable("table", [vocabulary, width], initializer=tf.random_normal_initializer(stddev=0.02, seed=1))
    h = tf.nn.embedding_lookup(table, ids[:, :-1])
    mask = tf.constant(np.triu(np.full((length, length), -1e9, np.float32), 1))
    for i in range(layers):
        with tf.variable_scope("block%d" % i):
            h = h + attention(norm(h, "norm1"), heads, mask)
            h = h + dense(dense(norm(h, "norm2"), 4 * width, "up", tf.nn.relu), width, "down")
    logits = dense(norm(h, "norm"), vocabulary, "logits")
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids[:, 1:], logits=logits))
    rng = np.random.RandomState(0)
    return {ids: rng.randint(0, vocabulary, (batch, length + 1))}, loss


def norm(x, name):
    width = int(x.shape[-1])
    with tf.variable_scope(name):
        gain = tf.get_variable("gain", [width], initializer=tf.ones_initializer())
        bias = tf.get_variable("bias", [width], initializer=tf.zeros_initializer())
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.rsqrt(variance + 1e-6) * gain + bias


def attention(x, heads, mask):
    width = int(x.shape[-1])
    q, k, v = (_heads(dense(x, width, n), heads) for n in ("query", "key", "value"))
    scores = tf.matmul(q, k, transpose_b=True) * (width // heads) ** -0.5 + mask
    mixed = tf.transpose(tf.matmul(tf.nn.softmax(scores), v), [0, 2, 1, 3])
    return dense(tf.reshape(mixed, [-1, int(x.shape[1]), width]), width, "out")


def _heads(x, heads):
    length, width = int(x.shape[1]), int(x.shape[2])
    return tf.transpose(tf.reshape(x, [-1, length, heads, width // heads]), [0, 2, 1, 3])


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}
