"""Two ranks with estimators: rows 26, 37, 40, 41."""

import glob
import json
import os
import tempfile
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.behaviour.models import W, inputs, model_fn, settings
from tests.equivalence.scripts import judge_variables
from tests.harness.parametrize import cases


def temporary_folder(run):
    """Every rank makes its estimator without a folder, under a TF_CONFIG without a chief, and uses it for everything."""
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": run.rank}})
    with run.program():
        del os.environ["TF_CONFIG"]
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": run.rank}})
        try:
            model = tf.estimator.Estimator(model_fn, config=settings())
        finally:
            del os.environ["TF_CONFIG"]
        model.train(inputs(run, True), steps=2)
        metrics = model.evaluate(inputs(run, False))
        in_memory = tf.estimator.experimental.InMemoryEvaluatorHook(model, inputs(run, False), every_n_iter=1)
        model.train(inputs(run, True), hooks=[in_memory], steps=1)
        predictions = [float(p["y"]) for p in model.predict(lambda: tf.data.Dataset.from_tensors(np.float32([2])))]
        path = model.export_saved_model(
            run.path("export"), lambda: tf.estimator.export.TensorServingInputReceiver(tf.placeholder(tf.float32, [None], "x"), {})
        )
        return {"metrics": {k: float(v) for k, v in metrics.items()}, "predictions": predictions, "path": path.decode(),
                "w": float(model.get_variable_value("w")), "there": os.path.exists(os.path.join(path.decode(), "saved_model.pb"))}  # fmt: skip


@cases(temporary_folder, "2x1")
def test_estimators_share_the_folder_of_rank_0(outcome):
    first, second = outcome.ranks
    for rank in outcome.ranks:
        assert rank["metrics"]["global_step"] == 2 and rank["metrics"]["w"] == pytest.approx(W[2], rel=1e-5)
        assert rank["predictions"] == [pytest.approx(2 * W[3], rel=1e-5)]
        assert rank["w"] == pytest.approx(W[3], rel=1e-5) and rank["there"]
    assert first["path"] == second["path"]


def early_return(run):
    """The checkpoint of a finished training is seen by rank 0 alone."""
    folder = run.path("model") if run.rank == 0 else tempfile.mkdtemp(dir=run.folder)
    with run.program():
        found = []
        for last in (2, 2, 3):
            model = tf.estimator.Estimator(model_fn, folder, settings())
            model.train(inputs(run, True), max_steps=last)
            found.append(int(model.get_variable_value("global_step")))
        return found


@cases(early_return, "2x1")
def test_row_26_all_return_early_or_none(outcome):
    assert outcome.ranks == [[2, 2, 3]] * 2


def evaluations(run):
    """Evaluations after each checkpoint, with an exporter."""
    evaluated = []

    def slow_input():
        evaluated.append(run.rank)
        time.sleep(0.5)
        return inputs(run, False)()

    with run.program():
        model = tf.estimator.Estimator(model_fn, run.path("model"), settings())
        exporter = tf.estimator.FinalExporter(
            "final", lambda: tf.estimator.export.TensorServingInputReceiver(tf.placeholder(tf.float32, [None], "x"), {})
        )
        metrics, exports = tf.estimator.train_and_evaluate(
            model,
            tf.estimator.TrainSpec(inputs(run, True), max_steps=6),
            tf.estimator.EvalSpec(slow_input, steps=None, exporters=[exporter], throttle_secs=0),
        )
        files = glob.glob(run.path("model/eval/events*"))
        return {"metrics": {k: float(v) for k, v in metrics.items()}, "exports": len(exports), "events": len(files), "evaluated": evaluated}


@cases(evaluations, "2x1")
def test_row_40_rank_0_evaluates_while_the_others_wait(outcome):
    first, second = outcome.ranks
    assert first["evaluated"] == [0, 0, 0] and second["evaluated"] == []
    assert first["metrics"] == second["metrics"] and first["metrics"]["global_step"] == 6
    assert first["exports"] == second["exports"] == 1 and first["events"] == 1


def long_evaluation(run):
    """Rank 0 alone evaluates for longer than the stall timeout, while rank 1 is in the next training already."""
    with run.program({"cluster.stall_timeout": 3}):
        model = tf.estimator.Estimator(model_fn, run.path("model"), settings())
        model.train(inputs(run, True), max_steps=2)
        if run.rank == 0:

            def slowly():
                time.sleep(5)
                return inputs(run, False)()

            assert model.evaluate(slowly)["global_step"] == 2
        model.train(inputs(run, True), max_steps=3)
        return float(model.get_variable_value("w"))


@cases(long_evaluation, "2x1", isolated=True)
def test_row_41_rank_0_may_evaluate_for_long(outcome):
    assert outcome.ranks == [pytest.approx(W[3], rel=1e-5)] * 2


def warm_start(run):
    """An estimator that begins with the weight of another one and trains on: everything after its first and its second step."""
    with run.program():
        tf.estimator.Estimator(model_fn, run.path("model"), settings()).train(inputs(run, True), max_steps=3)
        warm = tf.estimator.Estimator(model_fn, run.path("warm"), settings(), warm_start_from=run.path("model"))
        found = {}
        for steps in (1, 2):
            warm.train(inputs(run, True), max_steps=steps)
            found.update({"%s after %d" % (name, steps): warm.get_variable_value(name) for name in warm.get_variable_names()})
        return found


@cases(warm_start, "2x1", "2x1-m2run", compare=True)
def test_warm_start(outcome):
    assert outcome.plain["global_step after 2"] == 2, "the step is not that of the first training"
    assert outcome.plain["w after 1"] == pytest.approx(W[3] + 0.1, abs=1e-3), "the weight is, and Adam begins anew"
    judge_variables(outcome)
