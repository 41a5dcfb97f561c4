"""Offload of activations: what is moved, where it is, and when it comes back."""

import pytest

from epl.passes.clone import Clone
from epl.passes.offload import Offload
from tests.unit.passes.steps import apply, before, task, upto
from tests.unit.passes.test_recompute import layers

BIG = [("{shape: [?, 4]}", "{shape: [64, 4]}")]


def offloaded(program, **options):
    job = task(offload="v2", **options)
    earlier = before(Offload, program, job)
    result = apply(Offload(), earlier, job)
    return earlier, result, [name for name in result.nodes if name not in earlier.nodes]


def test_what_the_backward_part_needs_later_waits_on_the_host():
    """The tensors of the last layer are used at once."""
    _, result, new = offloaded(layers(3, replace=BIG))
    moved = sorted({name.split("/")[1] for name in new})
    assert moved == ["h0", "h1", "m0", "m1"]
    for name in moved:
        host, device = result.nodes["EPL_OFFLOAD/%s/host" % name], result.nodes["EPL_OFFLOAD/%s/device" % name]
        assert host.inputs == ((name, 0),) and device.inputs == ((host.name, 0),)
    readers = {name: [c for c, _ in result.consumers["EPL_OFFLOAD/%s/device" % name]] for name in moved}
    assert readers == {"h1": ["g2", "dt1"], "m1": ["ds1"], "h0": ["g1", "dt0"], "m0": ["ds0"]}


def test_it_comes_back_one_step_ahead():
    _, result, _ = offloaded(layers(3, replace=BIG))
    gates = {name: result.nodes["EPL_OFFLOAD/%s/device" % name].controls for name in ("h1", "m1", "h0", "m0")}
    # They are used in the order h2 (by the seed), m2, h1, m1, h0, m0.
    assert gates == {"h1": ("one",), "m1": ("ds2",), "h0": ("g2",), "m0": ("ds1",)}


def test_several_micro_batches_leave_nothing_on_the_device():
    """What is used first comes back when its gradient is there; nothing tells when the seed's is."""
    _, result, new = offloaded(layers(3, replace=BIG), m=2)
    assert {name.split("/")[1] for name in new} == {"h0", "h1", "m0", "m1", "m2"}
    assert result.nodes["EPL_OFFLOAD/m2/device"].controls == ("dt2",)


def test_small_tensors_are_not_worth_it():
    assert not offloaded(layers(3))[2]


@pytest.mark.parametrize("options", [dict(offload="v0"), dict(offload="")])
def test_other_levels_leave_activations_alone(options):
    job = task(**options)
    program = before(Offload, layers(3, replace=BIG), job)
    assert apply(Offload(), program, job) is program


def test_copies_are_in_host_memory_and_what_comes_back_on_the_device():
    job = task(devices=2, m=2, offload="v2")
    program = upto(Clone, layers(3, replace=BIG), job)
    places = {node.name.rsplit("/", 1)[1]: set() for node in program.nodes.values() if "EPL_OFFLOAD" in node.name}
    for node in program.nodes.values():
        if node.name.startswith("EPL_REPLICA_1/") and "EPL_OFFLOAD" in node.name:
            places[node.name.rsplit("/", 1)[1]].add(node.device)
    assert places == {"host": {"/device:CPU:0"}, "device": {"/device:CPU:1"}}
    name = "EPL_REPLICA_1/EPL_MICRO_BATCH_1/EPL_OFFLOAD/h0/"
    assert program.nodes[name + "device"].inputs == ((name + "host", 0),)
