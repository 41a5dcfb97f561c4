"""Estimators and SavedModels of a model whose two stages lie in two processes."""

import contextlib
import glob
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.harness.parametrize import cases, together
from tests.harness.pool import request

ROWS = np.random.RandomState(0).randn(64, 4).astype("f")
LABELS = (ROWS.sum(1) > 0).astype(np.int64)
STEPS = 10


def scope(run):
    import epl

    return contextlib.nullcontext() if run.plain else epl.replicate(device_count=1)


def dense(x, units, name, seed):
    w = tf.get_variable(name + "/w", [x.shape[-1], units], initializer=tf.glorot_uniform_initializer(seed=seed))
    return tf.nn.bias_add(tf.matmul(x, w), tf.get_variable(name + "/b", [units], initializer=tf.zeros_initializer()))


def model_fn(run):
    def build(features, labels, mode):
        with scope(run):
            hidden = tf.nn.relu(dense(features["x"], 8, "first", 1))
        with scope(run):
            logits = dense(hidden, 3, "second", 2)
            if mode == "infer":
                shares = {"p": tf.nn.softmax(logits)}
                outputs = {"serving_default": tf.estimator.export.PredictOutput(shares)}
                return tf.estimator.EstimatorSpec(mode, predictions=shares, export_outputs=outputs)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        tf.summary.scalar("rate", loss)
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, global_step=tf.train.get_global_step()) if mode == "train" else None
        metrics = {"accuracy": tf.metrics.accuracy(labels, tf.argmax(logits, 1))} if mode == "eval" else None
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train, eval_metric_ops=metrics)

    return build


def training_input(run):
    """Each first stage takes batches of 4; the plain script takes those of a step at once."""
    size = 4 * (2 if run.plain else 1)
    return lambda: tf.data.Dataset.from_tensor_slices(({"x": ROWS}, LABELS)).repeat().batch(size)


def evaluation_input():
    return tf.data.Dataset.from_tensor_slices(({"x": ROWS}, LABELS)).batch(7)


def receiver():
    x = tf.placeholder(tf.float32, [None, 4])
    return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})


def estimator(run):
    with run.program({"pipeline.num_micro_batch": 2}, annotate="none"):
        settings = tf.estimator.RunConfig(save_checkpoints_steps=5, log_step_count_steps=None, save_summary_steps=5, tf_random_seed=1)
        model = tf.estimator.Estimator(model_fn(run), run.path("model"), settings)
        metrics, exports = tf.estimator.train_and_evaluate(
            model,
            tf.estimator.TrainSpec(training_input(run), max_steps=STEPS),
            tf.estimator.EvalSpec(evaluation_input, steps=None, exporters=[tf.estimator.FinalExporter("final", receiver)], throttle_secs=0),
        )
        again = model.evaluate(evaluation_input)
        shares = [p["p"].tolist() for p in model.predict(lambda: tf.data.Dataset.from_tensor_slices({"x": ROWS[:9]}).batch(4))]
        names = model.get_variable_names()
        return {
            "metrics": {k: float(v) for k, v in metrics.items()},
            "again": {k: float(v) for k, v in again.items()},
            "shares": shares,
            "variables": {n: model.get_variable_value(n).tolist() for n in names},
            "exports": len(exports),
            "export": (glob.glob(run.path("model/export/final/*")) + [""])[0],
            "events": len(glob.glob(run.path("model/events*"))),
        }


PAIR = {"epl": request(estimator, "2x1"), "plain": request(estimator, "1x1")._replace(plain=True)}


@together(**PAIR)
def test_train_evaluate_predict_as_plain(outcomes):
    (plain,) = outcomes["plain"].ranks
    for rank in outcomes["epl"].ranks:
        assert rank["metrics"]["global_step"] == STEPS and rank["exports"] == 1 and rank["events"] == 1
        assert rank["metrics"] == rank["again"]
        for name, value in plain["metrics"].items():
            assert rank["metrics"][name] == pytest.approx(value, rel=1e-5), name
        np.testing.assert_allclose(rank["shares"], plain["shares"], rtol=1e-5)
        assert sorted(rank["variables"]) == sorted(plain["variables"])
        for name, value in plain["variables"].items():
            np.testing.assert_allclose(rank["variables"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def saved(run):
    """A SavedModel of the session that trains, written by all ranks together."""
    with run.program({"pipeline.num_micro_batch": 2}, annotate="none"):
        x = tf.placeholder(tf.float32, [None, 4], "x")
        with scope(run):
            hidden = tf.nn.relu(dense(x, 8, "first", 1))
        with scope(run):
            y = dense(hidden, 3, "second", 2)
            loss = tf.reduce_mean(tf.square(y))
        train = tf.train.AdamOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {x: ROWS[:8]})
            wanted = session.run(y, {x: ROWS[:3]})
            tf.saved_model.simple_save(session, run.path("saved"), {"x": x}, {"y": y})
    return {"wanted": wanted.tolist(), "files": sorted(os.listdir(run.path("saved/variables"))), "folder": run.path("saved")}


@cases(saved, "2x1")
def test_a_saved_model_has_the_variables_of_all_stages(outcome):
    first, second = outcome.ranks
    assert first["wanted"] == second["wanted"] and first["files"] == second["files"]
    with tf.Graph().as_default(), tf.Session() as session:
        tf.saved_model.load(session, ["serve"], first["folder"])
        found = session.run(next(n for n in ("add:0", "BiasAdd_1:0") if _has(session.graph, n)), {"x:0": ROWS[:3]})
    np.testing.assert_allclose(found, first["wanted"], rtol=1e-5)


def _has(graph, name):
    return name.split(":")[0] in {op.name for op in graph.get_operations()}
