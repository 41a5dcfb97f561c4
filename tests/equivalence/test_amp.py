"""Mixed precision: near float32, as written by hand, and steps that are skipped everywhere."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.harness.context import variables
from tests.harness.parametrize import cases, together
from tests.harness.pool import request

STEPS, ROWS, WIDTH = 6, 16, 8
LAYOUTS = ("1x2", "2x1-m2", "2x1-s2-m2", "2x1-p2")
OTHERS = ("1x1", "2x1", "1x2-a2", "1x1-m4", "1x2-m2run", "1x2-s2-m4", "2x2-s2-m2", "1x2-p2")
SPOILED = ((2, ROWS - 1),)
"""(step, row) whose input is infinite: the last row is one replica's, of one micro-batch."""


def layer(h, number, cast=None):
    weights = tf.get_variable("w%d" % number, [WIDTH, WIDTH], initializer=tf.glorot_uniform_initializer(seed=number))
    bias = tf.get_variable("b%d" % number, [WIDTH], initializer=tf.zeros_initializer())
    if cast is None:
        return tf.nn.relu(tf.nn.bias_add(tf.matmul(h, weights), bias))
    half = tf.nn.relu(tf.nn.bias_add(tf.matmul(tf.cast(h, cast), tf.cast(weights, cast)), tf.cast(bias, cast)))
    return tf.cast(half, tf.float32)


def model(run, x, t, cast=None, norm=False):
    h = x
    stages = run.layout.stages
    split = run.split() if stages == 1 else None
    for number in range(4):
        with split or run.stage(number * stages // 4):
            h = layer(h, number, cast) + h
            if norm and number == 1:
                h = tf.layers.batch_normalization(h, training=True, momentum=0.5)
            if number == 3:
                loss = run.merge(tf.reduce_mean(0.02 * tf.square(tf.reduce_mean(h, 1) - t)))
    return loss


def trained(run, config=(), spoiled=(), resource=False, norm=False, cast="", scale=0.0, steps=STEPS):
    """After each step the loss and the variables, at the end the dynamic scale.

    cast, scale: compute in this type, and with this fixed loss scale, as the user would write it.
    """
    with run.program(dict(config)), contextlib.ExitStack() as stack:
        if resource:
            stack.enter_context(tf.variable_scope("", use_resource=True))
        x, t = tf.placeholder(tf.float32, [None, WIDTH]), tf.placeholder(tf.float32, [None])
        loss = model(run, x, t, tf.as_dtype(cast) if cast else None, norm)
        count = tf.train.get_or_create_global_step()
        optimizer = tf.train.AdamOptimizer(0.01)
        pairs = optimizer.compute_gradients(loss * scale if scale else loss)
        gradients, trainable = zip(*pairs)
        gradients = [g / scale for g in gradients] if scale else gradients
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = optimizer.apply_gradients(zip(tf.clip_by_global_norm(gradients, 5.0)[0], trainable), count)
        history = []
        with run.session() as session:
            for step in range(steps):
                draw = np.random.RandomState(step)
                feeds = {x: draw.randn(ROWS, WIDTH).astype(np.float32), t: draw.randn(ROWS).astype(np.float32)}
                for at, row in spoiled:
                    if at == step:
                        feeds[x][row] = np.inf
                losses = run.train(session, loss, train, [feeds])
                history.append({"loss": losses[0], "variables": variables(session)})
        return {"history": history, "scale": loss_scale(run)}


def loss_scale(run):
    if run.plain:
        return None
    import epl

    scale = epl.Env.get().parallel_information.get("AMP_LOSS_SCALE")
    return None if scale is None else (scale._current_loss_scale, scale._num_good_steps)


def options(**keys):
    """A configuration with mixed precision."""
    return (("amp.level", "o1"),) + tuple((key.replace("__", "."), value) for key, value in keys.items())


def near(found, expected, rtol, atol):
    for one, other in zip(found["history"], expected["history"]):
        assert one["loss"] == pytest.approx(other["loss"], rel=rtol)
        for name, value in other["variables"].items():
            if "Adam" not in name:
                np.testing.assert_allclose(one["variables"][name], value, rtol=rtol, atol=atol, err_msg=name)


def rounded(outcome, tolerance):
    """Near the plain training, but not equal to it."""
    for rank in outcome.ranks:
        near(rank, outcome.plain, tolerance, tolerance)
        first, plain = rank["history"][0]["variables"]["w0"], outcome.plain["history"][0]["variables"]["w0"]
        assert np.abs(first - plain).max() > 0, "nothing was computed in half precision"


def judge_near(outcome):
    rounded(outcome, 0.02)
    for rank in outcome.ranks:
        assert rank["scale"] == [2.0**15, STEPS]


@cases(trained, *LAYOUTS, config=options(), compare=True)
def test_near_float32(outcome):
    judge_near(outcome)


@pytest.mark.slow
@cases(trained, *OTHERS, config=options(), compare=True)
def test_near_float32_in_other_layouts(outcome):
    judge_near(outcome)


@cases(trained, "1x2", "2x1-s2-m2", "2x1-p2", config=options(amp__loss_scale=128), compare=True)
def test_near_float32_with_a_fixed_scale(outcome):
    rounded(outcome, 0.02)
    assert all(rank["scale"] is None for rank in outcome.ranks)


@pytest.mark.slow
@cases(trained, "1x2", "2x1-s2-m2", "2x1-p2", config=options(amp__dtype="bfloat16"), compare=True)
def test_near_float32_in_bfloat16(outcome):
    rounded(outcome, 0.1)


@cases(trained, "2x1-s2-m2", config=options(gradient_checkpoint__type="auto"), compare=True)
def test_near_float32_with_recomputation(outcome):
    rounded(outcome, 0.02)


@together(
    hand=request(trained, "1x1", plain=True, cast="float16", scale=128.0, steps=3),
    amp=request(trained, "1x1", config=options(amp__loss_scale=128), steps=3),
)
def test_equal_to_what_a_user_would_write(outcomes):
    near(outcomes["amp"].ranks[0], outcomes["hand"].ranks[0], 2e-5, 1e-6)


# Skipped steps.


def judge_skipped(outcome):
    for rank in outcome.ranks:
        before, after, later = (rank["history"][step]["variables"] for step in (1, 2, 3))
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value, err_msg=name)
        assert after["global_step"] == 2 and later["global_step"] == 3
        assert any((later[name] != value).any() for name, value in before.items() if name.startswith("w"))
        assert all(np.isfinite(step["loss"]) for number, step in enumerate(rank["history"]) if number != 2)
        assert rank["scale"] == [2.0**14, 3]
    ranks = [rank["history"][-1]["variables"] for rank in outcome.ranks]
    for name, value in ranks[0].items():
        assert all(np.array_equal(other[name], value) for other in ranks), name


@cases(trained, *LAYOUTS, config=options(), spoiled=SPOILED)
def test_a_step_that_overflows_somewhere_is_skipped_everywhere(outcome):
    judge_skipped(outcome)


@pytest.mark.slow
@cases(trained, *OTHERS, config=options(), spoiled=SPOILED)
def test_a_step_is_skipped_in_other_layouts(outcome):
    judge_skipped(outcome)


@pytest.mark.slow
@cases(trained, "1x2", "2x1-s2-m2", config=options(), spoiled=SPOILED, resource=True)
def test_a_step_is_skipped_with_resource_variables(outcome):
    judge_skipped(outcome)


@cases(trained, "1x2", "2x1-s2-m2", config=options(optimizer__num_apply_group=3), spoiled=SPOILED)
def test_a_step_is_skipped_with_apply_groups(outcome):
    judge_skipped(outcome)


@cases(trained, "2x1-s2-m2", config=options(gradient_checkpoint__type="auto"), spoiled=SPOILED)
def test_a_step_is_skipped_with_recomputation(outcome):
    judge_skipped(outcome)


@cases(trained, "1x2-m2run", "2x1-s2-m2", config=options(), spoiled=SPOILED, norm=True)
def test_batch_statistics_are_as_before_a_skipped_step(outcome):
    judge_skipped(outcome)


@pytest.mark.slow
@cases(trained, "1x1", "1x2", "1x2-s2-m4", "2x1", config=options(), spoiled=SPOILED, norm=True)
def test_batch_statistics_are_as_before_a_skipped_step_in_other_layouts(outcome):
    judge_skipped(outcome)


@pytest.mark.slow
@cases(trained, "1x2", "2x1", config=options(), spoiled=SPOILED, norm=True, resource=True)
def test_batch_statistics_in_resource_variables_are_as_before_a_skipped_step(outcome):
    judge_skipped(outcome)


@cases(trained, "2x1", "1x2-m2run", config=options(zero__level="v1"), spoiled=SPOILED)
def test_a_step_is_skipped_with_zero(outcome):
    judge_skipped(outcome)


@cases(trained, "1x2", "2x1-s2-m2", config=options(offload__level="v2"), spoiled=SPOILED)
def test_a_step_is_skipped_with_offload(outcome):
    judge_skipped(outcome)


@cases(trained, "2x1", "1x2", config=options(zero__level="v2", gradient_checkpoint__type="auto"), compare=True)
def test_near_float32_with_zero_and_recomputation(outcome):
    rounded(outcome, 0.02)


@cases(trained, "1x2", "2x1", config=options(), norm=True)
def test_batch_statistics_move_in_other_steps(outcome):
    for rank in outcome.ranks:
        means = [step["variables"]["batch_normalization/moving_mean"] for step in rank["history"]]
        assert all(not np.array_equal(one, other) for one, other in zip(means, means[1:]))
