"""Gradients: the same training as with plain TensorFlow on the whole batch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.unit.machine import Machine, Plain, user_graph

X = np.random.RandomState(0).randn(12, 2).astype(np.float32)
IDS = np.array([0, 1, 1, 3, 3, 3, 0, 2, 2, 1, 0, 0], np.int32)
LAYOUTS = [
    dict(),
    dict(devices=2),
    dict(m=3),
    dict(devices=2, m=3),
    dict(ranks=2, m=2),
    dict(ranks=2, devices=3),
    dict(m=3, in_run=False),
    dict(ranks=2, m=2, in_run=False),
]


def train(machine, feeds, fetches="train"):
    """One step; a step of several runs takes their batches in the order of ranks, then runs."""
    runs, ranks = machine.plan.runs_per_step, machine.plan.ranks
    results = []
    for run in range(runs):
        part = {}
        for name, value in feeds.items():
            pieces = [np.split(piece, runs)[run] for piece in np.split(value, ranks)] if np.ndim(value) else value
            part[name] = np.concatenate(pieces) if np.ndim(value) else value
        results.append(machine.run(fetches, part))
    return results


def agree(whole, feeds, names, layout, steps=3, resource=True):
    machine, plain = Machine(whole, **layout), Plain(whole)
    machine.run("init"), plain.run("init")
    for _ in range(steps):
        train(machine, feeds), plain.run("train", feeds)
    for name in names:
        wanted = plain.run("%s/%s:0" % (name, "Read/ReadVariableOp" if resource else "read"))[0]
        for rank in range(machine.plan.ranks):
            np.testing.assert_allclose(machine.value(name, rank), wanted, rtol=1e-5, atol=1e-6, err_msg=name)


OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: tf.train.AdamOptimizer(0.1),
    "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_dense_and_sparse_variables(name, layout):
    with user_graph() as index:
        x, ids = tf.placeholder(tf.float32, [None, 2], "x"), tf.placeholder(tf.int32, [None], "ids")
        table = tf.get_variable("table", [5, 2], initializer=tf.ones_initializer())
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(tf.gather(table, ids) * w - x)) + 0.01 * tf.reduce_sum(w * w)
        OPTIMIZERS[name]().minimize(loss, name="train")
        tf.global_variables_initializer()
        whole = index()
    agree(whole, {"x:0": X, "ids:0": IDS}, ["table", "w"], layout)


@pytest.mark.parametrize("layout", [dict(ranks=2, m=2), dict(ranks=3, m=2, in_run=False)], ids=str)
@pytest.mark.parametrize("name", ["sgd", "adagrad"])  # Adam moves all rows of a dense gradient
def test_sparse_as_dense(name, layout):
    with user_graph() as index:
        ids = tf.placeholder(tf.int32, [None], "ids")
        tables = [tf.get_variable("t%d" % i, [5, 2], initializer=tf.ones_initializer()) for i in range(2)]
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(tf.gather(tables[0], ids) * w) + tf.gather(tables[1], ids))
        OPTIMIZERS[name]().minimize(loss, name="train")
        tf.global_variables_initializer()
        whole = index()
    agree(whole, {"ids:0": IDS}, ["t0", "t1", "w"], dict(layout, sparse_as_dense=True))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("resource", [True, False])
def test_rows_that_are_always_the_same(layout, resource):
    """Position embeddings: the indices do not depend on the batch, the values do."""
    with user_graph(resource=resource) as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        table = tf.get_variable("table", [5, 2], initializer=tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(tf.gather(table, [1, 3, 1])[None] * x[:, None]))
        tf.train.AdagradOptimizer(0.1).minimize(loss, name="train")
        tf.global_variables_initializer()
        whole = index()
    agree(whole, {"x:0": X}, ["table"], layout, resource=resource)


@pytest.mark.parametrize("layout", [dict(devices=2), dict(m=2), dict(ranks=2, m=2)], ids=str)
def test_values_that_are_always_the_same(layout):
    with user_graph() as index:
        ids = tf.placeholder(tf.int32, [2], "ids")
        table = tf.get_variable("table", [5], initializer=tf.zeros_initializer())
        tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(tf.gather(table, ids)), name="train")
        tf.global_variables_initializer()
        whole = index()
    machine = Machine(whole, **layout)
    machine.run("init")
    count = machine.plan.replicas * machine.plan.micro_batches
    machine.run("train", {"ids:0": np.array([1, 3] + [1, 4] * (count - 1))})
    np.testing.assert_allclose(machine.value("table"), [0, -1, 0, -1 / count, -(count - 1) / count], rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_clipping_by_the_global_norm(layout):
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        v, w = (tf.get_variable(n, [2], initializer=tf.ones_initializer()) for n in "vw")
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        pairs = optimizer.compute_gradients(tf.reduce_mean(tf.square(x * w - v)))
        clipped, _ = tf.clip_by_global_norm([g for g, _ in pairs], 0.3)
        optimizer.apply_gradients(zip(clipped, [v for _, v in pairs]), name="train")
        tf.global_variables_initializer()
        whole = index()
    agree(whole, {"x:0": X}, ["v", "w"], layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_gradient_inside_the_loss_is_not_aggregated(layout):
    """A penalty on the gradient with regard to the input of each sample."""
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        w = tf.get_variable("w", [2], initializer=tf.constant_initializer([0.5, 2.0]))
        y = tf.reduce_sum(tf.tanh(x * w), 1)
        inner = tf.gradients(y, [x, w])[0]
        loss = tf.reduce_mean(y) + tf.reduce_mean(tf.square(tf.norm(inner, axis=1) - 1))
        tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
        tf.global_variables_initializer()
        whole = index()
    agree(whole, {"x:0": X}, ["w"], layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_optimizers_in_one_program(layout):
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        d, g = (tf.get_variable(n, [2], initializer=tf.constant_initializer([0.5, 2.0])) for n in "dg")
        ops = [
            tf.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(tf.square(d * x)), var_list=[d]),
            tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(g * x * d), var_list=[g]),
        ]
        tf.group(*ops, name="train")
        tf.global_variables_initializer()
        whole = index()
    agree(whole, {"x:0": X}, ["d"], layout)


@pytest.mark.parametrize("layout", [item for item in LAYOUTS if item.get("in_run", True)], ids=str)
def test_updates_that_look_at_the_loss(layout):
    """The rate depends on the loss, a count on how often it was large, and a flag decides what is done."""
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        rate = tf.get_variable("rate", [], initializer=tf.constant_initializer(0.1), trainable=False)
        seen = tf.get_variable("seen", [], tf.int32, initializer=tf.zeros_initializer(), trainable=False)
        loss = tf.reduce_mean(tf.square(x * w - 1.0))
        ((g, _),) = tf.train.GradientDescentOptimizer(0.1).compute_gradients(loss, [w])
        with tf.control_dependencies([g]):
            slower = tf.where(loss > 1.0, rate * 0.9, rate * 0.99)
            count = seen.assign_add(tf.shape(x)[0])
            update = tf.cond(loss > 1.0, lambda: w.assign_sub(slower * g), lambda: w.assign_sub(0.5 * slower * g))
        tf.group(update, count, rate.assign(slower), name="train")
        tf.global_variables_initializer()
        whole = index()
    agree(whole, {"x:0": X}, ["w", "rate", "seen"], layout, steps=4)


@pytest.mark.parametrize("devices, ranks", [(2, 1), (1, 2)])
def test_the_sum_of_replicas_is_the_other_contract(devices, ranks):
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None], "x")
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_mean(x * w) + 3.0 * w, name="train")
        tf.global_variables_initializer()
        whole = index()
    machine = Machine(whole, devices=devices, ranks=ranks, m=2, reduce_method="sum")
    machine.run("init")
    machine.run("train", {"x:0": np.float32([1, 2, 3, 4])})
    assert machine.value("w") == -(1.5 + 3 + 3.5 + 3)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("layout", [LAYOUTS[3], LAYOUTS[4], LAYOUTS[6]], ids=str)
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


@pytest.mark.parametrize("layout", LAYOUTS[:6], ids=str)
def test_noise_that_is_added_to_a_gradient(layout):
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        ((g, v),) = optimizer.compute_gradients(tf.reduce_mean(tf.square(x * w)))
        optimizer.apply_gradients([(g + tf.random_normal([2], seed=3), v)], name="train")
        tf.global_variables_initializer()
        whole = index()
    agree(whole, {"x:0": X}, ["w"], layout)
