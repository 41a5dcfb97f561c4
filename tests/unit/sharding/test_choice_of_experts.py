"""What the search finds for layers of experts: tokens travel to their experts and back, by an all-to-all each."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.ir import attrs as A
from epl.ops import mixture_of_experts
from epl.passes.shard.hold import training_sharding
from epl.planner.plan import Plan
from epl.planner.sharding.spec import Group, S
from epl.planner.sharding.strategy import L
from tests.unit.machine import user_graph


def chosen(lanes, experts, k, groups, tokens, columns, hidden, replicated=True):
    """The sharding of a layer behind a weight that every device has, unless the scope holds that as well."""
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [groups, tokens, columns], "x")
        if replicated:
            x *= tf.get_variable("scale", [columns])
        with tf.get_default_graph()._attr_scope({A.TASKGRAPH: A.of_int(0)}):
            outputs, balance = mixture_of_experts(x, experts, hidden, k=k, name="moe")
            loss = tf.reduce_mean(tf.square(x + outputs)) + 0.01 * balance
        tf.train.AdamOptimizer(0.1).minimize(loss, name="train")
        whole = index()
    return training_sharding(whole, Plan(devices_per_rank=lanes, lanes=lanes, split=(0,)))


def moves(sharding, lanes, least):
    """(from, to, shape of the tensor) of what a device sends more than `least` bytes for."""
    group = Group.of(lanes)
    return [
        (source, target, sharding.items[ref[0]].op.outputs[ref[1]].shape)
        for ref, forms in sharding.forms.items()
        for target, source in forms.items()
        if sharding.sent(ref, source, target, group) > least
    ]


SIZES = {
    "Switch on 4": (4, 8, 1, 8, 512, 1024, 4096),
    "GShard on 4": (4, 8, 2, 8, 512, 1024, 4096),
    "GShard on 8, 64 experts": (8, 64, 2, 8, 1024, 1024, 4096),
    "Switch on 2": (2, 4, 1, 8, 512, 1024, 4096),
    "Switch on 2, any batch": (2, 4, 1, None, 64, 1024, 4096),
    "GShard on 3": (3, 6, 2, 4, 256, 512, 2048),
}


@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_exchanged(size):
    lanes, experts, _, groups, _, columns, _ = SIZES[size]
    sharding = chosen(*SIZES[size])
    held = sharding.held()
    for name in ("inner_kernel", "outer_kernel"):
        for slot in ("", "/Adam", "/Adam_1"):
            assert held["moe/%s%s" % (name, slot)] == S(0), "experts are divided"
    found = moves(sharding, lanes, 4 * columns * 64)
    places = found[0][2]
    assert places[0] == experts and places[1] == groups and places[3] == columns
    # To the experts and back, forward and backward: each the bytes of one batch but for the own part.
    assert sorted(found) == sorted([(L, S(0), places), (S(0), L, places)] * 2)
    batch = 4 * np.prod([n or 64 for n in places])
    assert sharding.bytes == pytest.approx(4 * batch * (lanes - 1) / lanes, rel=0.02)


def test_many_places_on_two_devices_cost_no_more_than_an_exchange():
    """With 2.5 places a token, gathering the tokens themselves may take fewer bytes than exchanging half of the places."""
    lanes, experts, k, groups, tokens, columns, hidden = 2, 4, 2, 8, 512, 1024, 4096
    sharding = chosen(lanes, experts, k, groups, tokens, columns, hidden)
    exchanged = 4 * (4 * experts * groups * tokens * 2.5 / experts * columns) / 2
    assert sharding.bytes <= 1.01 * exchanged


def test_few_weights_travel_to_many_tokens():
    """32,768 tokens of each device are larger than the experts: these are gathered where they are used."""
    lanes, columns, hidden = 2, 1024, 4096
    sharding = chosen(lanes, 4, 1, None, 512, columns, hidden)
    assert {"moe/inner_kernel", "moe/outer_kernel"} <= set(sharding.held())
    assert sharding.bytes == pytest.approx(4 * 4 * 4 * columns * hidden / 2, rel=0.02), "two weights forward, two gradients backward"


def test_the_gate_needs_no_other_device():
    sharding = chosen(*SIZES["GShard on 4"])
    decisions = [way for name, way in sharding.strategies.items() if name.startswith("moe/gating/")]
    forms = {form for way in decisions for form in way.outputs}
    assert all(form.kind in "LRP" for form in forms), forms
