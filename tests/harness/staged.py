"""Models that are about stages: what crosses them, skips them, or must happen in each of them once."""

import tensorflow.compat.v1 as tf

from tests.harness.data import Field
from tests.harness.models import CLASSES, MODELS, VOCABULARY, Forward, Inputs, Model, Part, cross_entropy, dense, table, uniform
from tests.harness.stages import at


def skips(inputs: Inputs) -> Forward:
    """Connections that skip one, two and three stages, a scalar among them, and an input that only the last stage uses."""
    first = dense(inputs["x"], 8, "first", tf.tanh, seed=1)
    scale = tf.reduce_mean(tf.square(tf.get_variable("scale", [3], initializer=tf.random_normal_initializer(seed=9))))
    at(1)
    second = dense(first, 8, "second", tf.tanh, seed=2)
    at(2)
    third = dense(first + second, 8, "third", tf.tanh, seed=3)
    at(3)
    logits = dense(tf.concat([first, second, third, inputs["x"]], 1), CLASSES, "logits", seed=4) * (1.0 + scale)
    return Forward([Part(cross_entropy(logits, inputs["y"]))], {"first": first, "third": third, "logits": logits})


def tied_dense(inputs: Inputs) -> Forward:
    """One matrix that three stages use, one of them transposed."""
    weights = tf.get_variable("weights", [6, 6], initializer=uniform(1))
    h = tf.tanh(tf.matmul(inputs["x"], weights))
    at(1)
    h = tf.tanh(tf.matmul(h, weights))
    at(2)
    h = dense(h, 6, "hidden", tf.tanh, seed=2)
    at(3)
    logits = tf.matmul(h, weights, transpose_b=True)
    return Forward([Part(tf.reduce_mean(tf.square(logits - inputs["x"])))], {"logits": logits})


def auxiliary(inputs: Inputs) -> Forward:
    """Further losses in the first and in a middle stage."""
    h = dense(inputs["x"], 8, "first", tf.tanh, seed=1)
    activity = tf.reduce_mean(tf.square(h))
    at(1)
    h = dense(h, 8, "second", tf.nn.relu, seed=2)
    middle = cross_entropy(dense(h, CLASSES, "middle", seed=5), inputs["y"])
    at(2)
    h = dense(h, 8, "third", tf.tanh, seed=3)
    at(3)
    logits = dense(h, CLASSES, "logits", seed=4)
    return Forward([Part(cross_entropy(logits, inputs["y"]) + 0.3 * middle + 0.1 * activity)], {"logits": logits})


def loop(inputs: Inputs) -> Forward:
    """Loops and a conditional in the first and the third quarter: weights in one, and a number of rounds that comes from the inputs."""
    h = dense(inputs["x"], 6, "first", tf.tanh, seed=1)
    rounds = 2 + 0 * tf.reduce_max(inputs["y"])
    inner = tf.get_variable("inner", [6, 6], initializer=uniform(5))

    def turn(i, v):
        return i + 1, tf.tanh(tf.matmul(v, inner)) * 0.9 + v * 0.1

    _, h = tf.while_loop(lambda i, v: i < rounds, turn, [tf.constant(0), h])
    at(1)
    h = dense(h, 6, "second", tf.tanh, seed=2)
    at(2)
    h = tf.map_fn(lambda row: tf.tanh(row) + 0.1 * row, h)
    h = tf.cond(tf.greater(tf.shape(h)[0], 0), lambda: h * 1.5, lambda: h)
    at(3)
    logits = dense(h, CLASSES, "logits", seed=3)
    return Forward([Part(cross_entropy(logits, inputs["y"]))], {"logits": logits})


def narrow(inputs: Inputs) -> Forward:
    """Stages without variables: one-hot rows first, then an embedding by a product, a mean, and the loss alone."""
    h = tf.one_hot(inputs["ids"], VOCABULARY)
    at(1)
    h = tf.tensordot(h, table("table", VOCABULARY, 6, seed=1), 1)
    at(2)
    logits = dense(tf.reduce_mean(h, 1), CLASSES, "logits", seed=3)
    at(3)
    return Forward([Part(cross_entropy(logits, inputs["y"]))], {"logits": logits})


def dropout(inputs: Inputs) -> Forward:
    """Dropout with seeds of its own in every stage; the masks differ between micro-batches and replicas."""
    h = tf.nn.dropout(dense(inputs["x"], 8, "first", tf.tanh, seed=1), rate=0.5, seed=11)
    at(1)
    h = tf.nn.dropout(dense(h, 8, "second", tf.tanh, seed=2), rate=0.3, seed=12)
    at(2)
    h = tf.nn.dropout(dense(h, 8, "third", tf.tanh, seed=3), rate=0.3, seed=13)
    at(3)
    logits = dense(h, CLASSES, "logits", seed=4)
    return Forward([Part(cross_entropy(logits, inputs["y"]))], {"first": h, "logits": logits})


def batch_norm(inputs: Inputs) -> Forward:
    """Batch normalisation in two stages: statistics per micro-batch, moving ones that the training op updates."""
    h = dense(inputs["x"], 8, "first", seed=1, use_bias=False)
    h = tf.tanh(tf.layers.batch_normalization(h, momentum=0.9, epsilon=0.1, training=True, name="norm1"))
    at(1)
    h = dense(h, 8, "second", tf.tanh, seed=2)
    at(2)
    h = tf.tanh(tf.layers.batch_normalization(dense(h, 8, "third", seed=3, use_bias=False), momentum=0.8, epsilon=0.1, training=True, name="norm2"))
    at(3)
    logits = dense(h, CLASSES, "logits", seed=4)
    return Forward([Part(cross_entropy(logits, inputs["y"]))], {"logits": logits})


_X = Field((6,))
_Y = Field((), high=CLASSES)
_XY = {"x": _X, "y": _Y}

STAGED = dict(
    MODELS,
    skips=Model(_XY, skips),
    tied_dense=Model({"x": _X}, tied_dense),
    auxiliary=Model(_XY, auxiliary),
    loop=Model(_XY, loop),
    loop_v2=Model(_XY, loop, control_flow_v2=True),
    narrow=Model({"ids": Field((3,), high=VOCABULARY), "y": _Y}, narrow),
    dropout=Model(_XY, dropout, alike=False),
    batch_norm=Model(_XY, batch_norm, alike=False),
)
"""All models that can have stages."""
