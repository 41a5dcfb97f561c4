"""The model zoo: small TF1-style models whose training must not depend on the layout.

A model is a function from inputs to `Losses`. Every initializer has a seed and every
dimension is tiny: what counts is the shape of the graph (loops, sparse gradients, second
order gradients, shared weights, several losses), not the amount of arithmetic. A parameter
whose gradient is zero but for rounding (the bias of an attention key, say) has no place
here: Adam turns rounding into steps of full length. `at(...)` says where a model may be cut
into stages; models that are about stages are in `tests.harness.staged`.
"""

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

import tensorflow.compat.v1 as tf

from tests.harness.data import Field
from tests.harness.stages import at

Tensor = tf.Tensor
Inputs = Dict[str, Tensor]

VOCABULARY = 20
CLASSES = 4


class Part(NamedTuple):
    """One loss and the name scope of the variables that it trains (None: all trainable ones)."""

    loss: Tensor
    scope: Optional[str] = None


class Forward(NamedTuple):
    """What a model computes: its losses, and tensors with a batch dimension that may be fetched."""

    parts: List[Part]
    outputs: Dict[str, Tensor]


class Model(NamedTuple):
    fields: Dict[str, Field]
    forward: Callable[[Inputs], Forward]
    control_flow_v2: bool = False
    alike: bool = True
    """Whether training is that of plain TensorFlow for all layouts; if not, for all with the same replicas and micro-batches."""

    @property
    def num_losses(self) -> int:
        return 2 if self.forward is two_losses else 1


def uniform(seed: int) -> tf.keras.initializers.Initializer:
    return tf.glorot_uniform_initializer(seed=seed)


def dense(h: Tensor, units: int, name: str, activation: Optional[Callable] = None, seed: int = 1, **options) -> Tensor:
    bias = tf.random_normal_initializer(stddev=0.1, seed=seed + 100)
    return tf.layers.dense(h, units, activation, kernel_initializer=uniform(seed), bias_initializer=bias, name=name, **options)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def table(name: str, rows: int, width: int, seed: int) -> tf.Variable:
    return tf.get_variable(name, [rows, width], initializer=tf.random_normal_initializer(stddev=0.3, seed=seed))


def linear(inputs: Inputs) -> Forward:
    """Linear regression with bare variables."""
    w = tf.get_variable("w", [5, 1], initializer=uniform(1))
    b = tf.get_variable("b", [1], initializer=tf.zeros_initializer())
    h = tf.matmul(inputs["x"], w)
    at(1)
    out = h + b
    at(2)
    error = tf.square(out[:, 0] - inputs["t"])
    at(3)
    return Forward([Part(tf.reduce_mean(error))], {"out": out})


def mlp(inputs: Inputs) -> Forward:
    """Dense layers; one trainable variable is not used at all, so that its gradient is None."""
    tf.get_variable("unused", [3], initializer=tf.ones_initializer())
    h = dense(inputs["x"], 8, "hidden1", tf.nn.relu, seed=1)
    at(1)
    h = dense(h, 8, "hidden2", tf.tanh, seed=2)
    at(2)
    logits = dense(h, CLASSES, "logits", seed=3)
    at(3)
    return Forward([Part(cross_entropy(logits, inputs["y"]))], {"logits": logits, "label": tf.argmax(logits, 1)})


def cnn(inputs: Inputs) -> Forward:
    """Convolutions and pooling."""
    h = tf.layers.conv2d(inputs["image"], 4, 3, padding="same", activation=tf.nn.relu, kernel_initializer=uniform(1), name="conv1")
    at(1)
    h = tf.layers.max_pooling2d(h, 2, 2)
    at(2)
    h = tf.layers.conv2d(h, 4, 2, strides=2, activation=tf.tanh, kernel_initializer=uniform(2), name="conv2")
    at(3)
    logits = dense(tf.layers.flatten(h), CLASSES, "logits", seed=3)
    return Forward([Part(cross_entropy(logits, inputs["y"]))], {"logits": logits})


def lstm(inputs: Inputs) -> Forward:
    """A while loop with tensor arrays over sequences of different lengths."""
    cell = tf.nn.rnn_cell.LSTMCell(4, initializer=uniform(1), name="lstm_cell")
    states, last = tf.nn.dynamic_rnn(cell, inputs["sequence"], sequence_length=inputs["length"], dtype=tf.float32)
    at(1)
    h = tf.concat([last.h, tf.reduce_sum(states, 1)], 1)
    at(2)
    logits = dense(h, CLASSES, "logits", seed=3)
    at(3)
    return Forward([Part(cross_entropy(logits, inputs["y"]))], {"states": states})


def embedding(inputs: Inputs) -> Forward:
    """Sparse gradients with repeated rows, from two lookups in one table."""
    weights = table("table", VOCABULARY, 6, seed=1)
    words = tf.reduce_mean(tf.nn.embedding_lookup(weights, inputs["ids"]), 1)
    at(1)
    first = tf.gather(weights, inputs["ids"][:, 0])
    at(2)
    logits = dense(tf.concat([words, first], 1), CLASSES, "logits", seed=3)
    at(3)
    return Forward([Part(cross_entropy(logits, inputs["y"]))], {"logits": logits})


def layer_norm(h: Tensor, name: str) -> Tensor:
    width = h.shape[-1]
    gain = tf.get_variable(name + "/gain", [width], initializer=tf.ones_initializer())
    offset = tf.get_variable(name + "/offset", [width], initializer=tf.zeros_initializer())
    mean, variance = tf.nn.moments(h, -1, keepdims=True)
    return (h - mean) * tf.math.rsqrt(variance + 1e-5) * gain + offset


def attention(h: Tensor, heads: int, name: str) -> Tensor:
    """Self-attention without biases; h is [batch, length, width]."""
    width = int(h.shape[-1])

    def split_heads(part, seed):
        projected = tf.layers.dense(h, width, use_bias=False, kernel_initializer=uniform(seed), name="%s/%s" % (name, part))
        return tf.transpose(tf.reshape(projected, [-1, h.shape[1], heads, width // heads]), [0, 2, 1, 3])

    query, key, value = split_heads("query", 11), split_heads("key", 12), split_heads("value", 13)
    weights = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) * (width // heads) ** -0.5)
    mixed = tf.reshape(tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3]), [-1, h.shape[1], width])
    return tf.layers.dense(mixed, width, use_bias=False, kernel_initializer=uniform(14), name=name + "/output")


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + tf.math.erf(x * 0.5**0.5))


def transformer(inputs: Inputs) -> Forward:
    """One encoder block on word and position embeddings, classified from the first position."""
    h = tf.gather(table("words", VOCABULARY, 8, seed=1), inputs["tokens"])
    h += tf.get_variable("positions", [h.shape[1], 8], initializer=tf.random_normal_initializer(stddev=0.3, seed=2))
    at(1)
    h = layer_norm(h + attention(h, 2, "attention"), "norm1")
    at(2)
    h = layer_norm(h + dense(dense(h, 16, "up", gelu, seed=3), 8, "down", seed=4), "norm2")
    at(3)
    logits = dense(h[:, 0], CLASSES, "logits", seed=5)
    return Forward([Part(cross_entropy(logits, inputs["y"]))], {"encoded": h})


def two_losses(inputs: Inputs) -> Forward:
    """A generator and a discriminator, each with its own loss, variables and optimizer."""

    def discriminate(sample):
        with tf.variable_scope("discriminator", reuse=tf.AUTO_REUSE):
            hidden = dense(sample, 6, "hidden", tf.tanh, seed=3)
            at(3)
            return dense(hidden, 1, "score", seed=4)

    with tf.variable_scope("generator"):
        hidden = dense(inputs["noise"], 6, "hidden", tf.tanh, seed=1)
        at(1)
        fake = dense(hidden, 4, "sample", seed=2)
    at(2)
    real_score, fake_score = discriminate(inputs["x"]), discriminate(fake)
    discriminator = tf.reduce_mean(tf.nn.softplus(-real_score)) + tf.reduce_mean(tf.nn.softplus(fake_score))
    generator = tf.reduce_mean(tf.nn.softplus(-fake_score))
    return Forward([Part(discriminator, "discriminator"), Part(generator, "generator")], {"fake": fake})


def regularized(inputs: Inputs) -> Forward:
    """A data loss (mean over the batch) and a loss of the weights alone, which counts once."""
    decay = tf.keras.regularizers.l2(0.05)
    h = dense(inputs["x"], 8, "hidden", seed=1, kernel_regularizer=decay)
    at(1)
    h = tf.tanh(h)
    at(2)
    logits = dense(h, CLASSES, "logits", seed=2, kernel_regularizer=decay)
    at(3)
    tf.losses.sparse_softmax_cross_entropy(inputs["y"], logits)
    return Forward([Part(tf.losses.get_total_loss())], {"logits": logits})


def gradient_penalty(inputs: Inputs) -> Forward:
    """A loss that contains `tf.gradients`: second-order gradients."""
    x = inputs["x"]
    h = dense(x, 8, "hidden", seed=1)
    at(1)
    h = tf.tanh(h)
    at(2)
    score = dense(h, 1, "score", seed=2)
    slope = tf.gradients(score, x)[0]
    at(3)
    penalty = tf.reduce_mean(tf.square(tf.sqrt(tf.reduce_sum(tf.square(slope), 1) + 1e-3) - 1.0))
    fit = tf.reduce_mean(tf.square(score[:, 0] - tf.sin(x[:, 0])))
    return Forward([Part(fit + penalty)], {"slope": slope})


def tied(inputs: Inputs) -> Forward:
    """One table as word embedding and as output weights: sparse and dense gradients of one variable."""
    weights = table("table", VOCABULARY, 6, seed=1)
    h = tf.reduce_mean(tf.gather(weights, inputs["ids"]), 1)
    at(1)
    h = dense(h, 6, "hidden", seed=2)
    at(2)
    h = tf.tanh(h)
    at(3)
    logits = tf.matmul(h, weights, transpose_b=True)
    return Forward([Part(cross_entropy(logits, inputs["word"]))], {"logits": logits})


_X = Field((6,))
_Y = Field((), high=CLASSES)
_IDS = Field((3,), high=VOCABULARY)

MODELS = {
    "linear": Model({"x": Field((5,)), "t": Field()}, linear),
    "mlp": Model({"x": _X, "y": _Y}, mlp),
    "cnn": Model({"image": Field((6, 6, 2)), "y": _Y}, cnn),
    "lstm": Model({"sequence": Field((4, 3)), "length": Field((), low=1, high=5), "y": _Y}, lstm),
    "lstm_v2": Model({"sequence": Field((4, 3)), "length": Field((), low=1, high=5), "y": _Y}, lstm, control_flow_v2=True),
    "embedding": Model({"ids": _IDS, "y": _Y}, embedding),
    "transformer": Model({"tokens": Field((4,), high=VOCABULARY), "y": _Y}, transformer),
    "two_losses": Model({"x": Field((4,)), "noise": Field((3,))}, two_losses),
    "regularized": Model({"x": _X, "y": _Y}, regularized),
    "gradient_penalty": Model({"x": _X}, gradient_penalty),
    "tied": Model({"ids": _IDS, "word": Field((), high=VOCABULARY)}, tied),
}


def trainable(scope: Optional[str]) -> Sequence[tf.Variable]:
    """The trainable variables that a loss with this scope trains."""
    return tf.trainable_variables(None if scope is None else scope + "/")
