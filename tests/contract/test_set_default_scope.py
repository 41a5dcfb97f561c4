import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.ir.graph import Graph
from epl.strategies.replicate import Replicate
from tests.contract.models import data, dense, run, slices


def test_colocated(gpus):
    gpus(2)
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True}))
    epl.set_default_strategy(epl.replicate(1))
    context = epl.Env.get().strategy_context
    assert context.state[0].is_default
    assert isinstance(context.default_strategy, Replicate)
    assert [slices(virtual) for virtual in epl.Env.get().cluster.virtual_devices] == [[[0], [1]]]
    assert len(Graph.get().taskgraphs) == 1
    assert Graph.get()._user_default_taskgraph.index == 0


CLIPPED = ["clip_by_global_norm/clip_by_global_norm/_%d" % k for k in range(4)]
SCALED = ["mul", "mul_1", "mul_2", "mul_3"]
RAW = ["gradients/%s" % name for name in (
    "dense_1/BiasAdd_grad/BiasAddGrad", "dense_1/MatMul_grad/MatMul_1", "dense/BiasAdd_grad/BiasAddGrad", "dense/MatMul_grad/MatMul_1",
)]  # fmt: skip


@pytest.mark.parametrize(
    "after_allreduce, scale, expected",
    [(False, None, CLIPPED), (False, 0.5, SCALED), (True, None, RAW)],
    ids=["clip", "clip and scale", "clip after allreduce"],
)
def test_gradients(gpus, after_allreduce, scale, expected):
    gpus(2)
    epl.init(epl.Config({"communication.clip_after_allreduce": after_allreduce}))
    epl.set_default_strategy(epl.replicate(1))
    x, _ = data()
    loss = tf.reduce_mean(dense(dense(x, 16), 10))
    variables = tf.trainable_variables()
    gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 0.5)
    if scale:
        gradients = [gradient * scale for gradient in gradients]
    train = tf.train.AdamOptimizer().apply_gradients(list(zip(gradients, variables)))
    run(train, 2)
    graph = Graph.get()
    assert len(graph.taskgraphs) == 1
    assert graph.taskgraphs[0].local_num_replicas == 2
    assert [op.name for op in graph.taskgraphs[0].backward_exit_ops(0, 0)] == expected
    assert [op.name for op in graph.taskgraphs[0].backward_exit_ops(1, 0)] == ["EPL_REPLICA_1/" + name for name in expected]
