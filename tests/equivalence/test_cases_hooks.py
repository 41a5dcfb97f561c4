"""Sessions, hooks, summaries, the Estimator: rows 26, 37, 40 to 43, 48, 50."""

import glob
import os
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, regression, scalar
from tests.harness.parametrize import cases

VALUES = {"losses": [67.5, 63.075005, 58.80432], "w": 0.29961747}


def sessions(run, kind):
    """Three updates in a session of some kind."""
    with run.program() as graph:
        x, w, loss, train, _ = regression(run, "adam")
        init = tf.global_variables_initializer()
        steps = [{x: X}] * 3

        def work(session):
            return {"losses": run.train(session, loss, train, steps), "w": float(session.run(w))}

        if kind == "interactive":
            session = tf.InteractiveSession(graph=graph)
            session.run(init)
            found = work(session)
            session.close()
            return found
        if kind == "supervisor":
            supervisor = tf.train.Supervisor(graph=graph, logdir=None, init_op=init, summary_op=None)
            with supervisor.managed_session() as session:
                return work(session)
        if kind == "singular":
            with tf.train.SingularMonitoredSession() as session:
                return work(session)
        with tf.Session(graph=graph, config=tf.ConfigProto(allow_soft_placement=True)) as session:
            init.run()
            return work(session)


@cases(sessions, "1x2", "2x1", "2x1-m2", kind="plain")
def test_row_43_session(outcome):
    judge_values(outcome)


@cases(sessions, "1x2", "2x1", kind="interactive")
def test_row_43_interactive_session(outcome):
    judge_values(outcome)


@cases(sessions, "1x2", "2x1", kind="supervisor")
def test_row_43_supervisor(outcome):
    judge_values(outcome)


@cases(sessions, "1x2", "2x1", "1x1-m2", kind="singular")
def test_row_43_singular_monitored_session(outcome):
    judge_values(outcome)


def judge_values(outcome):
    for rank in outcome.ranks:
        assert rank["losses"] == pytest.approx(VALUES["losses"], rel=1e-5)
        assert rank["w"] == pytest.approx(VALUES["w"], rel=1e-5)


def finalized(run):
    """The number of ops of the user's graph over a hundred runs, and whether it can be finalized."""
    with run.program() as graph:
        x, w, loss, train, step = regression(run)
        counts = set()
        with tf.train.MonitoredTrainingSession(log_step_count_steps=None) as session:
            for number in range(100):
                fetches = {"loss": loss, "w": w} if number % 10 == 9 else [train, loss, (step,)]
                session.run(fetches, {x: run.local(X)})
                counts.add(len(graph.get_operations()))
            return {"finalized": graph.finalized, "counts": sorted(counts)}


@cases(finalized, "1x2", "2x1", "1x1-m2run")
def test_row_48_runs_add_no_ops(outcome):
    for rank in outcome.ranks:
        assert rank["finalized"] and len(rank["counts"]) == 1


def summaries(run):
    """The loss as a summary of each step: the values in the events files, one list per file."""
    folder = run.path("events")
    if run.rank:
        time.sleep(1.1)  # the file's name has seconds: a second writer gets another name
    with run.program():
        x, w, loss, train, _ = regression(run, "adam")
        tf.summary.scalar("loss", loss)
        session = tf.train.MonitoredTrainingSession(checkpoint_dir=folder, save_checkpoint_secs=None, save_summaries_steps=1,
                                                    log_step_count_steps=None)  # fmt: skip
        with session:
            for _ in range(3 * run.runs):
                session.run(train, {x: run.local(X)})
    if run.rank:
        return []
    return [
        [float(tf.make_ndarray(value.tensor) if value.HasField("tensor") else value.simple_value) for event in tf.train.summary_iterator(name)
         for value in event.summary.value if value.tag == "loss"]
        for name in glob.glob(os.path.join(folder, "events*"))
    ]  # fmt: skip


@cases(summaries, "1x1", "2x1", "1x2", "1x1-m2run", "2x1-m2run", compare=True)
def test_row_50_summaries_are_merged_and_written_once(outcome):
    assert outcome.plain == [pytest.approx(VALUES["losses"], rel=1e-5)]
    assert outcome.ranks[0] == [pytest.approx(VALUES["losses"], rel=1e-5)]


# --- Estimator ----------------------------------------------------------------------------


def model_fn(features, labels, mode):
    w = scalar("w", 0)
    if mode == "infer":
        return tf.estimator.EstimatorSpec(mode, predictions={"y": w * features})
    loss = tf.reduce_mean(tf.square(w * features - labels))
    train = tf.train.AdamOptimizer(0.1).minimize(loss, global_step=tf.train.get_global_step()) if mode == "train" else None
    metrics = {"error": tf.metrics.mean(tf.abs(w * features - labels))} if mode == "eval" else None
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train, eval_metric_ops=metrics)


def input_of(run, repeat=True):
    mine = run.local(X)

    def input_fn():
        dataset = tf.data.Dataset.from_tensor_slices((mine, 3 * mine)).batch(len(mine) // run.layout.devices)
        return dataset.repeat() if repeat else dataset

    return input_fn


def estimator(run, name="model", every=2):
    settings = tf.estimator.RunConfig(model_dir=run.path(name), save_checkpoints_steps=every, log_step_count_steps=1000, save_summary_steps=1000)
    return tf.estimator.Estimator(model_fn, config=settings)


def again(run):
    """`train` to a step that the checkpoint has reached already, then to a later one."""
    with run.program():
        model = estimator(run)
        found = []
        for last in (2, 2, 3):
            model.train(input_of(run), max_steps=last)
            found.append(int(model.get_variable_value("global_step")))
        return found + [float(model.get_variable_value("w"))]


@cases(again, "1x2", "2x1")
def test_row_26_training_that_is_finished_already(outcome):
    for rank in outcome.ranks:
        assert rank[:3] == [2, 2, 3] and rank[3] == pytest.approx(VALUES["w"], rel=1e-5)


def train_and_evaluate(run):
    """Checkpoints every two steps, each evaluated."""
    with run.program():
        model = estimator(run)
        spec = tf.estimator.TrainSpec(input_of(run), max_steps=6)
        tf.estimator.train_and_evaluate(model, spec, tf.estimator.EvalSpec(input_of(run, repeat=False), steps=None, throttle_secs=0))
        events = glob.glob(run.path("model/eval/events*"))
        return {"step": int(model.get_variable_value("global_step")), "w": float(model.get_variable_value("w")), "events": len(events)}


@cases(train_and_evaluate, "1x2", "2x1", compare=True)
def test_row_40_train_and_evaluate(outcome):
    for rank in outcome.ranks:
        assert rank["step"] == 6 and rank["w"] == pytest.approx(outcome.plain["w"], rel=1e-5)


@cases(train_and_evaluate, "1x2", "2x1", compare=True)
def test_row_42_evaluation_leaves_events(outcome):
    assert outcome.ranks[0]["events"] >= 1


def chief_evaluates(run):
    """Rank 0 evaluates for longer than the stall timeout while the others already train on."""
    with run.program({"cluster.stall_timeout": 5}):
        model = estimator(run)
        model.train(input_of(run), max_steps=2)
        if run.rank == 0:

            def slowly():
                features, labels = tf.data.make_one_shot_iterator(input_of(run, repeat=False)()).get_next()

                def wait(value):
                    time.sleep(8)
                    return value

                slow = tf.py_func(wait, [features], tf.float32)
                slow.set_shape(features.shape)
                return slow, labels

            model.evaluate(slowly)
        model.train(input_of(run), max_steps=3)
        return float(model.get_variable_value("w"))


@cases(chief_evaluates, "2x1")
def test_row_41_the_chief_may_evaluate_for_long(outcome):
    for w in outcome.ranks:
        assert w == pytest.approx(VALUES["w"], rel=1e-5)


def export(run):
    """Every rank exports the trained model."""
    with run.program():
        model = estimator(run)
        model.train(input_of(run), max_steps=2)

        def receiver():
            x = tf.placeholder(tf.float32, [None])
            return tf.estimator.export.TensorServingInputReceiver(x, {"x": x})

        path = model.export_saved_model(run.path("export"), receiver)
        return {"path": path is not None, "exports": sorted(name for name in os.listdir(run.path("export")) if not name.startswith("temp"))}


@cases(export, "1x2", "2x1")
def test_row_37_exports(outcome):
    assert outcome.ranks[0]["path"] and len(outcome.ranks[0]["exports"]) == 1, outcome.ranks
    assert np.all([len(rank["exports"]) <= 1 for rank in outcome.ranks])
