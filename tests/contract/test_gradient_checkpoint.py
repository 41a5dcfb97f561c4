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
