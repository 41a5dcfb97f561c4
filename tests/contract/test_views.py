"""Views of graphs: what they show, and that they need no session."""

import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.ir.graph import Graph
from epl.ir.phase import ModelPhase
from tests.contract.models import data, dense, device, minimize, momentum


def two_stages(x):
    with epl.replicate(1):
        h = dense(x, 16)
    with epl.replicate(1):
        return tf.reduce_mean(dense(h, 10))


def names(operations):
    return [op.name for op in operations]


def test_clones_without_a_session(gpus):
    gpus(4)
    epl.init(epl.Config({"pipeline.num_micro_batch": 2}))
    x = tf.placeholder(tf.float32, [None, 10], name="x")
    rate = tf.placeholder(tf.float32, [], name="rate")
    train = tf.train.MomentumOptimizer(rate, 0.9).minimize(two_stages(x))
    graph = Graph.get()
    for replica in range(2):
        for micro_batch in range(2):
            prefix = ("EPL_REPLICA_1/" if replica else "") + ("EPL_MICRO_BATCH_1/" if micro_batch else "")
            for index, layer in enumerate(("dense", "dense_1")):
                op = graph.operations[prefix + layer + "/MatMul"]
                assert (op.origin, op.type, op.phase) == (layer + "/MatMul", "MatMul", ModelPhase.FORWARD)
                assert (op.replica_index, op.micro_batch_index, op.taskgraph.index) == (replica, micro_batch, index)
                assert op.device == device(2 * replica + index)
                groups = graph.taskgraphs[index].operations
                assert op.name in names(groups.forward_operations(replica, micro_batch))
                assert prefix + "gradients/%s/MatMul_grad/MatMul_1" % layer in names(groups.backward_operations(replica, micro_batch))
    matmul = graph.operations["EPL_REPLICA_1/EPL_MICRO_BATCH_1/dense_1/MatMul"]
    assert [t.name for t in matmul.inputs] == ["EPL_REPLICA_1/EPL_MICRO_BATCH_1/dense/BiasAdd:0", "EPL_REPLICA_1/dense_1/kernel/read:0"]
    assert matmul.inputs[1].op.device == matmul.device
    assert "EPL_REPLICA_1/EPL_MICRO_BATCH_1/dense_1/MatMul:0" in graph.tensors
    # The update runs once per replica, and what is fed once is shared.
    assert "EPL_REPLICA_1/rate" not in graph.operations
    kernels = [t.name for t in graph.taskgraphs[0].get_variables(1) if "kernel" in t.name]
    assert kernels == ["EPL_REPLICA_1/dense/kernel:0", "EPL_REPLICA_1/dense/kernel/Momentum:0"]
    updates = [op for op in graph.taskgraphs[1].operations.apply_operations(1) if op.type == "ApplyMomentum"]
    assert names(updates) == ["EPL_REPLICA_1/Momentum/update_dense_1/%s/ApplyMomentum" % part for part in ("kernel", "bias")]
    with tf.train.MonitoredTrainingSession() as session:
        session.run(train, {x: np.ones([8, 10], np.float32), rate: 0.1})


def test_accumulation_over_runs_has_one_micro_batch(gpus):
    gpus(2)
    epl.init(epl.Config({"pipeline.num_micro_batch": 4}))
    with epl.replicate(1):
        loss = tf.reduce_mean(dense(data()[0], 10))
    minimize(loss)
    assert not [name for name in Graph.get().operations if "EPL_MICRO_BATCH" in name]
    assert "EPL_REPLICA_1/dense/MatMul" in Graph.get().operations


def test_second_worker(gpus, monkeypatch):
    gpus(2)
    hosts = {"cluster": {"worker": ["127.0.0.1:8001", "127.0.0.1:8002"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(hosts))
    epl.init()
    momentum().minimize(two_stages(data()[0]))
    graph = Graph.get()
    assert [(t.num_replicas, t.local_num_replicas) for t in graph.taskgraphs] == [(2, 1), (2, 1)]
    assert [graph.operations[layer + "/MatMul"].device for layer in ("dense", "dense_1")] == [device(0, task=1), device(1, task=1)]
    assert not [name for name in graph.operations if name.startswith("EPL_REPLICA_1/")]
    assert "[Device: %s]" % device(1, task=1) in graph.format(max_depth=1)


def test_without_gradients_or_annotations(gpus):
    gpus(1)
    epl.init()
    x = tf.constant(np.ones([2, 3], np.float32), name="x")
    graph = Graph.get(may_create=True)
    assert list(graph.operations) == ["x"]
    assert graph.operations["x"].taskgraph is graph.taskgraphs[0]
    assert graph.gradients == []
    tf.identity(x, name="y")
    assert list(graph.operations) == ["x", "y"]
    assert graph.format().splitlines()[1:-1] == ["  y"]
    with pytest.raises(KeyError):
        graph.get_operation_by_name("z")


def test_one_cpu():
    epl.init()
    with epl.replicate(1):
        loss = tf.reduce_mean(dense(data()[0], 10))
    minimize(loss)
    op = Graph.get().operations["dense/MatMul"]
    assert op.device == device(0, "CPU")
    assert op.taskgraph.num_replicas == 1


def test_several_graphs_at_a_time(gpus):
    gpus(2)
    epl.init()
    graphs = [tf.Graph(), tf.Graph()]
    for size, one in enumerate(graphs, 1):
        with one.as_default(), epl.replicate(1):
            for _ in range(size):
                tf.constant(1.0)
    sizes = []
    for one in graphs:
        with one.as_default():
            sizes.append(len(Graph.get().operations))
    assert sizes == [1, 2]


def test_gradient_penalty_is_part_of_the_forward(gpus):
    gpus(1)
    epl.init()
    with epl.replicate(1):
        x = data()[0]
        h = tf.square(dense(x, 4))
        (slope,) = tf.gradients(h, x)
        loss = tf.reduce_mean(h) + tf.reduce_mean(tf.square(slope))
    minimize(loss)
    operations = Graph.get().operations
    assert operations["gradients/dense/MatMul_grad/MatMul"].phase == ModelPhase.FORWARD
    assert operations["gradients_1/dense/MatMul_grad/MatMul_1"].phase == ModelPhase.BACKWARD


def test_sparse_gradient(gpus):
    gpus(2)
    epl.init()
    with epl.replicate(1):
        table = tf.get_variable("table", [20, 4], initializer=tf.glorot_uniform_initializer(seed=1))
        rows = tf.nn.embedding_lookup(table, tf.cast(data()[0] * 20, tf.int32))
        loss = tf.reduce_mean(tf.square(rows))
    minimize(loss)
    taskgraph = Graph.get().taskgraphs[0]
    assert len(taskgraph.gradients) == 1 and isinstance(taskgraph.gradients[0], tf.IndexedSlices)
    assert names(taskgraph.backward_exit_ops(0, 0)) == [taskgraph.gradients[0].values.op.name]
    assert names(taskgraph.backward_exit_ops(1, 0)) == ["EPL_REPLICA_1/" + taskgraph.gradients[0].values.op.name]
