"""The memory of the timeline: the predicted peak of each device is near the measured one, whatever the layout and its options."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.test_recompute_memory import residual
from tests.harness.pool import request

LAYERS, WIDTH, ROWS = 24, 32, 512


def reported(run, config):
    """The memory that the timeline has of this rank's devices."""
    from epl.profiler import timeline
    from epl.profiler.timeline import Trace
    from epl.profiler.timeline.merge import part_name

    with run.program(config):
        x = h = tf.placeholder(tf.float32, [None, WIDTH])
        for stage in range(run.layout.stages):
            with run.stage(stage):
                for number in range(LAYERS // run.layout.stages):
                    h = residual(h, LAYERS * stage + number)
                if stage == run.layout.stages - 1:
                    loss = tf.reduce_mean(tf.square(h))
        train = tf.train.MomentumOptimizer(0.001, 0.9).minimize(loss)
        timeline(run.folder, steps=2)
        feeds = {x: np.random.RandomState(0).randn(ROWS * run.layout.batches, WIDTH).astype(np.float32)}
        with run.session() as session:
            for _ in range(4):
                run.step(session, [loss, train], feeds)
        return Trace.read(run.path(part_name(run.rank))).header["memory"]


CASES = {
    "replicas": ("2x1", {}),
    "accumulation": ("1x1-m4run", {}),
    "1F1B": ("1x4-s4-m8", {}),
    "GPipe": ("1x2-s2-m4", {"pipeline.strategy": "PreferForward"}),
    "stages on ranks": ("2x1-s2-m4", {}),
    "recomputed": ("2x1-s2-m4", {"gradient_checkpoint.type": "auto"}),
    "divided": ("2x1", {"zero.level": "v2"}),
    "offloaded": ("2x1-s2-m2", {"offload.level": "v2"}),
}


SELDOM = ("accumulation", "GPipe", "stages on ranks", "divided", "offloaded")
"""Those that only the slow tests measure."""


def case(name):
    layout, config = CASES[name]
    return request(reported, layout, config=config)


def devices(outcome):
    return [row for rows in outcome.ranks for row in rows]


def each():
    return [pytest.param(case(name), id=name, marks=[pytest.mark.slow] if name in SELDOM else []) for name in CASES]


@pytest.mark.parametrize("outcome", each(), indirect=True)
def test_predicted_within_15_percent(outcome):
    assert devices(outcome)
    for row in devices(outcome):
        assert row["peak"] == pytest.approx(row["predicted"], rel=0.15), row


def test_the_variables_of_a_device_are_those_of_its_stage(pool):
    rows = devices(pool.outcome(case("1F1B")))
    assert [row["stages"] for row in rows] == [[0], [1], [2], [3]]
    # Two weights in each of the layers, each with its slot of Momentum.
    layer = 2 * 2 * 4 * WIDTH * WIDTH * 4
    assert [row["variables"] for row in rows] == [LAYERS // 4 * layer] * 4


@pytest.mark.slow
def test_zero_divides_them(pool):
    whole, divided = (devices(pool.outcome(case(name))) for name in ("replicas", "divided"))
    # Beside them a device has a flag or two of a byte.
    assert [2 * row["variables"] for row in divided] == pytest.approx([row["variables"] for row in whole], abs=4)
