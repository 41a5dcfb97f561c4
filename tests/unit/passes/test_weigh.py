"""Weigh: unequal batches count by their samples."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.passes.weigh import Weigh, seeded_records
from epl.planner.plan import LAST
from tests.unit.graph_text import expect, fingerprint, parse, subset
from tests.unit.machine import Machine, user_graph
from tests.unit.passes.steps import apply, before, task

TRAIN = """
    i = IteratorV2() {output_types: [float], output_shapes: [[?]]}
    x = IteratorGetNext(i) {output_types: [float], output_shapes: [[?]]}
    w = VarHandleOp() {shape: []}
    read = ReadVariableOp(w)
    y = Mul(x, read)
    zero = Const() {value: 0}
    loss = Mean(y, zero)
    shape = Const() {value: [], dtype: int32}
    one = Const() {value: 1.0}
    seed = Fill(shape, one)  # backward=1 seed=1
    mean = Mean(x, zero)  # backward=1
    g = Mul(seed, mean)  # backward=1 raw=1/w
    rate = Const() {value: 1.0}
    train = ResourceApplyGradientDescent(w, rate, g)
    targets: train
"""


def weigh(job, text=TRAIN, ragged=True):
    program = parse(text).replace(ragged=[("x", 0)] if ragged else [])
    program = before(Weigh, program, job)
    result = apply(Weigh(), program, job)
    return program, result, subset(result, [n for n in result.nodes if "weight" in n or n.endswith("/g") or n == "g"])


def test_the_seed_of_an_instance_is_scaled_by_its_share():
    _, result, added = weigh(task(m=2))
    expect(
        added,
        """
        g = Mul(seed/epl_weighted, mean)
        EPL_MICRO_BATCH_1/g = Mul(EPL_MICRO_BATCH_1/seed/epl_weighted, EPL_MICRO_BATCH_1/mean)
        epl_gradient/g = EplAggregate(g, EPL_MICRO_BATCH_1/g)
        epl_batch/weight_0_0 = RealDiv(epl_batch/size_0_0, epl_batch/local)
        seed/epl_weighted = Mul(seed, epl_batch/weight_0_0)
        epl_batch/weight_0_1 = RealDiv(epl_batch/size_0_1, epl_batch/local)
        EPL_MICRO_BATCH_1/seed/epl_weighted = Mul(EPL_MICRO_BATCH_1/seed, epl_batch/weight_0_1)
        """,
    )
    assert seeded_records(result) == {1}


def test_in_a_step_of_several_runs_the_weight_is_the_number_of_samples():
    _, result, added = weigh(task(m=2, in_run=False, part=LAST))
    assert not [n for n in result.nodes if n.startswith("epl_batch/weight")]
    assert result.nodes["seed/epl_weighted"].inputs == (("seed", 0), ("epl_batch/size_0_0", 0)) and "g" in added.nodes


def test_the_weight_has_the_gradients_type():
    text = TRAIN.replace("one = Const() {value: 1.0}", "one = Const() {value: 1.0, dtype: float64}").replace("seed, mean", "wide, mean")
    _, result, _ = weigh(task(m=2), text.replace("mean = Mean", "wide = Cast(seed) {DstT: float}  # backward=1\n    mean = Mean"))
    cast = result.nodes["seed/epl_weight"]
    assert (cast.op, cast.attr("DstT").type, result.nodes["seed/epl_weighted"].attr("T").type) == ("Cast", 2, 2)


@pytest.mark.parametrize("job, ragged", [(task(m=2), False), (task(m=2, reduce_method="sum"), True), (task(m=2, parallel=False), True)])
def test_equal_batches_and_sums_have_no_weights(job, ragged):
    program, result, _ = weigh(job, ragged=ragged)
    assert fingerprint(result) == fingerprint(program)


def test_only_gradients_that_are_aggregated_are_weighted():
    """The inner gradient of a penalty is forward computation; what optimizers are given is weighted later."""
    inner = TRAIN.replace("raw=1/w", "").replace("rate, g)", "rate, g2)").replace(
        "    rate = ", "    seed2 = Fill(shape, one)  # backward=2 seed=2\n    g2 = Mul(seed2, g)  # backward=2 raw=2/w\n    rate = "
    )
    _, result, _ = weigh(task(m=2), inner)
    assert seeded_records(result) == {2} and result.nodes["g"].inputs[0] == ("seed", 0) and result.nodes["g2"].inputs[0] == ("seed2/epl_weighted", 0)
    given = TRAIN.replace("raw=1/w", "raw=1/w\n    clipped = Neg(g)  # apply=2/w").replace("rate, g)", "rate, clipped)")
    _, result, _ = weigh(task(m=2, aggregate_at="apply"), given)
    assert seeded_records(result) == set() and result.nodes["g"].inputs[0] == ("seed", 0)


# Numerics: ten samples in batches of 4, 4 and 2.

X = np.random.RandomState(0).randn(10, 2).astype(np.float32)
BATCHES = [X[:4], X[4:8], X[8:]]
START = np.array([1.0, 2.0])


def model(kind):
    with user_graph() as index:
        iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(X).batch(4))
        x = iterator.get_next()
        w = tf.get_variable("w", [2], initializer=tf.constant_initializer(START))
        loss = tf.reduce_mean(tf.square(x * w), name="loss")
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        if kind == "penalty":
            loss += tf.reduce_sum(tf.square(tf.gradients(loss, [w])[0]))
        if kind == "own":  # the call starts from a gradient of the user's
            ((g, v),) = [(tf.gradients(loss, [w], grad_ys=[tf.constant(1.0)])[0], w)]
        else:
            ((g, v),) = optimizer.compute_gradients(loss)
        if kind == "clip":
            g = tf.clip_by_norm(g, 1.5)
        optimizer.apply_gradients([(g, v)], name="train")
        tf.group(tf.global_variables_initializer(), iterator.initializer, name="start")
        return index()


def expected(kind, at):
    gradients = []
    for batch in BATCHES:
        square = np.mean(batch * batch, 0) / 2
        g = 2 * START * square
        gradients.append(g + 8 * START * square**2 if kind == "penalty" else g)

    def clip(g):
        return g * min(1, 1.5 / np.linalg.norm(g)) if kind == "clip" else g

    if at == "apply":
        gradients = [clip(g) for g in gradients]
    total = sum(g * len(b) / 10 for g, b in zip(gradients, BATCHES))
    return START - 0.1 * (total if at == "apply" else clip(total))


@pytest.mark.parametrize("layout", [dict(devices=3), dict(m=3), dict(m=3, in_run=False)], ids=str)
@pytest.mark.parametrize("at", ["raw", "apply"])
@pytest.mark.parametrize("kind", ["plain", "penalty", "clip", "own"])
def test_every_sample_counts_the_same(kind, at, layout):
    machine = Machine(model(kind), aggregate_at=at, **layout)
    machine.run("start")
    losses = [machine.run(["loss:0", "train"])[0][0] for _ in range(machine.plan.runs_per_step)]
    np.testing.assert_allclose(machine.value("w"), expected(kind, at), rtol=1e-5)
    assert len(losses) == machine.plan.runs_per_step


@pytest.mark.parametrize("layout", [dict(), dict(devices=2), dict(m=2, in_run=False)], ids=str)
def test_ranks_may_feed_batches_of_different_sizes(layout):
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        w = tf.get_variable("w", [2], initializer=tf.constant_initializer(START))
        tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(x * w)), name="train")
        tf.global_variables_initializer()
        whole = index()
    machine = Machine(whole, ranks=2, **layout)
    machine.run("init")
    runs = [(X[:4], X[4:6]), (X[6:8], X[8:])] if machine.plan.runs_per_step == 2 else [(X[:8], X[8:])]
    for parts in runs:
        machine.run("train", {"x:0": parts})
    wanted = START - 0.1 * START * np.mean(X * X, 0)
    for rank in range(2):
        np.testing.assert_allclose(machine.value("w", rank), wanted, rtol=1e-5)
