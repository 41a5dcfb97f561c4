"""What several test files train: the regression of H6 and H9 with Adam, as a graph and as an estimator."""

import os

import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, scalar

W = {1: 0.1, 2: 0.19989696, 3: 0.29961747}
"""The weight of `regression` with Adam after so many steps on `X`."""


def drawn(run, total=100):
    """The regression on a dataset that repeats this rank's part of X: (w, loss, train, step)."""
    mine = run.local(X)
    value = run.next_batch(tf.data.Dataset.from_tensors(mine).repeat(total))
    w = scalar("w", 0)
    loss = tf.reduce_mean(tf.square(w * value - 3.0 * value))
    step = tf.train.get_or_create_global_step()
    return w, loss, tf.train.AdamOptimizer(0.1).minimize(loss, global_step=step), step


def steps_of(folder):
    """The steps of the checkpoints in a folder."""
    return sorted(int(name.split("-")[1].split(".")[0]) for name in os.listdir(folder) if name.endswith(".index"))


class Recorder(tf.train.SessionRunHook):
    """Keeps the steps that the runs end with."""

    def __init__(self, step):
        self.step = step
        self.seen = []

    def after_run(self, run_context, run_values):
        self.seen.append(int(run_context.session.run(self.step)))


def model_fn(features, labels, mode):
    w = scalar("w", 0)
    if mode == "infer":
        outputs = {"serving_default": tf.estimator.export.PredictOutput({"y": w * features})}
        return tf.estimator.EstimatorSpec(mode, predictions={"y": w * features}, export_outputs=outputs)
    loss = tf.reduce_mean(tf.square(w * features - labels))
    train = tf.train.AdamOptimizer(0.1).minimize(loss, global_step=tf.train.get_global_step()) if mode == "train" else None
    metrics = {"w": tf.metrics.mean(w)} if mode == "eval" else None
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train, eval_metric_ops=metrics)


def inputs(run, repeat):
    mine = run.local(X)

    def input_fn():
        dataset = tf.data.Dataset.from_tensor_slices((mine, 3 * mine)).batch(len(mine))
        return dataset.repeat() if repeat else dataset

    return input_fn


def settings(**options):
    return tf.estimator.RunConfig(save_checkpoints_steps=2, log_step_count_steps=None, save_summary_steps=1000, **options)
