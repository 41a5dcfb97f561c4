import numpy as np
import tensorflow.compat.v1 as tf

import epl
from epl.ir.graph import Graph
from epl.utils import common
from tests.contract.models import momentum, slices

TIME, WIDTH = 4, 6


def recurrent(x):
    """A v1 loop over time with TensorArrays."""
    w = tf.get_variable("w", [2 * WIDTH, WIDTH], initializer=tf.glorot_uniform_initializer(seed=1))
    inputs = tf.TensorArray(tf.float32, TIME).unstack(tf.transpose(x, [1, 0, 2]))
    outputs = tf.TensorArray(tf.float32, TIME)

    def step(i, state, outputs):
        state = tf.tanh(tf.matmul(tf.concat([inputs.read(i), state], 1), w))
        return i + 1, state, outputs.write(i, state)

    start = (tf.constant(0), tf.zeros_like(x[:, 0]), outputs)
    _, _, outputs = tf.while_loop(lambda i, *_: i < TIME, step, start)
    return tf.transpose(outputs.stack(), [1, 0, 2])


def build(gpus):
    gpus(4)
    epl.init(epl.Config({"pipeline.num_micro_batch": 2}))
    rows = np.random.RandomState(1).rand(40, TIME, WIDTH).astype(np.float32)
    with epl.replicate(1, name="loop"):
        iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(rows).batch(2).repeat())
        tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        h = recurrent(iterator.get_next())
    with epl.replicate(1, name="loss"):
        loss = tf.reduce_mean(tf.square(tf.layers.dense(h[:, -1], 1)))
    return momentum().minimize(loss, global_step=tf.train.get_or_create_global_step()), loss


def test_clones(gpus):
    train, loss = build(gpus)
    with tf.train.MonitoredTrainingSession() as session:
        session.run([train, loss])
        session.run([train, loss])
    graph = Graph.get()
    assert [slices(t.virtual_device) for t in graph.taskgraphs] == [[[0], [2]], [[1], [3]]]
    operations = graph.operations
    contexts = clones = 0
    for original in tf.get_default_graph().get_operations():
        context = original._get_control_flow_context()
        for replica in range(2):
            for micro_batch in range(2):
                prefix = common.get_replica_prefix(replica) + common.get_micro_batch_prefix(micro_batch)
                clone = operations.get(prefix + original.name)
                if clone is None or not prefix:
                    continue
                clones += 1
                if context is not None:
                    contexts += 1
                    assert clone.get_control_flow_context().to_proto().context_name == prefix + context.to_proto().context_name
                else:
                    assert clone.get_control_flow_context() is None
                # The update reads aggregated gradients, which are no clones of anything: as the original shows it.
                wanted = [tensor.name for tensor in operations[original.name].inputs]
                wired = [tensor.name for tensor in clone.inputs]
                assert len(wired) == len(wanted)
                for source, name in zip(wanted, wired):
                    if prefix + source.partition(":")[0] in operations:
                        assert name == prefix + source
    assert contexts > 100 and clones > contexts
    loops = [op for op in graph.taskgraphs[0].operations.forward_operations(1, 1) if op.type == "Enter"]
    assert loops and all(op.name.startswith("EPL_REPLICA_1/EPL_MICRO_BATCH_1/") and op.device.endswith("GPU:2") for op in loops)
    assert not [op for op in graph.taskgraphs[1].operations.forward_operations(0, 0) if op.type == "Enter"]


def test_values_equal_one_device(gpus):
    """Two replicas with two micro-batches of 2 train like one device with batches of 8."""
    del gpus
    values = {}
    for stages in (1, 2):
        epl.init(epl.Config({"cluster.devices_per_worker": 4 if stages == 2 else 1, "pipeline.num_micro_batch": 2 if stages == 2 else 1}))
        x = tf.placeholder(tf.float32, [None, TIME, WIDTH])
        with epl.replicate(1):
            h = recurrent(x)
        scope = epl.replicate(1) if stages == 2 else None
        if scope:
            scope.__enter__()
        kernel = tf.glorot_uniform_initializer(seed=2)
        loss = tf.reduce_mean(tf.square(tf.layers.dense(h[:, -1], 1, kernel_initializer=kernel)))
        if scope:
            scope.__exit__(None, None, None)
        epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        rows = np.random.RandomState(1).rand(5, 8, TIME, WIDTH).astype(np.float32)
        with tf.train.MonitoredTrainingSession() as session:
            losses = [session.run([loss, train], {x: part})[0] for part in rows]
            values[stages] = np.array(losses), session.run(tf.trainable_variables())
    np.testing.assert_allclose(values[2][0], values[1][0], rtol=1e-5)
    for one, other in zip(values[1][1], values[2][1]):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_functions_run_where_they_are_called(gpus):
    """Branches as functions, built under the cluster's device names, which no session knows."""
    gpus(2)
    epl.init()
    epl.set_default_strategy(epl.replicate(1))
    tf.enable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            large = tf.reduce_sum(tf.ones([2])) > 1
            value = tf.cond(large, lambda: tf.ones([4, 3]), lambda: tf.zeros([4, 3]))
            assert {n.device for f in graph.as_graph_def().library.function for n in f.node_def if n.device}
            tf.train.get_or_create_global_step()
            with tf.train.MonitoredTrainingSession() as session:
                np.testing.assert_array_equal(session.run(value), np.ones([4, 3]))
    finally:
        tf.disable_control_flow_v2()
