"""Classifiers from the ops for `split` scopes, against the ops of plain TensorFlow."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.test_split import ROWS, judge, optimizer
from tests.harness.context import variables
from tests.harness.parametrize import cases

STEPS = 20


def head(run, h, labels, classes, **options):
    """(loss, predictions, which are right): by EPL's ops in the scope, or by those that they stand for."""
    make = {"kernel_initializer": tf.glorot_uniform_initializer(seed=3)}
    if run.plain:
        logits = tf.layers.dense(h, classes, name="head", **make)
        loss = tf.losses.sparse_softmax_cross_entropy(labels, logits, **options)
        predictions = tf.argmax(logits, -1)
        return loss, predictions, tf.equal(predictions, tf.cast(labels, tf.int64))
    from epl import ops

    with run.split():
        logits = ops.distributed_dense(h, classes, name="head", **make)
        loss = ops.distributed_sparse_softmax_cross_entropy_with_logits(labels, logits, **options)
        predictions = ops.distributed_argmax(logits, -1)
        return loss, predictions, ops.distributed_equal(predictions, labels, "hits")


def batch(step, classes, rows=ROWS):
    """Columns that tell the class, for some."""
    random = np.random.RandomState(step)
    labels = random.randint(0, classes, rows)
    return random.randn(rows, 6).astype(np.float32) + 3 * np.sin(np.outer(labels, np.arange(1, 7))).astype(np.float32), labels


def classifier(run, classes, how, integer="int64", words=False):
    """Steps; losses, gradients of one more step, variables; then accuracy and predictions for batches that are fed, and over all replicas."""
    with run.program():
        x, y = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(integer, [None])
        h, labels = tf.layers.dense(x, 8, tf.nn.relu, name="features", kernel_initializer=tf.glorot_uniform_initializer(seed=1)), y
        if words:
            h, labels = tf.stack([h, -h, tf.square(h)], 1), tf.stack([y, y, y], 1)
        loss, predictions, hits = head(run, h, labels, classes)
        accuracy = tf.reduce_mean(tf.cast(hits, tf.float32))
        merged = run.merge(tf.identity(accuracy))
        joined = run.merge(tf.identity(predictions), "GLOBAL_CONCAT_OBJECTS")
        run.merge(loss)
        made = optimizer(how)
        pairs = made.compute_gradients(loss)
        train = made.apply_gradients(pairs)
        found = {}
        with run.session() as session:
            steps = [dict(zip((x, y), batch(step, classes))) for step in range(STEPS)]
            found["losses"] = run.train(session, loss, train, steps)
            gradients = [g for g, _ in pairs]
            found.update({"gradient of " + v.op.name: g for (_, v), g in zip(pairs, run.step(session, gradients + [train], steps[0])[-1])})
            found.update(variables(session))
            fed = dict(zip((x, y), batch(99, classes, 12)))
            found["accuracy"], found["predictions"], found["hits"] = session.run([accuracy, predictions, hits], fed)
            found["accuracy of all"], found["predictions of all"] = run.step(session, [merged, joined], steps[0])[0]
        return found


@cases(classifier, "2x1-p2", classes=1001, how="adam", compare=True)
def test_classes_with_a_remainder(outcome):
    judge(outcome)
    assert len(set(outcome.plain["predictions"])) > 3


@cases(classifier, "1x3-p3", classes=1001, how="momentum", integer="int32", compare=True)
def test_classes_with_a_remainder_on_three_devices(outcome):
    judge(outcome)


@cases(classifier, "1x2-p2", classes=7, how="adam", compare=True)
def test_few_classes(outcome):
    judge(outcome)
    assert 0 < outcome.plain["accuracy"] < 1


@cases(classifier, "2x1-p2", classes=31, how="momentum", words=True, compare=True)
def test_rows_of_words(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(classifier, "1x2-p2", "1x3-p3", "2x1-p2-m2", "4x1-p2", "2x2-p4", classes=1001, how="adam", compare=True)
def test_more_layouts_with_adam(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(classifier, "2x1-p2", "1x2-p2", "4x1-p4", "1x3-p3", classes=1001, how="momentum", integer="int32", words=True, compare=True)
def test_more_layouts_with_momentum(outcome):
    judge(outcome)


def weighted(run, reduction="weighted_sum_by_nonzero_weights"):
    """Losses of samples that count differently, none of them 0; and one loss for each sample."""
    with run.program():
        x, y = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.int64, [None])
        loss, _, _ = head(run, x, y, 11, weights=0.5 + tf.abs(x[:, 0]), reduction=reduction)
        loss = run.merge(tf.reduce_mean(loss))
        train = optimizer("adam").minimize(loss)
        assert len(tf.losses.get_losses()) == 1
        with run.session() as session:
            return dict(losses=run.train(session, loss, train, [dict(zip((x, y), batch(step, 11))) for step in range(5)]), **variables(session))


@cases(weighted, "2x1-p2", compare=True)
def test_weights(outcome):
    judge(outcome)


@cases(weighted, "1x2-p2", reduction="none", compare=True)
def test_a_loss_for_each_sample(outcome):
    judge(outcome)
