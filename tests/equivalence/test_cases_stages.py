"""The values of other case files, of models cut into two stages.

Where the rows of users' troubles are tested with stages; "matrix" means models of `tests.harness.stage_cover`:

    1, 2, 5, 13, 14, 22, 55, 66, 91, 109, 111           test_stage_semantics
    3, 25, 41, 93, 110                                  tests/behaviour/test_bad_stages
    6, 15, 17, 18, 23, 51, 52, 57, 63 to 65, 85, 86,
        88 to 90, and fetches from sets of 49           here
    7, 8, 11, 12, 82, 96 to 98, 101                     test_cases_stage_rows
    9, 10, 54, 67                                       matrix: loop, lstm, dropout
    16, 21, 27 to 29, 31, 34, 36                        test_cases_stage_checkpoints
    24, 38                                              tests/behaviour/test_stage_checkpoints
    26, 37, 40, 42, 43, 48 to 50                        test_stage_hooks, tests/behaviour/test_stage_estimators
    59 to 62                                            test_stage_sparse; matrix: embedding, tied
    87                                                  test_stage_semantics (positional step); matrix: embedding
    89, 92, 94, 95, 99, 100, 102                        test_stage_input

Rows that have no test with stages:

    4                   ranks with other variables than the rest are refused, as in row 3
    19, 20, 35, 56, 68, 69    `epl.split` inside stages is refused
    30                  a step of a pipeline is one run and needs no accumulators; H9 compares the names in a checkpoint
    32, 33, 44 to 47, 58, 76, 78, 81    TensorFlow 2 style is not distributed; no graph has both scopes and Keras' `fit`
    39, 77, 80, 83, 84, 53, 70 to 75    mixed precision and recomputation are not carried out
    79                  gradients are compressed between replicas, whatever stage they are of: test_cases_compressed
    103 to 108          what happens before there is a graph, or while installing
    112, 113            speed: benchmarks/pipeline.py
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, regression, scalar
from tests.equivalence.test_cases_accumulation import W, schedule, updates
from tests.equivalence.test_cases_batch_norm import judge_one_device
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


@cases(clipping, *STAGES, clip_after_allreduce=True)
def test_row_85_clip_after_allreduce_of_stages(outcome):
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


def batch_norm(run, sync=False, policy="mean"):
    """H4: the loss of each of two steps, the weights and statistics after it, and what a checkpoint has at the end."""
    with run.program({"communication.sync_batch_norm": sync, "communication.statistics_reduce": policy}):
        x, t = tf.placeholder(tf.float32, [None, 1]), tf.placeholder(tf.float32, [None, 1])
        with run.stage(0):
            out = tf.layers.batch_normalization(x, momentum=0.9, training=True, name="bn")
        with run.stage(1):
            loss = run.merge(tf.reduce_mean(tf.square(out - t)))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        saver = tf.train.Saver()
        history = []
        with run.session() as session:
            for _ in range(2):
                (value,) = run.train(session, loss, train, [{x: H4_X[:, None], t: H4_T[:, None]}])
                history.append(dict(short(variables(session)), loss=value))
            path = saver.save(session, run.path("bn.ckpt")) or run.path("bn.ckpt")
        saved = {name: tf.train.load_variable(path, name) for name, _ in tf.train.list_variables(path)}
        return {"history": history, "saved": short(saved)}


H4_X, H4_T = np.float32([1, 2, 3, 6]), np.float32([0, 1, 0, 2])


def short(values):
    return {name.split("/")[-1]: float(np.ravel(value)[0]) for name, value in values.items()}


def by_hand(batches, combined):
    """What `batch_norm` gives if the samples of each batch are normalised together, and their statistics combined to one update or several."""
    mean, variance, gamma, beta, history = 0.0, 1.0, 1.0, 0.0, []
    for _ in range(2):
        moments, errors = [], []
        for x, t in ((H4_X[batch], H4_T[batch]) for batch in batches):
            moments.append([x.mean(), x.var()])
            normal = (x - x.mean()) / np.sqrt(x.var() + 1e-3)
            error = gamma * normal + beta - t
            errors.append([np.mean(error**2), np.mean(2 * error * normal), np.mean(2 * error)])
        updates = {"in turn": moments, "mean": [np.mean(moments, 0)], "first": moments[:1]}[combined]
        for one in updates:
            mean, variance = 0.9 * mean + 0.1 * one[0], 0.9 * variance + 0.1 * one[1]
        loss, slope, shift = np.mean(errors, 0)
        gamma, beta = gamma - 0.1 * slope, beta - 0.1 * shift
        history.append({"loss": loss, "moving_mean": mean, "moving_variance": variance, "gamma": gamma, "beta": beta})
    return history


def judge_statistics(outcome, batches, combined, first):
    """Both steps on all ranks, and the same checkpoint; `first` has the mean and the variance after the first step."""
    history = by_hand(batches, combined)
    assert (history[0]["moving_mean"], history[0]["moving_variance"]) == pytest.approx(first, rel=1e-5)
    for rank in outcome.ranks:
        assert rank["history"] == [pytest.approx(step, rel=1e-5) for step in history]
        # No difference in the last bit: all ranks have what the checkpoint has.
        assert rank["saved"] == {name: value for name, value in rank["history"][-1].items() if name != "loss"} == outcome.ranks[0]["saved"]


@cases(batch_norm, "2x1-s2", "1x2-s2")
def test_row_65_one_micro_batch_of_stages(outcome):
    judge_one_device(outcome._replace(ranks=[rank["history"] for rank in outcome.ranks]))
    judge_statistics(outcome, [[0, 1, 2, 3]], "in turn", (0.3, 1.25))


@cases(batch_norm, "2x1-s2-m2", "1x2-s2-m2")
def test_row_65_one_update_per_micro_batch_of_stages(outcome):
    judge_statistics(outcome, [[0, 1], [2, 3]], "in turn", (0.585, 1.0575))


@cases(batch_norm, *REPLICAS)
def test_row_63_averaged_over_replicas_of_stages(outcome):
    judge_statistics(outcome, [[0, 1], [2, 3]], "mean", (0.30, 1.025))


@cases(batch_norm, *REPLICAS, policy="first")
def test_row_63_statistics_of_the_first_replica_of_stages(outcome):
    judge_statistics(outcome, [[0, 1], [2, 3]], "first", (0.15, 0.925))


@cases(batch_norm, *REPLICAS, sync=True)
def test_row_64_synchronised_statistics_of_stages(outcome):
    judge_statistics(outcome, [[0, 1, 2, 3]], "in turn", (0.3, 1.25))


@cases(batch_norm, "4x1-s2-m2", sync=True)
def test_row_64_synchronised_statistics_of_each_micro_batch(outcome):
    judge_statistics(outcome, [[0, 2], [1, 3]], "in turn", (0.58, 1.3))


@cases(batch_norm, "2x1-s2-m2", sync=True)
def test_row_64_micro_batches_of_one_replica_are_not_synchronised(outcome):
    judge_statistics(outcome, [[0, 1], [2, 3]], "in turn", (0.585, 1.0575))


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
