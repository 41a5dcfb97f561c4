"""Partial: runs that only accumulate."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.passes.partial import Partial
from epl.planner.plan import FIRST, LAST, MIDDLE, WHOLE
from tests.unit.graph_text import expect, fingerprint
from tests.unit.machine import Machine, Plain, user_graph
from tests.unit.passes.steps import TRAIN, apply, before, task, training

COUNTED = TRAIN + """
    count = VarHandleOp() {shape: [], dtype: int64}
    count/read = ReadVariableOp(count) {dtype: int64}
    step = Const() {value: 1, dtype: int64}
    bump = AssignAddVariableOp(count, step, ^train)
    late = ReadVariableOp(count, ^bump) {dtype: int64}
    moved = VarHandleOp() {shape: [2]}
    update = AssignVariableOp(moved, rows)
    group = NoOp(^bump, ^train, ^update)
"""


def partial(program, part=FIRST, **options):
    job = task(m=3, in_run=False, part=part, **options)
    program = before(Partial, program, job)
    return program, apply(Partial(), program, job)


@pytest.mark.parametrize("part", [FIRST, MIDDLE])
def test_updates_are_taken_away(part):
    _, result = partial(training(fetches="loss:0, count/read:0, late:0", targets="group", text=COUNTED), part)
    expect(
        result,
        """
        x = Placeholder()
        w = VarHandleOp()
        read = ReadVariableOp(w)
        y = Mul(x, read)
        axes = Const()
        loss = Mean(y, axes)
        zero = Const()
        one = Const()
        rows = Mean(x, zero)
        g = Mul(rows, one)
        count = VarHandleOp()
        count/read = ReadVariableOp(count)
        late = ReadVariableOp(count)
        moved = VarHandleOp()
        update = AssignVariableOp(moved, rows)
        epl_gradient/g = EplAggregate(g)
        fetches: loss:0, count/read:0, late:0
        targets: update, epl_gradient/g
        feeds: x:0 -> x (divide)
        """,
    )


@pytest.mark.parametrize("part", [LAST, WHOLE])
def test_other_runs_are_left_as_they_are(part):
    program, result = partial(training(targets="group", text=COUNTED), part)
    assert result is program


REF = TRAIN.replace("VarHandleOp() {shape: [2], shared_name: w}", "VariableV2() {shape: [2]}").replace("ReadVariableOp(w)", "Identity(w)").replace(
    "AssignVariableOp(w, start)", "Assign(w, start)"
).replace("ResourceApply", "Apply")  # fmt: skip


def test_the_reference_that_an_update_returns_has_the_old_value():
    extra = "twice = Identity(train)\nagain = AssignAdd(train, start)\nout = Identity(again)"
    _, result = partial(training(extra, fetches="twice:0, train:0, out:0", text=REF))
    assert result.nodes["twice"].inputs == result.nodes["out"].inputs == (("w", 0),) and result.fetches[1] == ("w", 0)
    assert "train" not in result.nodes and "again" not in result.nodes


def test_a_fetch_may_use_the_runs_own_gradients():
    _, result = partial(training("norm = L2Loss(g)", fetches="norm:0, g:0"))
    assert result.fetches == (("norm", 0), ("epl_gradient/g", 0)) and result.nodes["norm"].inputs == (("epl_gradient/g", 0),)


def test_a_gradient_that_no_fetch_needs_is_still_accumulated():
    _, result = partial(training(fetches="", targets="train"))
    assert result.targets == ("epl_gradient/g",) and "train" not in result.nodes


def test_a_local_program_is_left_as_it_is():
    program = before(Partial, training(mode="same"), task(m=2, parallel=False))
    assert fingerprint(apply(Partial(), program, task(m=2, parallel=False))) == fingerprint(program)


# Numerics: three runs make a step.

X = np.random.RandomState(1).randn(12, 2).astype(np.float32)


def counted(resource):
    with user_graph(resource=resource) as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        step = tf.train.get_or_create_global_step()
        loss = tf.reduce_mean(tf.square(x * w), name="loss")
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, global_step=step, name="train")
        with tf.control_dependencies([train]):
            tf.identity(step.read_value() if resource else step, name="after")
        tf.identity(step, name="now")
        tf.global_variables_initializer()
        return index()


@pytest.mark.parametrize("resource", [True, False])
def test_the_global_step_moves_with_the_last_run(resource):
    whole = counted(resource)
    machine, plain = Machine(whole, m=3, in_run=False), Plain(whole)
    machine.run("init"), plain.run("init")
    fetches = ["loss:0", "now:0", "after:0", "train"]
    if not resource:
        fetches.insert(3, "train:0")  # the reference that the update of the step returns
    for number in range(2):
        wanted = plain.run(["loss:0", "train"], {"x:0": X})[0]
        runs = [machine.run(fetches, {"x:0": part})[0] for part in np.split(X, 3)]
        assert [int(r[1]) for r in runs] == [number] * 3
        for value in range(2, 3 if resource else 4):
            assert [int(r[value]) for r in runs] == [number, number, number + 1]
        np.testing.assert_allclose(np.mean([r[0] for r in runs]), wanted, rtol=1e-5)
    read = "w/Read/ReadVariableOp:0" if resource else "w/read:0"
    np.testing.assert_allclose(machine.value("w"), plain.run(read)[0], rtol=1e-5)


@pytest.mark.parametrize("v2", [True, False])
def test_a_conditional_update_is_no_update_in_a_run_that_accumulates(v2):
    """As a loss scale makes it: gradients that are not finite are left out."""
    with user_graph(v2=v2) as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        good = tf.get_variable("good", [], initializer=tf.zeros_initializer(), trainable=False)
        ((g, _),) = tf.train.GradientDescentOptimizer(0.1).compute_gradients(tf.reduce_mean(x * w), [w])

        def update():
            with tf.control_dependencies([w.assign_sub(g)]):
                return good.assign_add(1.0)

        done = tf.cond(tf.reduce_all(tf.is_finite(g)), update, lambda: good + 0.0)
        tf.identity(done, name="count")
        tf.group(done, name="train")
        tf.global_variables_initializer()
        whole = index()
    machine = Machine(whole, m=3, in_run=False)
    machine.run("init")
    counts = [float(machine.run(["count:0", "train"], {"x:0": X[i * 4 : i * 4 + 4]})[0][0]) for i in range(3)]
    assert counts == [0.0, 0.0, 1.0]
    np.testing.assert_allclose(machine.value("w"), 1 - X.mean(0) / 2, rtol=1e-5)
    for rows in (X[:4], X[4:8], np.full([4, 2], np.nan, np.float32)):
        machine.run("train", {"x:0": rows})
    assert machine.value("good") == 1.0


def test_two_training_ops_accumulate_apart():
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None], "x")
        for name in ("d", "g"):
            v = tf.get_variable(name, [], initializer=tf.zeros_initializer())
            tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_mean(v * x), var_list=[v], name="train_" + name)
        tf.global_variables_initializer()
        whole = index()
    machine = Machine(whole, m=2, in_run=False)
    machine.run("init")
    for name, value in (("d", 1.0), ("g", 2.0), ("d", 5.0), ("g", 6.0)):
        machine.run("train_" + name, {"x:0": np.float32([value])})
    assert (machine.value("d"), machine.value("g")) == (-3.0, -4.0)
