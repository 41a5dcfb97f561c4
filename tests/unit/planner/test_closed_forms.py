"""Closed forms: the simulation gives exactly what the literature's formulas say, where they hold."""

import itertools
import math

import pytest

from epl.cluster.hardware import Device, Hardware, Link, Node
from epl.errors import PlanError
from epl.planner.cost.model import Layer, Model, Work
from epl.planner.schedules import make_schedule, peak_activations
from epl.planner.schedules import simulate as run_schedule
from epl.planner.simulate import Candidate, simulate
from epl.planner.simulate import closed_forms as forms
from tests.unit.planner.ring_network import Ring

UNIT = Device("unit", {"float32": 1.0}, 1000.0, 1.0)
HARDWARE = Hardware((Node("n", (UNIT,) * 8, Link(1.0), Link(1.0)),))
TIMES = [(1, 1, 1), (2, 3, 1), (3, 2, 2), (1, 1, 3), (4, 2, 2)]
"""tF, tB, tW in whole numbers, so that sums are exact; tW is a part of tB + tW that a float holds exactly."""


def equal_stages(name, devices, micro_batches, chunks, times):
    """An iteration of a pipeline whose stages are all one layer, with `times` on each device."""
    forward, backward, weights = times
    stages = devices * chunks
    layer = Layer("l", Work(forward), Work(backward + weights), Work(weights), activation=1.0)
    rows = [make_schedule(name, stages, micro_batches, devices).device_of(stage) for stage in range(stages)]
    places = tuple((HARDWARE.places[row],) for row in rows)
    candidate = Candidate(tuple(range(stages + 1)), (places,), (1.0,), micro_batches, name)
    return simulate(candidate, Model((layer,) * stages), HARDWARE, Ring(HARDWARE))


def bubble(iteration):
    return iteration.seconds - sum(use.compute for use in iteration.devices) / len(iteration.devices)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_gpipe_and_1f1b(name, times):
    formula = {"GPipe": forms.gpipe_bubble, "1F1B": forms.one_f_one_b_bubble}[name]
    for devices, micro_batches in itertools.product((1, 2, 3, 5, 8), (1, 2, 5, 8, 13)):
        iteration = equal_stages(name, devices, micro_batches, 1, times)
        assert bubble(iteration) == formula(devices, *times)
        rate = forms.bubble_rate(formula(devices, *times), micro_batches, sum(times))
        # The shares are sums of quotients, so the last bit may differ.
        assert iteration.bubble_share == pytest.approx(rate, abs=1e-12) and rate == pytest.approx((devices - 1) / (micro_batches + devices - 1))
        if name == "GPipe":
            held = [forms.gpipe_in_flight(micro_batches)] * devices
        else:
            held = [forms.one_f_one_b_in_flight(devices, micro_batches, device) for device in range(devices)]
        assert [use.memory.activations for use in iteration.devices] == held


@pytest.mark.parametrize("times", [(2, 2, 2), (6, 6, 12)])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaved(chunks, times):
    """The formula has the times of a device: v stages."""
    for devices, micro_batches in itertools.product((1, 2, 3, 4), (1, 2, 4, 6, 9)):
        iteration = equal_stages("Interleaved", devices, micro_batches, chunks, times)
        of_device = tuple(time * chunks for time in times)
        assert bubble(iteration) == forms.interleaved_bubble(devices, micro_batches, chunks, *of_device)
        held = [forms.interleaved_in_flight(devices, micro_batches, chunks, device) for device in range(devices)]
        assert [use.memory.activations for use in iteration.devices] == held


@pytest.mark.parametrize("times", TIMES)
def test_zero_bubble_h1_and_h2(times):
    """For as many micro-batches as the schedules' docstrings ask for: m >= p, and m >= 2p - 1."""
    # The order that is made for the costs may be shorter where they are not equal; the formulas are of the paper's order.
    for devices, micro_batches in itertools.product((1, 2, 3, 5, 8), (5, 8, 13, 16)):
        for name, formula, least, held in (
            ("ZB-H1", forms.zb_h1_bubble, devices, forms.zb_h1_in_flight),
            ("ZB-H2", forms.zb_h2_bubble, 2 * devices - 1, forms.zb_h2_in_flight),
        ):
            if micro_batches < least:
                with pytest.raises(PlanError, match="holds for %d micro-batches or more, not for %d" % (least, micro_batches)):
                    formula(devices, micro_batches, *times)
                continue
            expected = formula(devices, micro_batches, *times)
            schedule = make_schedule(name, devices, micro_batches)
            assert run_schedule(schedule, dict(zip("FBW", times))).bubble == expected
            iteration = equal_stages(name, devices, micro_batches, 1, times)
            assert bubble(iteration) <= expected
            assert bubble(iteration) == expected or len(set(times)) > 1
            assert max(peak_activations(schedule)) == held(devices, micro_batches)


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
def test_zero_bubble_v(devices):
    for micro_batches in (1, 2, 4, 7, 9, 15, 20):
        iteration = equal_stages("ZB-V", devices, micro_batches, 2, (2, 2, 2))
        assert bubble(iteration) == forms.zb_v_bubble(devices, micro_batches, 2)
        assert max(use.memory.activations for use in iteration.devices) == forms.zb_v_in_flight(devices, micro_batches)


def test_a_zero_bubble_schedule_has_a_third_of_the_bubble_of_1f1b():
    """Qi et al., ICLR 2024, table 2, for tF = tB = tW."""
    assert forms.zb_h1_bubble(8, 24, 1, 1, 1) * 3 == forms.one_f_one_b_bubble(8, 1, 1, 1)
    assert forms.zb_h2_bubble(8, 24, 1, 1, 1) == forms.zb_v_bubble(8, 24) == 0


def test_the_planners_estimate_is_exact_for_gpipe():
    """Alpa's sum for unequal stages, with forward and backward passes apart; for 1F1B only with equal stages."""
    forward, backward = [3, 1, 4, 1], [5, 9, 2, 6]
    cost = {("F", stage): time for stage, time in enumerate(forward)}
    cost.update({("B", stage): time for stage, time in enumerate(backward)})
    apart = forms.slowest_stage_seconds(forward, 7) + forms.slowest_stage_seconds(backward, 7)
    assert run_schedule(make_schedule("GPipe", 4, 7), cost).makespan == apart
    assert run_schedule(make_schedule("1F1B", 4, 7), {"F": 2, "B": 5}).makespan == forms.slowest_stage_seconds([7] * 4, 7)
    assert forms.slowest_stage_seconds([2, 3], 4, [0.5]) == 5 + 9 + 0.5


# Memory.


def test_175_billion_parameters_need_35_devices_of_80_gigabytes():
    """16 bytes per parameter, 2.8 TB; ZeRO, SC'20, section 3.1, and Huawei's article on networks for large models."""
    assert forms.zero_bytes(175e9, 0, 1) == 2.8e12
    assert math.ceil(forms.zero_bytes(175e9, 0, 1) / 80e9) == 35
    assert forms.zero_bytes(175e9, 3, 35) == 80e9
    assert Model((), weight_bytes=2, gradient_bytes=2, state_bytes=12).bytes_per_parameter == 16


@pytest.mark.parametrize("level, gigabytes", [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_levels_as_in_the_paper(level, gigabytes):
    """ZeRO, SC'20, figure 1: 7.5 B parameters on 64 devices; the figure has one decimal."""
    assert forms.zero_bytes(7.5e9, level, 64) / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_the_simulation_holds_what_the_formula_says(level):
    layer = Layer("l", Work(1), Work(2), parameters=600.0)
    model = Model((layer,), weight_bytes=2, gradient_bytes=2, state_bytes=12)
    candidate = Candidate((0, 1), tuple(((place,),) for place in HARDWARE.places[:3]), (1.0,) * 3, zero=level)
    found = simulate(candidate, model, HARDWARE, Ring(HARDWARE)).devices[0].memory
    gathered = 600 * 2 if level == 3 else 0
    assert found.weights + found.gradients + found.state == pytest.approx(forms.zero_bytes(600, level, 3), rel=1e-12)
    assert found.workspace == gathered
    with pytest.raises(PlanError, match="no zero level 4"):
        forms.zero_bytes(1, 4, 1)


def test_transformer_layers():
    """Korthikanti et al., MLSys 2023: s b h (34 + 5 a s / h) without tensor parallelism; forward + backward is 72 s h^2 (1 + s / 6h)."""
    s, h, a = 2048, 12288, 96
    assert forms.transformer_activation(s, h, a) == s * h * (34 + 5 * a * s / h)
    assert sum(forms.transformer_flops(s, h)) == pytest.approx(72 * s * h**2 * (1 + s / (6 * h)))
