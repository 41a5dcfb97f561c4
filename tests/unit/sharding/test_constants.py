"""What is known of values before anything runs."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.passes.classify import Classify
from epl.planner.plan import Plan, Task
from epl.planner.sharding.constants import Constants, broadcast_axes
from epl.planner.sharding.strategy import OWN, SAME, Lane
from tests.unit.machine import user_graph

SAMPLES, ROWS = (("x", 0), 1), (("x", 0), 3)

AXES = [
    ([2, 3], [3], ([], [0])),
    ([3], [2, 3], ([0], [])),
    ([2, 1], [1, 3], ([1], [0])),
    ([1, 3], [1, 3], ([0], [0])),
    ([], [2], ([0], [])),
    ([SAMPLES, 3], [3], ([], [0])),
    ([SAMPLES, 3], [SAMPLES, 1], ([], [1])),
    ([None, None, 4], [4], ([], [0, 1])),
    ([SAMPLES, 3], [None, 3], None),
    ([None, 3], [None, 3], None),
    ([SAMPLES, 3], [ROWS, 3], None),
    ([SAMPLES, 3], [8, 3], None),
    (None, [3], None),
]


@pytest.mark.parametrize("left, right, wanted", AXES)
def test_axes_of_a_broadcast_gradient(left, right, wanted):
    assert broadcast_axes(left, right) == wanted


@pytest.mark.parametrize("left, right, wanted", AXES[:5])
def test_axes_are_those_of_the_op(left, right, wanted):
    """But for dimensions that are 1 on both sides, over which a sum changes nothing."""
    with tf.Graph().as_default(), tf.Session() as session:
        found = session.run(tf.raw_ops.BroadcastGradientArgs(s0=np.int32(left), s1=np.int32(right)))
    longest = max(left, right, key=len)
    for mine, its in zip(wanted, found):
        assert [a for a in mine if longest[a] != 1 or left != right] == [a for a in its if longest[a] != 1 or left != right]


def of(*tensors):
    """What is known of tensors of the default graph."""
    with user_graph() as index:
        made = [tensor() for tensor in tensors]
        program = Classify()(index(), Task(Plan()))
    constants = Constants(program, {})
    return [constants.of((t.op.name, t.value_index)) for t in made]


def test_what_follows_from_constants():
    found = of(
        lambda: tf.range(1, 4) + 2,
        lambda: tf.math.invert_permutation(tf.constant([2, 0, 1])),
        lambda: tf.concat([tf.stack([tf.constant(3), 5], 0), tf.constant([7])], 0),
        lambda: tf.math.floormod(tf.constant([-1, 4]), 3) * tf.expand_dims(tf.constant(2), 0),
        lambda: tf.identity(tf.constant([0.5])),
    )
    for value, wanted in zip(found, ([3, 4, 5], [1, 2, 0], [3, 5, 7], [4, 2], [0.5])):
        np.testing.assert_array_equal(value, wanted)


def test_what_is_not_computed():
    found = of(
        lambda: tf.range(1000000000),
        lambda: tf.range(tf.placeholder(tf.int32, [])),
        lambda: tf.constant(1.0) + tf.constant(2.0),
        lambda: tf.range(100) + 1,
        lambda: tf.random.uniform([]),
        lambda: tf.constant(1, shape=[1 << 17]),
    )
    assert found == [None] * 6


def test_chains_are_walked_without_recursion():
    def doubled():
        value = tf.constant([1])
        for _ in range(1500):
            value = value + value * 0
        return value

    np.testing.assert_array_equal(of(doubled)[0], [1])


def gradient_axes(x_lane, y_lane):
    """Of the gradient of x * y, both with rows of unknown number: those of both sides."""
    with user_graph() as index:
        x, y = tf.placeholder(tf.float32, [None, 3], "x"), tf.placeholder(tf.float32, [None, 1], "y")
        tf.gradients(x * y, [x, y])
        axes = next(op for op in x.graph.get_operations() if op.type == "BroadcastGradientArgs")
        program = Classify()(index(), Task(Plan()))
    constants = Constants(program, {("x", 0): x_lane, ("y", 0): y_lane})
    return [None if value is None else list(value) for value in (constants.of((axes.name, 0)), constants.of((axes.name, 1)))]


def test_samples_are_as_many_as_samples():
    samples = Lane("batch", 0, 1, ("x", 0))
    assert gradient_axes(samples, samples) == [[], [1]]
    assert gradient_axes(samples, Lane("batch", 0, 2, ("x", 0))) == [None, None]
    assert gradient_axes(samples, Lane("batch", 0, 1, ("y", 0))) == [None, None]
    assert gradient_axes(samples, OWN) == gradient_axes(samples, SAME) == [None, None]
    assert gradient_axes(Lane("batch", 0, 0, ("x", 0)), Lane("batch", 0, 0, ("x", 0))) == [None, None], "nobody knows how many"
