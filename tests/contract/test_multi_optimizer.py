import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.ir.graph import Graph
from tests.contract.models import dense, run


class Wrapper(tf.train.Optimizer):
    """An optimizer around another one."""

    def __init__(self, optimizer, name):
        super().__init__(use_locking=False, name=name)
        self.optimizer = optimizer

    def compute_gradients(self, *args, **kwargs):
        return self.optimizer.compute_gradients(*args, **kwargs)

    def get_slot(self, *args, **kwargs):
        return self.optimizer.get_slot(*args, **kwargs)


class Clipping(Wrapper):
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        gradients, variables = zip(*grads_and_vars)
        clipped, _ = tf.clip_by_global_norm(gradients, 0.1)
        return self.optimizer.apply_gradients(list(zip(clipped, variables)), global_step, name)


class Averaging(Wrapper):
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        train = self.optimizer.apply_gradients(grads_and_vars, global_step, name)
        average = tf.train.ExponentialMovingAverage(0.9)
        with tf.control_dependencies([train]):
            return average.apply([variable for _, variable in grads_and_vars])


@pytest.mark.parametrize("after_allreduce", [False, True])
def test_nested_optimizers(gpus, after_allreduce):
    gpus(2)
    epl.init(epl.Config({"communication.clip_after_allreduce": after_allreduce}))
    epl.set_default_strategy(epl.replicate(1))
    x = tf.random.uniform([8, 10], seed=1)
    for layer in range(10):
        x = dense(x, 10, use_bias=False, kernel_initializer=tf.glorot_uniform_initializer(seed=layer))
    labels = tf.constant([k % 10 for k in range(8)])
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=x))
    epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
    tf.summary.scalar("loss", loss)
    optimizer = Averaging(Clipping(tf.train.AdamOptimizer(), "clipping"), "averaging")
    train = optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())
    values = run([loss, train, tf.summary.merge_all(), tf.train.get_global_step()], 4)
    assert [int(value[3]) for value in values] == [0, 1, 2, 3]
    assert tf.Summary.FromString(values[0][2]).value[0].tag == "loss"
    gradients = Graph.get().gradients
    assert len(gradients) == 10
    assert len({gradient.name for gradient in gradients}) == 10
