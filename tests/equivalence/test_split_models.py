"""More models that are split, in more layouts and with more optimizers; their checkpoints between layouts and plain TensorFlow."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.test_split import ROWS, block, classes_of, classifier, dense, finish, judge, language_model, optimizer, tied, transformer
from tests.harness.context import variables
from tests.harness.parametrize import cases
from tests.harness.pool import request


def images(run, deep=False):
    """Convolutions in data parallelism, and a head of many classes that is split; `deep`: a convolution and a pool are split too."""
    x, y = tf.placeholder(tf.float32, [None, 6, 6, 2]), tf.placeholder(tf.int64, [None])
    kernel = tf.get_variable("conv/kernel", [3, 3, 2, 6], initializer=tf.glorot_uniform_initializer(seed=4))
    h = tf.nn.relu(tf.nn.conv2d(x, kernel, strides=[1, 1, 1, 1], padding="SAME"))
    with run.split():
        if deep:
            kernel = tf.get_variable("deep/kernel", [3, 3, 6, 10], initializer=tf.glorot_uniform_initializer(seed=5))
            h = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(h, kernel, strides=[1, 1, 1, 1], padding="VALID")), 2, 2, "VALID")
        h = tf.reshape(h, [-1, int(np.prod(h.shape[1:]))])
        logits = dense(tf.nn.relu(dense(h, 16, "hidden")), 103, "head")
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    feeds = []
    for step in range(5):
        draw = np.random.RandomState(step)
        feeds.append({x: draw.randn(ROWS, 6, 6, 2).astype(np.float32), y: draw.randint(0, 103, ROWS)})
    return loss, feeds


def convolutions(run, how="damped", deep=False):
    with run.program():
        return finish(run, *images(run, deep), how)


@cases(convolutions, "2x1-p2", "1x3-p3", compare=True)
def test_a_split_head_of_convolutions(outcome):
    judge(outcome)


@cases(convolutions, "2x1-p2", compare=True, how="momentum", deep=True)
def test_a_split_convolution(outcome):
    judge(outcome)


def everywhere(function, *layouts, adam="adam", **options):
    """Run the test once for each layout with Momentum and with Adam."""
    pairs = [(layout, how) for layout in layouts for how in ("momentum", adam)]
    params = [pytest.param(request(function, layout, compare=True, how=how, **options), id="%s-%s" % (layout, how)) for layout, how in pairs]
    return pytest.mark.parametrize("outcome", params, indirect=True)


LAYOUTS = ("1x2-p2", "2x1-p2", "2x1-p2-m2", "1x3-p3-m2", "3x1-p3", "1x4-p4", "4x1-p4", "2x2-p4-m2")


@pytest.mark.slow
@everywhere(convolutions, "2x1-p2", "1x2-p2-m2", "1x4-p4", "4x1-p2-m2", "2x2-p4", "3x1-p3", adam="damped")
def test_split_heads_everywhere(outcome):
    judge(outcome)


@pytest.mark.slow
@everywhere(convolutions, "2x1-p2-m2", "1x2-p2", "2x2-p4", "3x1-p3", adam="damped", deep=True)
def test_split_convolutions_everywhere(outcome):
    judge(outcome)


@pytest.mark.slow
@everywhere(classifier, *LAYOUTS, classes=1000)
def test_classifiers_everywhere(outcome):
    judge(outcome)


@pytest.mark.slow
@everywhere(classifier, "2x1-p2-m2", "1x3-p3", "2x2-p4", classes=100001)
def test_very_many_classes_everywhere(outcome):
    judge(outcome)


@pytest.mark.slow
@everywhere(block, *LAYOUTS)
def test_transformer_blocks_everywhere(outcome):
    judge(outcome)


@pytest.mark.slow
@everywhere(language_model, *LAYOUTS)
def test_tied_embeddings_everywhere(outcome):
    judge(outcome)


# --- Checkpoints --------------------------------------------------------------------------

MODELS = {"classes": lambda run: classes_of(run, 103), "transformer": transformer, "tied": tied, "images": images}


def part(run, model, how="adam", earlier=None, first=0, last=2):
    """Steps from a checkpoint or from the beginning, then a checkpoint; all variables before and after the steps."""
    with run.program():
        loss, feeds = MODELS[model](run)
        run.merge(loss)
        train = optimizer(how).minimize(loss, global_step=tf.train.get_or_create_global_step())
        saver = tf.train.Saver()
        with run.session() as session:
            if earlier is not None:
                saver.restore(session, earlier["path"])
            before = variables(session)
            losses = run.train(session, loss, train, feeds[first:last])
            saver.save(session, run.path("model.ckpt"))
            return {"path": run.path("model.ckpt"), "before": before, "losses": losses, "after": variables(session)}


def in_layout(layout, **options):
    """A case in a layout; "plain" is plain TensorFlow."""
    return request(part, "1x1" if layout == "plain" else layout, plain=layout == "plain", **options)


def chain(model, before, after, how="adam"):
    """A parameter: two steps in one layout, two more in another, and four without a break."""
    first = in_layout(before, model=model, how=how)
    then = in_layout(after, model=model, how=how, inputs={"earlier": first}, first=2, last=4)
    whole = in_layout("plain", model=model, how=how, last=4)
    return pytest.param({"first": first, "then": then, "whole": whole}, id="%s-%s-%s-then-%s" % (model, how, before, after))


def judge_chain(outcomes):
    saved, whole = outcomes["first"].ranks[0]["after"], outcomes["whole"].ranks[0]
    for rank in outcomes["then"].ranks:
        assert sorted(rank["before"]) == sorted(saved) == sorted(whole["after"])
        for name, value in saved.items():
            np.testing.assert_array_equal(rank["before"][name], value, err_msg="%s after restoring" % name)
        np.testing.assert_allclose(rank["losses"], whole["losses"][2:], rtol=1e-5)
        for name, value in whole["after"].items():
            np.testing.assert_allclose(rank["after"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


FEW = (("classes", "2x1-p2", "plain"), ("tied", "plain", "1x3-p3"), ("transformer", "2x1-p2", "1x3-p3"))


@pytest.mark.parametrize("outcomes", [chain(*names) for names in FEW], indirect=True)
def test_a_checkpoint_is_resumed_in_another_layout(outcomes):
    judge_chain(outcomes)


PAIRS = (("2x1-p2", "plain"), ("plain", "2x1-p2"), ("1x3-p3", "2x1-p2"), ("2x1-p2-m2", "2x2-p4"), ("2x2-p4", "2x1"))
MANY = [chain(model, *names, how) for model in MODELS for names in PAIRS for how in ("momentum", "adam")]


@pytest.mark.slow
@pytest.mark.parametrize("outcomes", MANY, indirect=True)
def test_checkpoints_are_resumed_in_any_layout(outcomes):
    judge_chain(outcomes)
