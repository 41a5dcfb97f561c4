"""Layers of experts as plain ops, without EPL."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.errors import ConfigError
from epl.ops import MoE, expert_capacity, mixture_of_experts
from tests.unit.test_gating import by_hand

E, M, H = 4, 6, 5


def values(shape, seed=0):
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def run(x, training=True, **options):
    """(outputs, loss, values of the variables, shares of dropped choices)."""
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(1)
        layer = MoE(E, H, name="moe", **options)
        outputs, loss = layer(tf.constant(x), training=training)
        session.run(tf.global_variables_initializer())
        session.run([v.assign(v + 0.1) for v in tf.global_variables() if "bias" in v.name])
        return session.run([outputs, loss, {v.op.name.split("/")[-1]: v for v in tf.global_variables()}, layer.gating.dropped])


def expected(groups, weights, k, capacity):
    """The layer, expert by expert."""
    combine, dispatch, loss, _ = by_hand(np.einsum("gsm,me->gse", groups, weights["gate"]), k, capacity, k > 1)
    out = np.zeros_like(groups)
    for e in range(E):
        seen = np.einsum("gsc,gsm->gcm", dispatch[:, :, e], groups)
        hidden = np.maximum(seen @ weights["inner_kernel"][e] + weights["inner_bias"][e], 0)
        out += np.einsum("gsc,gcm->gsm", combine[:, :, e], hidden @ weights["outer_kernel"][e] + weights["outer_bias"][e])
    return out, loss


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.5, 1.25, 4.0])
def test_samples_as_groups(k, factor):
    x = values([3, 8, M])
    found, loss, weights, _ = run(x, k=k, capacity_factor=factor)
    out, balance = expected(x, weights, k, expert_capacity(8, E, k, factor))
    np.testing.assert_allclose(found, out, rtol=1e-4, atol=1e-5)
    assert loss == pytest.approx(balance, rel=1e-5)


@pytest.mark.parametrize("shape, size", [([24, M], 8), ([6, 4, M], 8), ([3, 16, M], 8), ([3, 8, M], 8), ([2, 3, 4, M], 12), ([2, 3, 4, M], None)])
def test_groups_of_a_size(shape, size):
    x = values(shape)
    found, _, weights, _ = run(x, k=2, group_size=size)
    out, _ = expected(x.reshape(-1, size or 12, M), weights, 2, expert_capacity(size or 12, E, 2))
    np.testing.assert_allclose(found, out.reshape(shape), rtol=1e-4, atol=1e-5)


def test_a_batch_in_parts_is_the_batch():
    """What makes data parallelism right: groups do not cross batches."""
    x = values([24, M])
    whole = run(x, group_size=8)[0]
    parts = [run(x[i : i + 8], group_size=8)[0] for i in (0, 8, 16)]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-6)


def test_rounding_of_the_capacity():
    with tf.Graph().as_default():
        layer = MoE(E, H, k=1, capacity_multiple=4)
        layer(tf.zeros([2, 10, M]))
        assert layer.gating.combine.shape.as_list() == [2, 10, E, 4]


def test_initial_values_have_the_fans_of_one_expert():
    weights = run(values([1, 8, M]))[2]
    limit = np.sqrt(6.0 / (M + H))
    for name in ("inner_kernel", "outer_kernel"):
        assert 0.9 * limit < np.abs(weights[name]).max() <= limit


def test_dropped_tokens_get_nothing():
    x = np.tile(values([1, 1, M]), [1, 8, 1])
    found, _, _, dropped = run(x, k=1, capacity_factor=0.5)
    assert dropped == pytest.approx(7 / 8) and (np.abs(found[0]).max(-1) > 0).tolist() == [True] + [False] * 7


def test_random_numbers_are_for_training_alone():
    x = values([2, 8, M])
    plain = run(x)[0]
    for options in ({"jitter": 0.5}, {"random_second": True}):
        one, again = (run(x, seed=7, **options)[0] for _ in range(2))
        np.testing.assert_array_equal(one, again)
        assert np.abs(one - plain).max() > 1e-3
        np.testing.assert_array_equal(run(x, training=False, seed=7, **options)[0], plain)


def test_weights_are_shared_by_calls_and_by_name():
    with tf.Graph().as_default():
        layer = MoE(E, H, name="moe")
        layer(tf.zeros([2, 8, M]))
        layer(tf.zeros([3, 8, M]), training=False)
        assert len(tf.global_variables()) == 5 == len(layer.trainable_variables)
        with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
            mixture_of_experts(tf.zeros([2, 8, M]), E, H, name="one", use_bias=False)
            mixture_of_experts(tf.zeros([2, 8, M]), E, H, name="one", use_bias=False)
        assert [v.op.name for v in tf.global_variables()[5:]] == ["model/one/gate", "model/one/inner_kernel", "model/one/outer_kernel"]


def test_unknown_batches_and_other_dtypes():
    with tf.Graph().as_default():
        for shape, size in (([None, 8, M], None), ([None, M], 4), ([None, 3, 4, M], 24)):
            x = tf.placeholder(tf.float64, shape)
            outputs, loss = mixture_of_experts(x, E, H, group_size=size)
            assert outputs.shape.as_list() == shape and outputs.dtype == loss.dtype == tf.float64
        outputs, _ = mixture_of_experts(tf.zeros([2, 8, M], tf.float16), E, H)
        assert outputs.dtype == tf.float16


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(experts=0), "experts=0"),
        (dict(hidden_units=1.5), "hidden_units=1.5"),
        (dict(k=5), "there are 4 experts"),
        (dict(capacity_factor=-1), "capacity_factor"),
        (dict(capacity_multiple=0), "multiple"),
        (dict(group_size=0), "group_size=0"),
        (dict(jitter=1.0, seed=1), "jitter"),
        (dict(jitter=0.1), "seed"),
        (dict(random_second=True), "seed"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(ConfigError, match=text):
        MoE(**dict(dict(experts=E, hidden_units=H), **options))


@pytest.mark.parametrize(
    "shape, size, text",
    [
        ([24, M], None, "group_size"),
        ([M], 2, "group_size"),
        ([2, None, M], None, "all but the first are known"),
        ([2, 8, None], None, "all but the first are known"),
        ([2, 8, M], 3, "whole samples"),
        ([3, 8, M], 16, "whole groups"),
        ([25, M], 8, "whole groups"),
    ],
)
def test_inputs_without_groups(shape, size, text):
    with tf.Graph().as_default(), pytest.raises(ConfigError, match=text):
        mixture_of_experts(tf.placeholder(tf.float32, shape), E, H, group_size=size)


def test_whole_numbers_are_refused():
    with tf.Graph().as_default(), pytest.raises(ConfigError, match="floating point"):
        mixture_of_experts(tf.zeros([2, 8, M], tf.int32), E, H)
