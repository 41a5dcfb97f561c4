import glob

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.ir.graph import Graph
from epl.runtime.saver import MemoryEfficientBuilder, ShardingLoader
from tests.contract.models import apply_clipped, data, dense, momentum


def start(gpus):
    gpus(1)
    tf.reset_default_graph()
    epl.init()
    epl.set_default_strategy(epl.replicate(1))
    return data()[0]


def train(loss, optimizer=None, steps=5, **options):
    """The fetched steps, and the variables after training with a learning rate of 0."""
    step = tf.train.get_or_create_global_step()
    op = (optimizer or tf.train.MomentumOptimizer(0.0, 0.9)).minimize(loss, global_step=step)
    variables = tf.global_variables()
    with tf.train.MonitoredTrainingSession(**options) as session:
        steps = [int(session.run([step, op])[0]) for _ in range(steps)]
        return steps, {v.op.name: value for v, value in zip(variables, session.run(variables))}


@pytest.fixture
def checkpoint(gpus, tmp_path):
    """A checkpoint after five steps of D16, D10, and its values."""
    x = start(gpus)
    loss = tf.reduce_mean(dense(dense(x, 16, name="a"), 16, name="b"))
    steps, values = train(loss, checkpoint_dir=str(tmp_path))
    assert steps == [0, 1, 2, 3, 4]
    return tf.train.latest_checkpoint(str(tmp_path)), values


def test_saver_is_in_no_phase(gpus):
    x = start(gpus)
    loss = tf.reduce_mean(dense(dense(x, 16), 10))
    saver = tf.train.Saver()
    op = apply_clipped(loss, tf.train.AdamOptimizer())
    with tf.train.MonitoredTrainingSession() as session:
        session.run(op)
    operations = Graph.get().taskgraphs[0].operations
    groups = [operations.forward_operations(0, 0), operations.backward_operations(0, 0), operations.apply_operations(0)]
    assert all(groups)
    names = [op.name for group in groups for op in group]
    assert not [name for name in names if name.startswith("save/")]
    assert saver.saver_def.save_tensor_name in Graph.get().tensors
    assert [op.name for op in groups[1] if op.type == "BiasAddGrad"] == ["gradients/%s/BiasAdd_grad/BiasAddGrad" % n for n in ("dense_1", "dense")]
    assert len([op for op in groups[2] if op.type.endswith("ApplyAdam")]) == 4


def test_restore(gpus, checkpoint):
    path, expected = checkpoint
    x = start(gpus)
    loss = tf.reduce_mean(dense(dense(x, 16, name="a"), 16, name="b"))
    tf.train.get_or_create_global_step()
    ShardingLoader(path).restore()
    steps, values = train(loss)
    assert steps == [5, 6, 7, 8, 9]
    for name in ("a/kernel", "a/bias", "b/kernel", "b/bias"):
        np.testing.assert_array_equal(values[name], expected[name])


def test_no_checkpoint(gpus):
    x = start(gpus)
    loss = tf.reduce_mean(dense(x, 10))
    ShardingLoader(None).restore()
    assert train(loss)[0] == [0, 1, 2, 3, 4]


def test_some_variables_and_another_optimizer(gpus, checkpoint):
    path, expected = checkpoint
    x = start(gpus)
    loss = tf.reduce_mean(dense(dense(x, 16, name="a"), 16, name="b"))
    tf.train.get_or_create_global_step()
    ShardingLoader(path, var_list=[v for v in tf.global_variables() if v.op.name != "global_step"]).restore()
    steps, values = train(loss, tf.train.AdamOptimizer(0.0))
    assert steps == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(values["a/kernel"], expected["a/kernel"])


def test_copies_of_a_layer(gpus, checkpoint):
    path, expected = checkpoint
    x = dense(start(gpus), 16, name="a")
    for copy in range(5):
        x = dense(x, 16, name="copy%d" % copy)
    loss = tf.reduce_mean(x)
    sources = {"copy%d/%s" % (copy, part): "b/" + part for copy in range(5) for part in ("kernel", "bias")}
    ShardingLoader(path, assign_map=dict(sources, **{"a/kernel": "a/kernel", "a/bias": "a/bias"})).restore()
    _, values = train(loss)
    for name, source in sources.items():
        np.testing.assert_array_equal(values[name], expected[source])


def test_layers_of_half_the_width(gpus, checkpoint):
    path, expected = checkpoint
    loss = tf.reduce_mean(dense(dense(start(gpus), 8, name="a"), 16, name="b"))
    pieces = {"a/kernel": ([0, 8], [10, 8]), "a/bias": ([8], [8]), "b/kernel": ([8, 0], [8, 16])}
    ShardingLoader(path, sharding_info={name: {"begin": begin, "size": size} for name, (begin, size) in pieces.items()}).restore()
    _, values = train(loss)
    for name, (begin, size) in pieces.items():
        part = tuple(slice(b, b + s) for b, s in zip(begin, size))
        np.testing.assert_array_equal(values[name], expected[name][part])
    np.testing.assert_array_equal(values["b/bias"], expected["b/bias"])


def test_memory_efficient_builder(gpus, tmp_path):
    def build():
        x = start(gpus)
        step = tf.train.get_or_create_global_step()
        op = momentum().minimize(tf.reduce_mean(dense(dense(x, 16), 10)), global_step=step)
        return op, tf.train.Saver(sharded=True, restore_sequentially=True, builder=MemoryEfficientBuilder())

    path = str(tmp_path / "model.ckpt")
    op, saver = build()
    with tf.train.MonitoredTrainingSession() as session:
        session.run(op)
        inner = session
        while not isinstance(inner, tf.Session):
            inner = inner._sess
        saver.save(inner, path)
        expected = inner.run(tf.global_variables())
    assert glob.glob(path + "*")
    _, saver = build()
    with tf.Session() as session:
        saver.restore(session, path)
        for value, other in zip(session.run(tf.global_variables()), expected):
            np.testing.assert_array_equal(value, other)


def test_a_step_returns_what_all_variables_were_before_it(gpus):
    """Slots of reference variables too: their updates wait for the copies."""
    x = start(gpus)
    step = tf.train.get_or_create_global_step()
    op = tf.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(dense(x, 4, name="a")), global_step=step)
    variables = {v.op.name: v for v in tf.global_variables()}
    assert any(v.op.type == "VariableV2" for v in variables.values()) and "a/kernel/Adam_1" in variables
    with tf.train.MonitoredTrainingSession() as session:
        for _ in range(5):
            before = session.run(variables)
            during = session.run([op, variables])[1]
            for name, value in before.items():
                np.testing.assert_array_equal(during[name], value, err_msg=name)
        after = session.run(variables)
    assert all(np.any(after[name] != before[name]) for name in ("a/kernel", "a/kernel/Adam", "a/kernel/Adam_1", "beta1_power"))
