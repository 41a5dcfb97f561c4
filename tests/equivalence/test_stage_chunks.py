"""Schedules that put several stages on each device, with more stages than the models of the matrix have: 6 and 8, two or three on a device."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import judge_variables
from tests.harness.context import variables
from tests.harness.layouts import Layout
from tests.harness.pool import request

STEPS, ROWS = 4, 16


def deep(run, stages, schedule=""):
    """A layer in each stage. The first one is skipped to the last stage, and its weights are used again half way, where there is a second loss."""
    with run.program({"pipeline.strategy": schedule} if schedule else {}):
        x, t = tf.placeholder(tf.float32, [None, 4]), tf.placeholder(tf.float32, [None])
        h = x
        for stage in range(stages):
            with run.stage(stage):
                initial = tf.glorot_uniform_initializer(seed=stage)
                w, b = tf.get_variable("w%d" % stage, [4, 4], initializer=initial), tf.get_variable("b%d" % stage, [4], initializer=initial)
                h = tf.tanh(tf.matmul(h, w) + b) + 0.5 * h
                if stage == 0:
                    first, skipped = w, h
                if stage == stages // 2:
                    h += 0.3 * tf.matmul(h, first, transpose_b=True)
                    middle = tf.reduce_mean(tf.square(h))
                if stage == stages - 1:
                    loss = tf.reduce_mean(tf.square(tf.reduce_sum(h + skipped, 1) - t)) + 0.1 * middle
        run.merge(loss)
        optimizer = tf.train.AdamOptimizer(0.02)
        gradients, trained = zip(*optimizer.compute_gradients(loss))
        clipped, norm = tf.clip_by_global_norm(gradients, 2.0)
        train = optimizer.apply_gradients(zip(clipped, trained), tf.train.get_or_create_global_step())
        random = np.random.RandomState(3)
        with run.session() as session:
            found = []
            for _ in range(STEPS):
                feeds = {x: random.randn(ROWS, 4).astype(np.float32), t: random.randn(ROWS).astype(np.float32)}
                found.append([float(value) for value in run.step(session, [loss, norm, train], feeds)[-1][:2]])
            return dict(variables(session), losses=np.float32(found))


def case(layout, schedule, *marks):
    one = Layout.parse(layout)
    plain = request(deep, Layout(), plain=True, stages=one.stages)
    found = {"plain": plain, "epl": request(deep, one, stages=one.stages, schedule=schedule)}
    return pytest.param(found, id="%s %s" % (layout, schedule), marks=marks)


@pytest.mark.parametrize(
    "outcomes",
    [
        case("1x4-s8v2-m4", "Interleaved"),
        case("1x4-s8v2-m8", "ZeroBubbleV"),
        case("1x2-s6v3-m4", "Interleaved"),
        case("2x1-s6v3-m4", "Interleaved"),
        case("2x1-s6v3-m1", "Interleaved"),
        case("4x1-s8v2-m4", "Interleaved"),
        case("4x1-s8v2-m8", "ZeroBubbleV"),
        case("1x4-s8v2-m2", "Interleaved", pytest.mark.slow),
        case("1x4-s8v2-m1", "ZeroBubbleV", pytest.mark.slow),
        case("4x1-s8v2-m2", "ZeroBubbleV", pytest.mark.slow),
        case("4x1-s6v3-m2", "Interleaved", pytest.mark.slow),
        case("2x2-s8v2-m4", "ZeroBubbleV", pytest.mark.slow),
    ],
    indirect=True,
)
def test_many_stages_train_as_plain_tensorflow(outcomes):
    judge_variables(outcomes["epl"]._replace(plain=outcomes["plain"].ranks[0]))
