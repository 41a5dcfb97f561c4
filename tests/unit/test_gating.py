"""Gates against loops that follow the papers."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.errors import ConfigError
from epl.ops import expert_capacity, top_k_gating


def softmax(logits):
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_hand(logits, k, capacity, normalize):
    """(combine, dispatch, loss, dropped), token by token."""
    groups, tokens, experts = logits.shape
    gates = softmax(logits.astype(np.float64))
    combine = np.zeros((groups, tokens, experts, capacity))
    loss, dropped = 0.0, 0
    for g in range(groups):
        likes = np.argsort(-gates[g], -1, kind="stable")[:, :k]
        taken = np.zeros(experts, int)
        for choice in range(k):
            for s in range(tokens):
                e = likes[s, choice]
                share = gates[g, s, e] / (gates[g, s, likes[s]].sum() if normalize else 1)
                if taken[e] < capacity:
                    combine[g, s, e, taken[e]] = share
                else:
                    dropped += 1
                taken[e] += 1
        first = np.bincount(likes[:, 0], minlength=experts) / tokens
        loss += experts * (first * gates[g].mean(0)).sum() / groups
    return combine, combine > 0, loss, dropped / (groups * tokens * k)


def run(logits, **options):
    with tf.Graph().as_default(), tf.Session() as session:
        return session.run(top_k_gating(tf.constant(logits), **options))


def random_logits(groups=3, tokens=10, experts=4, seed=0):
    return np.random.RandomState(seed).randn(groups, tokens, experts).astype(np.float32)


@pytest.mark.parametrize("normalize", [None, True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("capacity", [1, 2, 4, 10])
def test_choices_places_and_loss(k, capacity, normalize):
    logits = random_logits()
    combine, dispatch, loss, dropped = by_hand(logits, k, capacity, k > 1 if normalize is None else normalize)
    found = run(logits, k=k, capacity=capacity, normalize=normalize)
    np.testing.assert_allclose(found.combine, combine, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(found.dispatch, dispatch)
    assert found.loss == pytest.approx(loss, rel=1e-5) and found.dropped == pytest.approx(dropped, abs=1e-6)


@pytest.mark.parametrize("k", [1, 2])
def test_a_place_has_one_token_and_a_token_k_places(k):
    found = run(random_logits(), k=k, capacity=3)
    assert found.dispatch.sum(1).max() <= 1 and found.dispatch.sum((2, 3)).max() <= k
    assert found.dropped == pytest.approx(1 - found.dispatch.sum() / (3 * 10 * k), abs=1e-6)


def test_groups_do_not_see_each_other():
    logits = random_logits()
    whole = run(logits, k=2)
    for g in range(3):
        one = run(logits[g : g + 1], k=2)
        np.testing.assert_allclose(one.combine[0], whole.combine[g], rtol=1e-6, atol=0)


def test_an_even_load_costs_1_and_a_single_expert_their_number():
    even = np.tile(100.0 * np.eye(4, dtype=np.float32), [1, 2, 1])
    assert run(even, k=1).loss == pytest.approx(1.0)
    assert run(np.tile(np.float32([100, 0, 0, 0]), [1, 8, 1]), k=1).loss == pytest.approx(4.0)


def test_second_choices_differ_from_the_first_where_all_others_have_no_probability():
    logits = np.tile(np.float32([1e4, 0, 0]), [1, 2, 1])
    assert run(logits, k=2, capacity=2).dispatch.sum((0, 1, 3)).tolist() == [2, 2, 0]


def test_gradients_flow_through_probabilities():
    with tf.Graph().as_default(), tf.Session() as session:
        logits = tf.constant(random_logits())
        found = top_k_gating(logits, k=2)
        assert tf.gradients(found.dispatch, logits) == [None]
        for tensor in (found.combine * tf.random.uniform([1, 10, 4, 1], seed=1), found.loss):
            assert np.abs(session.run(tf.gradients(tensor, logits)[0])).max() > 0


def test_a_random_second_choice_follows_its_share():
    logits = np.tile(np.log(np.float32([0.6, 0.2, 0.1, 0.1])), [200, 8, 1])
    found = run(logits, k=2, capacity=8, random_second=True, seed=3)
    assert found.dispatch[:, :, 0].sum() == 1600
    assert found.dispatch[:, :, 1].sum() / 1600 == pytest.approx(2 * 0.25, abs=0.05)
    np.testing.assert_array_equal(run(logits, k=2, capacity=8, random_second=True, seed=3).dispatch, found.dispatch)


@pytest.mark.parametrize(
    "arguments, places",
    [
        ((64, 4), 20),
        ((64, 4, 2), 40),
        ((64, 4, 1, 1.0), 16),
        ((10, 3, 1, 1.0), 4),  # 3.33 are rounded up
        ((10, 3, 1, 1.0, 8), 8),
        ((10, 4, 1, 0.01), 1),
        ((4, 2, 2, 4.0), 4),  # no more than there are tokens
        ((30, 3, 1, 1.1), 11),  # 11.000000000000002
        ((1000, 10, 1, 1.1), 110),
    ],
)
def test_capacity(arguments, places):
    assert expert_capacity(*arguments) == places


@pytest.mark.parametrize(
    "arguments", [dict(tokens=0), dict(experts=2.5), dict(k=True), dict(capacity_factor=0), dict(capacity_factor="2"), dict(multiple=-1)]
)
def test_capacity_of_what_is_out_of_range(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        expert_capacity(**dict(dict(tokens=8, experts=2), **arguments))


@pytest.mark.parametrize(
    "shape, options, text",
    [
        ([2, 8], {}, "groups, tokens, experts"),
        ([2, None, 4], {}, "groups, tokens, experts"),
        ([2, 8, 4], {"k": 5}, "there are 4 experts"),
        ([2, 8, 4], {"k": 0}, "k=0"),
        ([2, 8, 4], {"capacity": 0}, "capacity=0"),
        ([2, 8, 4], {"random_second": True}, "seed"),
        ([2, 8, 4], {"random_second": True, "k": 1, "seed": 1}, "two choices"),
    ],
)
def test_what_does_not_fit_is_refused(shape, options, text):
    with tf.Graph().as_default(), pytest.raises(ConfigError, match=text):
        top_k_gating(tf.placeholder(tf.float32, shape), **options)


def test_other_dtypes():
    with tf.Graph().as_default():
        assert top_k_gating(tf.zeros([2, 8, 4], tf.float16)).combine.dtype == tf.float32
        assert top_k_gating(tf.zeros([2, 8, 4], tf.float64)).combine.dtype == tf.float64
        with pytest.raises(ConfigError, match="floating point"):
            top_k_gating(tf.zeros([2, 8, 4], tf.int32))
