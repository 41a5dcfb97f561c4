"""Scaling and price curves: closed forms, and jobs of thousands of devices in a moment."""

import time

import pytest

from epl.cluster.hardware import Device, Hardware, Link, Node, Place
from epl.errors import PlanError
from epl.planner.cost.model import Layer, Model, Work
from epl.planner.simulate import Candidate, simulate
from epl.planner.simulate.closed_forms import transformer_activation, transformer_flops
from epl.planner.simulate.scaling import grow, repeat, scaling_curve
from tests.unit.planner.ring_network import Ring

GPU = Device("gpu", {"float32": 1.0}, 1e6, float("inf"), price=2.0)
HARDWARE = Hardware((Node("n", (GPU,) * 4, Link(1e30), Link(100.0), price=8.0),))
MODEL = Model((Layer("l", Work(1), Work(2), parameters=75.0),))
ONE = Candidate((0, 1), (((Place(0, 0),),),), (4.0,))


def test_weak_scaling_is_the_ring_s_closed_form():
    """12 s of computing and 2 (n - 1) / n * 300 bytes at 100 bytes/s, once there is more than one node."""
    points = scaling_curve(ONE, MODEL, HARDWARE, Ring, [1, 4, 8, 64, 1024])
    assert [point.devices for point in points] == [1, 4, 8, 64, 1024]
    seconds = [12 + (6 * (count - 1) / count if count > 4 else 0) for count in (1, 4, 8, 64, 1024)]
    assert [point.iteration.seconds for point in points] == pytest.approx(seconds)
    assert [point.speedup for point in points] == pytest.approx([12 / time for time in seconds])
    assert [point.throughput for point in points] == pytest.approx([4 * point.devices / point.iteration.seconds for point in points])


def test_strong_scaling_keeps_the_batch():
    points = scaling_curve(ONE, MODEL, HARDWARE, Ring, [1, 8, 16], strong=True)
    assert [point.iteration.candidate.batch for point in points] == pytest.approx([4, 4, 4])
    assert [point.iteration.seconds for point in points] == pytest.approx([12, 12 / 8 + 6 * 7 / 8, 12 / 16 + 6 * 15 / 16])
    assert points[2].speedup < points[1].speedup < 0.25


def test_a_speed_of_one_device_can_be_given():
    point = scaling_curve(ONE, MODEL, HARDWARE, Ring, [8], single=0.5)[0]
    assert point.speedup == pytest.approx(32 / (12 + 6 * 7 / 8) / 8 / 0.5)


def test_prices_rise_as_communication_does():
    """A node costs 4 * 2 + 8 dollars an hour; a single device pays for its whole node."""
    points = scaling_curve(ONE, MODEL, HARDWARE, Ring, [1, 4, 1024])
    assert points[0].dollars_per_million == pytest.approx(10 / 3600 / (4 / 12) * 1e6)
    assert points[1].dollars_per_million == pytest.approx(16 / 3600 / (16 / 12) * 1e6)
    assert points[2].dollars_per_million == pytest.approx(points[1].dollars_per_million * (12 + 6 * 1023 / 1024) / 12)


def test_collisions_make_it_worse():
    plain, collided = (scaling_curve(ONE, MODEL, HARDWARE, Ring, [64], slowdown=slowdown)[0] for slowdown in (1.0, 1.53))
    assert collided.iteration.seconds - 12 == pytest.approx(1.53 * (plain.iteration.seconds - 12))


def test_replicas_go_on_the_devices_that_follow():
    pair = Candidate((0, 1), (((Place(0, 0), Place(0, 1)),),), (2.0,))
    cluster = grow(HARDWARE, 2)
    assert [node.name for node in cluster.nodes] == ["n.0", "n.1"]
    job = repeat(pair, cluster, 3, batch=12.0)
    assert [replica[0] for replica in job.places] == [(Place(0, 0), Place(0, 1)), (Place(0, 2), Place(0, 3)), (Place(1, 0), Place(1, 1))]
    assert job.samples == (4.0, 4.0, 4.0)
    with pytest.raises(PlanError, match="5 replicas need 10 devices, the cluster has 8"):
        repeat(pair, cluster, 5)
    with pytest.raises(PlanError, match="3 replicas are no multiple of the candidate's 2"):
        repeat(repeat(pair, cluster, 2), cluster, 3)


def gpt3():
    """175 B parameters on 16 nodes: 8 parts of each layer in a node, 16 stages, 48 micro-batches."""
    sequence, hidden, heads = 2048, 12288, 96
    forward, backward, weights = transformer_flops(sequence, hidden)
    layer = Layer(
        "block",
        Work(forward),
        Work(backward + weights),
        Work(weights),
        parameters=12 * hidden**2,
        activation=transformer_activation(sequence, hidden, heads),
        output=2 * sequence * hidden,
        split_by=8,
        exchanged=4 * sequence * hidden,
    )
    model = Model((layer,) * 96, weight_bytes=2, gradient_bytes=2, state_bytes=12, dtype="float16")
    a100 = Device("A100", {"float32": 19.5e12, "float16": 312e12}, 80e9, 2.0e12, source="NVIDIA A100 80GB SXM data sheet")
    hardware = Hardware(tuple(Node("n%d" % n, (a100,) * 8, Link(300e9), Link(100e9)) for n in range(16)))
    places = tuple(tuple(Place(node, slot) for slot in range(8)) for node in range(16))
    return Candidate(tuple(range(0, 97, 6)), (places,), (1.0,), 48, zero=1, recompute=True, split=(8,) * 96), model, hardware


def test_thousands_of_devices_take_well_below_a_second():
    """4,096 devices: 32 replicas that are alike, simulated once. Measured 0.2 s, most of it in the network of the tests."""
    candidate, model, hardware = gpt3()
    cluster = grow(hardware, 512)
    job = repeat(candidate, cluster, 32)
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        found = simulate(job, model, cluster, Ring(cluster))
        seconds.append(time.process_time() - begin)
    assert len(found.devices) == 4096 and len({id(timeline) for timeline in found.timelines}) == 1
    assert found.fits and 0.2 < found.mfu < 0.6
    assert min(seconds) < 1


def test_curves_to_thousands_of_devices():
    candidate, model, hardware = gpt3()
    points = scaling_curve(candidate, model, hardware, Ring, [1, 2, 8, 32], overlap=True)
    assert [point.devices for point in points] == [128, 256, 1024, 4096]
    speedups = [point.speedup for point in points]
    assert speedups == sorted(speedups, reverse=True) and speedups[0] == 1 and speedups[-1] > 0.9
