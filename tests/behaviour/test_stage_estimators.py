"""Estimators and SavedModels of a model with two stages, in two processes or in one."""

import glob
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.test_cases_hooks import in_memory
from tests.harness.layouts import Layout
from tests.harness.many import log_of
from tests.harness.parametrize import cases
from tests.harness.pool import ROOT, environment, find_mpirun
from tests.harness.results import decode, encode

ROWS = np.random.RandomState(0).randn(64, 4).astype("f")
LABELS = (ROWS.sum(1) > 0).astype(np.int64)
STEPS = 10


def dense(x, units, name, seed):
    w = tf.get_variable(name + "/w", [x.shape[-1], units], initializer=tf.glorot_uniform_initializer(seed=seed))
    return tf.nn.bias_add(tf.matmul(x, w), tf.get_variable(name + "/b", [units], initializer=tf.zeros_initializer()))


def model_fn(run):
    def build(features, labels, mode):
        with run.stage(0):
            hidden = tf.nn.relu(dense(features["x"], 8, "first", 1))
        with run.stage(1):
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
    """Each first stage takes batches of 4, replicas in turn; the plain script takes those of a step at once."""
    size = 4 * (run.layout.batches if run.plain else 1)
    readers, mine = (1, 0) if run.plain or run.ranks < 4 else (run.layout.replicas, run.rank // run.layout.width)
    return lambda: tf.data.Dataset.from_tensor_slices(({"x": ROWS}, LABELS)).repeat().batch(size).shard(readers, mine)


def evaluation_input():
    return tf.data.Dataset.from_tensor_slices(({"x": ROWS}, LABELS)).batch(7)


def receiver():
    x = tf.placeholder(tf.float32, [None, 4])
    return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})


def estimator(run):
    with run.program():
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


@cases(estimator, "2x1-s2", "2x1-s2-m2", "1x2-s2-m2", "4x1-s2", compare=True)
def test_train_evaluate_predict_export_as_plain(outcome):
    plain = outcome.plain
    for rank in outcome.ranks:
        assert rank["metrics"]["global_step"] == STEPS and rank["exports"] == 1 and rank["events"] == 1
        assert rank["metrics"] == rank["again"]
        for name, value in plain["metrics"].items():
            assert rank["metrics"][name] == pytest.approx(value, rel=1e-5), name
        np.testing.assert_allclose(rank["shares"], plain["shares"], rtol=1e-5)
        assert sorted(rank["variables"]) == sorted(plain["variables"])
        for name, value in plain["variables"].items():
            np.testing.assert_allclose(rank["variables"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(loaded(rank["export"]), plain["shares"], rtol=1e-5)
    np.testing.assert_allclose(loaded(plain["export"]), plain["shares"], rtol=1e-5)


def loaded(folder):
    """What an exported model gives for the rows that `estimator` predicts."""
    with tf.Graph().as_default(), tf.Session() as session:
        signature = tf.saved_model.load(session, ["serve"], folder).signature_def["serving_default"]
        return session.run(signature.outputs["p"].name, {signature.inputs["x"].name: ROWS[:9]})


def hashed(run):
    """An evaluation in memory, on a rank whose sets have an order of their own."""
    return dict(in_memory(run), hash=hash("w"))


@pytest.mark.ranks
def test_ranks_may_hash_strings_in_their_own_way(tmp_path):
    """Row 49: Python's seed of hashes differs between the ranks of a pipeline, as it does if nobody sets it."""
    case = {"id": "hashed", "function": "%s:hashed" % __name__, "layout": list(Layout.parse("2x1-s2-m2")), "kwargs": {}, "plain": False,
            "timeout": 90, "folder": str(tmp_path)}  # fmt: skip
    job = tmp_path / "job.json"
    job.write_text(encode({"folder": str(tmp_path), "cases": [case]}))
    command = [find_mpirun(), "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    for seed in ("1", "2"):
        command += ["-np", "1", "-x", "PYTHONHASHSEED=" + seed, sys.executable, "-m", "tests.harness.many", str(job), ":"]
    done = subprocess.run(command[:-1], cwd=str(ROOT), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-3000:]
    reports = [[decode(line) for line in open(log_of(str(tmp_path), rank))][1] for rank in (0, 1)]
    first, second = (report["result"] for report in reports)
    assert first.pop("hash") != second.pop("hash")
    for one in (first, second):
        assert [int(found["variables"]["global_step"]) for found in one["evaluated"]] == [0, 2, 4, 5]
        assert [found["error"] for found in one["evaluated"]] == pytest.approx([1.5 * abs(found["variables"]["w"] - 3) for found in one["evaluated"]])
        assert one["losses"] == pytest.approx([67.5, 63.075005, 58.80432, 54.690495, one["losses"][4]], rel=1e-5)
        assert one["final"]["w"] == first["final"]["w"]


def saved(run):
    """A SavedModel of the session that trains, written by all ranks together."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, 4], "x")
        with run.stage(0):
            hidden = tf.nn.relu(dense(x, 8, "first", 1))
        with run.stage(1):
            y = dense(hidden, 3, "second", 2)
            loss = tf.reduce_mean(tf.square(y))
        train = tf.train.AdamOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {x: ROWS[:8]})
            wanted = session.run(y, {x: ROWS[:3]})
            tf.saved_model.simple_save(session, run.path("saved"), {"x": x}, {"y": y})
    return {"wanted": wanted.tolist(), "files": sorted(os.listdir(run.path("saved/variables"))), "folder": run.path("saved")}


@cases(saved, "2x1-s2-m2", "1x2-s2")
def test_a_saved_model_has_the_variables_of_all_stages(outcome):
    first, second = outcome.ranks[0], outcome.ranks[-1]
    assert first["wanted"] == second["wanted"] and first["files"] == second["files"]
    with tf.Graph().as_default(), tf.Session() as session:
        tf.saved_model.load(session, ["serve"], first["folder"])
        found = session.run(next(n for n in ("add:0", "BiasAdd_1:0") if _has(session.graph, n)), {"x:0": ROWS[:3]})
    np.testing.assert_allclose(found, first["wanted"], rtol=1e-5)


def _has(graph, name):
    return name.split(":")[0] in {op.name for op in graph.get_operations()}
