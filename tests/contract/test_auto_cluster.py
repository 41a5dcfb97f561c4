"""auto_cluster_test and strategy_new_test: the layout is there as soon as the gradients are."""

import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.ir.graph import Graph
from epl.ir.phase import ModelPhase
from tests.contract.models import apply_clipped, data, dense, slices


@pytest.fixture(autouse=True)
def four_gpus(gpus):
    gpus(4)
    with tf.Graph().as_default():
        yield


def build(units, micro_batches=1):
    """One stage for each list of layers; returns the training op and the loss."""
    epl.init(epl.Config({"pipeline.num_micro_batch": micro_batches}))
    x = None
    for number, layers in enumerate(units):
        with epl.replicate(device_count=1, name="stage_%d" % number):
            x = data(batch=2)[0] if x is None else x
            for count in layers:
                x = dense(x, count)
            if number == len(units) - 1:
                loss = tf.reduce_mean(x)
    return apply_clipped(loss, tf.train.AdamOptimizer()), loss


def check(train, loss, expected):
    cluster = epl.Env.get().cluster
    assert Graph.get().current_model_phase == ModelPhase.FORWARD
    assert cluster is not None
    assert cluster.worker_num == 1
    assert [slices(virtual) for virtual in cluster.virtual_devices] == expected
    with tf.train.MonitoredTrainingSession() as session:
        session.run([train, loss])


@pytest.mark.parametrize("micro_batches, replicas", [(1, 2), (2, 2), (4, 2)])
def test_two_stages(micro_batches, replicas):
    train, loss = build([[16], [10]], micro_batches)
    graph = Graph.get()
    assert graph.num_stages == 2
    assert graph.get_pipeline_config().num_micro_batch == micro_batches
    assert [taskgraph.local_num_replicas for taskgraph in graph.taskgraphs] == [replicas, replicas]
    check(train, loss, [[[0], [2]], [[1], [3]]])


def test_one_stage():
    train, loss = build([[16, 10]])
    assert Graph.get().num_stages == 1
    assert Graph.get().taskgraphs[0].local_num_replicas == 4
    check(train, loss, [[[0], [1], [2], [3]]])


def test_four_stages():
    train, loss = build([[16], [16], [16], [10]], 4)
    assert Graph.get().num_stages == 4
    assert [taskgraph.local_num_replicas for taskgraph in Graph.get().taskgraphs] == [1] * 4
    check(train, loss, [[[0]], [[1]], [[2]], [[3]]])
