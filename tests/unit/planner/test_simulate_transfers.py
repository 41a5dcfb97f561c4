"""Transfers between stages queue on their links; collectives that run at the same time share the network."""

import dataclasses
import random

import pytest

from epl.cluster.hardware import Hardware, Link, Node, Place
from epl.planner.cost.model import Model, Skip
from epl.planner.schedules import NAMES, Action, data_dependencies, make_schedule
from epl.planner.schedules import simulate as run_schedule
from epl.planner.simulate.sync import Exchange, run
from tests.unit.planner.plans import UNIT, cluster, layers, of, pipeline
from tests.unit.planner.ring_network import Ring

# Transfers.


def test_transfers_delay_and_queue():
    """Forward passes of 1 s, transfers of 5 s: the link is what bounds the second stage."""
    model = Model(layers(2, output=50.0))
    hardware = cluster(1, 1)
    candidate = pipeline((0, 1, 2), [Place(0, 0), Place(1, 0)], micro_batches=4, schedule="GPipe")
    found = of(candidate, model, hardware)
    starts = [span.start for span in found.timelines[0].devices[1] if span.action.kind == "F"]
    assert starts == [6, 11, 16, 21]
    assert found.seconds == 22 + 2 + 5 * 4 + 2, "the gradients queue too: each passes for 2 s, and travels for 5 s"
    free = of(candidate, dataclasses.replace(model, layers=layers(2)), hardware).seconds
    assert found.devices[0].transfer == found.seconds - free and found.bound == "communication"


def test_replicas_share_the_network_card():
    """Both replicas of a node send 50 bytes at 10 bytes/s at the same time: 10 s instead of 5 s."""
    model = Model(layers(2, output=50.0))
    one = pipeline((0, 1, 2), [Place(0, 0), Place(1, 0)])
    two = pipeline((0, 1, 2), [Place(0, 0), Place(1, 0)], [Place(0, 1), Place(1, 1)])
    assert of(one, model, cluster(2, 2)).seconds == 6 + 2 * 5
    assert of(two, model, cluster(2, 2)).seconds == 6 + 2 * 10


def test_what_is_read_later_crosses_every_cut():
    model = Model(layers(3, output=10.0), (Skip(0, 2, 100.0),))
    candidate = pipeline((0, 1, 2, 3), [0, 1, 2])
    # Layer 2 reads what layer 0 made as well: 10 bytes cross the first cut, 110 the second, forwards and backwards.
    assert of(candidate, model, cluster(3)).seconds == pytest.approx(9 + 2 * (10 + 110) / 100)


def reference(schedule, costs, transfer):
    """Times of queued transfers by relaxation: raise what is too early until nothing is."""
    actions = {action: device for device, row in enumerate(schedule.devices) for action in row}
    times = dict.fromkeys(actions, 0.0)
    arrivals = {}
    while True:
        before = dict(times)
        for row in schedule.devices:
            link = {}
            for at, action in enumerate(row):
                start = times[row[at - 1]] if at else 0.0
                for source in data_dependencies(action, schedule.stages):
                    there = source.chunk == action.chunk or actions[source] == actions[action]
                    start = max(start, times[source] if there else arrivals.get(source, 0.0))
                whole = costs["W", action.chunk] if action.kind == "B" and not schedule.split_backward else 0
                times[action] = start + costs[action.kind, action.chunk] + whole
                target = Action(action.kind, action.micro_batch, action.chunk + (1 if action.kind == "F" else -1))
                if action.kind != "W" and target in actions and actions[target] != actions[action]:
                    seconds = transfer[min(action.chunk, target.chunk)]
                    key = actions[target]
                    arrivals[action] = max(times[action], link.get(key, 0.0)) + seconds
                    link[key] = arrivals[action]
        if times == before:
            return times


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_queued_transfers_are_the_least_times_that_obey_the_links(name, seed):
    draw = random.Random(seed)
    devices, micro_batches = draw.randrange(2, 5), draw.randrange(1, 8)
    stages = devices * (2 if name in ("Interleaved", "ZeroBubbleV") else 1)
    costs = {(kind, chunk): draw.choice([1, 2, 5]) for kind in "FBW" for chunk in range(stages)}
    transfer = [draw.choice([1, 3, 9]) for _ in range(stages - 1)]
    schedule = make_schedule(name, stages, micro_batches, devices, costs)
    timeline = run_schedule(schedule, costs, transfer, queued=True)
    assert {span.action: span.end for row in timeline.devices for span in row} == reference(schedule, costs, transfer)
    assert timeline.makespan >= run_schedule(schedule, costs, transfer).makespan


# Collectives that share the network.


def exchange(ready, *slots, moved=50.0):
    return Exchange((0,), ready, (("all_reduce", tuple(Place(node, slot) for node in (0, 1) for slot in slots), moved),))


def test_collectives_progress_at_the_rate_that_the_others_leave():
    """Alone each takes 5 s; from 2 s on both halve: the first ends at 8, the second has done 3 of 5 s then and ends at 10."""
    network = Ring(cluster(2, 2))
    assert run([exchange(0, 0)], network) == [(0, 5)]
    assert run([exchange(0, 0), exchange(0, 1)], network) == [(0, 10), (0, 10)]
    assert run([exchange(2, 1), exchange(0, 0)], network) == [(2, 10), (0, 8)]
    assert run([exchange(0, 0), exchange(7, 1)], network) == [(0, 5), (7, 12)]
    # A short one makes room: both halve until 10 s, then the long one has 10 of its 15 s left.
    assert run([exchange(0, 0), exchange(0, 1, moved=150.0)], network) == [(0, 10), (0, 20)]
    assert run([], network) == []


def test_latency_counts_once():
    """2 (n - 1) messages of 0.25 s latency: 0.5 s, also for what goes on when another one starts."""
    hardware = Hardware(tuple(Node("n%d" % n, (UNIT,) * 2, Link(100.0), Link(10.0, 0.25)) for n in range(2)))
    assert run([exchange(0, 0)], Ring(hardware)) == [(0, 5.5)]
    apart = Hardware(hardware.nodes + tuple(Node("m%d" % n, (UNIT,), Link(100.0), Link(10.0, 0.25)) for n in range(2)))
    other = Exchange((1,), 2.0, (("all_reduce", (Place(2, 0), Place(3, 0)), 50.0),))
    found = run([exchange(0, 0), other], Ring(apart))
    # Within 2 of 5.5 s it has sent 2 / 5.5 of its bytes: evenly, as if latency took bandwidth.
    assert found == [(0, pytest.approx(2 + 5 * 3.5 / 5.5)), (2, 7.5)]


def test_a_device_takes_part_in_one_collective_at_a_time():
    network = Ring(cluster(2, 2))
    assert run([exchange(1, 0), exchange(0, 0)], network) == [(5, 10), (0, 5)]
    # The third must not overtake the second, which waits for the first.
    assert run([exchange(0, 0), exchange(1, 0, 1, moved=0), exchange(2, 1)], network) == [(0, 5), (5, 5), (5, 10)]
