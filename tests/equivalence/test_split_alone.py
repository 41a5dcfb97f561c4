"""Models that are split as a whole: the devices of a group compute one batch together."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.test_split import ROWS, block, checkpoints, classifier, datasets, dense, finish, judge, language_model
from tests.harness.context import variables
from tests.harness.parametrize import cases

ALL = ("1x2-a2", "1x3-a3", "4x1-a2", "2x1-a2-m2", "1x4-a2-m2")


@cases(classifier, "2x1-a2", "2x2-a2", classes=103, how="momentum", clip=0.3, compare=True)
def test_classifier_with_clipped_gradients(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(classifier, *ALL, classes=103, how="momentum", clip=0.3, compare=True)
def test_classifier_in_more_layouts(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(block, "1x2-a2", "2x1-a2", "4x1-a2", how="momentum", compare=True)
def test_transformer_block(outcome):
    judge(outcome)


@cases(language_model, "1x2-a2", "4x1-a2", how="adagrad", compare=True)
def test_tied_embedding_with_sparse_gradients(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(language_model, "2x1-a2", "2x1-a2-m2", how="adagrad", compare=True)
def test_tied_embedding_in_more_layouts(outcome):
    judge(outcome)


@cases(datasets, "1x2-a2", "4x1-a2", compare=True)
def test_datasets_with_a_smaller_last_batch(outcome):
    judge(outcome)


@cases(checkpoints, "2x1-a2", "1x3-a3", compare=True)
def test_a_checkpoint_has_whole_variables(outcome):
    for rank in outcome.ranks:
        assert rank["saved"] == outcome.plain["saved"]
        np.testing.assert_allclose(rank["first"], outcome.plain["first"], rtol=1e-5)
        np.testing.assert_allclose(rank["again"], rank["first"], rtol=1e-6)


def beside(run):
    """A part on one device of each group, `replicate(1)`, and a split part on all of them."""
    with run.program({"cluster.colocate_split_and_replicate": True}, annotate="none"):
        if not run.plain:
            import epl

            epl.set_default_strategy(epl.replicate(1))
        x, y = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.int64, [None])
        h = tf.nn.relu(dense(x, 8, "features"))
        with run.split():
            logits = dense(h, 11, "head")
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        feeds = [
            {x: np.random.RandomState(step).randn(ROWS, 6).astype(np.float32), y: np.random.RandomState(step).randint(0, 11, ROWS)}
            for step in range(4)
        ]
        return finish(run, loss, feeds)


@cases(beside, "2x1-a2", "1x4-a2", compare=True)
def test_a_replicated_part_on_one_device(outcome):
    judge(outcome)


def collected(run):
    """Fetches that are merged over all groups count each batch once."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, 6])
        with run.split():
            h = dense(x, 8, "up")
            loss = tf.reduce_mean(tf.square(dense(h, 6, "down") - x))
        rows, total, norm = tf.reduce_sum(x, 1), tf.reduce_sum(x), tf.reduce_mean(h)
        for tensor, how in ((rows, "GLOBAL_CONCAT_OBJECTS"), (total, "GLOBAL_SUM_OBJECTS"), (norm, "GLOBAL_MEAN_OBJECTS")):
            run.merge(tensor, how)
        run.merge(loss)
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        pairs = optimizer.compute_gradients(loss)
        train = optimizer.apply_gradients(pairs)
        with run.session() as session:
            value = np.random.RandomState(1).randn(ROWS, 6).astype(np.float32)
            (found,) = run.step(session, [rows, total, norm, pairs[0][0], train], {x: value})
            return dict(zip(("rows", "total", "norm", "gradient"), found))


@cases(collected, "4x1-a2", "1x4-a2-m2", "2x1-a2", compare=True)
def test_merged_fetches_and_gradients(outcome):
    judge(outcome)


def noise(run):
    """Dropout, with a seed and without: all devices of a group have the same mask."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, 6])
        with run.split():
            up = tf.nn.relu(dense(x, 8, "up"))
            seeded = tf.nn.dropout(up, rate=0.5, seed=5)
            tf.get_default_graph().seed = None  # no seed of the graph from here on
            h = tf.nn.dropout(seeded, rate=0.5)
            loss = tf.reduce_mean(tf.square(dense(h, 6, "down") - 1.0))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with run.session() as session:
            value = run.local(np.random.RandomState(1).randn(ROWS, 6).astype(np.float32))
            found = [session.run([seeded, h, up, loss, train], {x: value})[:4] for _ in range(2)]
            return {"masks": [[seeded != 0, h != 0, up != 0] for seeded, h, up, _ in found], "losses": [f[3] for f in found], **variables(session)}


@cases(noise, "2x1-a2", compare=True)
def test_random_numbers_of_a_group_are_one(outcome):
    first, second = outcome.ranks
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    (seeded, h, up), (seeded_again, _, _) = first["masks"]
    wanted, _, plain_up = outcome.plain["masks"][0]
    np.testing.assert_array_equal(seeded, wanted)
    np.testing.assert_array_equal(up, plain_up)
    assert 0 < h.sum() < seeded.sum() < up.sum()
    assert (seeded != seeded_again).any()
