"""Fusing gradients into few all-reduces, and compressing them."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from epl.ir.build import Builder
from epl.passes.fusion import GROUP_BYTES, all_reduce, groups_of
from epl.planner.plan import Plan, Task
from tests.unit.machine import Machine, user_graph

Item = collections.namedtuple("Item", "node value dtype size record taskgraph", defaults=[None])

sizes_of_tensors = st.lists(st.one_of(st.integers(0, 100), st.integers(0, 4 * GROUP_BYTES)), min_size=1, max_size=60)


@given(sizes_of_tensors, st.integers(0, 12))
@settings(max_examples=300, deadline=None)
def test_groups_hold_all_positions_in_order_and_are_not_too_many(sizes, most):
    groups = groups_of(sizes, most)
    assert [position for group in groups for position in group] == list(range(len(sizes)))
    assert all(groups) and len(groups) <= max(1, most)
    assert len(groups) <= max(1, -(-sum(sizes) // GROUP_BYTES)), "small gradients travel together"


@given(st.integers(1, 10), st.integers(1, 50))
@settings(max_examples=50, deadline=None)
def test_equal_tensors_make_equal_groups(most, count):
    groups = groups_of([GROUP_BYTES] * count, most)
    lengths = [len(group) for group in groups]
    assert len(groups) == min(most, count) and max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("sizes, most, groups", [
    ([GROUP_BYTES, GROUP_BYTES], 1, [[0, 1]]),
    ([GROUP_BYTES, GROUP_BYTES], 5, [[0], [1]]),
    ([4 * GROUP_BYTES, 1, 1], 2, [[0], [1, 2]]),
    ([1, 1, 4 * GROUP_BYTES], 3, [[0, 1], [2]]),
    ([0, 0, 0], 5, [[0, 1, 2]]),
])  # fmt: skip
def test_groups(sizes, most, groups):
    assert groups_of(sizes, most) == groups


def reduced(items, **plan):
    nodes = {}
    results = all_reduce(Builder(nodes), [Item(*item) for item in items], Task(Plan(ranks=2, **plan)), 0.5, ["gate"])
    return results, {n.name: n for n in nodes.values() if n.op == "EplAllReduce"}


def test_the_last_gradients_travel_first_and_results_come_in_the_old_order():
    results, found = reduced([("a", ("a", 0), 1, 4, 1), ("b", ("b", 0), 1, 4, 1), ("c", ("c", 0), 1, 4, 1)])
    (node,) = found.values()
    assert node.inputs == (("c", 0), ("b", 0), ("a", 0)) and node.controls == ("gate",)
    assert results == [("epl_all_reduce/1_1_0", 2), ("epl_all_reduce/1_1_0", 1), ("epl_all_reduce/1_1_0", 0)]


def test_types_and_gradient_calls_travel_apart():
    results, found = reduced([("a", ("a", 0), 2, 8, 1), ("b", ("b", 0), 1, 4, 1), ("c", ("c", 0), 1, 4, 2)])
    assert {name: node.inputs for name, node in found.items()} == {
        "epl_all_reduce/1_1_0": (("b", 0),), "epl_all_reduce/1_2_0": (("a", 0),), "epl_all_reduce/2_1_0": (("c", 0),),
    }  # fmt: skip
    assert results == [("epl_all_reduce/1_2_0", 0), ("epl_all_reduce/1_1_0", 0), ("epl_all_reduce/2_1_0", 0)]


def test_compressed_gradients_share_their_scale():
    _, found = reduced([("a", ("a", 0), 1, 4, 1), ("h", ("h", 0), 19, 2, 1)], fp16=True)
    assert {name: (node.info["dtype"], node.info.get("op")) for name, node in found.items()} == {
        "epl_all_reduce/1_1_0/peak": (1, "max"), "epl_all_reduce/1_1_0": (19, None), "epl_all_reduce/1_19_0": (19, None),
    }  # fmt: skip


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("part", ["whole", "runs"])
def test_compression_keeps_the_magnitude(scale, part):
    """Neither tiny nor huge gradients leave the range of float16; a gradient of zeros stays zero."""
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 3], "x")
        w, z = (tf.get_variable(n, [3], initializer=tf.zeros_initializer()) for n in "wz")
        loss = tf.reduce_mean(tf.reduce_sum(x * w + 0.0 * z, 1))
        tf.train.GradientDescentOptimizer(1.0).minimize(loss, name="train")
        tf.global_variables_initializer()
        whole = index()
    machine = Machine(whole, ranks=3, m=2, in_run=part == "whole", fp16=True)
    machine.run("init")
    values = (np.random.RandomState(0).randn(12, 3) * scale).astype(np.float32)
    for run in range(machine.plan.runs_per_step):
        machine.run("train", {"x:0": values if part == "whole" else values[run * 6 : run * 6 + 6]})
    np.testing.assert_allclose(machine.value("w"), -values.mean(0), rtol=1e-2, atol=1e-3 * scale)
    np.testing.assert_array_equal(machine.value("w", 2), machine.value("w"))
    assert not machine.value("z").any()
