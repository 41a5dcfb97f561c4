"""The models of the contract: IN is an iterator over 500 rows in batches of 10, Dn a dense layer, M4 four of them."""

import contextlib

import numpy as np
import tensorflow.compat.v1 as tf

ROWS = 500


def data(batch=10, width=10, seed=1, rows=ROWS):
    """IN: x and y of the next batch; the iterator is initialised with the tables."""
    rng = np.random.RandomState(seed)
    arrays = (rng.rand(rows, width).astype(np.float32), rng.rand(rows).astype(np.float32))
    dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(batch).repeat(1)
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


def dense(x, units, **options):
    """Dn."""
    return tf.layers.dense(inputs=x, units=units, **options)


def m4(batch=10):
    """M4: the loss of IN, D16, D16, D16, D10."""
    x, _ = data(batch)
    for units in (16, 16, 16, 10):
        x = dense(x, units)
    return tf.reduce_mean(x)


def momentum():
    return tf.train.MomentumOptimizer(0.001, 0.9)


def minimize(loss, optimizer=None):
    """The training op, which counts steps in the global step."""
    return (optimizer or momentum()).minimize(loss, global_step=tf.train.get_or_create_global_step())


def apply_clipped(loss, optimizer, clip=0.5):
    """Gradients by tf.gradients, clipped by their global norm."""
    variables = tf.trainable_variables()
    clipped, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), clip)
    return optimizer.apply_gradients(list(zip(clipped, variables)), global_step=tf.train.get_or_create_global_step())


def run(fetches, steps, **options):
    """The fetched values of some steps in a monitored session."""
    with tf.train.MonitoredTrainingSession(**options) as session:
        return [session.run(fetches) for _ in range(steps)]


def device(index, kind="GPU", task=0):
    return "/job:worker/replica:0/task:%d/device:%s:%d" % (task, kind, index)


def slices(virtual_device):
    """The indices of the devices of each replica."""
    return [[int(name.rpartition(":")[2]) for name in devices] for devices in virtual_device._slice_devices]


@contextlib.contextmanager
def fresh_graph():
    with tf.Graph().as_default() as graph:
        yield graph
