"""Gradients: the same training as with plain TensorFlow on the whole batch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.unit.machine import Machine, agree, user_graph

X = np.random.RandomState(0).randn(12, 2).astype(np.float32)
IDS = np.array([0, 1, 1, 3, 3, 3, 0, 2, 2, 1, 0, 0], np.int32)
LAYOUTS = [
    dict(),
    dict(devices=2),
    dict(devices=2, m=3),
    dict(ranks=2, m=2),
    dict(m=3, in_run=False),
    dict(ranks=2, m=2, in_run=False),
]


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


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
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


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_partitioned_variable_and_an_average(layout):
    with user_graph() as index:
        x, ids = tf.placeholder(tf.float32, [None, 2], "x"), tf.placeholder(tf.int32, [None], "ids")
        with tf.variable_scope("s", partitioner=tf.fixed_size_partitioner(2)):
            table = tf.get_variable("t", [6, 2], initializer=tf.ones_initializer())
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        train = tf.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, ids) * w - x)))
        with tf.control_dependencies([train]):
            tf.group(tf.train.ExponentialMovingAverage(0.5).apply([w]), name="train")
        tf.global_variables_initializer()
        whole = index()
    names = ["w", "s/t/part_0", "s/t/part_1", "w/ExponentialMovingAverage"]
    agree(whole, {"x:0": X, "ids:0": IDS}, names, layout, steps=2)


def test_dropout_does_not_depend_on_how_replicas_are_spread():
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(tf.nn.dropout(x * w, rate=0.5, seed=3))), name="train")
        tf.global_variables_initializer()
        whole = index()
    values = []
    for layout in (dict(devices=4), dict(m=4), dict(ranks=2, devices=2), dict(ranks=2, m=2), dict(ranks=4)):
        machine = Machine(whole, **layout)
        machine.run("init")
        for _ in range(2):
            machine.run("train", {"x:0": X})
        values.append(machine.value("w"))
    for value in values:
        np.testing.assert_allclose(value, values[0], rtol=1e-6)
