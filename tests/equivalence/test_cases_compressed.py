"""Gradients that travel as float16 over real ranks: `communication.fp16`."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.harness.context import variables
from tests.harness.parametrize import cases, together
from tests.harness.pool import request

SCALES = (1e-9, 1.0, 1e6)
"""Of the gradients: float16 alone has nothing between 0 and 6e-8, and nothing above 65504."""

STEPS = 3
HALF = 2.0**-11
"""How much a float16 may differ from a number, relative to it."""


def dtypes_of(session, train, feeds):
    """What the all-reduces of a run give, by TensorFlow's own trace: [[dtype, number of tensors], ...]."""
    metadata = tf.RunMetadata()
    session.run(train, feeds, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    found = []
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            if re.search(r" = Horovod\w*Allreduce\(", node.timeline_label) and not node.node_name.endswith(".epl_agree"):
                found += [tf.as_dtype(output.tensor_description.dtype).name for output in node.output]
    return sorted([name, found.count(name)] for name in set(found))


def scaled(run, fp16):
    """Layers whose gradients are tiny, usual and large: the variables before and after, and what has travelled."""
    batches = [np.random.RandomState(step).randn(8, 5).astype(np.float32) for step in range(STEPS)]
    with run.program({"communication.fp16": fp16}):
        x = tf.placeholder(tf.float32, [None, 5])
        parts = []
        for number, scale in enumerate(SCALES):
            w = tf.get_variable("w%d" % number, [5, 4], initializer=tf.random_normal_initializer(seed=number))
            parts.append(scale * tf.reduce_mean(tf.square(tf.matmul(x, w) - 1.0)))
        trained = tf.trainable_variables()
        # Weights move by one size, whatever the size of their gradients is.
        gradients = tf.gradients(tf.add_n(parts), trained)
        updates = [tf.train.GradientDescentOptimizer(0.1 / scale).apply_gradients([(gradient, variable)])
                   for gradient, variable, scale in zip(gradients, trained, SCALES)]  # fmt: skip
        train = tf.group(*updates)
        with run.session() as session:
            before = variables(session)
            for batch in batches[:-1]:
                run.step(session, train, {x: batch})
            travelled = [dtypes_of(session, train, {x: run.local(batches[-1], number)}) for number in range(run.runs)][-1]
            return {"before": before, "after": variables(session), "travelled": travelled}


def errors(rank, plain):
    """For each weight: its largest error, relative to how far its variable has moved."""
    found = {}
    for name, value in plain["after"].items():
        if re.fullmatch(r"w\d", name):
            moved = np.abs(value.astype(np.float64) - plain["before"][name]).max()
            found[name] = float(np.abs(rank["after"][name].astype(np.float64) - value).max() / moved)
    assert len(found) == len(SCALES)
    return found


@together(plain=request(scaled, "2x1", plain=True, fp16=False), half=request(scaled, "2x1", fp16=True), whole=request(scaled, "2x1", fp16=False))
def test_gradients_travel_as_float16(outcomes):
    plain = outcomes["plain"].ranks[0]
    for rank in outcomes["half"].ranks:
        # Each part of a sum is rounded once, and so is the sum.
        assert all(error < 2 * HALF for error in errors(rank, plain).values()), errors(rank, plain)
        assert all(error > HALF / 100 for error in errors(rank, plain).values()), "nothing was rounded: %s" % errors(rank, plain)
        assert dict(map(tuple, rank["travelled"]))["float16"] == len(SCALES)
    for rank in outcomes["whole"].ranks:
        assert all(error < 1e-5 for error in errors(rank, plain).values()), errors(rank, plain)
        assert rank["travelled"] == [["float32", len(SCALES)]]
    for kind in ("half", "whole"):
        first, second = outcomes[kind].ranks
        for name, value in first["after"].items():
            np.testing.assert_array_equal(value, second["after"][name], err_msg="%s on both ranks" % name)


@cases(scaled, "2x1", "2x1-m2", "2x1-m2run", "2x2", compare=True, fp16=True)
def test_values_are_those_of_plain_training_within_float16(outcome):
    for rank in outcome.ranks:
        assert all(error < 2 * HALF for error in errors(rank, outcome.plain).values()), errors(rank, outcome.plain)
        assert "float16" in dict(map(tuple, rank["travelled"]))


@cases(scaled, "1x2", compare=True, fp16=True)
def test_nothing_is_compressed_within_a_process(outcome):
    (rank,) = outcome.ranks
    assert rank["travelled"] == []
    assert all(error < 1e-5 for error in errors(rank, outcome.plain).values()), errors(rank, outcome.plain)


@pytest.mark.parametrize("scale", SCALES)
def test_plain_float16_would_not_do(scale):
    """The sizes above are such that a conversion without scaling fails; else the tests would show nothing about it."""
    value = np.float32(scale)
    with np.errstate(over="ignore"):
        kept = float(np.float16(value))
    assert (kept == pytest.approx(scale, rel=1e-3)) == (scale == 1.0)
