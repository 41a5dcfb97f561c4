"""Agree: the gate behind all draws, and the sizes of unequal batches."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.passes.agree import Agree, Agreement
from tests.unit.graph_text import expect, fingerprint, subset
from tests.unit.machine import Machine, user_graph
from tests.unit.passes.steps import apply, before, task, training

INPUT = """
    i = IteratorV2() {output_types: [float], output_shapes: [[?, 2]]}
    n = IteratorGetNext(i) {output_types: [float], output_shapes: [[?, 2]]}
    z = Neg(n)
    targets: z
"""


def agree(text, job):
    program = before(Agree, text, job)
    result = apply(Agree(), program, job)
    added = subset(result, [n for n in result.nodes if n not in program.nodes])
    return program, result, added


@pytest.mark.parametrize("job", [task(devices=2), task(devices=2, parallel=False)])
def test_a_program_without_draws_has_no_gate(job):
    program, result, added = agree(training(mode="same"), job)
    assert result.agreement == Agreement() and not added.nodes
    assert fingerprint(result.replace(agreement=None)) == fingerprint(program)


def test_one_rank_waits_for_its_own_draws():
    _, result, added = agree(INPUT, task(devices=2))
    expect(added, "epl_gate = NoOp(^n, ^EPL_REPLICA_1/n)")
    assert result.agreement == Agreement("epl_gate") and result.agreement.nodes() == ["epl_gate"]


def test_ranks_tell_each_other_that_they_have_drawn():
    _, result, added = agree(INPUT, task(ranks=2))
    expect(
        added,
        """
        epl_agree/one = Const() {value: 1.0}
        epl_agree/none = Const() {value: 0.0}
        epl_agree/said = Pack(epl_agree/one, epl_agree/none, ^n)
        epl_agree = EplAllReduce(epl_agree/said) {scale: 1.0}
        epl_agree/present/at = Const() {value: 0}
        epl_agree/present/axis = Const() {value: 0}
        epl_agree/present = GatherV2(epl_agree, epl_agree/present/at, epl_agree/present/axis)
        epl_agree/everybody = Const() {value: 2.0}
        epl_agree/complete = GreaterEqual(epl_agree/present, epl_agree/everybody)
        epl_gate = Assert(epl_agree/complete, epl_agree/present)
        """,
        "value",
        "scale",
    )
    assert result.agreement == Agreement("epl_gate")


def test_sizes_of_unequal_batches():
    program = before(Agree, INPUT, task(devices=2, m=2)).replace(ragged=[("n", 0)])
    job = task(devices=2, m=2)
    result = apply(Agree(), program, job)
    assert sorted(result.agreement.sizes) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert result.agreement.local_total == result.agreement.total == ("epl_batch/local", 0)
    names = [n for n in result.nodes if n.startswith(("epl_batch/size_1_1", "epl_batch/local"))]
    expect(
        subset(result, names),
        """
        epl_batch/size_1_1/rows/shape = Shape(EPL_REPLICA_1/EPL_MICRO_BATCH_1/n)
        epl_batch/size_1_1/rows/zero = Const()
        epl_batch/size_1_1/rows = GatherV2(epl_batch/size_1_1/rows/shape, epl_batch/size_1_1/rows/zero, epl_batch/size_1_1/rows/zero)
        epl_batch/size_1_1 = Cast(epl_batch/size_1_1/rows)
        epl_batch/local = AddN(epl_batch/size_0_0, epl_batch/size_0_1, epl_batch/size_1_0, epl_batch/size_1_1)
        """,
    )


def test_ranks_sum_their_samples():
    job = task(ranks=3, rank=1)
    result = apply(Agree(), before(Agree, INPUT, job).replace(ragged=[("n", 0)]), job)
    assert result.nodes["epl_agree/said"].inputs == (("epl_agree/one", 0), ("epl_batch/size_0_0", 0))
    assert result.agreement.local_total == ("epl_batch/size_0_0", 0) and result.agreement.total == ("epl_agree/total", 0)


BRANCH = """
    p = Placeholder() {dtype: bool, shape: []}
    switch = Switch(p, p)
    t = Identity(switch:1)
    f = Identity(switch)
    i = IteratorV2() {output_types: [float], output_shapes: [[?, 2]]}
    j = IteratorV2() {output_types: [float], output_shapes: [[?, 2]]}
    n = IteratorGetNext(i, ^t) {output_types: [float], output_shapes: [[?, 2]]}
    k = IteratorGetNext(j, ^f) {output_types: [float], output_shapes: [[?, 2]]}
    n/out = Identity(n)
    join = Merge(k, n/out)
    z = Neg(join)
    targets: z
"""


def test_a_draw_in_a_conditional_is_waited_for_where_the_branches_join():
    """A draw in the branch that is not taken never happens; the gate must open all the same."""
    job = task()
    result = apply(Agree(), before(Agree, BRANCH, job).replace(ragged=[("n", 0)]), job)
    assert result.nodes["epl_gate"].controls == ("join",)
    assert result.nodes["epl_batch/size_0_0/rows/shape"].inputs == (("join", 0),)


def test_a_batch_whose_size_is_known_in_a_branch_only_does_not_count():
    job = task()
    text = BRANCH.replace("n/out = Identity(n)", "n/out = Neg(n)")
    result = apply(Agree(), before(Agree, text, job).replace(ragged=[("n", 0)]), job)
    assert result.agreement.sizes == {}


# The gate at work.


def regression(rows, batch, choose=None):
    """w is fitted to inputs from an iterator; the train op reads `batch` rows."""
    data = np.arange(rows, dtype=np.float32)[:, None]
    with user_graph(v2=choose == "v2") as index:
        iterators = [tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(data + 100 * k).batch(batch)) for k in range(2)]
        p = tf.placeholder_with_default(True, [], "p")
        x = tf.cond(p, iterators[0].get_next, iterators[1].get_next) if choose else iterators[0].get_next()
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        loss = tf.reduce_mean(x * w, name="loss")
        tf.train.GradientDescentOptimizer(1.0).minimize(loss, name="train")
        tf.group(tf.global_variables_initializer(), *[i.initializer for i in iterators], name="start")
        return index()


LAYOUTS = [dict(), dict(devices=2), dict(m=2), dict(devices=2, m=2), dict(ranks=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("choose", ["v1", "v2"])
def test_inputs_chosen_by_a_conditional(layout, choose):
    machine = Machine(regression(64, 4, choose), **layout)
    machine.run("start")
    parts = machine.plan.replicas * machine.plan.micro_batches
    rows = 4 * (parts if machine.plan.ranks == 1 else 1)  # each rank has all data of its own
    machine.run("train")
    assert machine.value("w") == pytest.approx(-np.arange(rows).mean())
    machine.run("train", {"p:0": False})
    assert machine.value("w") == pytest.approx(-np.arange(rows).mean() * 2 - 100)


@pytest.mark.parametrize("layout", [dict(devices=2), dict(m=2), dict(devices=2, m=2)], ids=str)
def test_when_an_input_ends_nothing_of_the_step_is_applied(layout):
    machine = Machine(regression(20, 4), **layout)
    machine.run("start")
    parts = machine.plan.replicas * machine.plan.micro_batches
    for _ in range(5 // parts):
        machine.run("train")
    last = machine.value("w")
    with pytest.raises(tf.errors.OutOfRangeError):
        machine.run("train")
    assert machine.value("w") == last != 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_draw_may_wait_for_a_write(layout):
    with user_graph() as index:
        iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(np.ones([40, 1], np.float32)).batch(2))
        count = tf.get_variable("count", [], initializer=tf.zeros_initializer(), trainable=False)
        with tf.control_dependencies([count.assign_add(1.0)]):
            x = iterator.get_next()
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_mean(x * w), name="train")
        tf.group(tf.global_variables_initializer(), iterator.initializer, name="start")
        whole = index()
    machine = Machine(whole, **layout)
    machine.run("start")
    machine.run("train")
    assert machine.value("w") == -1 and machine.value("count") == 1
