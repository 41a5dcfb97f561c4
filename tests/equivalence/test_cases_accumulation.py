"""Gradient clipping and accumulation: H1, H6, rows 15, 51, 52, 85 to 87, 89 to 91, 96."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, judge_variables, raises, regression, scalar
from tests.harness.context import variables
from tests.harness.parametrize import cases

TOLERANCE = {"rel": 1e-5, "abs": 1e-6}
ACCUMULATED = ("1x1-m2", "1x1-m2run")


# --- H1 -----------------------------------------------------------------------------------


def clipping(run, after_allreduce=False, aggregate_at="raw"):
    """w after one step on gradients [[6, 8], [0, .5]] that are clipped to norm 1."""
    with run.program({"communication.clip_after_allreduce": after_allreduce, "communication.aggregate_at": aggregate_at}):
        g = tf.placeholder(tf.float32, [None, 2])
        w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
        loss = tf.reduce_mean(tf.reduce_sum(w * g, 1))
        clipped, _ = tf.clip_by_global_norm(tf.gradients(loss, [w]), 1.0)
        train = tf.train.GradientDescentOptimizer(1.0).apply_gradients(zip(clipped, [w]))
        with run.session() as session:
            run.step(session, train, {g: np.float32([[6, 8], [0, 0.5]])})
            return session.run(w)


@cases(clipping, "1x1", "2x1", "1x2", *ACCUMULATED)
def test_row_85_global_clip_sees_the_global_gradient(outcome):
    for w in outcome.ranks:
        np.testing.assert_allclose(w, [-0.57668316, -0.81696784], rtol=1e-5)


@cases(clipping, "2x1", "1x2", *ACCUMULATED, after_allreduce=True)
def test_row_86_clip_after_allreduce(outcome):
    for w in outcome.ranks:
        np.testing.assert_allclose(w, [-0.57668316, -0.81696784], rtol=1e-5)


@cases(clipping, "2x1", "1x2", after_allreduce=True, aggregate_at="apply")
def test_row_86_clip_after_allreduce_has_the_last_word(outcome):
    for w in outcome.ranks:
        np.testing.assert_allclose(w, [-0.57668316, -0.81696784], rtol=1e-5)


@cases(clipping, "2x1", "1x2", aggregate_at="apply")
def test_row_85_local_clip_as_in_the_original(outcome):
    for w in outcome.ranks:
        np.testing.assert_allclose(w, [-0.3, -0.65], rtol=1e-5)


# --- H6 -----------------------------------------------------------------------------------


def fixed_loss(run, positional=False):
    """loss = (1 - w)^2 without any input: w and global step after each of the runs of two steps."""
    with run.program():
        w = scalar("w", 0)
        loss = tf.square(1.0 - w)
        step = tf.train.get_or_create_global_step()
        optimizer = tf.train.GradientDescentOptimizer(0.01)
        if positional:
            train = optimizer.apply_gradients(optimizer.compute_gradients(loss), step)
        else:
            train = optimizer.minimize(loss, global_step=step)
        seen = []
        with run.session() as session:
            for _ in range(2 * run.runs):
                session.run(train)
                seen.append(session.run([w, step]))
    return [[float(w) for w, _ in seen], [int(step) for _, step in seen]]


@cases(fixed_loss, "1x1-m2", "1x2-m2", "2x1-m2")
def test_row_52_weights_and_step_move_on_the_last_run(outcome):
    for w, step in outcome.ranks:
        assert w == pytest.approx([0, 0.02, 0.02, 0.0396], **TOLERANCE)
        assert step == [0, 1, 1, 2]


@cases(fixed_loss, "1x1", "1x1-m2run", "1x2-m2run", "2x1-m2run")
def test_row_52_one_run_is_one_step(outcome):
    for w, step in outcome.ranks:
        assert w == pytest.approx([0.02, 0.0396], **TOLERANCE)
        assert step == [1, 2]


@cases(fixed_loss, "1x1-m2", "2x1-m2run", positional=True)
def test_row_87_positional_global_step(outcome):
    for w, step in outcome.ranks:
        assert w[-1] == pytest.approx(0.0396, **TOLERANCE) and step[-1] == 2


def own_step(run):
    """As in BERT's script, the global step is assigned beside the updates, no gradient leads to it: [rate, step, w] per step."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        w = scalar("w", 0)
        loss = tf.reduce_mean(tf.square(w * x - 3.0 * x))
        step = tf.train.get_or_create_global_step()
        rate = tf.train.polynomial_decay(0.01, step, 10, 0.0)
        train = tf.train.GradientDescentOptimizer(rate).apply_gradients(zip(tf.gradients(loss, [w]), [w]))
        train = tf.group(train, step.assign(step + 1))
        seen = []
        with run.session() as session:
            for _ in range(2):
                rates = [values[0] for values in run.step(session, [rate, train], {x: X})]
                seen.append([float(value) for value in [rates[-1]] + session.run([step, w])])
        return seen


@cases(own_step, "1x1", "1x2", "2x1", "1x1-m2", "2x1-m2", "1x1-m2run", "2x1-m2run")
def test_row_52_a_step_that_the_script_assigns(outcome):
    for seen in outcome.ranks:
        assert np.ravel(seen) == pytest.approx([0.01, 1, 0.45, 0.009, 2, 0.7942500], **TOLERANCE)


def sparse_accumulation(run):
    """A lookup with repeated rows, trained with Momentum."""
    with run.program():
        ids = tf.placeholder(tf.int32, [None])
        table = tf.get_variable("table", [4, 2], initializer=tf.random_normal_initializer(seed=1))
        loss = tf.reduce_mean(tf.square(tf.gather(table, ids) - 1.0))
        train = tf.train.MomentumOptimizer(0.5, 0.9).minimize(loss, global_step=tf.train.get_or_create_global_step())
        with run.session() as session:
            for batch in ([0, 0, 1, 2], [2, 2, 2, 2], [3, 1, 1, 0]):
                run.step(session, train, {ids: np.int32(batch)})
            return variables(session)


@cases(sparse_accumulation, *ACCUMULATED, "2x1-m2", "1x2-m2run", compare=True)
def test_row_87_sparse_gradients_accumulate(outcome):
    judge_variables(outcome)


def updates(run, optimizer):
    """w after each of three updates, and the loss before each."""
    with run.program():
        x, w, loss, train, step = regression(run, optimizer)
        history = {"w": [], "loss": []}
        with run.session() as session:
            for _ in range(3):
                history["loss"] += run.train(session, loss, train, [{x: X}])
                history["w"].append(float(session.run(w)))
            history["step"] = int(session.run(step))
    return history


W = {"sgd": [0.45, 0.8325, 1.157625], "momentum": [0.45, 1.2375, 2.210625], "adam": [0.1, 0.19989696, 0.29961747]}


def judge_updates(outcome, optimizer):
    for rank in outcome.ranks:
        assert rank["w"] == pytest.approx(W[optimizer], **TOLERANCE)
        assert rank["step"] == 3


@cases(updates, "1x1", *ACCUMULATED, "1x2", "2x1", "4x1", "2x1-m2", "2x1-m2run", optimizer="sgd")
def test_row_15_sgd_mean_of_means(outcome):
    judge_updates(outcome, "sgd")


@cases(updates, *ACCUMULATED, "1x2", "2x1", optimizer="momentum")
def test_row_88_momentum(outcome):
    judge_updates(outcome, "momentum")


@cases(updates, *ACCUMULATED, "1x2", "2x1", "2x1-m2", "2x1-m2run", optimizer="adam")
def test_row_89_adam_and_the_reported_loss(outcome):
    judge_updates(outcome, "adam")
    for rank in outcome.ranks:
        assert rank["loss"] == pytest.approx([67.5, 63.075005, 58.80432], rel=1e-5)


SIZES = {"full": (4, 4, 4, 4, 4, 4, 4, 4), "last": (4, 4, 4, 4, 4, 4, 4, 1), "uneven": (4, 1, 2, 4, 3, 1, 4, 2)}
"""How many samples the user's batches of two steps have when a step has four of them, or of four steps with two."""


def uneven_batches(run, sizes, optimizer):
    """A dataset whose batches have the given sizes, in the order in which ranks draw them: per step the loss, the gradients and the variables."""
    batches = run.layout.batches
    data = np.split(np.random.RandomState(3).randn(sum(SIZES[sizes]), 2).astype(np.float32), np.cumsum(SIZES[sizes])[:-1])
    steps = [data[at : at + batches] for at in range(0, len(data), batches)]
    if run.plain:
        mine = [np.concatenate(step) for step in steps]
    else:
        mine = [step[number] for step in steps for part in range(run.runs) for number in run.layout.batches_of(run.rank, part)]
    with run.program():
        rows, counts = tf.constant(np.concatenate(mine)), np.array([len(batch) for batch in mine])
        if sizes == "uneven":
            parts = tf.data.Dataset.from_tensor_slices((np.cumsum(counts) - counts, counts))
            dataset = parts.flat_map(lambda start, count: tf.data.Dataset.from_tensor_slices(rows[start : start + count]).batch(100))
        else:
            dataset = tf.data.Dataset.from_tensor_slices(rows).batch(counts[0])
        x = run.next_batch(dataset)
        w, b = tf.get_variable("w", [2], initializer=tf.ones_initializer()), scalar("b", 0)
        loss = run.merge(tf.reduce_mean(tf.square(tf.reduce_sum(w * x, 1) + b - 3.0 * x[:, 0])))
        rule = tf.train.GradientDescentOptimizer(0.1) if optimizer == "sgd" else tf.train.AdamOptimizer(0.1)
        gradients = tf.gradients(loss, [w, b])
        clipped, norm = tf.clip_by_global_norm(gradients, 1.0)
        train = rule.apply_gradients(zip(clipped, [w, b]), tf.train.get_or_create_global_step())
        history = {"losses": [], "gradients": [], "norms": [], "variables": []}
        with run.session() as session:
            for _ in steps:
                values = run.step(session, [loss, gradients, norm, train])
                history["losses"].append([float(value[0]) for value in values])
                history["gradients"].append(np.concatenate([np.ravel(one) for one in values[-1][1]]))
                history["norms"].append(float(values[-1][2]))
                history["variables"].append(np.concatenate([np.ravel(one) for one in session.run([w, b])]))
    return history


def judge_uneven(outcome, sizes):
    plain, layout_runs = outcome.plain, len(outcome.ranks[0]["losses"][0])
    for rank in outcome.ranks:
        for what in ("gradients", "norms", "variables"):
            if what == "variables" or layout_runs == 1:
                np.testing.assert_allclose(rank[what], plain[what], rtol=1e-5, atol=1e-6, err_msg=what)
        if layout_runs == 1:
            np.testing.assert_allclose(rank["losses"], plain["losses"], rtol=1e-5)
        else:  # each run reports the loss of its own batches
            weights = np.reshape(SIZES[sizes], [-1, layout_runs, len(SIZES[sizes]) // len(rank["losses"]) // layout_runs]).sum(-1)
            means = (np.array(rank["losses"]) * weights).sum(1) / weights.sum(1)
            np.testing.assert_allclose(means, np.ravel(plain["losses"]), rtol=1e-5)
    if sizes != "full":
        assert len({round(float(norm), 3) for norm in plain["norms"]}) > 1


UNEVEN = ("1x2", "2x1", "1x1-m2run", "1x1-m2", "2x1-m2run", "1x2-m2run")


@cases(uneven_batches, *UNEVEN, compare=True, sizes="last", optimizer="sgd")
def test_row_89_a_short_last_batch_weighs_its_samples(outcome):
    judge_uneven(outcome, "last")


@cases(uneven_batches, *UNEVEN, "4x1", compare=True, sizes="uneven", optimizer="adam")
def test_row_89_every_batch_weighs_its_samples(outcome):
    judge_uneven(outcome, "uneven")


@cases(uneven_batches, *UNEVEN, compare=True, sizes="full", optimizer="sgd")
def test_row_89_the_reported_loss_is_the_mean_over_micro_batches(outcome):
    judge_uneven(outcome, "full")


def schedule(run):
    """The learning rate in each run of three steps, and w after them."""
    with run.program():
        step = tf.train.get_or_create_global_step()
        rate = tf.train.exponential_decay(0.01, step, 1, 0.5)
        x, w, _, train, step = regression(run, "sgd", rate)
        with run.session() as session:
            rates = [float(value[0]) for _ in range(3) for value in run.step(session, [rate, train], {x: X})]
            return {"rates": rates, "runs": run.runs, "w": float(session.run(w))}


@cases(schedule, "1x1", *ACCUMULATED, "1x2", "2x1", "2x1-m2", compare=True)
def test_row_51_schedules_see_updates(outcome):
    for rank in outcome.ranks:
        assert rank["rates"] == pytest.approx(list(np.repeat([0.01, 0.005, 0.0025], rank["runs"])))
        assert rank["w"] == pytest.approx(outcome.plain["w"], rel=1e-5)


# --- A10 ----------------------------------------------------------------------------------


def moving_average(run):
    """w and its moving average after each run of a train op that updates both."""
    with run.program():
        w = scalar("w", 0)
        train = tf.train.GradientDescentOptimizer(0.01).minimize(tf.square(1.0 - w))
        average = tf.train.ExponentialMovingAverage(0.5)
        with tf.control_dependencies([train]):
            both = average.apply([w])
        shadow = average.average(w)
        seen = []
        with run.session() as session:
            for _ in range(2 * run.runs):
                session.run(both)
                seen.append([float(value) for value in session.run([w, shadow])])
    return seen


@cases(moving_average, "1x1-m2", "1x2-m2", "2x1-m2")
def test_row_90_moving_average_moves_once_per_update(outcome):
    for seen in outcome.ranks:
        assert np.ravel(seen) == pytest.approx([0, 0, 0.02, 0.01, 0.02, 0.01, 0.0396, 0.0248], **TOLERANCE)


@cases(moving_average, "1x1", "1x1-m2run", "2x1", "1x2-m2run")
def test_row_90_moving_average_in_one_run(outcome):
    for seen in outcome.ranks:
        assert np.ravel(seen) == pytest.approx([0.02, 0.01, 0.0396, 0.0248], **TOLERANCE)


def apply_groups(run, groups, clip):
    """A few layers with clipped gradients, applied in groups."""
    with run.program({"optimizer.num_apply_group": groups}):
        x = h = tf.placeholder(tf.float32, [None, 4])
        for layer in range(4):
            with run.stage(layer // 2):
                h = tf.layers.dense(h, 4, tf.tanh, kernel_initializer=tf.glorot_uniform_initializer(seed=layer), name="layer%d" % layer)
        with run.stage(1):
            loss = tf.reduce_mean(tf.square(h - 1.0))
        optimizer = tf.train.AdamOptimizer(0.01)
        pairs = optimizer.compute_gradients(loss)
        if clip == "norm":
            pairs = [(tf.clip_by_norm(gradient, 0.05), variable) for gradient, variable in pairs]
        else:
            clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.05)
            pairs = list(zip(clipped, [variable for _, variable in pairs]))
        train = optimizer.apply_gradients(pairs, tf.train.get_or_create_global_step())
        with run.session() as session:
            for step in range(4):
                run.step(session, train, {x: np.random.RandomState(step).randn(8, 4).astype(np.float32)})
            return variables(session)


@cases(apply_groups, "2x1", "1x1-m2", compare=True, groups=3, clip="norm")
def test_row_91_apply_groups_keep_the_clip_by_norm(outcome):
    judge_variables(outcome)


@cases(apply_groups, "2x1", "1x1-m2", compare=True, groups=3, clip="global")
def test_row_91_apply_groups_keep_the_global_clip(outcome):
    judge_variables(outcome)


def undividable(run):
    """Six samples fed for four micro-batches."""
    with run.program():
        x, w, loss, train, _ = regression(run)
        with run.session() as session:
            with raises() as caught:
                session.run(train, {x: np.float32([1, 2, 3, 4, 5, 6])})
            return {"errors": caught, "w": float(session.run(w))}


def judge_undividable(outcome):
    for rank in outcome.ranks:
        (error,) = rank["errors"]
        assert "FeedError" in error["types"] and "x" in error["text"] and "6" in error["text"] and "4" in error["text"], error
        assert rank["w"] == 0


@cases(undividable, "1x1-m4run", "1x4")
def test_row_96_undividable_feed_is_an_error(outcome):
    judge_undividable(outcome)
