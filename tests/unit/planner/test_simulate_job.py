"""One iteration of a plan: times and memory that can be worked out by hand, and rules that hold for any plan."""

import dataclasses
import random

import pytest

from epl.cluster.hardware import Device, Hardware, Link, Node, Place
from epl.errors import PlanError
from epl.planner.cost.model import Layer, Model, Work
from epl.planner.schedules import NAMES, ScheduleError, make_schedule
from epl.planner.simulate import Candidate
from tests.unit.planner.plans import FREE, UNIT, cluster, layers, of, pipeline

# Data parallelism.


def test_data_parallelism_is_computing_and_an_all_reduce():
    """Two replicas: 3 s, and 2 (n - 1) / n * 200 bytes at 100 bytes/s."""
    model = Model(layers(1, parameters=50.0))
    found = of(pipeline((0, 1), [0], [1]), model, cluster(2))
    assert found.seconds == 3 + 2
    use = found.devices[0]
    assert (use.compute, use.sync, use.idle, use.exchange, use.transfer, use.update) == (3, 2, 0, 0, 0, 0)
    assert found.communication_share == 2 / 5 and found.compute_share == 3 / 5
    assert found.bound == "compute" and found.fits and found.throughput == 2 / 5
    assert of(pipeline((0, 1), [0]), model, cluster(2)).seconds == 3, "one replica has nothing to sum"


def test_gradients_of_a_stage_are_summed_while_earlier_stages_work():
    """1F1B with two micro-batches: the last stage is done at 7, the first at 9; each sums for 2 s."""
    model = Model(layers(2, parameters=50.0))
    found = of(pipeline((0, 1, 2), [0, 1], [2, 3], micro_batches=2), model, cluster(4))
    times = {exchange.stages: tuple(period) for exchange, period in found.exchanges}
    assert times == {(1,): (7, 9), (0,): (9, 11)}
    assert found.seconds == 11
    first, last = found.devices[0], found.devices[1]
    assert (first.compute, first.sync, first.idle) == (6, 2, 3)
    # The last stage has started one second later, so its two idle seconds come behind its all-reduce.
    assert (last.compute, last.sync, last.idle) == (6, 2, 3)


@pytest.mark.parametrize("parameters, plain, overlapped", [(25.0, 6 + 2, 6 + 1), (75.0, 6 + 6, 4 + 6)])
def test_gradients_can_be_summed_layer_by_layer(parameters, plain, overlapped):
    """The backward pass of two layers runs from 2 to 6; the gradients of the last layer are there at 4."""
    model = Model(layers(2, parameters=parameters))
    candidate = pipeline((0, 2), [0], [1])
    assert of(candidate, model, cluster(2)).seconds == plain
    found = of(candidate, model, cluster(2), overlap=True)
    assert found.seconds == overlapped
    assert [exchange.ready for exchange, _ in found.exchanges] == [6, 4]
    split = dataclasses.replace(candidate, schedule="ZB-H1")
    ready = [exchange.ready for exchange, _ in of(split, model, cluster(2), overlap=True).exchanges]
    assert ready == [6, 5], "W, from 4 to 6, completes the gradients"


def test_unequal_devices_wait_for_each_other_unless_samples_are_unequal():
    fast = Device("fast", {"float32": 3.0}, 1000.0, FREE)
    hardware = Hardware((Node("n", (fast, UNIT), Link(100.0), Link(10.0)),))
    model = Model(layers(1, parameters=50.0))
    even = of(pipeline((0, 1), [0], [1], samples=(2.0, 2.0)), model, hardware)
    assert even.seconds == 6 + 2
    assert [use.idle for use in even.devices] == [4, 0] and [use.sync for use in even.devices] == [2, 2]
    assert even.imbalance_share == even.bubble_share == 2 / 8
    uneven = of(pipeline((0, 1), [0], [1], samples=(3.0, 1.0)), model, hardware)
    assert uneven.seconds == 3 + 2 and uneven.bubble_share == 0
    assert uneven.throughput / even.throughput == 8 / 5


def test_devices_of_a_stage_share_its_samples():
    """Four devices as one replica do what four replicas do."""
    model = Model(layers(1, parameters=50.0))
    together = Candidate((0, 1), ((tuple(Place(0, slot) for slot in range(4)),),), (4.0,))
    apart = pipeline((0, 1), [0], [1], [2], [3])
    assert of(together, model, cluster(4)).seconds == of(apart, model, cluster(4)).seconds == 3 + 3
    assert together.batch == apart.batch == 4


# Split layers.


def test_a_split_layer_divides_work_and_weights_and_exchanges():
    """Degree 2, 4 samples: each device computes 2 samples' work; an all-reduce of 4 * 25 bytes takes 1 s each way."""
    model = Model(layers(1, parameters=50.0, split_by=2, exchanged=25.0))
    places = ((tuple(Place(0, slot) for slot in range(2)),),)
    found = of(Candidate((0, 1), places, (4.0,), split=(2,)), model, cluster(2))
    assert (found.devices[0].compute, found.devices[0].exchange, found.exchanges) == (6, 2, ())
    assert found.seconds == 8
    assert found.devices[0].memory.weights == 100
    again = of(Candidate((0, 1), places, (4.0,), split=(2,), recompute=True), model, cluster(2))
    assert (again.devices[0].compute, again.devices[0].exchange) == (8, 3), "the forward pass exchanges again"


def test_what_is_not_divided_is_computed_by_each_part():
    model = Model(layers(1, split_by=2, divided=0.75))
    found = of(Candidate((0, 1), ((tuple(Place(0, slot) for slot in range(2)),),), (4.0,), split=(2,)), model, cluster(2))
    assert found.devices[0].compute == 0.75 * 6 + 0.25 * 12


def test_a_bridge_gathers_what_a_split_layer_reads():
    """Whale's hybrid: the first layer on all four devices, the second split over them; 8 samples of 10 bytes."""
    model = Model((layers(1, parameters=100.0, output=10.0)[0], layers(1, parameters=400.0, split_by=4)[0]))
    places = ((tuple(Place(0, slot) for slot in range(4)),),)
    found = of(Candidate((0, 2), places, (8.0,), split=(1, 4)), model, cluster(4))
    gather = 80 * 3 / 4 / 100
    use = found.devices[0]
    assert use.exchange == pytest.approx(2 * gather)
    assert use.compute == 2 * 6 and use.memory.weights == (100 + 400 / 4) * 4
    # Only the first layer has copies.
    assert use.sync == pytest.approx(2 * 3 / 4 * 400 / 100)
    back = Model(tuple(reversed(model.layers)))
    again = of(Candidate((0, 2), places, (8.0,), split=(4, 1)), dataclasses.replace(back, layers=tuple(
        dataclasses.replace(layer, output=10.0) for layer in back.layers)), cluster(4))  # fmt: skip
    assert again.devices[0].exchange == pytest.approx(gather), "behind a split layer only the backward pass gathers"


def test_parts_of_a_split_layer_sum_with_their_like():
    """Two replicas of degree 2 across two nodes: both parts share the cards, so 2 * 100 bytes at 10 bytes/s take 20 s."""
    model = Model(layers(1, parameters=50.0, split_by=2))
    places = tuple((tuple(Place(node, slot) for slot in range(2)),) for node in range(2))
    found = of(Candidate((0, 1), places, (1.0, 1.0), split=(2,)), model, cluster(2, 2))
    groups = [group for _, group, _ in found.exchanges[0][0].messages]
    assert groups == [(Place(0, 0), Place(1, 0)), (Place(0, 1), Place(1, 1))]
    assert found.devices[0].sync == 20


# ZeRO, recompute, tied weights.


def test_dividing_the_optimizer_state_moves_as_much():
    """Reduce-scatter, update and all-gather take what an all-reduce and the update took; the update is divided."""
    device = Device("unit", {"float32": 1.0}, 1000.0, 100.0)
    model = Model(layers(1, parameters=50.0))
    plain, divided = (of(pipeline((0, 1), [0], [1], zero=level), model, cluster(2, device=device)) for level in (0, 1))
    moved = 50 * (4 + 2 * (4 + 8)) / 100
    assert plain.seconds == 3 + 2 + moved and plain.devices[0].update == moved
    assert divided.seconds == 3 + 1 + moved / 2 + 1


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_divided_gradients_and_weights_travel_with_each_micro_batch(micro_batches):
    """200 bytes: one reduce-scatter (1 s) at level 2, and two all-gathers more at level 3, for each micro-batch."""
    model = Model(layers(1, parameters=50.0))
    times = {}
    for level in (2, 3):
        for overlap in (False, True):
            candidate = pipeline((0, 1), [0], [1], zero=level, micro_batches=micro_batches)
            times[level, overlap] = of(candidate, model, cluster(2), overlap=overlap).seconds
    assert times[2, False] == (3 + 1) * micro_batches + 1, "the updated weights are gathered"
    assert times[3, False] == (3 + 1 + 2) * micro_batches
    # Passes of 1 and 2 s hide a gather of 1 s, and a gather and a reduce-scatter of 1 s each.
    assert (times[2, True], times[3, True]) == (3 * micro_batches + 1, 3 * micro_batches)


def test_recompute_trades_time_for_memory():
    """Four layers that keep 10 and read 2 bytes, 1F1B on two devices."""
    model = Model(layers(4, activation=10.0, output=2.0, workspace=1.0))
    plain = of(pipeline((0, 2, 4), [0, 1], micro_batches=4), model, cluster(2))
    again = of(pipeline((0, 2, 4), [0, 1], micro_batches=4, recompute=True), model, cluster(2))
    assert [use.memory.activations for use in plain.devices] == [2 * 20, 20]
    # The first layer reads the batch, which is not the model's; one layer at a time is there as a whole.
    assert [(use.memory.activations, use.memory.workspace) for use in again.devices] == [(2 * 2, 11), (4, 11)]
    assert (plain.devices[0].compute, again.devices[0].compute) == (4 * 6, 4 * 8)
    assert again.flops == plain.flops and again.mfu < plain.mfu


def test_tied_weights_are_summed_over_their_stages():
    """The first and the last layer are one variable: one all-reduce over all four devices, once both stages are done."""
    tied = layers(1, parameters=50.0, tied="words")[0]
    model = Model((tied, layers(1)[0], tied))
    found = of(pipeline((0, 1, 3), [0, 1], [2, 3]), model, cluster(4))
    ((exchange, period),) = found.exchanges
    assert exchange.stages == (0, 1) and len(exchange.members) == 4
    assert period == (9, 9 + 2 * 3 / 4 * 200 / 100) and exchange.ready == 9
    assert [use.memory.weights for use in found.devices] == [200] * 4


# Rules.


def test_replicas_that_are_alike_are_simulated_once():
    model = Model(layers(2))
    found = of(pipeline((0, 1, 2), [0, 1], [2, 3], [4, 5], samples=(1.0, 2.0, 1.0)), model, cluster(6))
    assert found.timelines[0] is found.timelines[2] and found.timelines[0] is not found.timelines[1]


@pytest.mark.parametrize("seed", range(30))
def test_the_time_of_every_device_adds_up(seed):
    """Random plans on random clusters: no part is negative, the parts are the iteration, no device computes longer than it."""
    draw = random.Random(seed)
    kinds = [Device("k%d" % n, {"float32": draw.choice([1.0, 2.0, 5.0])}, 1e4, 1e3, price=draw.choice([1.0, 3.0])) for n in range(2)]
    hardware = Hardware(tuple(Node("n%d" % n, (draw.choice(kinds),) * 4, Link(50.0, 0.01), Link(7.0, 0.1)) for n in range(4)))
    name = draw.choice(NAMES)
    chunks = 2 if name in ("Interleaved", "ZeroBubbleV") else 1
    degree, rows, replicas = draw.choice([(1, 1, 4), (2, 2, 2), (2, 4, 2), (4, 2, 2), (1, 4, 4), (4, 4, 1), (2, 1, 4)])
    stages = rows * chunks
    model = Model(tuple(
        Layer("l", Work(draw.randrange(1, 9)), Work(draw.randrange(2, 17)), Work(1), draw.choice([0.0, 30.0]), 5.0, draw.choice([0.0, 4.0]), 1.0,
              split_by=4, exchanged=draw.choice([0.0, 3.0]), divided=draw.choice([1.0, 0.5])) for _ in range(2 * stages)))  # fmt: skip
    order = [make_schedule(name, stages, 4, rows).device_of(stage) for stage in range(stages)]
    places = hardware.places
    candidate = Candidate(
        tuple(range(0, 2 * stages + 1, 2)),
        tuple(tuple(tuple(places[(row * replicas + r) * degree + at] for at in range(degree)) for row in order) for r in range(replicas)),
        tuple(draw.choice([1.0, 2.0]) for _ in range(replicas)),
        draw.randrange(1, 7),
        name,
        draw.random() < 0.5,
        draw.randrange(4),
        tuple(draw.choice([1, degree]) for _ in model.layers),
    )
    for overlap in (False, True):
        found = of(candidate, model, hardware, overlap=overlap)
        for use in found.devices:
            parts = (use.compute, use.exchange, use.sync, use.transfer, use.update, use.idle)
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(found.seconds)
        assert found.compute_share + found.communication_share + found.bubble_share == pytest.approx(1)
        assert all(0 < utilisation <= 1 + 1e-9 for utilisation in found.utilisation)
        assert 0 <= found.imbalance_share <= found.bubble_share + 1e-12
        assert 0 < found.mfu <= 1
    plain = of(candidate, model, hardware)
    assert found.seconds <= plain.seconds * (1 + 1e-9) or candidate.zero < 2, "what hides cannot delay"
    assert of(candidate, model, hardware, slowdown=2).seconds >= plain.seconds * (1 - 1e-9)


def test_money_and_rates():
    device = Device("gpu", {"float32": 2e12, "float16": 8e12}, 1000.0, FREE, price=3.0)
    model = Model((Layer("l", Work(1e12), Work(2e12)),), dtype="float16")
    found = of(pipeline((0, 1), [0], [1]), model, cluster(2, 2, device=device, price=4.0))
    assert found.seconds == 3 / 8 and found.flops_per_second == 16e12 and found.mfu == 1
    assert found.price == 2 * 3 + 4, "the second node is not used"
    assert found.dollars_per_million == pytest.approx(10 / 3600 * (3 / 8) / 2 * 1e6)
    assert found.tflops_per_dollar == pytest.approx(16 / 10)
    unpriced = of(pipeline((0, 1), [0], [1]), model, cluster(2))
    assert (unpriced.price, unpriced.dollars_per_million, unpriced.tflops_per_dollar) == (None, None, None)


def test_what_bounds_an_iteration():
    def bound(model, *replicas, bounds=(0, 1), hardware=None, **more):
        return of(pipeline(bounds, *replicas, **more), model, hardware or cluster(4)).bound

    assert bound(Model(layers(1)), [0]) == "compute"
    assert bound(Model(layers(1, parameters=50.0)), [0], [1], hardware=cluster(2, intra=1.0)) == "communication"
    assert bound(Model(layers(1, activation=1001.0)), [0]) == "memory"
    assert bound(Model(layers(4)), [0, 1, 2, 3], bounds=(0, 1, 2, 3, 4)) == "bubble"
    unequal = Model(layers(1, 10, 20) + layers(3, 0, 1))
    assert bound(unequal, [0, 1, 2, 3], bounds=(0, 1, 2, 3, 4), micro_batches=8) == "imbalance"


GOOD = pipeline((0, 1, 2), [0, 1], [2, 3], micro_batches=2)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(bounds=(0, 2)), "replica 0 has places for 2 stages; there are 1"),
        (dict(bounds=(0, 1, 3)), r"bounds \(0, 1, 3\) do not cut 2 layers; they must rise from 0 to 2"),
        (dict(bounds=(0, 0, 2)), "must rise"),
        (dict(samples=(1.0,)), "samples for 1 replicas, but places for 2"),
        (dict(samples=(1.0, 0.0)), "must have more than 0 samples"),
        (dict(micro_batches=0), "in each of 0 micro-batches"),
        (dict(zero=4), "no zero level 4; it is 0, 1, 2 or 3"),
        (dict(split=(1,)), "split has 1 degrees for 2 layers"),
        (dict(split=(2, 1)), "layer 0, l, can't be split by 2; its degree may be 1 to 1"),
        (dict(places=(GOOD.places[0], ((Place(0, 2),), (Place(0, 9),)))), "no device 9 on node 0 in this cluster of 1 nodes"),
        (dict(places=(GOOD.places[0], ((Place(0, 2),), (Place(0, 0),)))), "device 0 of node 0 is in replica 0 and in replica 1"),
        (dict(places=(GOOD.places[0], ((Place(0, 2),), ()))), r"stage 1 of replica 1 has places \(\); name at least one"),
        (dict(schedule="ZB-V"), "4 stages on 2 devices, not on|2 stages on 1 devices, not on 2"),
        (dict(places=(((Place(0, 0),), (Place(0, 0),)), GOOD.places[1])), "stages that share devices in replica 0 must do so in replica 1"),
    ],
)
def test_plans_that_do_not_fit(change, message):
    with pytest.raises((PlanError, ScheduleError), match=message):
        of(dataclasses.replace(GOOD, **change), Model(layers(2)), cluster(4))


def test_places_must_be_those_of_the_schedule():
    """Interleaved stages go round the devices; these do not."""
    model = Model(layers(4))
    places = tuple((Place(0, slot),) for slot in (0, 0, 1, 1))
    with pytest.raises(PlanError, match=r"has stage 1 on device 1 of 2.*in the order \[0, 1, 0, 1\]"):
        of(Candidate((0, 1, 2, 3, 4), (places,), (1.0,), schedule="Interleaved"), model, cluster(2))
    degrees = Candidate((0, 1), ((tuple(Place(0, slot) for slot in range(3)),),), (1.0,), split=(2,))
    with pytest.raises(PlanError, match="layer 0 is split by 2, which does not divide the 3 devices of stage 0"):
        of(degrees, Model(layers(1, split_by=2)), cluster(3))
