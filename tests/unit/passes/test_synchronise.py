"""Synchronise: marked identities give the value of all replicas."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl import compat
from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.passes.synchronise import Synchronise
from tests.unit.graph_text import expect, fingerprint, subset
from tests.unit.machine import Machine, Plain, user_graph
from tests.unit.passes.steps import apply, before, task, training


def marked(program, name, kind="mean"):
    node = program.nodes[name]
    return program.replace(nodes=dict(program.nodes, **{name: node.replace(attrs=dict(node.attrs, **{A.SYNC: A.of_str(kind)}))}))


def synchronise(job, name="v", kind="mean", extra="v = Identity(rows)\nuse = Neg(v)"):
    program = before(Synchronise, marked(training(extra, targets="train, use"), name, kind), job)
    result = apply(Synchronise(), program, job)
    return program, result, subset(result, [n for n in result.nodes if n not in program.nodes])


def test_micro_batch_by_micro_batch():
    _, result, added = synchronise(task(devices=2, m=2))
    expect(
        added,
        """
        v/epl_all/sum = AddN(v, EPL_REPLICA_1/v) @/device:CPU:0
        v/epl_all/scaled/factor = Const() {value: 0.5} @/device:CPU:0
        v/epl_all/scaled = Mul(v/epl_all/sum, v/epl_all/scaled/factor) @/device:CPU:0
        EPL_MICRO_BATCH_1/v/epl_all/sum = AddN(EPL_MICRO_BATCH_1/v, EPL_REPLICA_1/EPL_MICRO_BATCH_1/v) @/device:CPU:0
        EPL_MICRO_BATCH_1/v/epl_all/scaled/factor = Const() {value: 0.5} @/device:CPU:0
        EPL_MICRO_BATCH_1/v/epl_all/scaled = Mul(EPL_MICRO_BATCH_1/v/epl_all/sum, EPL_MICRO_BATCH_1/v/epl_all/scaled/factor) @/device:CPU:0
        """,
        "value",
        devices=True,
    )
    assert result.nodes["EPL_REPLICA_1/EPL_MICRO_BATCH_1/use"].inputs == (("EPL_MICRO_BATCH_1/v/epl_all/scaled", 0),)


@pytest.mark.parametrize("kind, scale", [("mean", 0.25), ("sum", 1.0)])
def test_ranks(kind, scale):
    _, _, added = synchronise(task(devices=2, ranks=2), kind=kind)
    assert added.nodes["v/epl_all"].info == {"dtype": 1, "scale": scale, "taskgraph": None}


@pytest.mark.parametrize("job, extra", [(task(m=2), "v = Identity(rows)\nuse = Neg(v)"), (task(devices=2), "v = Identity(read)\nuse = Neg(v)")])
def test_the_same_value_everywhere_is_left_as_it_is(job, extra):
    program, result, _ = synchronise(job, extra=extra)
    assert fingerprint(result) == fingerprint(program)


def test_a_loop_is_refused():
    extra = """
        enter = Enter(rows) {frame_name: frame}
        merge = Merge(enter, next)
        v = Identity(merge)
        limit = Const(^merge) {value: true}
        cond = LoopCond(limit)
        switch = Switch(v, cond)
        use = Exit(switch)
        next = NextIteration(switch:1)
    """
    with pytest.raises(ProgramError, match="'v' synchronises replicas inside a while loop; take the normalisation out of the loop"):
        synchronise(task(devices=2), extra=extra)


@pytest.mark.parametrize("layout", [dict(), dict(devices=3), dict(ranks=2), dict(ranks=3, devices=2)], ids=str)
def test_values_and_gradients_are_those_of_the_whole_batch(layout):
    """As with synchronised batch normalisation: centred by the mean of all rows."""
    data = np.random.RandomState(0).randn(12, 2).astype(np.float32)

    @tf.custom_gradient
    def synced(value):
        def mark(tensor):
            tensor = tf.identity(tensor)
            compat.set_op_attr(tensor.op, A.SYNC, A.of_str("mean"))
            return tensor

        return mark(value), mark

    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        w = tf.get_variable("w", [2], initializer=tf.constant_initializer([1.0, 2.0]))
        h = tf.tanh(x * w)
        loss = tf.reduce_mean(tf.square(h - synced(tf.reduce_mean(h, 0)) - 1.0) * x)
        tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
        tf.global_variables_initializer()
        whole = index()
    machine, plain = Machine(whole, **layout), Plain(whole)
    machine.run("init"), plain.run("init")
    for _ in range(3):
        machine.run("train", {"x:0": data}), plain.run("train", {"x:0": data})
    np.testing.assert_allclose(machine.value("w", machine.plan.ranks - 1), plain.run("w/Read/ReadVariableOp:0")[0], rtol=1e-5)
