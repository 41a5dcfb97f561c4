"""H1, H4, H6 and H9 in a split scope."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import OPTIMIZERS, SPLIT_DEVICES, SPLIT_RANKS, X
from tests.harness.context import variables
from tests.harness.parametrize import cases
from tests.harness.pool import request


def clipping(run, after_allreduce=False, aggregate_at="raw"):
    """H1, the weights as a matrix of one column that is divided."""
    with run.program({"communication.clip_after_allreduce": after_allreduce, "communication.aggregate_at": aggregate_at}):
        g = tf.placeholder(tf.float32, [None, 2])
        with run.split():
            w = tf.get_variable("w", [2, 1], initializer=tf.zeros_initializer())
            loss = tf.reduce_mean(tf.matmul(g, w))
        clipped, _ = tf.clip_by_global_norm(tf.gradients(loss, [w]), 1.0)
        train = tf.train.GradientDescentOptimizer(1.0).apply_gradients(zip(clipped, [w]))
        with run.session() as session:
            run.step(session, train, {g: np.float32([[6, 8], [0, 0.5]])})
            return session.run(w)[:, 0]


@cases(clipping, SPLIT_RANKS, SPLIT_DEVICES)
def test_row_85_global_clip_sees_the_global_gradient(outcome):
    for w in outcome.ranks:
        np.testing.assert_allclose(w, [-0.57668316, -0.81696784], rtol=1e-5)


@cases(clipping, SPLIT_RANKS, SPLIT_DEVICES, after_allreduce=True)
def test_row_86_clip_after_allreduce(outcome):
    for w in outcome.ranks:
        np.testing.assert_allclose(w, [-0.57668316, -0.81696784], rtol=1e-5)


@cases(clipping, SPLIT_RANKS, SPLIT_DEVICES, aggregate_at="apply")
def test_row_85_local_clip_as_in_the_original(outcome):
    for w in outcome.ranks:
        np.testing.assert_allclose(w, [-0.3, -0.65], rtol=1e-5)


def batch_norm(run, policy="mean"):
    """H4 in a split scope: the moving statistics after a step."""
    with run.program({"communication.statistics_reduce": policy}):
        x, t = tf.placeholder(tf.float32, [None, 1]), tf.placeholder(tf.float32, [None, 1])
        with run.split():
            out = tf.layers.batch_normalization(x, momentum=0.9, training=True, name="bn")
            loss = tf.reduce_mean(tf.square(out - t))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with run.session() as session:
            run.step(session, train, {x: np.float32([[1], [2], [3], [6]]), t: np.float32([[0], [1], [0], [2]])})
            found = variables(session)
            return [float(found["bn/moving_mean"][0]), float(found["bn/moving_variance"][0])]


@cases(batch_norm, SPLIT_RANKS, SPLIT_DEVICES)
def test_row_63_statistics_are_averaged_over_lanes(outcome):
    for found in outcome.ranks:
        assert found == pytest.approx([0.30, 1.025], rel=1e-5)


@cases(batch_norm, SPLIT_RANKS, SPLIT_DEVICES, policy="first")
def test_row_63_statistics_of_the_first_lane(outcome):
    for found in outcome.ranks:
        assert found == pytest.approx([0.15, 0.925], rel=1e-5)


COLUMNS = 4
NAMES = ["beta1_power", "beta2_power", "global_step", "w", "w/Adam", "w/Adam_1"]


def regression(run, optimizer, rate):
    """H6 and H9: y = 3x in each of some columns, whose losses are added; a vector that is made of a divided matrix."""
    x = tf.placeholder(tf.float32, [None], "x")
    with run.split():
        w = tf.get_variable("w", [1, COLUMNS], initializer=tf.zeros_initializer())
        loss = tf.reduce_mean(tf.reduce_sum(tf.square(tf.matmul(x[:, None], w) - 3.0 * x[:, None]), 1))
    run.merge(loss)
    step = tf.train.get_or_create_global_step()
    return x, w, loss, OPTIMIZERS[optimizer](rate).minimize(loss, global_step=step), step


def updates(run, optimizer, rate, steps=3):
    """w after each update, the global step, what is saved."""
    with run.program():
        x, w, loss, train, step = regression(run, optimizer, rate)
        seen, losses = [], []
        with run.session() as session:
            for _ in range(steps):
                losses += run.train(session, loss, train, [{x: X}])
                seen.append(session.run(w))
            found = {"w": seen, "losses": losses, "step": session.run(step), "path": run.path("model.ckpt")}
            tf.train.Saver().save(session, found["path"])
            return found


LAYOUTS = (SPLIT_RANKS, SPLIT_DEVICES, "1x2-p2-m2", "2x2-p4")
H6 = {"sgd": (0.01, [0.45, 0.8325, 1.157625]), "momentum": (0.01, [0.45, 1.2375, 2.210625]), "adam": (0.1, [0.1, 0.19989696, 0.29961747])}


def judge_updates(outcome, how):
    for rank in outcome.ranks:
        np.testing.assert_allclose(np.reshape(rank["w"], [3, COLUMNS]), np.tile(np.float32(H6[how][1])[:, None], [1, COLUMNS]), rtol=1e-5)
        assert rank["losses"][0] == pytest.approx(67.5 * COLUMNS, rel=1e-6) and rank["step"] == 3


@cases(updates, *LAYOUTS[:3], optimizer="sgd", rate=0.01)
def test_row_15_sgd(outcome):
    judge_updates(outcome, "sgd")


@cases(updates, *LAYOUTS[:3], optimizer="momentum", rate=0.01)
def test_row_88_momentum(outcome):
    judge_updates(outcome, "momentum")


@cases(updates, *LAYOUTS, optimizer="adam", rate=0.1)
def test_row_89_adam(outcome):
    judge_updates(outcome, "adam")


def resumed(run, earlier):
    """H9: the fourth update from a checkpoint."""
    with run.program():
        x, w, loss, train, step = regression(run, "adam", 0.1)
        names = [name for name, _ in tf.train.list_variables(earlier["path"])]
        with run.session() as session:
            tf.train.Saver().restore(session, earlier["path"])
            restored = int(session.run(step))
            losses = run.train(session, loss, train, [{x: X}])
            return {"names": names, "step": restored, "loss": losses[0] / COLUMNS, "w": session.run(w)}


FILES = {layout: request(updates, layout, optimizer="adam", rate=0.1) for layout in LAYOUTS}
FILES["plain"] = request(updates, "1x1", plain=True, optimizer="adam", rate=0.1)


def resume(before, after):
    layout = "1x1" if after == "plain" else after
    one = request(resumed, layout, plain=after == "plain", inputs={"earlier": FILES[before]})
    return pytest.param(one, id="%s-then-%s" % (before, after))


ORDERS = "2x1-p2 then plain,2x2-p4 then plain,plain then 2x1-p2,plain then 2x2-p4,2x1-p2 then 2x2-p4,1x2-p2 then 2x1".split(",")


@pytest.mark.parametrize("outcome", [resume(*names.split(" then ")) for names in ORDERS], indirect=True)
def test_row_34_checkpoints_are_resumed_anywhere(outcome):
    for rank in outcome.ranks:
        assert rank["names"] == NAMES and rank["step"] == 3
        assert rank["loss"] == pytest.approx(54.690495, rel=1e-5)
        np.testing.assert_allclose(np.ravel(rank["w"]), [0.39908516] * COLUMNS, rtol=1e-5)
