import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.errors import ConfigError
from epl.ir.graph import Graph
from tests.contract.models import apply_clipped, data, dense, run, slices

EXPERTS, HIDDEN, MODEL, GROUPS, CAPACITY, SIZE = 4, 8, 6, 2, 3, 5


class Experts(tf.layers.Layer):
    """Two weights of each expert, built in one scope and used in another."""

    def __init__(self, devices=None, **options):
        super().__init__(**options)
        self._devices = devices

    def build(self, shape):
        with epl.split(epl.Env.get().strategy_context.default_strategy.device_count):
            make = tf.glorot_uniform_initializer(seed=3)
            self.first = self.add_weight("first", [EXPERTS, MODEL, HIDDEN], tf.float32, initializer=make)
            self.second = self.add_weight("second", [EXPERTS, HIDDEN, MODEL], tf.float32, initializer=make)
        self.built = True

    def call(self, x, combine):
        with epl.split(self._devices):
            x = tf.nn.relu(tf.einsum("EGCM,EMH->EGCH", x, self.first))
            x = tf.einsum("EGCH,EHM->EGCM", x, self.second)
            return tf.einsum("GSEC,EGCM->GSM", combine, x)


def losses(gpus, groups, devices=1, lanes=1):
    gpus(devices)
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True, "optimizer.num_apply_group": groups}))
    epl.set_default_strategy(epl.replicate(lanes))
    rng = np.random.RandomState(1)
    x = tf.constant(rng.rand(EXPERTS, GROUPS, CAPACITY, MODEL).astype(np.float32))
    combine = tf.constant(rng.rand(GROUPS, SIZE, EXPERTS, CAPACITY).astype(np.float32))
    loss = tf.reduce_mean(tf.square(Experts(lanes if lanes < devices else None, name="experts")(x, combine)))
    train = tf.train.AdamOptimizer(0.001).minimize(loss, global_step=tf.train.get_or_create_global_step())
    return [float(values[0]) for values in run([loss, train], 5)]


def test_one_device(gpus):
    one = losses(gpus, 1)
    assert one == sorted(one, reverse=True) and one[0] > one[-1]
    np.testing.assert_allclose(losses(gpus, 3), one, atol=1e-6)


def test_two_devices_share_the_experts(gpus):
    """Both see the same tokens, so that the mean over both is that of one."""
    one = losses(gpus, 1)
    for groups in (1, 3):
        np.testing.assert_allclose(losses(gpus, groups, devices=2, lanes=2), one, atol=1e-6)
        first, *scopes = Graph.get().taskgraphs
        assert len(scopes) == 2 and all(t.is_split for t in scopes) and not first.is_split
        for taskgraph in (first, *scopes):
            assert slices(taskgraph.virtual_device) == [[0, 1]]


def test_four_devices_are_two_groups(gpus):
    one = losses(gpus, 1)
    np.testing.assert_allclose(losses(gpus, 1, devices=4, lanes=2), one, atol=1e-6)
    assert [slices(t.virtual_device) for t in Graph.get().taskgraphs][1] == [[0, 1], [2, 3]]


def test_the_scope_is_the_active_strategy(gpus):
    gpus(2)
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True}))
    default = epl.replicate(2)
    epl.set_default_strategy(default)
    context = epl.Env.get().strategy_context
    with epl.split(2, name="experts") as scope:
        assert context.state == [scope] and scope.is_split and not scope.is_default and scope.name == "experts"
    assert context.state == [default] == [context.default_strategy]


def test_layers_of_the_library(gpus):
    """A classifier and experts by the names of `epl.ops`: variables, gradients and slots belong to their scopes."""
    gpus(2)
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True}))
    epl.set_default_strategy(epl.replicate(2))
    tf.set_random_seed(1)
    x, _ = data()
    h = dense(x, 16, name="features")
    with epl.split(2):
        found, balance = epl.ops.mixture_of_experts(tf.reshape(h, [10, 2, 8]), 4, 6, k=1, name="experts")
    labels = tf.cast(10.0 * x[:, 0], tf.int64)
    with epl.split(2):
        logits = epl.ops.distributed_dense(tf.reshape(found, [10, 16]), 11, name="classes")
        loss = epl.ops.distributed_sparse_softmax_cross_entropy_with_logits(labels, logits) + 0.01 * balance
        hits = epl.ops.distributed_equal(epl.ops.distributed_argmax(logits, 1), labels)
    train = apply_clipped(loss, tf.train.AdamOptimizer(0.03))
    values = run([loss, hits, train], 20)
    assert np.mean([v[0] for v in values[-5:]]) < np.mean([v[0] for v in values[:5]])
    assert values[0][1].dtype == bool and values[0][1].shape[0] in (10, 20)
    taskgraphs = Graph.get().taskgraphs
    of = [sorted({v.name.split("/")[0] for v in t.get_variables(0)} - {"beta1_power:0", "beta2_power:0", "global_step:0"}) for t in taskgraphs]
    assert of == [["features"], ["experts"], ["classes"]]
    assert [len(t.gradients) for t in taskgraphs] == [2, 5, 2]


def test_bad_arguments_of_the_library(gpus):
    gpus(1)
    epl.init()
    with pytest.raises(ValueError, match="units=0"):
        epl.ops.distributed_dense(tf.zeros([2, 3]), 0)
    with pytest.raises(ConfigError, match="labels=None"):
        epl.ops.distributed_sparse_softmax_cross_entropy_with_logits(None, tf.zeros([2, 3]))
