"""Stages of unequal groups: compared with all cuts and all orders, and with the simulator."""

import dataclasses
import itertools
import time

import numpy as np
import pytest

from epl.cluster.hardware.spec import Link
from epl.errors import PlanError
from epl.planner.balance import Group, balance_stages, costs, in_flight, price_stages, row, stages
from epl.planner.cost.model import Layer, Model, Skip, Work
from epl.planner.schedules import make_schedule, peak_activations, simulate
from tests.unit.planner.balance_models import device, layer, random_model


def brute(model, groups, micro_batches, schedule, link, bottleneck=False, keep_order=False):
    """The best plan by trying all, and by the sums that the plans themselves report."""
    layers, count = len(model.layers), len(groups)
    tables, held = costs.Tables(model), costs.held_by(schedule, count, micro_batches)
    best = None
    orders = [tuple(range(count))] if keep_order else itertools.permutations(range(count))
    for order in orders:
        for inner in itertools.combinations(range(1, layers), count - 1):
            picks = [row.Pick(number, *ends) for number, ends in zip(order, zip((0, *inner), (*inner, layers)))]
            plan = stages.plan_of(tables, groups, picks, micro_batches, held, link, False)
            if plan.fits:
                value = (plan.bottleneck, plan.seconds) if bottleneck else (plan.seconds,)
                best = value if best is None or value < best else best
    return best


def independent_seconds(model, plan, micro_batches, link):
    """T by its definition, from the layers alone."""
    times, hops, syncs = [], [], [0.0]
    for stage, group in zip(plan.stages, plan.groups):
        part = model.layers[stage.first : stage.last]
        alone = [sum(one.forward_seconds(d, n) + one.backward_seconds(d, n) for one in part) for d, n in zip(group.devices, group.shares)]
        times.append(max(alone))
        if stage.first:
            moved = model.crossing(stage.first) * group.samples
            hops.append(link.seconds(moved) if link else 0.0)
        if group.link and len(group.devices) > 1:
            count = len(group.devices)
            size = dataclasses.replace(model, layers=part).parameters * model.gradient_bytes
            syncs.append(2 * (count - 1) * (group.link.latency + size / count / group.link.rate))
    return sum(times) + 2 * sum(hops) + (micro_batches - 1) * max(times + hops) + max(syncs)


def random_groups(random, count, samples, link):
    kinds = [device("d%d" % i, float(random.integers(1, 5)), float(random.integers(30, 200))) for i in range(3)]
    groups = []
    for _ in range(count):
        members = tuple(kinds[int(random.integers(0, 3))] for _ in range(int(random.integers(1, 3))))
        shares = (samples,) if len(members) == 1 else (samples - 1, 1)
        groups.append(Group(members, shares, link))
    return groups


@pytest.mark.parametrize("bottleneck", [False, True])
def test_cuts_and_orders_equal_brute_force(bottleneck):
    random = np.random.default_rng(int(bottleneck))
    solved = 0
    for number in range(100):
        model = random_model(random, int(random.integers(4, 8)), tied=bool(number % 2))
        if number % 3 == 0:
            model = dataclasses.replace(model, skips=(Skip(0, 3, 4.0),))
        link = [None, Link(float(random.integers(1, 8)), 0.5)][number % 2]
        group_link = [None, Link(float(random.integers(1, 8)), 0.25)][number // 2 % 2]
        groups = random_groups(random, int(random.integers(1, 5)), 2, group_link)
        micro_batches = int(random.integers(1, 7))
        schedule = ["PreferForward", "PreferBackward", "ZeroBubbleH1"][number % 3]
        keep = number % 5 == 0
        wanted = brute(model, groups, micro_batches, schedule, link, bottleneck, keep)
        if wanted is None:
            with pytest.raises(PlanError, match="no cut of"):
                balance_stages(model, groups, micro_batches, schedule, link, bottleneck, keep)
            continue
        plan = balance_stages(model, groups, micro_batches, schedule, link, bottleneck, keep)
        solved += 1
        assert plan.proven and plan.fits
        assert sorted(stage.group for stage in plan.stages) == list(range(len(groups)))
        assert plan.seconds == pytest.approx(independent_seconds(model, plan, micro_batches, link), rel=1e-9)
        if bottleneck:
            # Among equal bottlenecks the sum of times is smallest, not the step time with its sync.
            assert plan.bottleneck == pytest.approx(wanted[0], rel=1e-9)
        else:
            assert plan.seconds == pytest.approx(wanted[0], rel=1e-9)
    assert 30 < solved < 100


def test_links_may_differ_by_the_groups_they_join():
    random = np.random.default_rng(2)
    for _ in range(20):
        model = random_model(random, 6)
        groups = random_groups(random, 3, 2, None)
        groups = [dataclasses.replace(group, devices=tuple(dataclasses.replace(d, memory=1e9) for d in group.devices)) for group in groups]
        slow, fast = Link(1.0), Link(9.0)

        def link(a, b, slow=slow, fast=fast):
            return fast if a.devices[0].kind == b.devices[0].kind else slow

        micro_batches = int(random.integers(1, 7))
        plan = balance_stages(model, groups, micro_batches, link=link)
        assert plan.seconds == pytest.approx(brute(model, groups, micro_batches, "PreferBackward", link)[0], rel=1e-9)


def test_search_beyond_the_exact_one_finds_nearly_the_same(monkeypatch):
    random = np.random.default_rng(3)
    ratios = []
    for _ in range(6):
        model = random_model(random, 14)
        groups = [Group((device("d%d" % i, float(random.integers(1, 6)), 1e9),), (2,)) for i in range(6)]
        exact = balance_stages(model, groups, 8)
        with monkeypatch.context() as patch:
            patch.setattr(stages, "EXACT_WORK", 0)
            searched = balance_stages(model, groups, 8)
        assert exact.proven and not searched.proven
        ratios.append(searched.seconds / exact.seconds)
    assert min(ratios) >= 1 - 1e-12
    # No proof stands behind this bound: it is what the search reaches here, 3 % at most, and shall not get worse.
    assert max(ratios) < 1.03


def test_a_beam_keeps_the_promising_states():
    # Up to 20 states after a stage, of which 4 are kept; with all of them it is exact.
    random = np.random.default_rng(7)
    ratios = []
    for _ in range(20):
        tables = costs.Tables(random_model(random, 14))
        groups = [Group((device("d%d" % i, float(random.integers(1, 6))),), (2,)) for i in range(6)]
        options = [stages.option_of(tables, group, tuple(int(i == k) for k in range(6)), lambda stage: 1, 6) for i, group in enumerate(groups)]
        rests = np.array([option.seconds[0][:, -1] for option in options])
        rests[:, -1] = 0.0
        times = []
        for beam in (20, 4):
            problem = row.Row(options, (1,) * 6, 6, 14, np.zeros(15), beam=beam, rests=rests)
            times.append(problem.time(problem.best(8).picks, 8))
        problem = row.Row(options, (1,) * 6, 6, 14, np.zeros(15))
        assert times[0] == pytest.approx(problem.time(problem.best(8).picks, 8), rel=1e-9)
        ratios.append(times[1] / times[0])
    # 13 % and 2.5 % are lost here.
    assert max(ratios) < 1.2 and np.mean(ratios) < 1.05


def test_a_search_that_ends_early_says_so():
    random = np.random.default_rng(4)
    tables = costs.Tables(random_model(random, 30))
    options = []
    for i in range(3):
        group = Group((device("d%d" % i, 1.0 + i), device("e%d" % i, 2.0 + i)), (1, 2), Link(3.0))
        options.append(stages.option_of(tables, group, tuple(int(i == k) for k in range(3)), lambda stage: 1, 6))
    problem = row.Row(options, (2, 2, 2), 6, 30, np.zeros(31))
    assert problem.best(2).proven
    assert not problem.best(2, sweeps=1).proven


def test_memory_decides_who_comes_first():
    # Four equal layers and two equally fast devices; with 1F1B the first stage holds two micro-batches, the last one.
    # 2 layers: 2 * 16 bytes of state, and 2 * 8 of activations for each micro-batch held.
    model = Model(tuple(layer(3.0, 1.0, 8.0) for _ in range(4)))
    small, large = Group((device("small", 1.0, 48.0),), (1,)), Group((device("large", 1.0, 64.0),), (1,))
    plan = balance_stages(model, [small, large], 4)
    assert [stage.group for stage in plan.stages] == [1, 0] and plan.cuts == (0, 2, 4)
    assert [stage.memory for stage in plan.stages] == [(64.0,), (48.0,)]
    # GPipe holds all four micro-batches everywhere: 2 layers need 96 bytes.
    with pytest.raises(PlanError, match="no cut of 4 layers into 2 stages fits"):
        balance_stages(model, [small, large], 4, "PreferForward")
    # In the other order the small one holds 1 layer (32 bytes), and the large one 2 (48).
    with pytest.raises(PlanError, match="no cut of"):
        balance_stages(model, [small, large], 4, keep_order=True)


def test_fixed_memory_of_175_billion_parameters_takes_35_devices_of_80_gb():
    # 16 bytes per parameter (ZeRO, SC'20, section 3.1), 2.8 TB: exactly 35 devices, if the layers divide so.
    model = Model(tuple(layer(3.0, 175e9 / 35) for _ in range(35)), weight_bytes=2, gradient_bytes=2, state_bytes=12)
    groups = [Group((device("80GB", 1.0, 80e9),), (1,)) for _ in range(35)]
    assert balance_stages(model, groups, 1).fits
    with pytest.raises(PlanError, match="2.8e"):
        balance_stages(model, groups[:34], 1)


def test_memory_of_a_stage_in_closed_form():
    # Two layers, 3 samples, 2 micro-batches in flight: 16 bytes for each of 1 + 2 parameters, 2 * 3 * (4 + 5) bytes of activations, and
    # the larger workspace for 3 samples.
    model = Model((layer(3.0, 1.0, 4.0, workspace=7.0), layer(3.0, 2.0, 5.0, workspace=2.0), layer(3.0)))
    one = Group((device("d", 1.0),), (3,))
    plan = price_stages(model, [one, one], (0, 2, 3), 2)
    assert plan.stages[0].memory == (16 * 3 + 2 * 3 * 9 + 3 * 7,)
    assert plan.fits
    small = Group((device("d", 1.0, 122.9),), (3,))
    assert not price_stages(model, [small, one], (0, 2, 3), 2).fits  # 123 bytes


def test_tied_weights_count_once_in_a_stage_and_again_in_each_other():
    tied = [layer(3.0, 10.0, tied="table"), layer(3.0, 1.0), layer(3.0, 10.0, tied="table")]
    model = Model(tuple(tied), weight_bytes=1, gradient_bytes=0, state_bytes=0)
    one = Group((device("d", 1.0, 100.0),), (1,))
    assert balance_stages(model, [one], 1).stages[0].memory == (11.0,)
    assert [stage.memory for stage in balance_stages(model, [one, one], 1).stages] in ([(10.0,), (11.0,)], [(11.0,), (10.0,)])


def test_estimate_equals_the_simulated_gpipe_step():
    # Where forward and backward take the same parts of each stage, all forwards take sum F + (m - 1) max F, and the
    # backwards likewise.
    random = np.random.default_rng(5)
    for _ in range(30):
        model = random_model(random, 8)
        groups = [Group((device("d%d" % i, float(random.integers(1, 6)), 1e9),), (2,)) for i in range(4)]
        micro_batches = int(random.integers(1, 9))
        plan = balance_stages(model, groups, micro_batches, "PreferForward")
        cost = {}
        for i, stage in enumerate(plan.stages):
            cost["F", i], cost["B", i] = stage.seconds / 3, stage.seconds * 2 / 3
        made = make_schedule("PreferForward", 4, micro_batches)
        assert simulate(made, {**cost, "W": 0}).makespan == pytest.approx(plan.seconds, rel=1e-9)


def test_simulated_1f1b_takes_no_longer_than_estimated():
    # 1F1B overlaps the fill of forwards with backwards of unequal stages, which the estimate does not see: up to 9 % less here. With
    # transfers, which hold up the few micro-batches in flight, it was between 11 % less and 2 % more.
    random = np.random.default_rng(5)
    ratios = []
    for _ in range(30):
        model = random_model(random, 8)
        groups = [Group((device("d%d" % i, float(random.integers(1, 6)), 1e9),), (2,)) for i in range(4)]
        micro_batches = int(random.integers(1, 12))
        plan = balance_stages(model, groups, micro_batches)
        cost = {}
        for i, stage in enumerate(plan.stages):
            cost["F", i], cost["B", i] = stage.seconds / 3, stage.seconds * 2 / 3
        ratios.append(simulate(make_schedule("PreferBackward", 4, micro_batches), {**cost, "W": 0}).makespan / plan.seconds)
    assert min(ratios) > 0.85 and max(ratios) <= 1 + 1e-9


def test_the_bottleneck_may_be_a_transfer():
    # Two layers on two devices, 1 second each; 5 bytes for a transfer, one byte a second: 2 + 2 * 5 + 3 * 5.
    one = Group((device("d", 3.0),), (1,))
    plan = balance_stages(Model((layer(3.0, output=5.0), layer(3.0))), [one, one], 4, link=Link(1.0))
    assert plan.bottleneck == 5.0 and plan.seconds == 27.0


def test_in_flight_activations_of_each_schedule():
    # Closed forms of GPipe and 1F1B; the others as their lists say.
    for p, m in [(1, 1), (4, 2), (4, 8)]:
        assert [in_flight("gpipe", p, m)(i) for i in range(p)] == [m] * p
        assert [in_flight("1F1B", p, m)(i) for i in range(p)] == [min(m, p - i) for i in range(p)]
        for name in ("PreferForward", "PreferBackward", "PreferBackwardOptimizer", "ZeroBubbleH1", "ZeroBubbleH2"):
            assert tuple(in_flight(name, p, m)(i) for i in range(p)) == peak_activations(make_schedule(name, p, m))
    # Two chunks on each device, each half a stage.
    assert tuple(2 * in_flight("ZBV", 4, 8)(i) for i in range(4)) == peak_activations(make_schedule("ZBV", 8, 8))
    assert tuple(2 * in_flight("Interleaved", 4, 8)(i) for i in range(4)) == peak_activations(make_schedule("Interleaved", 8, 8, 4))


def test_a_thousand_devices_and_48_layers_take_less_than_a_second():
    random = np.random.default_rng(6)
    model = Model(tuple(layer(float(random.integers(20, 40)), 1.0, 1.0, 1.0) for _ in range(48)))
    kinds = [device("d%d" % i, 1.0 + i, 200.0 * (4 - i)) for i in range(4)]
    for count in (8, 16, 32):
        size = 1024 // count
        groups = [Group((kinds[i * 4 // count],) * size, (1,) * size) for i in range(count)]
        start = time.process_time()
        plan = balance_stages(model, groups, 64, link=Link(100.0))
        taken = time.process_time() - start
        assert plan.proven and plan.fits
        # 0.04 s for 8 groups to 0.4 s for 32, of this process's own time.
        assert taken < 1.0, taken


def test_errors_say_what_to_do():
    one = Group((device("d", 1.0),), (1,))
    model = Model((layer(3.0), layer(3.0)))
    with pytest.raises(PlanError, match="use between 1 and 2"):
        balance_stages(model, [one] * 3, 1)
    with pytest.raises(PlanError, match="at least 1 micro-batch"):
        balance_stages(model, [one], 0)
    with pytest.raises(PlanError, match="their shares add up to"):
        balance_stages(model, [one, Group((device("d", 1.0),), (2,))], 1)
    with pytest.raises(PlanError, match="share of at least 1 sample"):
        Group((device("d", 1.0),), (0,))
    with pytest.raises(PlanError, match="ascending numbers from 0 to 2"):
        price_stages(model, [one, one], (0, 2, 2), 1)


def test_layers_without_work_cost_only_what_they_hold():
    nothing = Layer("nothing", Work(), Work())
    one = Group((device("d", 3.0),), (1,))
    assert balance_stages(Model((nothing, layer(3.0), layer(3.0), nothing)), [one, one], 2).seconds == 3.0
