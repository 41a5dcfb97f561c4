"""Weights built in one split scope and used in another, with gradients clipped and scaled outside both."""

import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.ir.graph import Graph

DENSE = sorted("dense/%s%s:0" % (name, slot) for name in ("bias", "kernel") for slot in ("", "/Adam", "/Adam_1"))
FFN = sorted("ffn/%s_weights%s:0" % (name, slot) for name in ("in", "out") for slot in ("", "/Adam", "/Adam_1"))


class Ffn(tf.layers.Layer):
    """Two weights, one matrix for each of ten experts."""

    def build(self, shape):
        with epl.split():
            self.inner = self.add_weight("in_weights", [10, 16, 16], tf.float32)
            self.outer = self.add_weight("out_weights", [10, 16, 16], tf.float32)
        self.built = True

    def call(self, x):
        with epl.split():
            x = tf.nn.relu(tf.einsum("GSE,EHM->GSM", x, self.inner))
            return tf.einsum("GSM,EHM->GSE", x, self.outer)


def build(gpus, clip, scale, amp):
    gpus(1)
    options = {"amp.level": "O1", "amp.loss_scale": 128} if amp else {}
    epl.init(epl.Config(dict(options, **{"cluster.colocate_split_and_replicate": True})))
    epl.set_default_strategy(epl.replicate(1))
    x = tf.random.uniform([4, 8, 10], seed=1)
    x = Ffn(name="ffn")(x)
    loss = tf.reduce_mean(tf.layers.dense(tf.reshape(x, [32, 10]), 10))
    variables = tf.trainable_variables()
    gradients = tf.gradients(loss, variables)
    if clip == "local":
        gradients = [tf.clip_by_norm(gradient, 0.5) for gradient in gradients]
    elif clip == "global":
        gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
    if scale:
        gradients = [gradient * 0.5 for gradient in gradients]
    train = tf.train.AdamOptimizer().apply_gradients(list(zip(gradients, variables)))
    with tf.train.MonitoredTrainingSession() as session:
        session.run([train, loss])


def names(tensors):
    return sorted(tensor.name for tensor in tensors)


CASES = {
    "local clip": ("local", False, ["clip_by_norm_2:0", "clip_by_norm_3:0"], ["clip_by_norm:0", "clip_by_norm_1:0"]),
    "global clip": ("global", False, ["clip_by_global_norm/clip_by_global_norm/_%d:0" % k for k in (2, 3)],
                    ["clip_by_global_norm/clip_by_global_norm/_%d:0" % k for k in (0, 1)]),
    "scale": (None, True, ["mul_2:0", "mul_3:0"], ["mul:0", "mul_1:0"]),
    "local clip and scale": ("local", True, ["mul_2:0", "mul_3:0"], ["mul:0", "mul_1:0"]),
    "global clip and scale": ("global", True, ["mul_2:0", "mul_3:0"], ["mul:0", "mul_1:0"]),
}  # fmt: skip


@pytest.mark.parametrize("amp", [False, True], ids=["", "amp"])
@pytest.mark.parametrize("case", CASES)
def test_taskgraphs(gpus, case, amp):
    clip, scale, of_dense, of_ffn = CASES[case]
    build(gpus, clip, scale, amp)
    taskgraphs = Graph.get().taskgraphs
    assert [taskgraph.local_num_replicas for taskgraph in taskgraphs] == [1, 1, 1]
    assert names(taskgraphs[0].get_variables(0)) == DENSE
    assert names(taskgraphs[1].get_variables(0)) == sorted(FFN + ["beta1_power:0", "beta2_power:0"])
    assert names(taskgraphs[2].get_variables(0)) == []
    assert names(taskgraphs[0].gradients) == of_dense
    assert names(taskgraphs[1].gradients) == []
    assert names(taskgraphs[2].gradients) == of_ffn
    assert [gradient.name for gradient in Graph.get().gradients] == sorted(of_dense + of_ffn)
