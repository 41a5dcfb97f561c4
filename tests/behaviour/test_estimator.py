"""Estimators on local devices: the contract, configurations for other distributions, evaluation, export, warm start."""

import gc
import json
import logging
import os
import re
import weakref

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.behaviour.models import W, inputs, model_fn, settings
from tests.equivalence.scripts import X, scalar
from tests.harness.parametrize import cases

W4 = 0.39908516


def serving():
    return tf.estimator.export.TensorServingInputReceiver(tf.placeholder(tf.float32, [None], "x"), {})


def modes(run):
    """What EPL's graph says after training, evaluation (also without a checkpoint) and prediction."""
    from epl.env import Env

    found = []

    def note():
        graph = Env.get().epl_graphs[-1]
        found.append([graph.model_mode, graph.need_parallel])

    with run.program():
        model = tf.estimator.Estimator(model_fn, run.path("untrained"), settings())
        untrained = model.evaluate(inputs(run, False))
        note()
        model = tf.estimator.Estimator(model_fn, run.path("model"), settings())
        model.train(inputs(run, True), max_steps=3)
        note()
        trained = model.evaluate(inputs(run, False))
        note()
        predicted = [float(p["y"]) for p in model.predict(lambda: tf.data.Dataset.from_tensors(np.float32([2, 4])))]
        note()
    return {"found": found, "untrained": [float(untrained[k]) for k in ("w", "loss", "global_step")],
            "trained": [float(trained[k]) for k in ("w", "loss", "global_step")], "predicted": predicted}  # fmt: skip


@cases(modes, "1x2")
def test_modes_of_the_graph(outcome):
    (found,) = outcome.ranks
    assert found["found"] == [["eval", False], ["train", True], ["eval", False], ["infer", False]]
    assert found["untrained"] == pytest.approx([0, 67.5, 0])
    assert found["trained"] == pytest.approx([W[3], 54.690495, 3], rel=1e-5)
    assert found["predicted"] == pytest.approx([2 * W[3], 4 * W[3]], rel=1e-5)


def evaluation_is_local(run):
    """An evaluation whose loss is to be merged over the replicas in training: its own batches are evaluated, once each."""

    def merging(features, labels, mode):
        w = scalar("w", 1)
        loss = tf.reduce_mean(w * features)
        run.merge(loss)
        train = tf.train.GradientDescentOptimizer(0.0).minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)

    seen = []

    def counting():
        dataset = tf.data.Dataset.from_tensor_slices((np.float32([1, 2, 3, 4, 5, 6]), np.zeros(6, np.float32))).batch(2)
        return dataset.map(lambda f, la: (tf.py_func(lambda v: seen.append(1) or v, [f], tf.float32), la))

    with run.program():
        model = tf.estimator.Estimator(merging, run.path("model"), settings())
        return [float(model.evaluate(counting)["loss"]), len(seen)]


@cases(evaluation_is_local, "1x2")
def test_evaluation_runs_on_one_replica(outcome):
    assert outcome.ranks == [[3.5, 3]]


def softmax_regression(features, labels, mode):
    """The contract's model."""
    from epl.env import Env

    logits = tf.layers.dense(features, 10, kernel_initializer=tf.zeros_initializer())
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    if mode == "train" and Env.get().cluster:
        import epl

        epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
    train = tf.train.AdamOptimizer(0.1).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)


class Losses(logging.Handler):
    """The losses that estimators log."""

    def __init__(self):
        super().__init__()
        self.values = []

    def emit(self, record):
        found = re.match(r"loss = (\S+), step", record.getMessage())
        if found:
            self.values.append(float(found[1]))


def mirrored(run):
    """MirroredStrategy before `epl.init`, then EPL on two local devices: the logged losses of ten steps."""
    import epl

    assert epl.Env.get().adapters is None, "this must be the first case of its process"
    random = np.random.RandomState(3)
    features, labels = random.rand(40, 78).astype(np.float32), random.randint(0, 10, 40).astype(np.int64)
    session = tf.ConfigProto(device_count={"CPU": 2}, allow_soft_placement=True)
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])

    def input_fn():
        dataset = tf.data.Dataset.from_tensor_slices((features, labels)).batch(2)
        if epl.Env.get().cluster:
            tf.data.make_one_shot_iterator(dataset).get_next()  # never used
        return dataset

    def train(name, distribution):
        handler = Losses()
        logger = tf.get_logger()
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        config = tf.estimator.RunConfig(run.path(name), 1, log_step_count_steps=1, session_config=session, train_distribute=distribution)
        tf.estimator.Estimator(softmax_regression, config=config).train(input_fn, steps=10)
        logger.removeHandler(handler)
        logger.setLevel(level)
        return handler.values

    found = {"mirrored": train("mirrored", strategy)}
    epl.init(epl.Config({"cluster.devices_per_worker": 2}))
    epl.set_default_strategy(epl.replicate(1))
    found["epl"] = train("epl", None)
    epl.shutdown()
    found["mirrored again"] = train("again", strategy)
    return found


@cases(mirrored, "1x2", isolated=True)
def test_losses_equal_those_of_mirrored_strategy(outcome):
    (found,) = outcome.ranks
    assert len(found["mirrored"]) == 10 and found["mirrored"][0] != found["mirrored"][9]
    assert found["epl"] == pytest.approx(found["mirrored"], abs=1e-6)
    assert found["mirrored again"] == pytest.approx(found["mirrored"], abs=1e-6)


def other_distribution(run):
    """Configurations for another distribution, made before and after `epl.init`: what is warned about, and the result."""
    from absl import logging as absl_logging

    import epl

    epl.shutdown()
    warnings, original = [], absl_logging.warning
    absl_logging.warning = lambda text, *rest: warnings.append(text % rest)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"chief": ["a:1"], "worker": ["b:2"]}, "task": {"type": "worker", "index": 0}})
    try:
        before = tf.estimator.RunConfig(run.path("early"), save_checkpoints_steps=2)
        del os.environ["TF_CONFIG"]
        early = tf.estimator.Estimator(model_fn, config=before)
        with run.program():
            options = {"train_distribute": tf.distribute.MirroredStrategy(["/cpu:0"]), "device_fn": lambda op: "/job:nowhere/device:CPU:7"}
            os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}, "model_dir": "x"})
            config = tf.estimator.RunConfig(**options)
            kept = json.loads(os.environ.pop("TF_CONFIG"))["task"]["index"]
            late = tf.estimator.Estimator(model_fn, run.path("late"), tf.estimator.RunConfig(save_checkpoints_steps=2, **options))
            weights = []
            for model in (early, late):
                tf.estimator.train_and_evaluate(
                    model, tf.estimator.TrainSpec(inputs(run, True), max_steps=3), tf.estimator.EvalSpec(inputs(run, False), steps=None)
                )
                weights.append(float(model.get_variable_value("w")))
            return {"warnings": warnings, "weights": weights, "chief": config.is_chief, "model_dir": config.model_dir, "kept": kept}
    finally:
        absl_logging.warning = original
        os.environ.pop("TF_CONFIG", None)


@cases(other_distribution, "1x2")
def test_other_distributions_are_ignored_with_one_warning(outcome):
    (found,) = outcome.ranks
    assert found["weights"] == pytest.approx([W[3]] * 2, rel=1e-5)
    assert found["chief"] and found["model_dir"] == "x" and found["kept"] == 1
    (warning,) = (text for text in found["warnings"] if "ignored" in text)
    assert "train_distribute" in warning and "device_fn" in warning and "TF_CONFIG" in warning


def whole_life(run):
    """Training with early returns, hooks of the spec, evaluations by a hook and by train_and_evaluate, exports, a warm start."""
    calls = []

    class Note(tf.train.SessionRunHook):
        def __init__(self, name):
            self.name = name

        def end(self, session):
            calls.append(self.name)

    def hooked(features, labels, mode):
        spec = model_fn(features, labels, mode)
        return spec._replace(training_hooks=[Note("train")], training_chief_hooks=[Note("chief")], evaluation_hooks=[Note("eval")])

    with run.program():
        model = tf.estimator.Estimator(hooked, run.path("model"), settings())
        for last in (2, 2):
            model.train(inputs(run, True), max_steps=last)
        in_memory = tf.estimator.experimental.InMemoryEvaluatorHook(model, inputs(run, False), every_n_iter=1)
        model.train(inputs(run, True), hooks=[in_memory], max_steps=3)
        metrics, exports = tf.estimator.train_and_evaluate(
            model,
            tf.estimator.TrainSpec(inputs(run, True), max_steps=4),
            tf.estimator.EvalSpec(inputs(run, False), steps=None, exporters=tf.estimator.LatestExporter("latest", serving), throttle_secs=0),
        )
        by_hand = model.export_saved_model(run.path("export"), serving)
        warm = tf.estimator.Estimator(model_fn, run.path("warm"), settings(), warm_start_from=run.path("model"))
        warm.train(lambda: inputs(run, True)().map(lambda x, y: (0.0 * x, 0.0 * y)), steps=1)
        return {"calls": calls, "metrics": [float(metrics["w"]), int(metrics["global_step"])], "warm": float(warm.get_variable_value("w")),
                "exports": [os.path.exists(os.path.join(path.decode(), "saved_model.pb")) for path in exports + [by_hand]]}  # fmt: skip


@cases(whole_life, "1x2", "1x2-m2run")
def test_the_life_of_an_estimator(outcome):
    (found,) = outcome.ranks
    assert found["metrics"] == [pytest.approx(W4, rel=1e-5), 4]
    assert found["warm"] == pytest.approx(W4, rel=1e-5)
    assert found["exports"] == [True, True]
    assert found["calls"].count("train") == found["calls"].count("chief") == 3 and "eval" in found["calls"]


def many_evaluations(run):
    """How many of the graphs of ten evaluations are still in memory."""
    graphs = []

    def watched(features, labels, mode):
        graphs.append(weakref.ref(tf.get_default_graph()))
        return model_fn(features, labels, mode)

    with run.program():
        model = tf.estimator.Estimator(watched, run.path("model"), settings())
        for _ in range(10):
            model.evaluate(inputs(run, False))
            list(model.predict(lambda: tf.data.Dataset.from_tensors(X)))
        gc.collect()
        return [len(graphs), sum(graph() is not None for graph in graphs)]


@cases(many_evaluations, "1x2")
def test_graphs_of_evaluations_are_freed(outcome):
    (made, alive), = outcome.ranks
    assert made == 20 and alive <= 2
