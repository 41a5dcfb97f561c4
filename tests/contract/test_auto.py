import re

import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.ir.graph import Graph
from tests.contract.models import data, dense, device, m4, minimize


def test_auto_parallel(gpus):
    gpus(4)
    epl.init(epl.Config({"auto.auto_parallel": True, "pipeline.num_stages": 4, "pipeline.num_micro_batch": 8}))
    config = epl.Env.get().config
    assert config.auto.auto_parallel is True
    assert config.pipeline.num_stages == 4
    assert config.pipeline.num_micro_batch == 8
    train = minimize(m4(batch=2))
    graph = Graph.get()
    assert graph.num_stages == 4
    assert graph.taskgraphs[0].num_replicas == 1
    assert graph._user_default_taskgraph is None
    with tf.train.MonitoredTrainingSession(hooks=[tf.train.StopAtStepHook(last_step=3)]) as session:
        runs = 0
        while not session.should_stop():
            session.run(train)
            runs += 1
    assert runs == 3


def repeated(x, layers):
    """Each layer is five dense layers without bias in the scope s1/s2/s3/s4_layer<i>, each clipped."""
    for layer in range(layers):
        with tf.name_scope("s1/s2/s3/s4_layer%d" % layer):
            for _ in range(5):
                x = tf.clip_by_norm(dense(x, 16, activation=tf.nn.relu, use_bias=False), 2.0)
    return x


@pytest.mark.parametrize(
    "layers, stages",
    [
        (8, [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        (12, [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 10, 11}]),
        (6, [{0, 1}, {1, 2, 3}, {3, 4}, {4, 5}]),
    ],
)
def test_repeated_layers(gpus, layers, stages):
    gpus(4)
    epl.init(epl.Config({"auto.auto_parallel": True, "pipeline.num_stages": 4, "pipeline.num_micro_batch": 4}))
    x, _ = data(batch=2)
    loss = tf.reduce_mean(dense(dense(repeated(x, layers), 16), 10))
    train = minimize(loss)
    if layers == 6:
        with tf.train.MonitoredTrainingSession() as session:
            session.run(train)
    taskgraphs = Graph.get().taskgraphs
    assert len(taskgraphs) == 4
    for index, expected in enumerate(stages):
        forward = taskgraphs[index].operations.forward_operations(0, 0)
        assert {int(layer) for op in forward for layer in re.findall("s4_layer([0-9]+)", op.name)} == expected
        assert taskgraphs[index].virtual_device.get_device(0, 0) == device(index)
        assert forward[-1].device == device(index)


def test_scopes_win(gpus):
    gpus(2)
    epl.init(epl.Config({"auto.auto_parallel": True, "pipeline.num_stages": 2}))
    with epl.replicate(1):
        loss = m4()
    minimize(loss)
    assert Graph.get().num_stages == 1


def test_number_of_stages_is_needed(gpus):
    gpus(2)
    epl.init(epl.Config({"auto.auto_parallel": True}))
    loss = m4()
    with pytest.raises(ValueError, match="pipeline.num_stages"):
        minimize(loss)
