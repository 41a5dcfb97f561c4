"""Two stages on four devices (two replicas) with two micro-batches train like one device on the whole batch."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import epl

WIDTH = 6
ROWS = np.random.RandomState(1).rand(4, 8, WIDTH).astype(np.float32)


def dense(x, units, seed):
    return tf.layers.dense(x, units, kernel_initializer=tf.glorot_uniform_initializer(seed=seed))


def train(model, staged):
    """Losses and variables after some steps of Adam."""
    tf.reset_default_graph()
    options = {"cluster.devices_per_worker": 4, "pipeline.num_micro_batch": 2} if staged else {}
    epl.init(epl.Config(options))
    x = tf.placeholder(tf.float32, [None, WIDTH])
    loss, after = model(x, (lambda: epl.replicate(1)) if staged else contextlib.nullcontext)
    epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
    step = tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(0.05, step, 2, 0.5)
    op = tf.train.AdamOptimizer(rate).minimize(loss, global_step=step)
    op = after(op) if after else op
    with tf.train.MonitoredTrainingSession() as session:
        losses = [session.run([loss, op], {x: rows})[0] for rows in ROWS]
        variables = tf.global_variables()
        return losses, dict(zip([v.op.name for v in variables], session.run(variables)))


def loop_reads_variable_of_another_stage(x, scope):
    """A loop in the second stage multiplies by a weight of the first one."""
    with scope():
        w = tf.get_variable("w", [WIDTH, WIDTH], initializer=tf.glorot_uniform_initializer(seed=4))
        h = tf.tanh(tf.matmul(x, w))
    with scope():
        _, h = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w))), (tf.constant(0), h))
        return tf.reduce_mean(tf.square(dense(h, 2, 5))), None


def between_scopes(x, scope):
    """Layers, a variable and a branch that are in no scope; one layer in a scope that is left by a skip connection."""
    with scope():
        h = first = dense(x, WIDTH, 1)
    h = tf.tanh(dense(h, WIDTH, 2))
    scale = tf.get_variable("scale", [], initializer=tf.ones_initializer())
    with scope():
        h = dense(h * scale, WIDTH, 3) + first
    h = tf.cond(tf.reduce_mean(h) > -1e9, lambda: tf.nn.relu(h) * scale, lambda: h)
    return tf.reduce_mean(tf.square(h)), None


def moving_average(x, scope):
    """Averages of all weights, kept after each step."""
    with scope():
        h = tf.tanh(dense(x, WIDTH, 1))
    with scope():
        loss = tf.reduce_mean(tf.square(dense(h, 2, 2)))

    def after(op):
        with tf.control_dependencies([op]):
            return tf.train.ExponentialMovingAverage(0.5).apply(tf.trainable_variables())

    return loss, after


def default_and_scope(x, scope):
    """A default strategy around one scope."""
    if scope is not contextlib.nullcontext:
        epl.set_default_strategy(epl.replicate(1))
    h = tf.tanh(dense(x, WIDTH, 1))
    with scope():
        h = tf.tanh(dense(h, WIDTH, 2))
    return tf.reduce_mean(tf.square(dense(h, 2, 3) + dense(x, 2, 4))), None


@pytest.mark.parametrize("resource", [False, True], ids=["reference", "resource"])
@pytest.mark.parametrize("model", [loop_reads_variable_of_another_stage, between_scopes, moving_average, default_and_scope])
def test_equal_to_one_device(model, resource):
    try:
        # Plain TensorFlow may read reference variables while they are written.
        tf.enable_resource_variables()
        losses, variables = train(model, False)
        (tf.enable_resource_variables if resource else tf.disable_resource_variables)()
        staged_losses, staged = train(model, True)
    finally:
        tf.disable_resource_variables()
    np.testing.assert_allclose(staged_losses, losses, rtol=1e-5)
    assert staged.keys() == variables.keys()
    for name, value in variables.items():
        np.testing.assert_allclose(staged[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
