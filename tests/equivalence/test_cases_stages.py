"""The values of other case files, of models cut into two stages; `test_cases_stage_rows` has the rows about stages."""


import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, regression, scalar
from tests.equivalence.test_cases_accumulation import W, schedule, updates
from tests.harness.context import variables
from tests.harness.parametrize import cases

STAGES = ("2x1-s2", "2x1-s2-m2", "1x2-s2-m2")
REPLICAS = ("4x1-s2", "2x2-s2")
"""Two replicas of two stages, over ranks and in ranks."""


def clipping(run, **config):
    """H1: w after one step on gradients [[6, 8], [0, .5]] that are clipped to norm 1."""
    with run.program({"communication." + key: value for key, value in config.items()}):
        g = tf.placeholder(tf.float32, [None, 2])
        with run.stage(0):
            w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
            product = w * g
        with run.stage(1):
            loss = tf.reduce_mean(tf.reduce_sum(product, 1))
        clipped, _ = tf.clip_by_global_norm(tf.gradients(loss, [w]), 1.0)
        train = tf.train.GradientDescentOptimizer(1.0).apply_gradients(zip(clipped, [w]))
        with run.session() as session:
            run.step(session, train, {g: np.float32([[6, 8], [0, 0.5]])})
            return session.run(w)


@cases(clipping, *STAGES, *REPLICAS)
def test_row_85_global_clip_of_stages(outcome):
    for w in outcome.ranks:
        np.testing.assert_allclose(w, [-0.57668316, -0.81696784], rtol=1e-5)


@cases(clipping, "4x1-s2", clip_after_allreduce=True, aggregate_at="apply")
def test_row_86_clip_after_allreduce_of_stages(outcome):
    for w in outcome.ranks:
        np.testing.assert_allclose(w, [-0.57668316, -0.81696784], rtol=1e-5)


@cases(clipping, *REPLICAS, aggregate_at="apply")
def test_row_85_local_clip_of_stages(outcome):
    for w in outcome.ranks:
        np.testing.assert_allclose(w, [-0.3, -0.65], rtol=1e-5)


def batch_norm(run, sync=False):
    """H4: the statistics after one step."""
    with run.program({"communication.sync_batch_norm": sync}):
        x, t = tf.placeholder(tf.float32, [None, 1]), tf.placeholder(tf.float32, [None, 1])
        with run.stage(0):
            out = tf.layers.batch_normalization(x, momentum=0.9, training=True, name="bn")
        with run.stage(1):
            loss = run.merge(tf.reduce_mean(tf.square(out - t)))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with run.session() as session:
            run.step(session, [loss, train], {x: np.float32([[1], [2], [3], [6]]), t: np.float32([[0], [1], [0], [2]])})
            found = variables(session)
            return float(found["bn/moving_mean"][0]), float(found["bn/moving_variance"][0])


@cases(batch_norm, "2x1-s2", "1x2-s2")
def test_row_65_one_micro_batch_of_stages(outcome):
    for found in outcome.ranks:
        assert found == pytest.approx((0.3, 1.25), rel=1e-5)


@cases(batch_norm, "2x1-s2-m2", "1x2-s2-m2")
def test_row_65_one_update_per_micro_batch_of_stages(outcome):
    for found in outcome.ranks:
        assert found == pytest.approx((0.585, 1.0575), rel=1e-5)


@cases(batch_norm, *REPLICAS)
def test_row_63_averaged_over_replicas_of_stages(outcome):
    for found in outcome.ranks:
        assert found == pytest.approx((0.30, 1.025), rel=1e-5)


@cases(batch_norm, *REPLICAS, sync=True)
def test_row_64_synchronised_statistics_of_stages(outcome):
    for found in outcome.ranks:
        assert found == pytest.approx((0.3, 1.25), rel=1e-5)


def fixed_loss(run, averaged=False):
    """H6 (a): a loss without any input; w and the global step after each of two steps, and w's moving average (row 90) if wanted."""
    with run.program():
        with run.stage(0):
            w = scalar("w", 0)
            rest = 1.0 - w
        with run.stage(1):
            loss = tf.square(rest)
        step = tf.train.get_or_create_global_step()
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=step)
        seen, watched = [], [w, step]
        if averaged:
            average = tf.train.ExponentialMovingAverage(0.5)
            with tf.control_dependencies([train]):
                train = average.apply([w])
            watched.append(average.average(w))
        with run.session() as session:
            for _ in range(2):
                session.run(train)
                seen += [float(value) for value in session.run(watched)]
            return seen


@cases(fixed_loss, *STAGES, *REPLICAS)
def test_row_52_one_run_is_one_step_of_stages(outcome):
    for seen in outcome.ranks:
        assert seen == pytest.approx([0.02, 1, 0.0396, 2], rel=1e-5)


def judge_averages(outcome):
    for seen in outcome.ranks:
        assert seen == pytest.approx([0.02, 1, 0.01, 0.0396, 2, 0.0248], rel=1e-5)


@cases(fixed_loss, "1x2-s2-m2", "2x2-s2", averaged=True)
def test_row_90_moving_averages_of_stages(outcome):
    judge_averages(outcome)


@cases(fixed_loss, "2x1-s2", "2x1-s2-m2", "4x1-s2", averaged=True)
def test_row_90_moving_averages_of_stages_over_ranks(outcome):
    judge_averages(outcome)


def judge_updates(outcome, optimizer):
    for rank in outcome.ranks:
        assert rank["w"] == pytest.approx(W[optimizer], rel=1e-5)
        assert rank["step"] == 3


@cases(updates, *STAGES, *REPLICAS, "4x1-s2-m2", optimizer="sgd")
def test_row_15_sgd_of_stages(outcome):
    judge_updates(outcome, "sgd")


@cases(updates, "2x1-s2-m2", "4x1-s2-m2", optimizer="momentum")
def test_row_88_momentum_of_stages(outcome):
    judge_updates(outcome, "momentum")


@cases(updates, *STAGES, "4x1-s2-m2", optimizer="adam")
def test_row_89_adam_and_the_reported_loss_of_stages(outcome):
    judge_updates(outcome, "adam")
    for rank in outcome.ranks:
        assert rank["loss"] == pytest.approx([67.5, 63.075005, 58.80432], rel=1e-5)


@cases(schedule, "2x1-s2-m2", "4x1-s2", compare=True)
def test_row_51_schedules_of_stages_see_updates(outcome):
    for rank in outcome.ranks:
        assert rank["rates"] == pytest.approx([0.01, 0.005, 0.0025])
        assert rank["w"] == pytest.approx(outcome.plain["w"], rel=1e-5)


def unequal(run):
    """Row 17: the replicas are fed three samples and one; processes without a first stage other rubbish."""
    with run.program():
        x, w, loss, train, _ = regression(run)
        batch = np.split(X, [3])[run.layout.replicas_of(run.rank)[0]] if run.feeds else np.float32([np.nan])
        with run.session() as session:
            value, _ = session.run([loss, train], {x: batch})
            return {"w": float(session.run(w)), "loss": float(value)}


@cases(unequal, "4x1-s2", "2x2-s2")
def test_row_17_every_sample_weighs_the_same_in_stages(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx({"w": 0.45, "loss": 67.5}, rel=1e-5)


def penalized(run):
    """Row 18: a mean over the data in the second stage, a penalty on the weight of the first."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        with run.stage(0):
            w = scalar("w", 2, regularizer=lambda value: 0.1 * tf.square(value))
            y = w * x
        with run.stage(1):
            tf.losses.mean_squared_error(3.0 * x, y)
            loss = run.merge(tf.losses.get_total_loss())
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
        with run.session() as session:
            (value,) = run.train(session, loss, train, [{x: X}])
            return {"loss": value, "w": float(session.run(w))}


@cases(penalized, *STAGES, *REPLICAS)
def test_row_18_a_penalty_counts_once_in_stages(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx({"loss": 7.9, "w": 2.146}, rel=1e-5)


def second_order(run):
    """Row 23: mean(f) + mean((df/dx)^2) with f = w x^2 of the first stage."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        with run.stage(0):
            w = scalar("w", 1)
            f = w * tf.square(x)
        with run.stage(1):
            loss = run.merge(tf.reduce_mean(f) + tf.reduce_mean(tf.square(tf.gradients(f, x)[0])))
        train = tf.train.GradientDescentOptimizer(0.001).minimize(loss)
        with run.session() as session:
            (value,) = run.train(session, loss, train, [{x: np.float32([1, 2, 3, 4])}])
            return {"loss": value, "w": float(session.run(w))}


@cases(second_order, *STAGES, *REPLICAS)
def test_row_23_gradients_inside_the_loss_of_stages(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx({"loss": 37.5, "w": 0.9325}, rel=1e-5)


def branch(run, v2):
    """Row 57: each replica or micro-batch takes another branch, in the first stage: a = b = 1, x = [2 | 4]."""
    with run.program(control_flow_v2=v2):
        x, p = tf.placeholder(tf.float32, [None]), tf.placeholder(tf.bool, [None])
        with run.stage(0):
            a, b = scalar("a", 1), scalar("b", 1)
            y = tf.cond(p[0], lambda: a * x, lambda: b * x)
        with run.stage(1):
            loss = tf.reduce_mean(y)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with run.session() as session:
            run.step(session, train, {x: np.float32([2, 4]), p: np.array([True, False])})
            return [float(value) for value in session.run([a, b])]


@cases(branch, "2x1-s2-m2", "1x2-s2-m2", *REPLICAS, v2=False)
def test_row_57_branches_of_stages_v1(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx([0.9, 0.8], rel=1e-5)


@cases(branch, "2x1-s2-m2", "4x1-s2", v2=True)
def test_row_57_branches_of_stages_v2(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx([0.9, 0.8], rel=1e-5)


def two_optimizers(run):
    """Row 6: d of the first stage and g of the second, by an optimizer each: one step of the first, then two of the other."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        with run.stage(0):
            d = scalar("d", 1)
            first = tf.reduce_mean(tf.square(d * x))
        with run.stage(1):
            g = scalar("g", 1)
            second = tf.reduce_mean(tf.square(g * x))
        train_d = tf.train.GradientDescentOptimizer(0.1).minimize(first, var_list=[d])
        train_g = tf.train.GradientDescentOptimizer(0.1).minimize(second, var_list=[g])
        with run.session() as session:
            for train in (train_d, train_g, train_g):
                run.step(session, train, {x: np.float32([1, 2])})
            return [float(value) for value in session.run([d, g])]


@cases(two_optimizers, *STAGES, *REPLICAS)
def test_row_06_two_optimizers_of_stages(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx([0.5, 0.25], rel=1e-5)


def fetched_in_any_order(run):
    """Each rank names what it fetches in an order of its own, as one that comes from a set has."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, 2])
        with run.stage(0):
            first = tf.square(tf.get_variable("a", [2], initializer=tf.ones_initializer()) * x, name="first")
        with run.stage(1):
            loss = run.merge(tf.reduce_mean(tf.get_variable("b", [2], initializer=tf.ones_initializer()) * first))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        fetched = {"first": run.merge(tf.reduce_mean(first)), "loss": loss, "train": train, "b": tf.global_variables()[1]}
        names = sorted(fetched, reverse=run.rank % 2 == 1)
        with run.session() as session:
            rows = np.arange(8, dtype=np.float32).reshape([4, 2])
            found = session.run({name: fetched[name] for name in names}, {x: run.local(rows)} if run.feeds else {x: rows})
            assert list(found) == names
            return {name: np.asarray(found[name]).tolist() for name in ("first", "loss")}


@cases(fetched_in_any_order, "2x1", "4x1-s2", *STAGES, compare=True)
def test_row_49_fetches_may_be_in_another_order_on_each_rank(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx(outcome.plain)
