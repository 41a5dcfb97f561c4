import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.ir.graph import Graph
from tests.contract.models import apply_clipped, data, dense, m4, run

ROWS = np.random.RandomState(5).rand(160, 10).astype(np.float32)


def deep(batch):
    """Ten dense layers without bias on ROWS."""
    iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(ROWS).batch(batch).repeat())
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    x = iterator.get_next()
    for layer in range(10):
        x = tf.layers.dense(x, 10, use_bias=False, kernel_initializer=tf.glorot_uniform_initializer(seed=layer))
    return tf.reduce_mean(tf.square(x))


def losses(gpus, batch, micro_batches, groups, steps, decay=False):
    gpus(1)
    epl.init(epl.Config({"pipeline.num_micro_batch": micro_batches, "optimizer.num_apply_group": groups}))
    epl.set_default_strategy(epl.replicate(1))
    loss = deep(batch)
    step = tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(0.01, step, 2, 0.5) if decay else 0.01
    optimizer = tf.train.AdamOptimizer(rate)
    train = optimizer.minimize(loss, global_step=step)
    slots = ["accum", "m", "v"] if micro_batches > 1 else ["m", "v"]
    assert optimizer.get_slot_names() == slots
    return [float(values[0]) for values in run([loss, train], steps)]


@pytest.mark.parametrize("decay", [False, True], ids=["", "decay"])
def test_apply_groups(gpus, decay):
    plain = losses(gpus, 4, 1, 1, 6, decay)
    np.testing.assert_allclose(losses(gpus, 4, 1, 5, 6, decay), plain, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_accumulation(gpus, micro_batches, groups):
    whole = losses(gpus, 2 * micro_batches, 1, 1, 5)
    parts = losses(gpus, 2, micro_batches, groups, 5 * micro_batches)
    assert len(parts) == micro_batches * len(whole)
    np.testing.assert_allclose(np.mean(np.reshape(parts, [-1, micro_batches]), axis=1), whole, atol=1.1e-6)


@pytest.mark.parametrize("after_allreduce", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_accumulation_without_strategy(gpus, groups, after_allreduce):
    gpus(2)
    options = {"optimizer.num_apply_group": groups, "communication.clip_after_allreduce": after_allreduce}
    epl.init(epl.Config(dict(options, **{"pipeline.num_micro_batch": 5})))
    x, _ = data()
    for number, units in enumerate((16, 16, 16, 10), 1):
        x = dense(x, units, name="dense%d" % number)
    loss = tf.reduce_mean(x)
    optimizer = tf.train.AdamOptimizer()
    step = tf.train.get_or_create_global_step()
    train = optimizer.minimize(loss, global_step=step)
    assert optimizer.get_slot_names() == ["accum", "m", "v"]
    kernel = [variable for variable in tf.trainable_variables() if variable.op.name == "dense1/kernel"][0]
    values = run([train, step, kernel], 20)
    assert [int(value[1]) for value in values] == [i // 5 for i in range(20)]
    for first in range(0, 20, 5):
        for i in range(first + 1, first + 4):
            np.testing.assert_array_equal(values[i][2], values[first][2])
    assert not np.array_equal(values[0][2], values[5][2])
    assert len(Graph.get().gradients) == 8


@pytest.mark.parametrize("groups", [1, 3])
def test_two_stages(gpus, groups):
    gpus(2)
    epl.init(epl.Config({"pipeline.num_micro_batch": 3, "optimizer.num_apply_group": groups}))
    with epl.replicate(1):
        x, _ = data()
        x = dense(dense(x, 16), 16)
    with epl.replicate(1):
        loss = tf.reduce_mean(dense(dense(x, 16), 10))
    optimizer = tf.train.AdamOptimizer()
    step = tf.train.get_or_create_global_step()
    train = optimizer.minimize(loss, global_step=step)
    assert optimizer.get_slot_names() == ["m", "v"]
    assert [int(values[1]) for values in run([train, step], 5)] == [0, 1, 2, 3, 4]
    names = list(Graph.get().operations)
    if groups == 1:
        assert not [name for name in names if "epl_apply_grad" in name]
    assert [name for name in names if "EPL_MICRO_BATCH_2" in name]


def test_replicated(gpus):
    gpus(2)
    epl.init()
    epl.set_default_strategy(epl.replicate(1))
    train = apply_clipped(m4(), tf.train.AdamOptimizer())
    assert [int(values[1]) for values in run([train, tf.train.get_global_step()], 5)] == [0, 1, 2, 3, 4]


def test_steps_of_accumulation_with_clipping(gpus):
    gpus(2)
    epl.init(epl.Config({"pipeline.num_micro_batch": 5, "communication.clip_after_allreduce": True}))
    epl.set_default_strategy(epl.replicate(1))
    train = apply_clipped(m4(batch=5), tf.train.AdamOptimizer())
    assert [int(values[1]) for values in run([train, tf.train.get_global_step()], 10)] == [0] * 5 + [1] * 5


@pytest.mark.parametrize("micro_batches, label", [(1, "epl_apply_grad_group"), (5, "epl_apply_grad_ga_group")])
def test_names_of_apply_groups(gpus, micro_batches, label):
    losses(gpus, 2, micro_batches, 3, micro_batches)
    assert any(label in name for name in Graph.get().operations)
    losses(gpus, 2, micro_batches, 1, micro_batches)
    assert not any("epl_apply_grad" in name for name in Graph.get().operations)
