import gc
import sys
import threading

import pytest
import tensorflow as tf

from epl.cluster import Cluster
from epl.cluster.default_device import push_default_device
from epl.env import Env


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    Env.get().clear()
    yield
    Env.get().clear()


@pytest.fixture
def pretend(monkeypatch):
    """Pretend to have GPUs."""

    def patch(count):
        monkeypatch.setattr(Cluster, "available_gpus", lambda self: ["GPU:%d" % index for index in range(count)])

    patch(4)
    return patch


def gpu(worker, index):
    return "/job:worker/replica:0/task:%d/device:GPU:%d" % (worker, index)


def device_stack(graph):
    return [spec.display_name for spec in graph._device_function_stack.peek_objs()]


def test_context_gives_the_default_device(pretend):
    pretend(1)
    with tf.Graph().as_default() as graph:
        with Cluster() as cluster:
            assert Env.get().cluster is cluster
            assert device_stack(graph)[0].endswith("device:GPU:0")
            assert tf.constant(1).device == gpu(0, 0)
        assert device_stack(graph) == []
        assert Env.get().cluster is None


def test_context_without_accelerators(pretend):
    pretend(0)
    with tf.Graph().as_default() as graph, Cluster():
        assert device_stack(graph) == []
        assert not push_default_device(graph, Env.get().cluster)


def test_contexts_nest_and_leave_other_settings_alone(pretend):
    with tf.Graph().as_default() as graph:
        outer, inner, third = Cluster(), Cluster(layout="auto"), Cluster()
        with outer:
            with inner:
                assert Env.get().cluster is inner
                assert len(device_stack(graph)) == 2
            assert Env.get().cluster is outer
            with outer:
                Env.get().cluster = third
            assert Env.get().cluster is third
        assert Env.get().cluster is third
        assert device_stack(graph) == []


def test_push_default_device(pretend):
    graph, cluster = tf.Graph(), Cluster()
    assert push_default_device(graph, cluster)
    assert not push_default_device(graph, cluster)
    assert device_stack(graph) == [gpu(0, 0)]
    with graph.as_default(), cluster:
        assert device_stack(graph) == [gpu(0, 0)] * 2
    with graph.as_default():
        assert tf.constant(1).device == gpu(0, 0)
        with tf.device("/cpu:0"):
            assert tf.constant(1).device.endswith("CPU:0")


def test_push_default_device_leaves_functions_alone(pretend):
    cluster = Cluster()
    pushed = []

    @tf.function
    def double(value):
        pushed.append(push_default_device(tf.compat.v1.get_default_graph(), cluster))
        return value * 2

    assert double(tf.constant(2)).numpy() == 4
    assert pushed == [False]


def test_pushed_graphs_can_be_forgotten_on_another_thread(monkeypatch, pretend):
    """A device scope that is entered and held would complain here."""
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    graphs = [tf.Graph()]
    push_default_device(graphs[0], Cluster())

    def forget():
        graphs.clear()
        gc.collect()

    thread = threading.Thread(target=forget)
    thread.start()
    thread.join()
    assert complaints == []
