"""Recomputation leaves the losses as they are."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import epl
from tests.contract.models import minimize, run

ROWS = np.random.RandomState(2).rand(60, 10).astype(np.float32)


def losses(gpus, options):
    gpus(1)
    epl.init(epl.Config(dict(options, **{"gradient_checkpoint.check_gradients": True})))
    epl.set_default_strategy(epl.replicate(1))
    tf.set_random_seed(7)
    iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(ROWS).batch(10).repeat())
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    x = iterator.get_next()
    for index, units in enumerate((16, 16, 16)):
        x = tf.layers.dense(x, units, name="dense%d" % index, kernel_initializer=tf.glorot_uniform_initializer(seed=index))
        if index == 1:
            x = tf.keras.layers.Dropout(0.5, seed=1, name="dropout0")(x, training=True)
    tf.add_to_collection("checkpoints", x)
    x = tf.keras.layers.Dropout(0.5, seed=2, name="dropout1")(x, training=True)
    loss = tf.reduce_mean(tf.layers.dense(x, 10, name="dense3", kernel_initializer=tf.glorot_uniform_initializer(seed=9)))
    return [float(values[0]) for values in run([loss, minimize(loss)], 5)]


@pytest.mark.parametrize("options", [{}, {"pipeline.num_micro_batch": 1}], ids=["", "one micro-batch"])
def test_collection(gpus, options):
    plain = losses(gpus, {})
    assert len(set(plain)) == 5
    np.testing.assert_allclose(losses(gpus, dict(options, **{"gradient_checkpoint.type": "collection"})), plain, atol=1e-5)


def network(between=lambda x: x, stop=False, checkpoints=("dense2",)):
    """Dense layers with two dropouts; named outputs become checkpoints."""
    iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(ROWS).batch(10).repeat())
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    x = iterator.get_next()
    for index in range(3):
        x = tf.layers.dense(x, 16, name="dense%d" % index)
        if "dense%d" % index in checkpoints:
            tf.add_to_collection("checkpoints", x)
        if index == 1:
            x = tf.keras.layers.Dropout(0.5, name="dropout0")(x, training=True)
    x = between(x)
    x = tf.keras.layers.Dropout(0.5, name="dropout1")(x, training=True)
    return tf.reduce_mean(tf.layers.dense(x, 10, name="dense3"))


def names_after_training(loss):
    run([loss, minimize(loss)], 2)
    return list(epl.Graph.get().operations)


def recurrent(x):
    cell = tf.nn.rnn_cell.LSTMCell(8)
    outputs, _ = tf.nn.dynamic_rnn(cell, tf.reshape(x, [-1, 4, 4]), dtype=tf.float32)
    return tf.reshape(outputs, [-1, 32])


def both_ways(x):
    cells = [tf.nn.rnn_cell.LSTMCell(8) for _ in range(2)]
    outputs, _ = tf.nn.bidirectional_dynamic_rnn(*cells, tf.reshape(x, [-1, 4, 4]), dtype=tf.float32)
    return tf.reshape(tf.concat(outputs, 2), [-1, 64])


@pytest.mark.parametrize("between", [lambda x: x, recurrent, both_ways], ids=["", "recurrent", "both ways"])
def test_names_of_what_is_computed_again(gpus, between):
    gpus(1)
    epl.init(epl.Config({"gradient_checkpoint.type": "collection", "gradient_checkpoint.check_gradients": True}))
    epl.set_default_strategy(epl.replicate(1))
    names = names_after_training(network(between))
    assert [name for name in names if name.endswith("_gc_sg")] == ["dense2/BiasAdd_gc_sg"]
    again = [name for name in names if name.startswith("EPL_GRADIENT_CHECKPOINTS")]
    assert any("dense1" in name for name in again)
    for part in ("dropout1", "RandomUniform", "dense3"):
        assert not [name for name in again if part in name]


def test_no_checkpoint_before_stopped_gradients(gpus):
    gpus(1)
    epl.init(epl.Config({"gradient_checkpoint.type": "collection", "gradient_checkpoint.check_gradients": True}))
    epl.set_default_strategy(epl.replicate(1))
    iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(ROWS).batch(10).repeat())
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    x = iterator.get_next()
    for index in range(6):
        x = tf.layers.dense(x, 16, name="d%d" % index)
        if index in (1, 3, 4):
            tf.add_to_collection("checkpoints", x)
        if index == 1:
            x = tf.stop_gradient(x)
    names = names_after_training(tf.reduce_mean(x))
    assert sorted(name for name in names if name.endswith("_gc_sg")) == ["d3/BiasAdd_gc_sg", "d4/BiasAdd_gc_sg"]
