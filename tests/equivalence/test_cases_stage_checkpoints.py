"""H9 and rows 16, 21, 27, 29, 31, 36 with stages: what they save, what they go on from, how they start and stay equal."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, regression, scalar
from tests.equivalence.test_cases_checkpoints import LOSS4, NAMES, W3, W4, inspect, load_export, resume, train_and_export, train_and_save
from tests.equivalence.test_cases_numerics import judge_grid, recorded_meetings
from tests.harness.context import variables
from tests.harness.parametrize import cases, together
from tests.harness.pool import request

LAYOUTS = ("2x1-s2", "2x1-s2-m2", "1x2-s2-m2", "4x1-s2", "2x2-s2")
SAVED = {layout: request(train_and_save, layout) for layout in LAYOUTS}


def each(function, **inputs):
    """One case in plain TensorFlow for what each layout has left."""
    (name, left), *_ = inputs.items()
    params = [pytest.param(request(function, "1x1", plain=True, inputs={name: request(left, layout)}), id=layout) for layout in LAYOUTS]
    return pytest.mark.parametrize("outcome", params, indirect=True)


@cases(train_and_save, *LAYOUTS)
def test_h9_value_before_saving(outcome):
    for rank in outcome.ranks:
        assert rank["w"] == pytest.approx(W3, rel=1e-5)


@each(inspect, earlier=train_and_save)
def test_h9_plain_tensorflow_reads_the_checkpoint_and_its_graph(outcome):
    (found,) = outcome.ranks
    assert found["names"] == NAMES
    assert found["w"] == pytest.approx(W3, rel=1e-5) and found["meta"] == pytest.approx(W3, rel=1e-5)
    assert found["modules"] == [] == found["ops"]
    assert not [name for name in found["files"] if "part-" in name or "temp" in name], found["files"]


@each(load_export, folder=train_and_export)
def test_h9_plain_tensorflow_loads_the_export(outcome):
    assert outcome.ranks == [pytest.approx(2 * W3, rel=1e-5)]


def losses(run):
    """The losses before four updates, and w after them."""
    with run.program():
        x, w, loss, train, _ = regression(run, "adam")
        with run.session() as session:
            return run.train(session, loss, train, [{x: X}] * 4) + [float(session.run(w))]


@cases(losses, *LAYOUTS)
def test_h9_losses(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx([67.5, 63.075005, 58.80432, LOSS4, W4], rel=1e-5)


def resumed(layout, saved_by, **options):
    saved = request(train_and_save, saved_by, plain=saved_by == "1x1")
    return pytest.param(request(resume, layout, inputs={"earlier": saved}, **options), id="%s-to-%s" % (saved_by, layout))


@pytest.mark.parametrize(
    "outcome",
    [resumed("1x1", layout, plain=True) for layout in LAYOUTS]
    + [resumed(layout, "1x1") for layout in LAYOUTS]
    + [resumed(layout, "2x1-s2-m2") for layout in ("2x1", "1x2", "1x2-s2-m2", "4x1-s2")]
    + [resumed("2x1-s2-m2", layout) for layout in ("2x1", "1x1-m2")],
    indirect=True,
)
def test_h9_training_goes_on(outcome):
    for rank in outcome.ranks:
        assert rank["restored"] == [3, pytest.approx(W3, rel=1e-5)]
        assert (rank["loss"], rank["w"]) == (pytest.approx(LOSS4, rel=1e-5), pytest.approx(W4, rel=1e-5))


def unseeded(run):
    """A net whose variables nothing seeds: (x, step, train)."""
    x = tf.placeholder(tf.float32, [None, 4])
    with run.stage(0):
        h = tf.layers.dense(tf.layers.batch_normalization(x, training=True), 3, name="first")
    with run.stage(1):
        noise = tf.get_variable("noise", [5], initializer=tf.random_uniform_initializer(), trainable=False)
        loss = tf.reduce_mean(tf.square(tf.layers.dense(h, 2, name="second"))) * noise[0]
    step = tf.train.get_or_create_global_step()
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return x, step, tf.train.AdamOptimizer(0.1).minimize(loss, global_step=step)


def saved_unseeded(run):
    """A checkpoint of `unseeded`, after a hundred steps by its global step."""
    with run.program(seed=5):
        _, step, _ = unseeded(run)
        with run.session() as session:
            session.run(step.assign(100))
            return {"path": tf.train.Saver().save(session, run.path("model.ckpt")), "values": variables(session)}


def kept_equal(run, earlier=None):
    """All variables before and after each of four steps, and how often the ranks had met by then to make them equal."""
    with run.program(seed=0):
        x, _, train = unseeded(run)
        saver, history, met = tf.train.Saver(), [], []
        with run.session() as session, recorded_meetings() as entered:
            if earlier is not None:
                saver.restore(session, earlier["path"])
            history.append(variables(session))
            for number in range(4):
                run.step(session, train, {x: np.random.RandomState(number).randn(8, 4).astype(np.float32)})
                met.append(entered.count("synchronize"))
                history.append(variables(session))
            return {"history": history, "met": met}


def judge_kept_equal(outcome, begin):
    first = outcome.ranks[0]["history"]
    assert {"first/kernel", "second/kernel/Adam", "batch_normalization/moving_mean", "noise", "global_step"} <= set(first[0])
    for rank in outcome.ranks:
        assert [int(values["global_step"]) for values in rank["history"]] == [begin + number for number in range(5)]
        # The first values are each process's own until the first step has sent those of the first replica to all.
        for number, values in enumerate(rank["history"][1:], 1):
            for name, value in first[number].items():
                np.testing.assert_array_equal(values[name], value, err_msg="%s after step %d" % (name, number))
        assert rank["met"] == [1] * 4, "once, before the first step"
    kernels = [values["second/kernel"] for values in first]
    assert all(np.abs(one - other).max() > 1e-3 for one, other in zip(kernels, kernels[1:])), "the steps move the weights"


KEPT = ("2x1-s2-m2", "4x1-s2", "2x2-s2")
SAVED_UNSEEDED = request(saved_unseeded, "1x1", plain=True)


@cases(kept_equal, *KEPT)
def test_row_16_replicas_of_stages_start_equal_and_stay_equal(outcome):
    judge_kept_equal(outcome, 0)


@pytest.mark.parametrize("outcomes", [
    pytest.param({"saved": SAVED_UNSEEDED, "found": request(kept_equal, layout, inputs={"earlier": SAVED_UNSEEDED})}, id=layout) for layout in KEPT
], indirect=True)  # fmt: skip
def test_row_16_one_broadcast_after_restoring(outcomes):
    judge_kept_equal(outcomes["found"], 100)
    for rank in outcomes["found"].ranks:
        for name, value in outcomes["saved"].ranks[0]["values"].items():
            np.testing.assert_array_equal(rank["history"][0][name], value, err_msg="%s after restoring" % name)


def save_some(run):
    with tf.Graph().as_default(), tf.Session() as session:
        for name, value in (("w", 5.0), ("v", 0.5)):
            tf.get_variable(name, [], initializer=tf.constant_initializer(value), use_resource=True)
        session.run(tf.global_variables_initializer())
        return tf.train.Saver().save(session, run.path("some"))


def warm_start(run, path, late):
    """`init_from_checkpoint` of a variable of each stage, before or after the training op is built: their values, and the first loss."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        with run.stage(0):
            w = scalar("w", 0)
            y = w * x
        with run.stage(1):
            v = scalar("v", 0)
            loss = run.merge(tf.reduce_mean(tf.square(v * y - 3.0 * x)))
        if not late:
            tf.train.init_from_checkpoint(path, {"w": "w", "v": "v"})
        train = tf.train.AdamOptimizer(0.1).minimize(loss)
        if late:
            tf.train.init_from_checkpoint(path, {"w": "w", "v": "v"})
        with run.session() as session:
            seen = session.run([w, v])
            (value,) = run.train(session, loss, train, [{x: X}])
            return [float(one) for one in seen] + [value]


@pytest.mark.parametrize("outcome", [
    pytest.param(request(warm_start, layout, late=late, inputs={"path": request(save_some, "1x1", plain=True)}), id="%s-%s" % (layout, late))
    for layout, late in (("2x1-s2-m2", False), ("2x1-s2-m2", True), ("1x2-s2-m2", False), ("4x1-s2", True))
], indirect=True)  # fmt: skip
def test_row_36_init_from_checkpoint(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx([5.0, 0.5, 0.25 * 7.5], rel=1e-5)


def small_net(run):
    """Six steps of a two-layer net, one layer a stage, on twelve samples a step."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, 3])
        with run.stage(0):
            h = tf.layers.dense(x, 4, tf.tanh, kernel_initializer=tf.glorot_uniform_initializer(seed=1), name="hidden")
        with run.stage(1):
            out = tf.layers.dense(h, 1, kernel_initializer=tf.glorot_uniform_initializer(seed=2), name="out")
            loss = run.merge(tf.reduce_mean(tf.square(out[:, 0] - x[:, 0] * x[:, 1])))
        train = tf.train.AdamOptimizer(0.01).minimize(loss)
        with run.session() as session:
            found = run.train(session, loss, train, [{x: np.random.RandomState(k).randn(24, 3).astype(np.float32)} for k in range(6)])
            return dict(variables(session), losses=found)


GRID = tuple("%s-s2%s" % (devices, m) for devices in ("2x1", "1x2", "4x1", "1x4") for m in ("", "-m3"))


@together(plain=request(small_net, "1x1", plain=True), **{layout: request(small_net, layout) for layout in GRID})
def test_row_21_results_do_not_depend_on_stages(outcomes):
    judge_grid(outcomes)
