import os
import subprocess
import sys

import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.env import Env
from tests.contract.models import data, dense, device, minimize


def first_device(graph):
    """The innermost device of a graph."""
    return next(iter(graph._device_function_stack.peek_objs()))._device_name_or_function


def test_default_device(gpus):
    gpus(1)
    for _ in range(2):
        epl.init()
        with tf.Graph().as_default() as graph:
            assert str(tf.constant(1).device) == device(0)
            with epl.Cluster():
                assert str(first_device(graph)).endswith("device:GPU:0")
                assert str(tf.constant(1).device) == device(0)


def test_fields(gpus):
    gpus(1)
    assert epl.env.Env is Env
    epl.init()
    env = Env.get()
    assert env.config.auto.auto_parallel is False
    env.config.auto.auto_parallel = True
    assert env.config.auto.auto_parallel is True
    epl.init()
    assert Env.get() is env
    assert env.config.auto.auto_parallel is False
    assert env.strategy_context.state == [] and env.epl_graphs == [] and env.parallel_information == {}
    assert env.cluster.worker_num == 1


def test_init_resets_the_default_graph(gpus):
    gpus(1)
    for _ in range(2):
        epl.init()
        tf.get_variable("w", [2])
    with tf.Graph().as_default() as graph:
        before = tf.constant(1)
        epl.init()
        assert before.graph is tf.get_default_graph() is graph


def test_init_takes_a_config_only():
    with pytest.raises(ValueError, match="epl.Config"):
        epl.init("text")


def test_session_without_target(gpus):
    gpus(3)
    epl.init()
    with epl.replicate(1):
        loss = tf.reduce_mean(dense(data()[0], 10))
    train = minimize(loss)
    with tf.train.MonitoredTrainingSession() as session:
        session.run(train)
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.tables_initializer()])
        session.run(train)
    with tf.train.MonitoredTrainingSession("grpc://localhost:1") as session:
        session.run(train)


EAGER = """
import tensorflow as tf
import epl
assert tf.executing_eagerly()
x = tf.Variable(2.0)
for _ in range(2):
    epl.init(epl.Config({"cluster.devices_per_worker": 2}))
    assert float(x * 3.0) == 6.0
    assert tf.executing_eagerly()
epl.set_default_strategy(epl.replicate(1))
assert epl.Env.get().cluster.gpu_num_per_worker == 2
epl.shutdown()
"""


def test_eager():
    """Unlike the original's, our `epl.init` works in eager mode, and resets nothing there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EPL_")}
    subprocess.run([sys.executable, "-c", EAGER], env=environment, check=True, timeout=120)
