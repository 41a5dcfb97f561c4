import numpy as np
import tensorflow.compat.v1 as tf

import epl
from tests.contract.models import run

EXPERTS, HIDDEN, MODEL, GROUPS, CAPACITY, SIZE = 4, 8, 6, 2, 3, 5


class Experts(tf.layers.Layer):
    """Two weights of each expert, built in one scope and used in another."""

    def build(self, shape):
        with epl.split(epl.Env.get().cluster.worker_num):
            make = tf.glorot_uniform_initializer(seed=3)
            self.first = self.add_weight("first", [EXPERTS, MODEL, HIDDEN], tf.float32, initializer=make)
            self.second = self.add_weight("second", [EXPERTS, HIDDEN, MODEL], tf.float32, initializer=make)
        self.built = True

    def call(self, x, combine):
        with epl.split():
            x = tf.nn.relu(tf.einsum("EGCM,EMH->EGCH", x, self.first))
            x = tf.einsum("EGCH,EHM->EGCM", x, self.second)
            return tf.einsum("GSEC,EGCM->GSM", combine, x)


def losses(gpus, groups):
    gpus(1)
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True, "optimizer.num_apply_group": groups}))
    epl.set_default_strategy(epl.replicate(epl.Env.get().cluster.worker_num))
    rng = np.random.RandomState(1)
    x = tf.constant(rng.rand(EXPERTS, GROUPS, CAPACITY, MODEL).astype(np.float32))
    combine = tf.constant(rng.rand(GROUPS, SIZE, EXPERTS, CAPACITY).astype(np.float32))
    loss = tf.reduce_mean(tf.square(Experts(name="experts")(x, combine)))
    train = tf.train.AdamOptimizer(0.001).minimize(loss, global_step=tf.train.get_or_create_global_step())
    return [float(values[0]) for values in run([loss, train], 5)]


def test_one_device(gpus):
    one = losses(gpus, 1)
    assert one == sorted(one, reverse=True) and one[0] > one[-1]
    np.testing.assert_allclose(losses(gpus, 3), one, atol=1e-6)
