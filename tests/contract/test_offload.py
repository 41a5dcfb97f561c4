import numpy as np
import tensorflow.compat.v1 as tf

import epl
from epl.ir.graph import Graph
from tests.contract.models import device, m4, minimize, run


def test_variables_are_on_the_device(gpus):
    gpus(1)
    with tf.Graph().as_default() as graph:
        epl.init()
        with epl.replicate(1):
            loss = m4()
        assert len(run(minimize(loss), 2)) == 2
        variables = [op for op in graph.get_operations() if op.type == "VariableV2"]
        # 4 layers, their momenta, and the step
        assert len(variables) == 17
        assert {Graph.get().operations[op.name].device for op in variables} == {device(0)}


def test_every_new_graph_has_the_device(gpus):
    gpus(1)
    epl.init()
    with tf.Graph().as_default() as graph:
        with epl.replicate(1):
            loss = m4()
        minimize(loss)
        assert {op.device for op in graph.get_operations() if op.type == "VariableV2"} == {device(0)}


def trained(gpus, level, steps, folder=None):
    """The losses of some steps, those fetched as steps, the devices of the variables, and the graph as it is written down."""
    gpus(1)
    epl.init(epl.Config({"offload.level": level}))
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(3)
        with epl.replicate(1):
            loss = m4()
        train = minimize(loss)
        step = tf.train.get_global_step()
        found = run([loss, step, train], steps, checkpoint_dir=folder)
        variables = [op for op in graph.get_operations() if op.type == "VariableV2"]
        devices = {op.device for op in variables} | {Graph.get().operations[op.name].device for op in variables}
        return [float(loss) for loss, _, _ in found], [int(step) for _, step, _ in found], devices, tf.train.export_meta_graph().graph_def


def test_weights_stay_in_host_memory(gpus):
    plain, _, devices, _ = trained(gpus, "", 5)
    assert devices == {device(0)}
    offloaded, _, devices, graph_def = trained(gpus, "v0", 5)
    assert devices == {device(0, "CPU")}
    np.testing.assert_allclose(offloaded, plain, atol=1e-6)
    # What is written down has no devices of this job.
    assert not [node.name for node in graph_def.node if node.device and node.op == "VariableV2"]


def test_a_checkpoint_of_an_offloaded_run_is_resumed_without(gpus, tmp_path):
    folders = {level: str(tmp_path / (level or "plain")) for level in ("", "v0")}
    for level, folder in folders.items():
        assert len(trained(gpus, level, 5, folder)[0]) == 5
    resumed = {level: trained(gpus, "", 3, folder) for level, folder in folders.items()}
    assert resumed["v0"][2] == {device(0)} and resumed["v0"][1] == resumed[""][1] and resumed["v0"][1][0] >= 5
    np.testing.assert_allclose(resumed["v0"][0], resumed[""][0], atol=1e-6)
