"""Checkpoints and exports between layouts and plain TensorFlow: H9, rows 24, 25, 27 to 31, 34, 36, 38.

A checkpoint is written in one case and read in another, in both directions; "plain" cases
run in a process that imports neither EPL nor Horovod.
"""

import os
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, raises, regression, scalar
from tests.harness.context import variables
from tests.harness.parametrize import cases, together
from tests.harness.pool import request

NAMES = ["beta1_power", "beta2_power", "global_step", "w", "w/Adam", "w/Adam_1"]
W3, LOSS4, W4 = 0.29961747, 54.690495, 0.39908516
LAYOUTS = ("2x1", "1x2", "1x1-m2", "1x1-m2run", "2x1-m2", "2x2")


def train_and_save(run):
    """Three updates of the regression with Adam, on the same four samples; returns the checkpoint."""
    with run.program():
        x, w, loss, train, _ = regression(run, "adam")
        saver = tf.train.Saver()
        with run.session() as session:
            run.train(session, loss, train, [{x: X}] * 3)
            path = saver.save(session, run.path("model.ckpt"))
            return {"path": path or run.path("model.ckpt"), "w": float(session.run(w))}


def train_and_export(run):
    """Every rank exports the trained model; returns the folder of the export and the files in it."""
    with run.program():
        x, w, loss, train, _ = regression(run, "adam")
        y = w * x
        with run.session() as session:
            run.train(session, loss, train, [{x: X}] * 3)
            tf.saved_model.simple_save(session, run.path("export"), {"x": x}, {"y": y})
            session.run(w)
            return run.path("export")


def resume(run, earlier):
    """The fourth update from a checkpoint: the loss before it, and w after it."""
    with run.program():
        x, w, loss, train, step = regression(run, "adam")
        saver = tf.train.Saver([variable for variable in tf.global_variables() if variable.op.name in NAMES])
        with run.session() as session:
            saver.restore(session, earlier["path"])
            restored = [int(session.run(step)), float(session.run(w))]
            (value,) = run.train(session, loss, train, [{x: X}])
            return {"restored": restored, "loss": value, "w": float(session.run(w))}


def resume_all(run, earlier):
    """As `resume`, with a saver of all variables, of which the graph may have more than the checkpoint."""
    with run.program():
        x, w, loss, train, _ = regression(run, "adam")
        saver = tf.train.Saver()
        with run.session() as session:
            saver.restore(session, earlier["path"])
            (value,) = run.train(session, loss, train, [{x: X}])
            return {"restored": [3, W3], "loss": value, "w": float(session.run(w))}


def inspect(run, earlier):
    """What plain TensorFlow finds in a checkpoint and in its graph."""
    found = {"names": [name for name, _ in tf.train.list_variables(earlier["path"])]}
    found["w"] = float(tf.train.load_variable(earlier["path"], "w"))
    found["modules"] = sorted({"epl", "horovod"} & set(sys.modules))
    found["files"] = sorted(os.listdir(os.path.dirname(earlier["path"])))
    with tf.Graph().as_default(), tf.Session() as session:
        saver = tf.train.import_meta_graph(earlier["path"] + ".meta")
        saver.restore(session, earlier["path"])
        w = next(variable for variable in tf.global_variables() if variable.op.name == "w")
        found["meta"] = float(session.run(w))
        found["ops"] = sorted({op.type for op in session.graph.get_operations() if op.type.lower().startswith(("horovod", "epl"))})
    return found


def load_export(run, folder):
    """Plain TensorFlow computes w * 2 with an exported model."""
    with tf.Graph().as_default(), tf.Session() as session:
        signature = tf.saved_model.load(session, ["serve"], folder).signature_def["serving_default"]
        return float(session.run(signature.outputs["y"].name, {signature.inputs["x"].name: np.float32([2])})[0])


SAVED = {layout: request(train_and_save, layout) for layout in LAYOUTS}
PLAIN = request(train_and_save, "1x1", plain=True)


@pytest.mark.parametrize("outcomes", [pytest.param({"plain": PLAIN}, id="plain")] + [pytest.param({"epl": one}, id=layout) for layout, one in
                                                                                SAVED.items()], indirect=True)  # fmt: skip
def test_row_29_value_before_saving(outcomes):
    for outcome in outcomes.values():
        for rank in outcome.ranks:
            assert rank["w"] == pytest.approx(W3, rel=1e-5)


@pytest.mark.parametrize(
    "outcome", [pytest.param(request(inspect, "1x1", plain=True, inputs={"earlier": one}), id=layout) for layout, one in SAVED.items()], indirect=True
)
def test_row_31_plain_tensorflow_reads_the_checkpoint(outcome):
    (found,) = outcome.ranks
    assert found["names"] == NAMES
    assert found["w"] == pytest.approx(W3, rel=1e-5)
    assert found["modules"] == []
    assert not [name for name in found["files"] if "part-" in name or "temp" in name], found["files"]


@pytest.mark.parametrize(
    "outcome", [pytest.param(request(inspect, "1x1", plain=True, inputs={"earlier": one}), id=layout) for layout, one in SAVED.items()], indirect=True
)
def test_row_27_plain_tensorflow_loads_the_graph(outcome):
    (found,) = outcome.ranks
    assert found["meta"] == pytest.approx(W3, rel=1e-5)
    assert found["ops"] == []


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(request(load_export, "1x1", plain=True, inputs={"folder": request(train_and_export, layout)}), id=layout)
        for layout in ("1x2", "2x1", "1x1-m2", "2x1-m2run")
    ],
    indirect=True,
)
def test_row_28_plain_tensorflow_loads_the_export(outcome):
    assert outcome.ranks == [pytest.approx(2 * W3, rel=1e-5)]


def judge_resumed(outcome):
    for rank in outcome.ranks:
        assert rank["restored"] == [3, pytest.approx(W3, rel=1e-5)]
        assert rank["loss"] == pytest.approx(LOSS4, rel=1e-5)
        assert rank["w"] == pytest.approx(W4, rel=1e-5)


@pytest.mark.parametrize(
    "outcome", [pytest.param(request(resume, "1x1", plain=True, inputs={"earlier": one}), id=layout) for layout, one in SAVED.items()], indirect=True
)
def test_row_34_plain_tensorflow_resumes(outcome):
    judge_resumed(outcome)


@pytest.mark.parametrize(
    "outcome", [pytest.param(request(resume, layout, inputs={"earlier": PLAIN}), id=layout) for layout in LAYOUTS], indirect=True
)
def test_row_29_a_plain_checkpoint_is_resumed(outcome):
    judge_resumed(outcome)


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(request(resume, after, inputs={"earlier": SAVED[before]}), id="%s-then-%s" % (before, after))
        for before, after in (("2x1", "1x2"), ("2x1", "1x1-m2"), ("1x2", "2x1"), ("1x1-m2", "2x1"), ("2x2", "1x1-m2run"), ("1x1-m2run", "2x2"))
    ],
    indirect=True,
)
def test_row_34_another_layout_resumes(outcome):
    judge_resumed(outcome)


@pytest.mark.parametrize(
    "outcome",
    [pytest.param(request(resume_all, layout, inputs={"earlier": PLAIN}), id=layout) for layout in ("1x1-m2", "2x1-m2", "1x1-m2run")],
    indirect=True,
)
def test_row_30_accumulators_are_optional(outcome):
    judge_resumed(outcome)


def chief_writes(run):
    """All ranks use one checkpoint folder; the files there afterwards."""
    with run.program():
        x, _, _, train, _ = regression(run, "adam")
        with tf.train.MonitoredTrainingSession(checkpoint_dir=run.folder, save_checkpoint_steps=2, log_step_count_steps=None) as session:
            for _ in range(5):
                session.run(train, {x: run.local(X)})
        latest = tf.train.latest_checkpoint(run.folder) if run.rank == 0 else ""
        return {"files": sorted(os.listdir(run.folder)), "latest": os.path.basename(latest or "")}


@cases(chief_writes, "2x1", "1x2")
def test_row_24_only_the_chief_writes(outcome):
    found = outcome.ranks[0]
    assert found["latest"] == "model.ckpt-5"
    assert len([name for name in found["files"] if name.startswith("events.")]) == 1, found["files"]
    kept = {name.split(".")[1] for name in found["files"] if name.endswith(".index")}
    assert kept >= {"ckpt-2", "ckpt-4", "ckpt-5"} and not [name for name in found["files"] if "temp" in name], found["files"]


def chief_restores(run, earlier):
    """Only rank 0 restores; the others start with their own values and get those of rank 0."""
    with run.program():
        x, w, loss, train, _ = regression(run, "adam")
        saver = tf.train.Saver()
        with raises() as caught, run.session() as session:
            if run.rank == 0:
                saver.restore(session, earlier["path"])
            (value,) = run.train(session, loss, train, [{x: X}])
            return {"restored": [3, W3], "loss": value, "w": float(session.run(w))}
        return {"error": caught}


@pytest.mark.parametrize("outcome", [pytest.param(request(chief_restores, "2x1", isolated=True, inputs={"earlier": PLAIN}), id="2x1")], indirect=True)
def test_row_25_a_restore_on_the_chief_reaches_all(outcome):
    judge_resumed(outcome)


def save_five(run):
    with tf.Graph().as_default(), tf.Session() as session:
        tf.get_variable("w", [], initializer=tf.constant_initializer(5.0), use_resource=True)
        session.run(tf.global_variables_initializer())
        return tf.train.Saver().save(session, run.path("five"))


def warm_start(run, path, late):
    """`init_from_checkpoint` before or after the training op is built; the first loss uses the value of the checkpoint."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        w = scalar("w", 0)
        loss = tf.reduce_mean(tf.square(w * x - 3.0 * x))
        if not late:
            tf.train.init_from_checkpoint(path, {"w": "w"})
        train = tf.train.AdamOptimizer(0.1).minimize(loss)
        if late:
            tf.train.init_from_checkpoint(path, {"w": "w"})
        with run.session() as session:
            seen = session.run(w)
            value = session.run([loss, train], {x: run.local(X)})[0]
            return [float(seen), float(value)]


@pytest.mark.parametrize("outcome", [
    pytest.param(request(warm_start, layout, late=late, inputs={"path": request(save_five, "1x1", plain=True)}), id="%s-%s" % (layout, late))
    for layout in ("2x1", "1x2") for late in (False, True)
], indirect=True)  # fmt: skip
def test_row_36_init_from_checkpoint(outcome):
    assert [rank[0] for rank in outcome.ranks] == [5.0] * len(outcome.ranks)
    if len(outcome.ranks) == 2:
        assert np.mean([rank[1] for rank in outcome.ranks]) == pytest.approx(4 * 7.5, rel=1e-5)


def restart(run, interrupted):
    """Eight steps in one session, or four and then four from the checkpoint of a second one."""
    folder = run.path("run")
    steps = (4, 8) if interrupted else (8,)
    losses = []
    for last in steps:
        with run.program():
            x = tf.placeholder(tf.float32, [None, 3])
            h = tf.layers.dense(x, 3, tf.tanh, kernel_initializer=tf.glorot_uniform_initializer(seed=1), name="hidden")
            loss = run.merge(tf.reduce_mean(tf.square(h - 0.5)))
            step = tf.train.get_or_create_global_step()
            train = tf.train.AdamOptimizer(0.05).minimize(loss, global_step=step)
            with tf.train.MonitoredTrainingSession(checkpoint_dir=folder, save_checkpoint_steps=4, log_step_count_steps=None) as session:
                for number in range(int(session.run(step)), last):
                    losses += run.train(session, loss, train, [{x: np.random.RandomState(number).randn(4, 3).astype(np.float32)}])
                values = variables(session)
    return dict({name: value for name, value in values.items() if "accum" not in name}, losses=losses)


@together(whole=request(restart, "1x1", plain=True, interrupted=False), **{layout: request(restart, layout, interrupted=True) for layout in
                                                                       ("2x1", "1x2", "1x1-m2run", "1x1-m2")})  # fmt: skip
def test_row_38_a_restarted_run_equals_an_uninterrupted_one(outcomes):
    expected = outcomes["whole"].ranks[0]
    for layout, outcome in outcomes.items():
        for rank in outcome.ranks:
            for name, value in expected.items():
                np.testing.assert_allclose(rank[name], value, rtol=1e-5, atol=1e-6, err_msg="%s in %s" % (name, layout))
