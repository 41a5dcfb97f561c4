"""Layers of experts that the devices of a group hold together, against plain TensorFlow."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.test_split import dense, judge
from tests.harness.context import variables
from tests.harness.parametrize import cases
from tests.harness.pool import request

ROWS, LENGTH, WIDTH, WORDS, STEPS = 24, 6, 12, 17, 20


def optimizer(how):
    """Adam's epsilon is larger than usual: few tokens reach some weights, and rounding errors of tiny gradients would become steps."""
    return tf.train.AdamOptimizer(0.01, epsilon=1e-4) if how == "adam" else tf.train.MomentumOptimizer(0.01, 0.9)


def norm(h, name):
    mean, variance = tf.nn.moments(h, [-1], keepdims=True)
    gain = tf.get_variable(name + "/gain", [WIDTH], initializer=tf.ones_initializer())
    return (h - mean) * tf.rsqrt(variance + 1e-3) * gain


def attention(h, name):
    query, key, value = (dense(h, WIDTH, "%s/%s" % (name, part), bias=False) for part in ("query", "key", "value"))
    return dense(tf.matmul(tf.nn.softmax(tf.matmul(query, key, transpose_b=True) / np.sqrt(WIDTH)), value), WIDTH, name + "/out")


def feeds_of(tokens, steps=STEPS):
    return [{tokens: np.random.RandomState(step).randint(0, WORDS, [ROWS, LENGTH])} for step in range(steps)]


def language_model(run, tokens, experts, k, layers=1, **options):
    """(loss, predictions): a transformer whose feed-forward layers are experts; only these are in split scopes."""
    from epl.ops import mixture_of_experts

    table = tf.get_variable("table", [WORDS, WIDTH], initializer=tf.random_normal_initializer(stddev=0.5, seed=2))
    h = tf.nn.embedding_lookup(table, tokens)
    balance = 0.0
    for layer in range(layers):
        name = "layer%d" % layer
        h += attention(norm(h, name + "/before"), name)
        x = norm(h, name + "/between")
        with run.split():
            init = tf.glorot_uniform_initializer(seed=4)
            outputs, loss = mixture_of_experts(x, experts, 16, k=k, kernel_initializer=init, gate_initializer=init, name=name + "/experts", **options)
        h += outputs
        balance += loss
    logits = dense(h, WORDS, "head")
    # What each word has to become: the one after it, at the same place of another language.
    wanted = (tokens * 3 + 1) % WORDS
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=wanted, logits=logits)) + 0.01 * balance
    return loss, tf.argmax(logits, -1)


def trained(run, experts, k, how, **options):
    """Steps; the losses, all variables, and predictions for a fed batch afterwards."""
    with run.program():
        tokens = tf.placeholder(tf.int64, [None, LENGTH])
        loss, predictions = language_model(run, tokens, experts, k, **options)
        run.merge(loss)
        train = optimizer(how).minimize(loss)
        with run.session() as session:
            losses = run.train(session, loss, train, feeds_of(tokens))
            found = dict(variables(session), losses=losses)
            return dict(found, predictions=session.run(predictions, {tokens: np.arange(4 * LENGTH).reshape(4, LENGTH) % WORDS}))


@cases(trained, "2x1-p2", experts=4, k=1, how="adam", compare=True)
def test_switch(outcome):
    judge(outcome)
    assert outcome.plain["losses"][-1] < 0.7 * outcome.plain["losses"][0]


@cases(trained, "1x3-p3", experts=6, k=2, how="momentum", compare=True)
def test_gshard(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(trained, "1x2-p2", "1x4-p4", "4x1-p4", "4x1-p2", "2x2-p4", "1x2-p2-m2", "4x1-p4-m2", "2x1-a2", experts=4, k=1, how="adam", compare=True)
def test_switch_in_more_layouts(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(trained, "1x2-p2", "1x3-p3", "2x1-p2", "2x1-p2-m2", "4x1-p4", "2x2-p2", "2x2-p4-m2", experts=6, k=2, how="adam", compare=True)
def test_gshard_in_more_layouts(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(trained, "2x1-p2", "1x3-p3", "1x4-p4", "4x1-p2-m2", experts=6, k=1, how="momentum", compare=True)
def test_switch_with_momentum(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(trained, "2x1-p2", "1x3-p3", experts=6, k=1, how="adam", layers=2, compare=True)
def test_two_layers(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(trained, "2x1-p2", "4x1-p4", experts=4, k=2, how="momentum", capacity_factor=0.5, compare=True)
def test_with_dropped_tokens(outcome):
    judge(outcome)


def on_tokens(run, group_size, scope="experts"):
    """Rows as tokens, several of them a group: the layer alone, or all of the model, in the scope."""
    from epl.ops import MoE

    with run.program():
        x = tf.placeholder(tf.float32, [None, WIDTH])
        init = tf.glorot_uniform_initializer(seed=4)
        layer = MoE(4, 16, k=2, group_size=group_size, kernel_initializer=init, gate_initializer=init, name="experts")
        if scope == "all":
            with run.split():
                outputs, balance = layer(tf.nn.tanh(dense(x, WIDTH, "before")))
                found = dense(outputs, 1, "after")
        else:
            h = tf.nn.tanh(dense(x, WIDTH, "before"))
            with run.split():
                outputs, balance = layer(h)
            found = dense(outputs, 1, "after")
        loss = tf.reduce_mean(tf.square(found - tf.reduce_sum(x, 1, keepdims=True))) + 0.01 * balance
        run.merge(loss), run.merge(layer.gating.dropped)
        train = optimizer("adam").minimize(loss)
        feeds = [{x: np.random.RandomState(step).randn(ROWS, WIDTH).astype(np.float32)} for step in range(STEPS)]
        with run.session() as session:
            losses = run.train(session, loss, train, feeds)
            dropped = np.mean([values[0] for values in run.step(session, [layer.gating.dropped, train], feeds[0])])
            return dict(variables(session), losses=losses, dropped=dropped)


@cases(on_tokens, "2x1-p2-m2", group_size=2, compare=True)
def test_groups_of_rows(outcome):
    judge(outcome)


@cases(on_tokens, "1x3-p3", group_size=4, scope="all", compare=True)
def test_all_of_a_model_in_the_scope(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(on_tokens, "1x2-p2", "4x1-p2", "2x2-p4", "1x2-a2", group_size=6, compare=True)
def test_groups_of_rows_in_more_layouts(outcome):
    judge(outcome)


def saved(run, experts=4, k=2):
    """Some steps and a checkpoint, then more steps."""
    with run.program():
        tokens = tf.placeholder(tf.int64, [None, LENGTH])
        loss, _ = language_model(run, tokens, experts, k)
        run.merge(loss)
        train = optimizer("adam").minimize(loss)
        feeds = feeds_of(tokens, 8)
        with run.session() as session:
            run.train(session, loss, train, feeds[:4])
            path = tf.train.Saver().save(session, run.path("model.ckpt"))
            return {"path": path, "losses": run.train(session, loss, train, feeds[4:])}


def resumed(run, earlier, experts=4, k=2):
    """The steps after the checkpoint."""
    with run.program():
        tokens = tf.placeholder(tf.int64, [None, LENGTH])
        loss, _ = language_model(run, tokens, experts, k)
        run.merge(loss)
        train = optimizer("adam").minimize(loss)
        with run.session() as session:
            tf.train.Saver().restore(session, earlier["path"])
            return dict(variables(session), losses=run.train(session, loss, train, feeds_of(tokens, 8)[4:]), before=earlier["losses"])


SAVED = {layout: request(saved, layout) for layout in ("2x1-p2", "1x3-p3", "4x1-p4")}
PLAIN = request(saved, "1x2", plain=True)


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(request(resumed, "1x2", plain=True, inputs={"earlier": SAVED["2x1-p2"]}), id="2x1-p2-to-plain"),
        pytest.param(request(resumed, "1x2-p2", inputs={"earlier": PLAIN}), id="plain-to-1x2-p2", marks=pytest.mark.slow),
        pytest.param(request(resumed, "1x3", plain=True, inputs={"earlier": SAVED["1x3-p3"]}), id="1x3-p3-to-plain", marks=pytest.mark.slow),
        pytest.param(request(resumed, "1x4", plain=True, inputs={"earlier": SAVED["4x1-p4"]}), id="4x1-p4-to-plain", marks=pytest.mark.slow),
        pytest.param(request(resumed, "2x2-p4", inputs={"earlier": SAVED["4x1-p4"]}), id="4x1-p4-to-2x2-p4", marks=pytest.mark.slow),
        pytest.param(request(resumed, "2x1-p2", inputs={"earlier": request(saved, "1x2-p2")}), id="1x2-p2-to-2x1-p2", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_training_goes_on_from_a_checkpoint(outcome):
    for rank in outcome.ranks:
        np.testing.assert_allclose(rank["losses"], rank["before"], rtol=1e-5, atol=1e-6)


def drawn(run):
    """Two identical runs with random numbers in the gate; and an evaluation without."""
    found = []
    for _ in range(2):
        with run.program():
            tokens = tf.placeholder(tf.int64, [None, LENGTH])
            loss, predictions = language_model(run, tokens, 4, 2, jitter=0.3, random_second=True, seed=5)
            run.merge(loss)
            train = optimizer("adam").minimize(loss)
            with run.session() as session:
                found.append(run.train(session, loss, train, feeds_of(tokens, 4)))
    return found


@cases(drawn, "1x2-p2", compare=True)
def test_random_gates_are_reproducible(outcome):
    for rank in outcome.ranks:
        np.testing.assert_allclose(rank[0], rank[1], rtol=1e-6)
        assert np.abs(np.subtract(rank[0], outcome.plain[0])).max() > 1e-4, "each lane draws its own"
        np.testing.assert_allclose(rank[0], outcome.plain[0], rtol=0.2)
