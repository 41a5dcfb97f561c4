import warnings

import numpy as np
import tensorflow.compat.v1 as tf

import epl
from epl.ir.graph import Graph
from epl.ir.phase import ModelPhase
from tests.contract.models import apply_clipped, data, dense, device, m4, minimize, momentum, run


def two_stages(clip=False):
    with epl.replicate(device_count=1, name="stage0"):
        x, _ = data()
        x = dense(x, 16)
    with epl.replicate(device_count=1, name="stage1"):
        loss = tf.reduce_mean(dense(x, 10))
    return loss


def test_clip_after_allreduce(gpus):
    gpus(4)
    epl.init(epl.Config({"communication.clip_after_allreduce": True, "pipeline.num_micro_batch": 2}))
    loss = two_stages()
    epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
    assert Graph.get().current_model_phase == ModelPhase.FORWARD
    train = apply_clipped(loss, tf.train.AdamOptimizer())
    assert Graph.get().current_model_phase == ModelPhase.FORWARD
    assert len(run([train, loss], 1)) == 1
    for index, layer in enumerate(("dense", "dense_1")):
        exits = Graph.get().taskgraphs[index].backward_exit_ops(0, 0)
        assert [op.name for op in exits] == ["gradients/%s/BiasAdd_grad/BiasAddGrad" % layer, "gradients/%s/MatMul_grad/MatMul_1" % layer]
        others = Graph.get().taskgraphs[index].backward_exit_ops(1, 1)
        assert [op.name for op in others] == ["EPL_REPLICA_1/EPL_MICRO_BATCH_1/" + op.name for op in exits]


def test_outside_strategy(gpus):
    gpus(4)
    epl.init()
    tf.constant(1)
    with epl.replicate(name="replica_0"):
        x = tf.constant(np.ones([4, 3], np.float32))
    with epl.replicate(name="replica_1"):
        loss = tf.reduce_mean(dense(x, 2))
        optimizer = tf.train.AdamOptimizer()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pairs = optimizer.compute_gradients(loss)
            optimizer.apply_gradients(pairs)
    tf.constant(2)
    graph = Graph.get()
    assert graph._user_default_taskgraph is None
    assert graph._epl_default_taskgraph.index == 1
    epl.set_default_strategy(epl.replicate(1))
    tf.constant(3)
    with epl.replicate(name="replica_3"):
        tf.constant(4)
    assert graph._user_default_taskgraph.index == 2
    assert graph._epl_default_taskgraph.index == 3


DATA = ["TensorSliceDataset", "BatchDatasetV2", "RepeatDataset", "MakeIterator", "IteratorToStringHandle", "IteratorGetNext"]


def block(taskgraph, replica, index, lines):
    where = "Taskgraph %d replica %d [Device: %s]" % (taskgraph, replica, device(index))
    lines = ["  " * (line.count("/") + 1) + line for line in lines]
    return "\n".join(["======= Begin %s =======" % where] + lines + ["======= End %s =======" % where])


def test_format(gpus):
    gpus(4)
    epl.init(epl.Config({"pipeline.num_micro_batch": 2}))
    train = momentum().minimize(two_stages())
    with tf.train.MonitoredTrainingSession() as session:
        session.run(train)
        text = Graph.get().format(max_depth=1)
        dense_only = Graph.get().format(max_depth=1, prefix_list=["dense"])
    clone = "EPL_REPLICA_1"
    assert text == "\n\n".join(
        [
            block(0, 0, 0, DATA + ["dense"]),
            block(0, 1, 2, [clone, clone + "/IteratorGetNext", clone + "/dense"]),
            block(1, 0, 1, ["dense_1", "Mean"]),
            block(1, 1, 3, [clone, clone + "/dense_1", clone + "/Mean"]),
        ]
    )
    assert dense_only == "\n\n".join(
        [
            block(0, 0, 0, ["dense"]),
            block(0, 1, 2, [clone, clone + "/dense"]),
            block(1, 0, 1, ["dense_1"]),
            block(1, 1, 3, [clone, clone + "/dense_1"]),
        ]
    )
    assert "    dense/MatMul" in Graph.get().format().splitlines()


def test_several_graphs(gpus):
    gpus(4)
    epl.init()
    with tf.Graph().as_default():
        with epl.replicate(1):
            loss = m4()
        train = minimize(loss)
        steps = [values[1] for values in run([train, tf.train.get_global_step()], 3)]
        assert Graph.get().num_stages == 1
        assert Graph.get().taskgraphs[0].num_replicas == 4
        assert steps == [0, 1, 2]
    with tf.Graph().as_default():
        loss = m4()
        minimize(loss)
        steps = [values[1] for values in run([loss, tf.train.get_global_step()], 3)]
        assert Graph.get().num_stages == 1
        assert Graph.get().taskgraphs[0].num_replicas == 4
        assert steps == [0, 0, 0]
    assert len(epl.Env.get().epl_graphs) == 2


def outside(gpus, micro_batches, runs):
    gpus(4)
    epl.init(epl.Config({"pipeline.num_micro_batch": micro_batches}))
    step = tf.train.get_or_create_global_step()
    with epl.replicate(1):
        loss = m4()
    train = minimize(loss)
    steps = [int(values[1]) for values in run([train, step], runs)]
    taskgraph = Graph.get().taskgraphs[0]
    assert "global_step:0" in [variable.name for variable in taskgraph.get_variables(0)]
    assert Graph.get().operations["global_step"].taskgraph is taskgraph
    return steps


def test_op_outside_taskgraph(gpus):
    assert outside(gpus, 1, 3) == [0, 1, 2]


def test_op_outside_taskgraph_with_accumulation(gpus):
    assert outside(gpus, 2, 6) == [0, 0, 1, 1, 2, 2]


def test_multithread_prefetch(gpus):
    gpus(4)
    epl.init()
    epl.set_default_strategy(epl.replicate(1))
    rows = np.random.RandomState(1).rand(64, 10).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices(rows).map(lambda r: r * 2, num_parallel_calls=2).batch(2).prefetch(2)
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    train = minimize(tf.reduce_mean(dense(iterator.get_next(), 10)))
    assert [values[1] for values in run([train, tf.train.get_global_step()], 3)] == [0, 1, 2]


def test_views_follow_the_graph(gpus):
    gpus(2)
    epl.init()
    with epl.replicate(1):
        x = tf.constant(np.ones([2, 3], np.float32), name="x")
    graph = Graph.get()
    assert "x" in graph.operations and "later" not in graph.operations
    with epl.replicate(1):
        tf.identity(x, name="later")
    assert graph.operations["later"].taskgraph.index == 1
    assert graph.operations["later"].inputs[0].name == "x:0"
    assert graph.operations["later"].device == device(1)
    assert "later:0" in graph.tensors
    assert graph.get_operation_by_name("later") is graph.operations["later"]
