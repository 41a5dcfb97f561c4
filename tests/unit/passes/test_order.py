"""Order: an update waits until what reads the variable is done."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.passes.effects import Order
from tests.unit.graph_text import fingerprint
from tests.unit.machine import Machine, Plain, user_graph
from tests.unit.passes.steps import TRAIN, apply, before, task, training

REF = (
    TRAIN.replace("VarHandleOp() {shape: [2], shared_name: w}", "VariableV2() {shape: [2]}")
    .replace("ReadVariableOp(w)", "Identity(w)")
    .replace("AssignVariableOp(w, start)", "Assign(w, start)")
    .replace("ResourceApply", "Apply")
)


def order(program, job=None, update="train"):
    """What an update waits for."""
    job = job or task()
    result = apply(Order(), before(Order, program, job), job)
    return result.nodes[update].controls


def test_a_resource_is_read_when_it_is_read():
    assert order(training()) == ("read",)
    assert order(training(), task(devices=2, m=2), "EPL_REPLICA_1/train") == ("EPL_REPLICA_1/read",)


def test_a_reference_is_read_when_its_consumers_are_done():
    """Identity of a reference variable returns the buffer itself."""
    assert order(training(text=REF)) == ("y",)
    assert set(order(training(text=REF), task(m=2))) == {"y", "EPL_MICRO_BATCH_1/y"}
    assert order(training(text=REF), task(devices=2), "EPL_REPLICA_1/train") == ("EPL_REPLICA_1/y",)


@pytest.mark.parametrize("view, waits", [
    ("view = Identity(read)", "y"),
    ("view = Reshape(read, shape)", "y"),
    ("view = StopGradient(read)", "y"),
    ("inner = ExpandDims(read, zero)\nview = Squeeze(inner)", "y"),
    ("view = Neg(read)", "view"),
])  # fmt: skip
def test_views_of_a_reference_are_followed(view, waits):
    text = REF.replace("    zero = Const() {value: 0}\n", "")
    text = text.replace("y = Mul(x, read)", "zero = Const() {value: 0}\nshape = Const() {value: [2]}\n%s\ny = Mul(x, view)" % view)
    assert order(training(text=text)) == (waits,)


def test_reads_after_the_update_are_not_waited_for():
    program = training("late = ReadVariableOp(w, ^train)\nuse = Neg(late)", targets="train, use")
    assert order(program) == ("read",)


def test_reads_of_the_apply_phase_are_not_waited_for():
    extra = "again = ReadVariableOp(w)\ndecayed = Mul(again, g)\nsecond = ResourceApplyGradientDescent(w, rate, decayed)"
    program = training(extra, targets="train, second")
    assert set(order(program)) == {"read", "again"} and set(order(program, update="second")) == {"read", "again"}
    program = training(extra.replace("(w)", "(w, ^g)"), targets="second")
    assert "again" not in order(program, update="second")


def test_a_variable_that_is_only_copied_from_is_not_written():
    """An average of w reads w: it does not wait for w's readers, and w's readers do not wait for it."""
    extra = "m = VarHandleOp() {shape: [2]}\nnow = ReadVariableOp(w, ^train)\naverage = AssignVariableOp(m, now)"
    assert order(training(extra, targets="average"), update="average") == ()


@pytest.mark.parametrize("job", [task(parallel=False), task()])
def test_a_program_without_updates_is_left_as_it_is(job):
    program = before(Order, training(targets="", mode="same"), job)
    assert fingerprint(apply(Order(), program, job)) == fingerprint(program)


LOOP = """
    enter = Enter(read) {frame_name: frame}
    merge = Merge(enter, next)
    limit = Const(^merge) {value: [9.0, 9.0]}
    less = Less(merge, limit)
    all = Const(^merge) {value: [0]}
    any = All(less, all)
    cond = LoopCond(any)
    switch = Switch(merge, cond)
    leave = Exit(switch)
    double = Add(switch:1, switch:1)
    next = NextIteration(double)
    after = Neg(leave)
"""


def test_a_loop_is_done_when_it_is_left():
    assert set(order(training(LOOP, fetches="after:0", text=REF))) == {"leave"}


COND = """
    p = Placeholder() {dtype: bool, shape: []}
    handle = Switch(w, p)
    inside = ReadVariableOp(handle:1)
    no = Switch(rows, p)
    out = Merge(no, inside)
"""


def test_a_conditional_is_done_where_its_branches_join():
    """In a branch that is not taken nothing is read: an update that waited for it would never come."""
    assert set(order(training(COND, fetches="out:0"))) == {"out"}


def test_a_merge_of_values_reads_the_buffer():
    program = training("view = Identity(read, ^y)\nused = Mul(view, x)\nscaled = Mul(view, g)", fetches="scaled:0, view:0, used:0", text=REF)
    assert "epl_merge/view/of_0" in order(program, task(m=2))


def test_a_fetched_reference_is_copied_before_the_update():
    job = task()
    program = before(Order, training(fetches="w:0, read:0, train:0", text=REF), job)
    result = apply(Order(), program, job)
    first, second, third = (n for n, _ in result.fetches)
    assert first.startswith("epl_fetch/w") and second.startswith("epl_fetch/read") and third == "train"
    assert {first, second} <= set(result.nodes["train"].controls)


# With TensorFlow.

X = np.random.RandomState(0).randn(12, 2).astype(np.float32)


def branches(v2, resource, vector):
    """The loss is of a or of b; `vector` asks each instance for itself."""
    with user_graph(v2=v2, resource=resource) as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        q = tf.placeholder(tf.bool, [None] if vector else [], "q")
        a, b = (tf.get_variable(n, [2], initializer=tf.ones_initializer()) for n in "ab")
        loss = tf.reduce_mean(tf.cond(q[0] if vector else q, lambda: a * x, lambda: b * x), name="loss")
        tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
        tf.global_variables_initializer()
        return index()


LAYOUTS = [dict(), dict(devices=2), dict(m=2), dict(devices=2, m=3), dict(ranks=2, m=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("v2, resource", [(False, True), (False, False), (True, True)])
def test_variables_of_branches_are_trained(layout, v2, resource):
    whole = branches(v2, resource, vector=False)
    machine, plain = Machine(whole, **layout), Plain(whole)
    machine.run("init"), plain.run("init")
    for value in (True, False, True):
        feeds = {"x:0": X, "q:0": np.bool_(value)}
        machine.run("train", feeds), plain.run("train", feeds)
    reads = ["%s/%s:0" % (n, "Read/ReadVariableOp" if resource else "read") for n in "ab"]
    for name, value in zip("ab", plain.run(reads)):
        np.testing.assert_allclose(machine.value(name, machine.plan.ranks - 1), value, rtol=1e-5)


@pytest.mark.parametrize("v2", [False, True])
def test_instances_may_take_different_branches(v2):
    machine = Machine(branches(v2, True, vector=True), devices=2, m=2)
    machine.run("init")
    machine.run("train", {"x:0": X, "q:0": np.repeat([True, False, False, True], 3)})
    np.testing.assert_allclose(machine.value("a"), 1 - 0.1 * X[[0, 1, 2, 9, 10, 11]].mean(0) / 4, rtol=1e-5)
    np.testing.assert_allclose(machine.value("EPL_REPLICA_1/b"), 1 - 0.1 * X[3:9].mean(0) / 4, rtol=1e-5)


@pytest.mark.parametrize("layout", [dict(), dict(devices=2), dict(m=2)], ids=str)
def test_nested_loops(layout):
    """A control edge may leave a loop inside a loop by the outer loop's exits only."""
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        w = tf.get_variable("w", [2], initializer=tf.constant_initializer([0.5, 2.0]))

        def inner(v):
            return tf.while_loop(lambda j, u: j < 2, lambda j, u: (j + 1, u * w), [0, v])[1]

        out = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, inner(v)), [0, x])[1]
        tf.train.GradientDescentOptimizer(0.01).minimize(tf.reduce_mean(out), name="train")
        tf.global_variables_initializer()
        whole = index()
    machine, plain = Machine(whole, **layout), Plain(whole)
    machine.run("init"), plain.run("init")
    for _ in range(2):
        machine.run("train", {"x:0": X}), plain.run("train", {"x:0": X})
    np.testing.assert_allclose(machine.value("w"), plain.run("w/Read/ReadVariableOp:0")[0], rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_training_steps_one_after_the_other(layout):
    """The second loss is computed from what the first step updates."""
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None], "x")
        d, g = (tf.get_variable(n, [], initializer=tf.ones_initializer()) for n in "dg")
        first = tf.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(tf.square(d * x)), var_list=[d])
        with tf.control_dependencies([first]):
            loss = tf.reduce_mean(tf.square(g * x) * d.read_value())
            tf.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=[g], name="train")
        tf.global_variables_initializer()
        whole = index()
    machine, plain = Machine(whole, **layout), Plain(whole)
    machine.run("init"), plain.run("init")
    for _ in range(3):
        machine.run("train", {"x:0": X[:, 0]}), plain.run("train", {"x:0": X[:, 0]})
    for name in "dg":
        np.testing.assert_allclose(machine.value(name), plain.run(name + "/Read/ReadVariableOp:0")[0], rtol=1e-5)


COUNTER = """
    c = VarHandleOp() {shape: [], shared_name: c}
    rate_of = ReadVariableOp(c)
    slower = Mul(rate_of, rate)
    own = ReadVariableOp(c)
    more = Add(own, rate)
    count = AssignVariableOp(c, more)
    asked = ReadVariableOp(c, ^count)
"""


def test_a_counter_of_the_script_waits_for_what_reads_it_without_asking_for_the_new_value():
    program = training(COUNTER, targets="train, count, slower, asked")
    assert order(program, update="count") == ("rate_of", "own")
    assert order(program, task(devices=2), "EPL_REPLICA_1/count") == ("EPL_REPLICA_1/rate_of", "EPL_REPLICA_1/own")
