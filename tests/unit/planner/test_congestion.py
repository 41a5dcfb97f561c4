"""Congestion: hash collisions exactly, stretched networks, failed links."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from epl.cluster.hardware import Device, Hardware, Link, Node, Place
from epl.errors import PlanError
from epl.planner.cost.model import Layer, Model, Work
from epl.planner.simulate import Candidate, simulate
from epl.planner.simulate.congestion import (
    LinkFailures,
    Stretched,
    completion,
    ecmp_slowdown,
    expected_fullest,
    fullest_path,
    perfectly_even,
)
from tests.unit.planner.ring_network import Ring

TABLE = [
    (4, 2, 0.375, 2.75, 1.38),
    (8, 2, 0.273, 5.09, 1.27),
    (4, 4, 0.094, 2.13, 2.13),
    (8, 4, 0.038, 3.54, 1.77),
    (8, 8, 0.0024, 2.60, 2.60),
    (16, 8, 2.9e-4, 4.20, 2.10),
    (32, 8, 3.0e-5, 7.05, 1.76),
    (64, 8, 2.9e-6, 12.2, 1.53),
]
"""Flows, paths, P(perfectly even), E[max], slowdown: shared/systems.md, section 3, computed there from the multinomial."""


@pytest.mark.parametrize("flows, paths, even, fullest, slowdown", TABLE)
def test_the_table_of_hash_collisions(flows, paths, even, fullest, slowdown):
    """The table has two or three digits."""
    assert perfectly_even(flows, paths) == pytest.approx(even, rel=0.02)
    assert expected_fullest(flows, paths) == pytest.approx(fullest, rel=0.005)
    assert ecmp_slowdown(flows, paths) == pytest.approx(slowdown, rel=0.005)


def test_as_many_flows_as_paths():
    assert ecmp_slowdown(64, 64) == pytest.approx(3.96, abs=0.005)
    assert perfectly_even(64, 64) < 1e-20


@pytest.mark.parametrize("flows, paths", [(1, 1), (1, 3), (3, 2), (4, 3), (5, 4), (6, 3), (7, 2)])
def test_the_distribution_is_that_of_all_outcomes(flows, paths):
    counts = [0] * (flows + 1)
    for outcome in itertools.product(range(paths), repeat=flows):
        counts[max(outcome.count(path) for path in range(paths))] += 1
    exact = [float(Fraction(count, paths**flows)) for count in counts]
    assert fullest_path(flows, paths) == pytest.approx(exact, abs=1e-13)
    even = float(Fraction(counts[flows // paths], paths**flows)) if flows % paths == 0 else 0.0
    assert perfectly_even(flows, paths) == pytest.approx(even)


def test_the_distribution_agrees_with_drawing():
    """For sizes that can't be enumerated: 20,000 draws, so the mean is within four standard errors."""
    draws = np.random.default_rng(5).multinomial(96, [1 / 16] * 16, size=20000).max(axis=1)
    assert expected_fullest(96, 16) == pytest.approx(draws.mean(), abs=4 * draws.std() / math.sqrt(len(draws)))


def test_many_flows_even_out():
    """Few, large flows collide; the ratio of many small ones concentrates, and one path can't collide at all."""
    slowdowns = [ecmp_slowdown(flows, 8) for flows in (8, 32, 128, 512)]
    assert slowdowns == sorted(slowdowns, reverse=True) and slowdowns[-1] < 1.2
    assert ecmp_slowdown(7, 1) == 1.0
    assert fullest_path(300, 4).sum() == pytest.approx(1)
    with pytest.raises(PlanError, match="0 flows on 4 paths"):
        fullest_path(0, 4)


def test_a_collective_ends_with_its_slowest_flow():
    """Four flows of 10 bytes on two paths of 5 bytes/s: 2 to 4 on one path, so 4, 6 or 8 s with probability 3/8, 4/8, 1/8."""
    assert completion(10, 5, 4, 2) == pytest.approx((4 * 3 + 6 * 4 + 8) / 8)
    assert [completion(10, 5, 4, 2, certainty) for certainty in (0.3, 0.375, 0.5, 0.875, 0.9)] == [4, 4, 6, 6, 8]


# A job on a network that collides.

GPU = Device("gpu", {"float32": 10.0}, 1e4, float("inf"))
CLUSTER = Hardware((Node("a", (GPU,) * 2, Link(50.0), Link(5.0)), Node("b", (GPU,) * 2, Link(50.0), Link(5.0))))
MODEL = Model((Layer("l", Work(10), Work(20), parameters=25.0, output=10.0),) * 2)


def test_only_what_leaves_a_node_is_stretched():
    ring = Ring(CLUSTER)
    network = Stretched(ring, 1.5)
    inside, across = (Place(0, 0), Place(0, 1)), (Place(0, 0), Place(1, 0))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert getattr(network, kind)(inside, 100) == getattr(ring, kind)(inside, 100)
        assert getattr(network, kind)(across, 100) == 1.5 * getattr(ring, kind)(across, 100)
    assert network.transfer(*across, 10) == 1.5 * ring.transfer(*across, 10)
    assert network.together([("all_reduce", inside, 100), ("transfer", across, 10)]) == [2.0, 3.0]
    with pytest.raises(PlanError, match="0.5 would make the network faster"):
        Stretched(ring, 0.5)


def test_the_job_is_slower_by_what_it_sends_between_nodes():
    """Two replicas on two nodes: an all-reduce of 200 bytes at 5 bytes/s takes 40 s, and 40 s more with a slowdown of 2."""
    across = Candidate((0, 2), (((Place(0, 0),),), ((Place(1, 0),),)), (1.0, 1.0))
    inside = Candidate((0, 2), (((Place(0, 0),),), ((Place(0, 1),),)), (1.0, 1.0))
    times = [simulate(across, MODEL, CLUSTER, Ring(CLUSTER), slowdown=slowdown).seconds for slowdown in (1.0, 2.0)]
    assert times == [6 + 40, 6 + 80]
    times = [simulate(inside, MODEL, CLUSTER, Ring(CLUSTER), slowdown=slowdown).seconds for slowdown in (1.0, 2.0)]
    assert times == [6 + 4, 6 + 4]


# Failures.


def test_control_plane_against_data_plane_recovery():
    """1,000 links that fail once in 100 days: 10 failures a day, each 0.1 to 3 s, or below 1 ms (systems.md, section 3, rows 10 and 11)."""
    control, data = LinkFailures(1000, 0.01, 0.1, 3.0), LinkFailures(1000, 0.01, 0.0, 0.001)
    # So few that hardly any two overlap.
    assert control.stall_per_day == pytest.approx(10 * 1.55, rel=1e-3)
    assert data.stall_per_day == pytest.approx(10 * 0.0005, rel=1e-3)
    assert control.throughput(100) == pytest.approx(100 * (1 - 15.5 / 86400), rel=1e-6)
    assert LinkFailures(0, 0.01, 1, 2).throughput(100) == 100


def test_overlapping_outages_count_once():
    """Against a drawn day: Poisson arrivals, uniform recoveries, the union of the outages."""
    failures = LinkFailures(200, 60.0, 2.0, 10.0)
    draw = np.random.default_rng(7)
    shares = []
    for _ in range(40):
        arrivals = np.sort(draw.uniform(0, 86400, draw.poisson(200 * 60)))
        ends = np.maximum.accumulate(arrivals + draw.uniform(2, 10, len(arrivals)))
        starts = np.maximum(arrivals, np.concatenate([[0], ends[:-1]]))
        shares.append(np.clip(np.minimum(ends, 86400) - starts, 0, None).sum() / 86400)
    error = 4 * np.std(shares) / math.sqrt(len(shares))
    # 12,000 outages of 6 s would be 0.83 of the day, had they not overlapped.
    assert failures.stalled_share == pytest.approx(np.mean(shares), abs=error)
    assert failures.stalled_share == pytest.approx(1 - math.exp(-12000 * 6 / 86400))


@pytest.mark.parametrize(
    "patience, outage", [(math.inf, 2.0), (3.0, 2.0), (0.5, 0.5 + 100), (2.0, 0.5 * 1.5 + 0.5 * (2 + 100)), (1.5, 0.25 * 1.25 + 0.75 * (1.5 + 100))]
)
def test_collectives_that_give_up_cost_a_restart(patience, outage):
    assert LinkFailures(1, 1, 1.0, 3.0, patience, 100.0).outage == pytest.approx(outage)


def test_descriptions_of_failures_are_checked():
    with pytest.raises(PlanError, match="no description of failures"):
        LinkFailures(10, 0.1, 3.0, 1.0)
