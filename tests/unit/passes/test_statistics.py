"""Statistics: variables written in the forward pass are equal on all replicas after the step."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.passes.effects import Statistics
from epl.passes.instances import instance_name
from tests.unit.graph_text import expect, fingerprint, subset
from tests.unit.machine import Machine, Plain, user_graph
from tests.unit.passes.steps import apply, before, task, training

MOVING = """
    m = VarHandleOp() {shape: [2]}
    old = ReadVariableOp(m)
    new = Add(old, rows)
    set = AssignVariableOp(m, new)
    look = ReadVariableOp(m)
"""


def statistics(extra, job, targets="train, set, look"):
    program = before(Statistics, training(extra, targets=targets), job)
    result = apply(Statistics(), program, job)
    return program, result, subset(result, [n for n in result.nodes if n not in program.nodes])


def test_local_replicas_are_averaged():
    program, result, added = statistics(MOVING, task(devices=2, m=2))
    expect(
        added,
        """
        epl_statistics/m/read_0 = ReadVariableOp(m, ^set, ^EPL_MICRO_BATCH_1/set) @/device:CPU:0
        epl_statistics/m/read_1 = ReadVariableOp(EPL_REPLICA_1/m, ^EPL_REPLICA_1/set, ^EPL_REPLICA_1/EPL_MICRO_BATCH_1/set) @/device:CPU:1
        epl_statistics/m/sum = AddN(epl_statistics/m/read_0, epl_statistics/m/read_1) @/device:CPU:0
        epl_statistics/m/mean/factor = Const() @/device:CPU:0
        epl_statistics/m/mean = Mul(epl_statistics/m/sum, epl_statistics/m/mean/factor) @/device:CPU:0
        epl_statistics/m/assign_0 = AssignVariableOp(m, epl_statistics/m/mean, ^epl_statistics/m/read_0, ^old, ^EPL_MICRO_BATCH_1/old, \
^set, ^EPL_MICRO_BATCH_1/set, ^look, ^EPL_MICRO_BATCH_1/look) @/device:CPU:0
        epl_statistics/m/assign_1 = AssignVariableOp(EPL_REPLICA_1/m, epl_statistics/m/mean, ^epl_statistics/m/read_1, ^EPL_REPLICA_1/old, \
^EPL_REPLICA_1/EPL_MICRO_BATCH_1/old, ^EPL_REPLICA_1/set, ^EPL_REPLICA_1/EPL_MICRO_BATCH_1/set, ^EPL_REPLICA_1/look, \
^EPL_REPLICA_1/EPL_MICRO_BATCH_1/look) @/device:CPU:1
        """,
        devices=True,
    )
    assert result.targets == program.targets + ("epl_statistics/m/assign_0", "epl_statistics/m/assign_1")


def test_ranks_are_averaged_too():
    _, _, added = statistics(MOVING, task(devices=2, ranks=2))
    node = added.nodes["epl_statistics/m/mean"]
    assert (node.op, node.inputs, node.info["scale"]) == ("EplAllReduce", (("epl_statistics/m/sum", 0),), 0.25)


def test_or_the_first_replica_counts():
    _, _, added = statistics(MOVING, task(devices=2, statistics_reduce="first"))
    assert added.nodes["epl_statistics/m/assign_1"].inputs[1] == ("epl_statistics/m/read_0", 0)
    _, _, added = statistics(MOVING, task(ranks=2, statistics_reduce="first"))
    assert added.nodes["epl_statistics/m/first"].op == "EplBroadcast"


@pytest.mark.parametrize("extra, job", [
    (MOVING, task(m=2)),
    ("set = NoOp()\nlook = NoOp()", task(devices=2)),
    (MOVING.replace("shape: [2]", "shape: [2], dtype: int64").replace("ReadVariableOp(m)", "ReadVariableOp(m) {dtype: int64}").replace(
        "new = Add(old, rows)", "whole = Cast(rows) {DstT: int64}\nnew = Add(old, whole)"), task(devices=2)),
])  # fmt: skip
def test_nothing_to_average(extra, job):
    program, result, _ = statistics(extra, job)
    assert fingerprint(result) == fingerprint(program)


def test_an_update_by_gradients_comes_after_the_average():
    _, result, _ = statistics("clip = AssignVariableOp(w, rows)", task(devices=2), "train, clip")
    assert result.nodes["clip"].phase == "APPLY"  # no forward write: it belongs to the update
    _, result, _ = statistics("clip = AssignVariableOp(w, rows)\nuse = Mul(rows, one, ^clip)\ng2 = Neg(use)  # raw=1/v", task(devices=2), "train, g2")
    assert result.nodes["clip"].phase == "FORWARD" and "epl_statistics/w/assign_0" in result.nodes["train"].controls


# With TensorFlow: one update per micro-batch, in order, then the average.

X = np.random.RandomState(3).randn(24, 2).astype(np.float32)
KINDS = ["resource", "ref", "cond_v1", "cond_v2", "loop_v1", "loop_v2"]


def normalised(kind):
    with user_graph(v2=kind.endswith("v2"), resource=kind != "ref") as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        on = tf.placeholder_with_default(True, [], "on")
        m = tf.get_variable("m", [2], initializer=tf.zeros_initializer(), trainable=False)
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        mean = tf.reduce_mean(x, 0)

        def update():
            with tf.control_dependencies([m.assign(m * 0.5 + mean)]):
                return mean + 0.0

        if kind.startswith("cond"):
            used = tf.cond(on, update, lambda: m + 0.0)
        elif kind.startswith("loop"):
            used = tf.while_loop(lambda i, _: i < 1, lambda i, _: (i + 1, update()), [0, mean])[1]
        else:
            used = update()
        loss = tf.reduce_mean(tf.square((x - used) * w))
        tf.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        tf.global_variables_initializer()
        return index()


def moving(start, parts):
    for part in parts:
        start = start * 0.5 + part.mean(0)
    return start


LAYOUTS = [dict(), dict(m=3), dict(devices=2), dict(devices=3, m=2), dict(ranks=2, m=2), dict(ranks=2, devices=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_one_update_for_each_micro_batch_in_order(kind, layout):
    machine = Machine(normalised(kind), **layout)
    machine.run("init")
    replicas, batches = machine.plan.replicas, machine.plan.micro_batches
    want = np.zeros(2)
    for step in range(2):
        batch = X + step
        machine.run("train", {"x:0": batch})
        want = np.mean([moving(want, np.split(rows, batches)) for rows in np.split(batch, replicas)], 0)
    for rank in range(machine.plan.ranks):
        for replica in range(machine.plan.devices_per_rank):
            value = machine.value(instance_name("m", replica, None), rank)
            np.testing.assert_allclose(value, want, rtol=1e-5, err_msg=str((rank, replica)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["cond_v1", "cond_v2"])
def test_a_branch_that_is_not_taken_writes_nothing_and_stops_nothing(kind, layout):
    whole = normalised(kind)
    machine, plain = Machine(whole, **layout), Plain(whole)
    machine.run("init"), plain.run("init")
    for _ in range(2):
        machine.run("train", {"x:0": X, "on:0": False}), plain.run("train", {"x:0": X, "on:0": False})
    np.testing.assert_allclose(machine.value("w"), plain.run("w/Read/ReadVariableOp:0")[0], rtol=1e-5)
    assert machine.value("m").tolist() == [0, 0]
