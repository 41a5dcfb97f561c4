"""Optimizers of the matrix: TensorFlow's own, and user classes that override `apply_gradients`."""

import re
from typing import Optional, Sequence

import tensorflow.compat.v1 as tf


class AdamWeightDecay(tf.train.Optimizer):
    """Adam with decoupled weight decay in the manner of BERT.

    Overrides `apply_gradients` completely: makes its state with `get_variable`, uses
    assign ops, and leaves the global step to its caller. With `trust_ratio` the update
    is scaled per variable as in LAMB. Epsilon is larger than usual, or the first steps
    would turn rounding errors of small gradients into visible differences.
    """

    def __init__(self, learning_rate, decay=0.01, trust_ratio=False, name="AdamWeightDecay"):
        super().__init__(False, name)
        self.learning_rate = learning_rate
        self.decay = decay
        self.trust_ratio = trust_ratio

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        assigns = []
        for gradient, variable in grads_and_vars:
            if gradient is None:
                continue
            base = re.sub(r":\d+$", "", variable.name)
            zeros = {"shape": variable.shape.as_list(), "dtype": tf.float32, "trainable": False, "initializer": tf.zeros_initializer()}
            m = tf.get_variable(base + "/adam_m", **zeros)
            v = tf.get_variable(base + "/adam_v", **zeros)
            next_m = tf.multiply(0.9, m) + tf.multiply(0.1, gradient)
            next_v = tf.multiply(0.999, v) + tf.multiply(0.001, tf.square(gradient))
            update = next_m / (tf.sqrt(next_v) + 1e-3)
            if not re.search("bias|norm", base):
                update += self.decay * variable
            if self.trust_ratio:
                length = tf.norm(variable)
                update *= tf.where(tf.greater(length, 0.0), length / (tf.norm(update) + 1e-6), 1.0)
            assigns += [variable.assign(variable - self.learning_rate * update), m.assign(next_m), v.assign(next_v)]
        return tf.group(*assigns, name=name)


def _bert_style(
    optimizer: tf.train.Optimizer, loss: tf.Tensor, variables: Sequence[tf.Variable], step: Optional[tf.Variable], ordered: bool
) -> tf.Operation:
    """Global clipping of `tf.gradients`, and an own assignment to the global step that no gradient leads to.

    BERT's script leaves open whether the learning rate reads the step before or after that.
    With resource variables it is before, with reference variables anything goes; `ordered`
    makes it before.
    """
    clipped, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), clip_norm=0.5)
    train = optimizer.apply_gradients(list(zip(clipped, variables)))
    if step is None:
        return train
    with tf.control_dependencies([train] if ordered else []):
        return tf.group(train, step.assign(step + 1))


def train_op(name: str, loss: tf.Tensor, variables: Sequence[tf.Variable], count: bool, racy: bool = False) -> tf.Operation:
    """The op that trains `variables` on `loss`; it advances the global step if `count`.

    racy: the script may leave the order of reading and assigning the global step open, see `_bert_style`.

    Learning rates decay with the global step, so that a wrong step shows in the variables.
    """
    step = tf.train.get_or_create_global_step()
    counted = step if count else None
    if name == "sgd":
        rate = tf.train.piecewise_constant(step, [5, 12], [0.2, 0.1, 0.05])
        return tf.train.GradientDescentOptimizer(rate).minimize(loss, counted, variables)
    if name == "momentum":
        rate = tf.train.exponential_decay(0.05, step, 4, 0.9, staircase=True)
        optimizer = tf.train.MomentumOptimizer(rate, 0.9)
        return optimizer.apply_gradients(optimizer.compute_gradients(loss, variables), counted)
    if name == "adam":
        rate = tf.train.polynomial_decay(0.01, step, 30, 0.002)
        return tf.train.AdamOptimizer(rate).minimize(loss, global_step=counted, var_list=variables)
    if name == "adagrad":
        return tf.train.AdagradOptimizer(0.05).minimize(loss, global_step=counted, var_list=variables)
    if name in ("bert", "lamb"):
        rate = tf.train.polynomial_decay(0.01, step, 30, 0.0)
        return _bert_style(AdamWeightDecay(rate, trust_ratio=name == "lamb"), loss, variables, counted, ordered=not racy or name == "lamb")
    raise ValueError("no optimizer %r; there are %s" % (name, ", ".join(OPTIMIZERS)))


OPTIMIZERS = ("sgd", "momentum", "adam", "adagrad", "bert", "lamb")
