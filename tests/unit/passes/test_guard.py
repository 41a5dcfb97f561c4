"""Guard: what changes state waits for the gate of the step."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.passes.effects import Guard
from tests.unit.graph_text import fingerprint, parse
from tests.unit.machine import Machine, user_graph
from tests.unit.passes.steps import DRAWN, apply, before, task, training

EXTRA = """
    m = VarHandleOp() {shape: [2]}
    average = AssignVariableOp(m, rows)
    seen = VarHandleOp() {shape: []}
    seen/one = Const() {value: 1.0}
    before = AssignAddVariableOp(seen, seen/one)
"""


def guarded(text, targets, job):
    program = before(Guard, parse(text + "\ntargets: " + targets).pruned(), job)
    result = apply(Guard(), program, job)
    return program, {n.name for n in result.nodes.values() if "epl_gate" in n.controls and "epl_gate" not in program.nodes[n.name].controls}


def test_writes_wait_for_the_draws():
    _, names = guarded(DRAWN + EXTRA, "train, average", task(devices=2))
    assert names == {"train", "EPL_REPLICA_1/train", "average", "EPL_REPLICA_1/average"}


def test_a_write_that_a_draw_waits_for_comes_first():
    text = DRAWN.replace("IteratorGetNext(i)", "IteratorGetNext(i, ^before)")
    _, names = guarded(text + EXTRA, "train", task())
    assert names == {"train"}


@pytest.mark.parametrize("job", [task(devices=2), task(parallel=False)])
def test_without_a_gate_nothing_changes(job):
    program = before(Guard, training(mode="same"), job)
    assert fingerprint(apply(Guard(), program, job)) == fingerprint(program)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("layout", [dict(devices=2), dict(m=2)], ids=str)
def test_when_an_input_ends_a_loop_writes_nothing(layout, v2):
    with user_graph(v2=v2) as index:
        iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(np.ones([3, 1], np.float32)).batch(1))
        x = iterator.get_next()
        total = tf.get_variable("total", [], initializer=tf.zeros_initializer(), trainable=False)
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())

        def body(i, value):
            with tf.control_dependencies([total.assign_add(1.0)]):
                return i + 1, value + tf.reduce_sum(x) * w

        loss = tf.while_loop(lambda i, _: i < 3, body, [0, 0.0])[1]
        tf.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        tf.group(tf.global_variables_initializer(), iterator.initializer, name="start")
        whole = index()
    machine = Machine(whole, **layout)
    machine.run("start")
    machine.run("train")
    done = machine.value("total"), machine.value("w")
    with pytest.raises(tf.errors.OutOfRangeError):
        machine.run("train")
    assert (machine.value("total"), machine.value("w")) == done and done[0] > 0
