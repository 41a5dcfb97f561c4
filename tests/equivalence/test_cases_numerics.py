"""Numbers against a single device: rows 13, 14, 16 to 18, 21 to 23, 109, 111."""

import contextlib
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, judge_variables, regression, scalar, traffic
from tests.harness.context import variables
from tests.harness.parametrize import cases, together
from tests.harness.pool import request


def one_gradient(run, method="mean"):
    """loss = mean(w x), x = [1, 3 | 5, 7]: the gradient that is fetched and the one that is applied."""
    with run.program({"communication.gradients_reduce_method": method}):
        x = tf.placeholder(tf.float32, [None])
        w = scalar("w", 1)
        optimizer = tf.train.GradientDescentOptimizer(1.0)
        ((gradient, _),) = pairs = optimizer.compute_gradients(tf.reduce_mean(w * x))
        train = optimizer.apply_gradients(pairs)
        with run.session() as session:
            fetched = run.step(session, [gradient, train], {x: np.float32([1, 3, 5, 7])})
            return {"fetched": float(fetched[-1][0]), "applied": 1 - float(session.run(w))}


@cases(one_gradient, "1x1", "1x2", "2x1", "1x1-m2run", "2x2")
def test_row_13_fetched_and_applied_gradient_are_global(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx({"fetched": 4, "applied": 4}, rel=1e-5)


@cases(one_gradient, "1x1-m2", "2x1-m2")
def test_row_13_accumulated_gradient(outcome):
    for rank in outcome.ranks:
        assert rank["applied"] == pytest.approx(4, rel=1e-5)


@cases(one_gradient, "1x2", "2x1", method="sum")
def test_row_14_sum_over_two_replicas(outcome):
    for rank in outcome.ranks:
        assert rank["applied"] == pytest.approx(8, rel=1e-5)


@cases(one_gradient, "2x2", method="sum")
def test_row_14_sum_over_four_replicas(outcome):
    for rank in outcome.ranks:
        assert rank["applied"] == pytest.approx(16, rel=1e-5)


def unseeded(run):
    """All variables after one step, without any seed."""
    with run.program(seed=0):
        x = tf.placeholder(tf.float32, [None, 4])
        h = tf.layers.dense(tf.layers.batch_normalization(x, training=True), 3, name="dense")
        noise = tf.get_variable("noise", [5], initializer=tf.random_uniform_initializer(), trainable=False)
        step = tf.train.get_or_create_global_step()
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(tf.square(h)) * noise[0], global_step=step)
        with run.session() as session:
            run.step(session, train, {x: np.random.RandomState(0).randn(8, 4).astype(np.float32)})
            return variables(session)


@cases(unseeded, "2x1", "4x1", "2x2")
def test_row_16_replicas_start_equal_and_stay_equal(outcome):
    first = outcome.ranks[0]
    assert {"global_step", "noise", "beta1_power", "dense/kernel/Adam"} <= set(first)
    for rank in outcome.ranks[1:]:
        for name, value in first.items():
            np.testing.assert_array_equal(rank[name], value, err_msg=name)


def kept_equal(run, how, earlier=None):
    """All variables of this rank after each of four steps, without any seed; how often variables were sent to the ranks before each step.

    how: "fresh", or "restored" by rank 0 alone, or "monitored": a monitored session that restores.
    """
    from epl.runtime.adapters.sessions import rank_session

    with run.program(seed=0):
        x = tf.placeholder(tf.float32, [None, 4])
        h = tf.layers.dense(tf.layers.batch_normalization(x, training=True), 3, name="dense")
        noise = tf.get_variable("noise", [5], initializer=tf.random_uniform_initializer(), trainable=False)
        step = tf.train.get_or_create_global_step()
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(tf.square(h)) * noise[0], global_step=step)
        saver = tf.train.Saver()
        sent = []

        def broadcasts(session):
            """How many variables can be sent, and how many times the ranks met to send some."""
            nodes = rank_session(session).store.graph.as_graph_def().node
            return [sum(node.op == "HorovodBroadcast" for node in nodes), entered.count("synchronize")]

        def steps(session, raw, history):
            for number in range(4):
                run.step(session, train, {x: np.random.RandomState(number).randn(8, 4).astype(np.float32)})
                sent.append(broadcasts(raw))
                history.append(variables(raw))

        history = []
        with recorded_meetings() as entered:
            if how == "monitored":
                with tf.train.MonitoredTrainingSession(checkpoint_dir=earlier and earlier["folder"], save_checkpoint_secs=None,
                                                       save_summaries_steps=None, log_step_count_steps=None) as session:  # fmt: skip
                    raw = session._tf_sess()
                    before = variables(raw)
                    steps(session, raw, history)
            else:
                with run.session() as session:
                    before = variables(session)
                    if how == "restored" and run.rank == 0:
                        saver.restore(session, earlier["path"])
                    steps(session, session, history)
        return {"before": before, "history": history, "sent": sent}


@contextlib.contextmanager
def recorded_meetings():
    """The names under which this rank meets the others, in order."""
    from epl.runtime.control import ControlChannel

    entered, original = [], ControlChannel.enter

    def enter(self, program, step):
        entered.append(program)
        return original(self, program, step)

    ControlChannel.enter = enter
    try:
        yield entered
    finally:
        ControlChannel.enter = original


def saved_for_16(run):
    """A checkpoint of a graph like that of `kept_equal`, after a hundred steps by its global step."""
    with run.program(seed=5):
        x = tf.placeholder(tf.float32, [None, 4])
        h = tf.layers.dense(tf.layers.batch_normalization(x, training=True), 3, name="dense")
        noise = tf.get_variable("noise", [5], initializer=tf.random_uniform_initializer(), trainable=False)
        step = tf.train.get_or_create_global_step()
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(tf.square(h)) * noise[0], global_step=step)
        with run.session() as session:
            session.run(train, {x: np.ones([2, 4], np.float32) * [[1], [3]]})
            session.run(step.assign(100))
            path = tf.train.Saver().save(session, run.path("model.ckpt"), global_step=step)
            return {"path": path, "folder": run.folder, "values": variables(session)}


SAVED_FOR_16 = request(saved_for_16, "1x1", plain=True)
NAMES_16 = {"batch_normalization/%s" % name for name in ("gamma", "beta", "moving_mean", "moving_variance", "gamma/Adam", "beta/Adam_1")}


def judge_kept_equal(outcome, begin):
    first = outcome.ranks[0]
    assert NAMES_16 | {"global_step", "noise", "beta1_power", "dense/kernel/Adam"} <= set(first["history"][0])
    for rank in outcome.ranks:
        assert [int(values["global_step"]) for values in rank["history"]] == [begin + number for number in (1, 2, 3, 4)]
        for number, values in enumerate(rank["history"]):
            for name, value in first["history"][number].items():
                np.testing.assert_array_equal(values[name], value, err_msg="%s after step %d" % (name, number + 1))
        assert rank["sent"] == [[len(first["history"][0]), 1]] * 4, "each variable is sent once, before the first step"
    kernels = [values["dense/kernel"] for values in first["history"]]
    assert all(np.abs(one - other).max() > 1e-3 for one, other in zip(kernels, kernels[1:])), "the steps move the weights"


@cases(kept_equal, "2x1", "4x1", how="fresh")
def test_row_16_equal_bits_after_each_step_and_one_broadcast(outcome):
    judge_kept_equal(outcome, 0)
    assert np.any(outcome.ranks[0]["before"]["noise"] != outcome.ranks[1]["before"]["noise"]), "each rank had values of its own"


@cases(kept_equal, "2x1", "4x1", how="monitored")
def test_row_16_monitored_session(outcome):
    judge_kept_equal(outcome, 0)
    for rank in outcome.ranks[1:]:
        for name, value in outcome.ranks[0]["before"].items():
            np.testing.assert_array_equal(rank["before"][name], value, err_msg=name)


@together(
    saved=SAVED_FOR_16,
    chief=request(kept_equal, "2x1", how="restored", inputs={"earlier": SAVED_FOR_16}),
    monitored=request(kept_equal, "2x1", how="monitored", inputs={"earlier": SAVED_FOR_16}),
)
def test_row_16_one_broadcast_after_restoring(outcomes):
    saved = outcomes["saved"].ranks[0]["values"]
    judge_kept_equal(outcomes["chief"], 100)
    judge_kept_equal(outcomes["monitored"], 100)
    for rank in outcomes["monitored"].ranks:
        for name, value in saved.items():
            np.testing.assert_array_equal(rank["before"][name], value, err_msg=name)
    for one, other in zip(outcomes["chief"].ranks, outcomes["monitored"].ranks):
        np.testing.assert_array_equal(one["history"][0]["noise"], saved["noise"])
        for name, value in one["history"][3].items():
            np.testing.assert_array_equal(other["history"][3][name], value, err_msg=name)


def unequal(run, shares):
    """Ranks feed different numbers of samples."""
    with run.program():
        x, w, loss, train, _ = regression(run)
        start = sum(shares[: run.rank])
        batch = X if run.plain else X[start : start + shares[run.rank]]
        with run.session() as session:
            value, _ = session.run([loss, train], {x: batch})
            return {"w": float(session.run(w)), "loss": float(value)}


@cases(unequal, "2x1", shares=(3, 1))
def test_row_17_every_sample_weighs_the_same(outcome):
    for rank in outcome.ranks:
        assert rank["w"] == pytest.approx(0.45, rel=1e-5)
        assert rank["loss"] == pytest.approx(67.5, rel=1e-5)


@cases(unequal, "4x1", shares=(1, 1, 1, 1))
def test_row_17_equal_shares(outcome):
    for rank in outcome.ranks:
        assert rank["w"] == pytest.approx(0.45, rel=1e-5)


def regularized(run):
    """A mean over the data and a penalty on the weight: w = 2, y = 3x, penalty 0.1 w^2."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        w = scalar("w", 2, regularizer=lambda value: 0.1 * tf.square(value))
        tf.losses.mean_squared_error(3.0 * x, w * x)
        loss = tf.losses.get_total_loss()
        run.merge(loss)
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
        with run.session() as session:
            (value,) = run.train(session, loss, train, [{x: X}])
            return {"loss": value, "w": float(session.run(w))}


@cases(regularized, "1x1", "1x2", "2x1", "2x2", "1x1-m2", "1x1-m2run", "2x1-m2run")
def test_row_18_a_penalty_counts_once(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx({"loss": 7.9, "w": 2.146}, rel=1e-5)


def small_net(run):
    """Six steps of a two-layer net on 48 samples a step."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, 3])
        h = tf.layers.dense(x, 4, tf.tanh, kernel_initializer=tf.glorot_uniform_initializer(seed=1), name="hidden")
        out = tf.layers.dense(h, 1, kernel_initializer=tf.glorot_uniform_initializer(seed=2), name="out")
        loss = tf.reduce_mean(tf.square(out[:, 0] - x[:, 0] * x[:, 1]))
        run.merge(loss)
        train = tf.train.AdamOptimizer(0.01).minimize(loss)
        with run.session() as session:
            losses = run.train(session, loss, train, [{x: np.random.RandomState(k).randn(48, 3).astype(np.float32)} for k in range(6)])
            return dict(variables(session), losses=losses)


GRID = ("1x2", "1x3", "2x1", "2x2", "2x3") + tuple("%dx%d-m%d%s" % (ranks, devices, m, how) for ranks in (1, 2) for devices in (1, 2)
                                                   for m in (2, 3, 4) for how in ("", "run"))  # fmt: skip


def judge_grid(outcomes):
    """All ranks of all layouts give what the plain run gives."""
    expected = outcomes["plain"].ranks[0]
    for layout, outcome in outcomes.items():
        for rank in outcome.ranks:
            for name, value in expected.items():
                np.testing.assert_allclose(rank[name], value, rtol=0, atol=1e-6, err_msg="%s in %s" % (name, layout))


@together(plain=request(small_net, "1x1", plain=True), **{layout: request(small_net, layout) for layout in GRID})
def test_row_21_results_do_not_depend_on_the_layout(outcomes):
    judge_grid(outcomes)


def second_order(run):
    """mean(f) + mean((df/dx)^2) with f = w x^2."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        w = scalar("w", 1)
        f = w * tf.square(x)
        loss = tf.reduce_mean(f) + tf.reduce_mean(tf.square(tf.gradients(f, x)[0]))
        run.merge(loss)
        train = tf.train.GradientDescentOptimizer(0.001).minimize(loss)
        with run.session() as session:
            (value,) = run.train(session, loss, train, [{x: np.float32([1, 2, 3, 4])}])
            return {"loss": value, "w": float(session.run(w))}


@cases(second_order, "1x1", "1x2", "2x1", "4x1", "1x1-m2", "1x1-m2run", "2x1-m2run")
def test_row_23_gradients_inside_the_loss_are_forward_code(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx({"loss": 37.5, "w": 0.9325}, rel=1e-5)


def branches(run, steps):
    """Six branches with gradients of their own, ready in an order that differs from rank to rank and from step to step."""
    random, order, slept = np.random.RandomState(run.rank), [], []

    def dawdle(value, number):
        pause = random.rand() * 0.004
        time.sleep(pause)
        slept.append(pause)
        order.append(int(number))
        return value

    with run.program():
        x = tf.placeholder(tf.float32, [None, 6])
        ids = tf.placeholder(tf.int32, [None])
        losses, updates = [], []
        for number in range(6):
            w = tf.get_variable("w%d" % number, [1] if number < 4 else [5, 1], initializer=tf.ones_initializer())
            slow = tf.py_func(dawdle, [x[:, number], number], tf.float32, stateful=False)
            slow.set_shape([None])
            scale = w if number < 4 else tf.gather(w, ids)[:, 0]
            losses.append(run.merge(tf.reduce_mean(tf.square(scale * slow - 2.0))))
            updates.append(tf.train.MomentumOptimizer(0.01, 0.9).minimize(losses[-1], var_list=[w]))
        loss = run.merge(tf.add_n(losses))
        feeds = [{x: np.random.RandomState(step).randn(4, 6).astype(np.float32), ids: np.int32([step % 5, 1, 2, 2])} for step in range(steps)]
        with run.session(threads=6) as session:
            values = run.train(session, loss, updates, feeds[:-1])
            moved = traffic(session, updates, {key: run.local(value) for key, value in feeds[-1].items()})
            # Each run of a step calls the six functions for each replica and micro-batch once.
            calls = np.reshape(order, [steps, -1])
            found = dict(variables(session), losses=np.float32(values))
            if not run.plain:
                found.update({"/moved": moved, "/orders": len({tuple(row) for row in calls}), "/order": order, "/slept": max(slept)})
            return found


def judge_branches(outcome, steps):
    judge_variables(outcome)
    for rank in outcome.ranks:
        reduced = [shapes for collective, shapes in rank["/moved"] if collective == "allreduce" and shapes == [[1]]]
        gathered = [shapes for collective, shapes in rank["/moved"] if collective == "allgather"]
        assert len(reduced) == 4 and len(gathered) == 4, "each branch has its own collective: %s" % rank["/moved"]
        assert rank["/orders"] > 5 and rank["/slept"] > 0.003, "the branches end in orders that vary"
    assert outcome.ranks[0]["/order"] != outcome.ranks[1]["/order"]


@cases(branches, "2x1", "2x2", compare=True, steps=40)
def test_row_109_independent_branches_in_any_order(outcome):
    judge_branches(outcome, 40)


@pytest.mark.slow
@cases(branches, "4x1", compare=True, steps=200)
def test_row_109_many_steps(outcome):
    judge_branches(outcome, 200)


def twice(run):
    """The same training under two `epl.init` in one process."""
    histories = []
    for _ in range(2):
        with run.program():
            x, w, loss, train, _ = regression(run, "adam")
            with run.session() as session:
                losses = run.train(session, loss, train, [{x: X}] * 3)
                histories.append(losses + [float(session.run(w))])
    return histories


@cases(twice, "1x2", "2x1", "2x1-m2")
def test_row_111_two_inits_in_one_process(outcome):
    for rank in outcome.ranks:
        for history in rank:
            assert history == pytest.approx([67.5, 63.075005, 58.80432, 0.29961747], rel=1e-5)
