"""Loops, conditionals and functions train as with plain TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from tests.unit.machine import agree, user_graph

X = np.random.RandomState(0).randn(12, 2).astype(np.float32)
LAYOUTS = [dict(), dict(devices=2), dict(devices=2, m=3), dict(ranks=2, m=2)]
RUNS = [dict(devices=2, m=3), dict(ranks=2, m=2), dict(m=3, in_run=False)]


def two_variables():
    return [tf.get_variable(n, [2], initializer=tf.constant_initializer([0.5, 2.0])) for n in "vw"]


def finish(loss, index):
    tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
    tf.global_variables_initializer()
    return index()


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("layout", RUNS, ids=str)
def test_loops_with_arrays_and_stacks(layout, v2):
    """A recurrence over time: tensor arrays, and in the gradient the stacks of its intermediate values."""
    with user_graph(v2=v2) as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        w = tf.get_variable("w", [2], initializer=tf.constant_initializer([0.5, 2.0]))
        steps = tf.map_fn(lambda t: tf.tanh(x * w + t), tf.constant([0.1, 0.2]))
        state = tf.scan(lambda a, s: tf.sin(a * w + s), steps, initializer=x)
        tf.train.MomentumOptimizer(0.1, 0.9).minimize(tf.reduce_mean(state), name="train")
        tf.global_variables_initializer()
        whole = index()
    agree(whole, {"x:0": X}, ["w"], layout, steps=2)


@pytest.mark.parametrize("layout", [dict(devices=2), dict(devices=2, m=2), dict(ranks=2)], ids=str)
@pytest.mark.parametrize("where", ["forward", "apply"])
def test_loops_on_what_replicas_share(layout, where):
    """A loop on the weights (power iteration) or on the gradient exists once per replica."""
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        w = tf.get_variable("w", [2], initializer=tf.constant_initializer([0.5, 2.0]))

        def thrice(start, factor):
            return tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, v * factor), [0, start])[1]

        used = thrice(tf.ones([2]), w) if where == "forward" else w
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        ((g, v),) = optimizer.compute_gradients(tf.reduce_mean(tf.square(x * used)))
        optimizer.apply_gradients([(thrice(g, 0.5) if where == "apply" else g, v)], name="train")
        tf.global_variables_initializer()
        whole = index()
    agree(whole, {"x:0": X}, ["w"], layout)


@pytest.mark.parametrize("layout", LAYOUTS + RUNS[2:], ids=str)
@pytest.mark.parametrize("taken", [True, False])
def test_conditionals_in_a_loop_in_a_conditional(layout, taken):
    with user_graph() as index:
        x, p = tf.placeholder(tf.float32, [None, 2], "x"), tf.placeholder(tf.bool, [], "p")
        v, w = two_variables()

        def body(i, a):
            return i + 1, tf.cond(tf.equal(i, 0), lambda: a * w, lambda: tf.sin(a * v))

        y = tf.cond(p, lambda: tf.while_loop(lambda i, _: i < 2, body, [0, x])[1], lambda: x * v)
        whole = finish(tf.reduce_mean(tf.square(y)), index)
    agree(whole, {"x:0": X, "p:0": np.bool_(taken)}, ["v", "w"], layout, steps=2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("v2", [False, True])
def test_one_of_three_branches(layout, v2):
    with user_graph(v2=v2) as index:
        x, k = tf.placeholder(tf.float32, [None, 2], "x"), tf.placeholder(tf.int32, [], "k")
        v, w = two_variables()
        whole = finish(tf.reduce_mean(tf.square(tf.switch_case(k, [lambda: x * w, lambda: x * v, lambda: x * v * w]))), index)
    for branch in (0, 2):
        agree(whole, {"x:0": X, "k:0": np.int32(branch)}, ["v", "w"], layout, steps=2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("taken", [True, False])
def test_one_of_two_training_steps(layout, taken):
    with user_graph() as index:
        x, p = tf.placeholder(tf.float32, [None, 2], "x"), tf.placeholder(tf.bool, [], "p")
        v, w = two_variables()

        def step(variable):
            with tf.control_dependencies([tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_mean(tf.square(variable * x)), var_list=[variable])]):
                return tf.constant(1.0)

        tf.group(tf.cond(p, lambda: step(v), lambda: step(w)), name="train")
        tf.global_variables_initializer()
        whole = index()
    agree(whole, {"x:0": X, "p:0": np.bool_(taken)}, ["v", "w"], layout, steps=2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_function(layout):
    with user_graph(v2=True) as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        v, w = two_variables()
        loss = tf2.function(lambda a: tf.reduce_mean(tf.square(a * w) * v))(x)
        whole = finish(loss, index)
    agree(whole, {"x:0": X}, ["v", "w"], layout, steps=2)
