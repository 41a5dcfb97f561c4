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
