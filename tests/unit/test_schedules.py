"""Pipeline schedules: complete, free of deadlock, and as good as the formulas of their papers."""

import random
import subprocess
import sys
import textwrap

import pytest

from epl.errors import ConfigError, EplError
from epl.planner.schedules import (
    DEFAULT_COSTS,
    NAMES,
    Action,
    Schedule,
    ScheduleError,
    canonical_name,
    make_schedule,
    optimizer_edges,
    peak_activations,
    render,
    simulate,
    validate,
)

DEVICES = range(1, 9)
MICRO_BATCHES = range(1, 17)
CHUNKS = {"Interleaved": 2, "ZeroBubbleV": 2}  # stages per device
SPLIT = ("ZeroBubbleH1", "ZeroBubbleH2", "ZeroBubbleV")
COSTS = [dict(F=f, B=b, W=w) for f, b, w in [(1, 1, 1), (2, 3, 1), (3, 2, 2), (1, 1, 3), (2, 1, 3), (1, 4, 2)]]


def build(name, devices, micro_batches, costs=None):
    return make_schedule(name, devices * CHUNKS.get(name, 1), micro_batches, devices, costs)


def random_costs(seed, stages):
    draw = random.Random(seed)
    return {(kind, chunk): draw.choice([0, 1, 2, 5]) + draw.random() for kind in "FBW" for chunk in range(stages)}


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_complete_and_runs(name, devices):
    for micro_batches in MICRO_BATCHES:
        schedule = build(name, devices, micro_batches)
        validate(schedule)
        assert (schedule.name, schedule.micro_batches, len(schedule.devices)) == (name, micro_batches, devices)
        assert schedule.split_backward == (name in SPLIT)
        found = sorted(action for actions in schedule.devices for action in actions)
        kinds = "BFW" if name in SPLIT else "BF"
        assert found == [(kind, m, c) for kind in kinds for m in range(micro_batches) for c in range(schedule.stages)]
        for device in range(devices):
            assert {action.chunk for action in schedule.devices[device]} == set(schedule.chunks_of(device))
            assert all(schedule.device_of(chunk) == device for chunk in schedule.chunks_of(device))


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_keep_their_order(name, devices):
    """All schedules add gradients in the same order, so they give the same sums."""
    for actions in build(name, devices, 7).devices:
        for kind, chunk in {(action.kind, action.chunk) for action in actions}:
            assert [a.micro_batch for a in actions if (a.kind, a.chunk) == (kind, chunk)] == list(range(7))


@pytest.mark.parametrize("name", NAMES)
def test_same_arguments_give_the_same_schedule(name):
    costs = random_costs(3, 8)
    assert build(name, 4, 6) == build(name, 4, 6)
    assert build(name, 4, 6, costs) == build(name, 4, 6, costs)


def test_placement():
    interleaved = make_schedule("Interleaved", 6, 4, devices=2)
    assert [interleaved.chunks_of(device) for device in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert [make_schedule("ZeroBubbleV", 6, 4).chunks_of(device) for device in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [make_schedule("PreferBackward", 3, 4).device_of(chunk) for chunk in range(3)] == [0, 1, 2]
    with pytest.raises(ScheduleError, match="no stage 6: its stages are 0 to 5"):
        interleaved.device_of(6)


# Closed forms.


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", ["PreferForward", "PreferBackward", "PreferBackwardOptimizer"])
def test_bubble_of_whole_backwards(name, devices, costs):
    for micro_batches in MICRO_BATCHES:
        timeline = simulate(build(name, devices, micro_batches), costs)
        step = sum(costs.values())
        assert timeline.makespan == timeline.period == (micro_batches + devices - 1) * step
        assert timeline.bubble == (devices - 1) * step
        assert timeline.bubble_share == pytest.approx((devices - 1) / (micro_batches + devices - 1), abs=1e-12)
        assert timeline.busy == (micro_batches * step,) * devices


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("devices", DEVICES)
def test_bubble_of_interleaving(devices, chunks):
    """(p - 1)(tF + tB) / v, where tF and tB are those of a device: v stages."""
    for costs in COSTS:
        for micro_batches in range(1, 14):
            schedule = make_schedule("Interleaved", devices * chunks, micro_batches, devices)
            validate(schedule)
            small = max(0, devices - micro_batches) * (chunks - 1)
            assert simulate(schedule, costs).bubble == (devices - 1 + small) * sum(costs.values())


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("devices", DEVICES)
def test_bubble_of_h1(devices, costs):
    f, b, w = costs["F"], costs["B"], costs["W"]
    for micro_batches in range(devices, 17):
        timeline = simulate(build("ZeroBubbleH1", devices, micro_batches), costs)
        assert timeline.bubble == (devices - 1) * (f + b - min(f, w))
        if w <= f:  # otherwise the last device, whose W come last, ends behind the first
            assert timeline.makespan == timeline.period


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("devices", DEVICES)
def test_bubble_of_h2(devices, costs):
    f, b, w = costs["F"], costs["B"], costs["W"]
    for micro_batches in range(2 * devices - 1, 17):
        timeline = simulate(build("ZeroBubbleH2", devices, micro_batches), costs)
        assert timeline.bubble == max(0, (devices - 1) * (f + b - 2 * min(f, w)))


@pytest.mark.parametrize("devices", DEVICES)
def test_bubbles_with_equal_times(devices):
    """For any number of micro-batches; in units of one F of one stage."""
    for micro_batches in range(1, 25):
        few = 2 * devices - 1 - micro_batches
        assert simulate(build("ZeroBubbleH1", devices, micro_batches)).bubble == max(devices - 1, few if devices > 1 else 0)
        assert simulate(build("ZeroBubbleH2", devices, micro_batches)).bubble == max(0, few)
        assert simulate(build("ZeroBubbleV", devices, micro_batches)).bubble == max(0, few, 4 * (devices - micro_batches) - 1)


def test_a_parallelogram_ends_one_after_the_other():
    timeline = simulate(make_schedule("ZeroBubbleH2", 4, 8))
    assert [(row[0].start, row[-1].end) for row in timeline.devices] == [(0, 24), (1, 25), (2, 26), (3, 27)]
    assert (timeline.makespan, timeline.period, timeline.bubble, timeline.bubble_share) == (27, 24, 0, 0)


@pytest.mark.parametrize("devices", DEVICES)
def test_peak_activations(devices):
    p = devices
    for m in MICRO_BATCHES:
        assert peak_activations(build("PreferForward", p, m)) == (m,) * p
        assert peak_activations(build("PreferBackward", p, m)) == tuple(min(m, p - i) for i in range(p))
        optimizer = [min(m, p - i + 1) for i in range(p - 1)] + [1]
        assert peak_activations(build("PreferBackwardOptimizer", p, m)) == tuple(optimizer)
        assert max(peak_activations(build("ZeroBubbleH1", p, m))) == min(m, p)
        assert max(peak_activations(build("ZeroBubbleH2", p, m))) == min(m, 2 * p - 1)
        balanced = peak_activations(build("ZeroBubbleV", p, m))
        assert max(balanced) == min(2 * m, 2 * p)
        for v in (2, 3):
            group = -(-m // max(1, m // p))
            expected = tuple(min(v * m, 2 * (p - i - 1) + (v - 1) * group + 1) for i in range(p))
            assert peak_activations(make_schedule("Interleaved", v * p, m, p)) == expected


@pytest.mark.parametrize("name, peak", [("ZeroBubbleH1", 4), ("ZeroBubbleH2", 7), ("ZeroBubbleV", 8)])
def test_split_schedules_fill_all_devices_alike(name, peak):
    assert peak_activations(build(name, 4, 12)) == (peak,) * 4


def test_peak_activations_with_sizes():
    schedule = make_schedule("PreferBackward", 3, 8)
    assert peak_activations(schedule, [10, 1, 0.5]) == (30, 2, 0.5)
    assert peak_activations(make_schedule("ZeroBubbleV", 2, 2), [10, 1]) == (20,)  # F0.0, then F1.0: never two of each
    with pytest.raises(ScheduleError, match="3 stages, but 2 sizes"):
        peak_activations(schedule, [1, 2])


def test_bubble_shares_rank_as_in_the_paper():
    """Zero Bubble, table 5: 8 stages, 24 micro-batches. Without transfers it is a little less."""
    shares = [simulate(build(name, 8, 24)).bubble_share for name in ("PreferBackward", "ZeroBubbleH1", "Interleaved", "ZeroBubbleV")]
    assert shares == pytest.approx([7 / 31, 7 / 79, 7 / 55, 0], abs=1e-12)


# The rule of PreferBackwardOptimizer.


@pytest.mark.parametrize("stages", DEVICES)
def test_optimizer_edges_are_the_rule(stages):
    for micro_batches in MICRO_BATCHES:
        expected = set()
        for s in range(stages):
            for m in range(1, micro_batches):
                if s == stages - 1:
                    waited = Action("B", m - 1, s)
                elif m + s <= stages:
                    waited = Action("F", m - 1, s)
                else:
                    waited = Action("B", m + s - stages - 1, s)
                expected.add((waited, Action("F", m, s)))
        edges = optimizer_edges(stages, micro_batches)
        assert set(edges) == expected and len(edges) == len(expected)


@pytest.mark.parametrize("stages", DEVICES)
def test_optimizer_order_follows_its_edges(stages):
    """What a forward waits for is right before it: no edge is broken, and none is stricter than needed."""
    for micro_batches in MICRO_BATCHES:
        schedule = make_schedule("PreferBackwardOptimizer", stages, micro_batches)
        before = {later: earlier for actions in schedule.devices for earlier, later in zip(actions, actions[1:])}
        assert all(before[later] == earlier for earlier, later in optimizer_edges(stages, micro_batches))


def test_optimizer_order_hides_transfers():
    times = [simulate(make_schedule(name, 4, 16), transfer=0.5).makespan for name in ("PreferBackward", "PreferBackwardOptimizer")]
    assert times[1] < times[0]


# Names and numbers.


@pytest.mark.parametrize(
    "name, canonical",
    [
        ("preferforward", "PreferForward"),
        ("GPipe", "PreferForward"),
        ("1f1b", "PreferBackward"),
        ("PREFERBACKWARD", "PreferBackward"),
        ("prefer_backward_optimizer", "PreferBackwardOptimizer"),
        ("interleaved-1F1B", "Interleaved"),
        ("ZB-H1", "ZeroBubbleH1"),
        ("zbh2", "ZeroBubbleH2"),
        ("zero bubble v", "ZeroBubbleV"),
    ],
)
def test_names(name, canonical):
    assert canonical_name(name) == canonical
    assert make_schedule(name, 2, 2).name == canonical


@pytest.mark.parametrize("name", ["", "2F2B", None])
def test_unknown_name(name):
    with pytest.raises(ConfigError) as error:
        make_schedule(name, 2, 2)
    assert repr(name) in str(error.value)
    assert all(known in str(error.value) for known in NAMES)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("Interleaved", 3, 4), "can't divide 3 stages: it puts two on each device unless `devices` says otherwise; use 2 or 4 stages"),
        (("Interleaved", 5, 4, 3), "can't divide 5 stages: it puts equally many on each of 3 devices; use 3 or 6 stages"),
        (("Interleaved", 2, 4, 8), "each of 8 devices; use 8 stages"),
        (("ZeroBubbleV", 1, 4), "can't divide 1 stages: it puts two on each device; use 2 stages"),
        (("ZeroBubbleV", 4, 4, 4), "4 stages on 2 devices, not on 4"),
        (("PreferBackward", 4, 4, 2), "4 stages on 4 devices, not on 2; use 4 devices, or Interleaved"),
        (("PreferBackward", 0, 4), "number of stages of a pipeline must be at least 1, not 0"),
        (("PreferForward", 4, -1), "number of micro-batches of a pipeline must be at least 1, not -1"),
        (("PreferForward", 4, 4, 0), "number of devices of a pipeline must be at least 1, not 0"),
    ],
)
def test_numbers_that_do_not_fit(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        make_schedule(*arguments)


def test_interleaved_defaults():
    assert make_schedule("Interleaved", 8, 4) == make_schedule("Interleaved", 8, 4, devices=4)
    assert make_schedule("Interleaved", 1, 4).devices == make_schedule("1F1B", 1, 4).devices
    assert make_schedule("Interleaved", 4, 6, devices=4).devices == make_schedule("1F1B", 4, 6).devices


# Validation.


def changed(schedule, change):
    devices = [list(actions) for actions in schedule.devices]
    change(devices)
    return Schedule(schedule.name, schedule.stages, schedule.micro_batches, tuple(map(tuple, devices)), schedule.split_backward)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d[0].pop(0), "lacks F0 of stage 0: 2 stages and 3 micro-batches need each of F, B once"),
        (lambda d: d[1].clear(), "lacks B0 of stage 1 and 5 more"),
        (lambda d: d[0].append(d[0][0]), "repeats F0 of stage 0"),
        (lambda d: d[0].append(Action("W", 0, 0)), "has unknown W0 of stage 0"),
        (lambda d: d[0].append(Action("F", 3, 0)), "has unknown F3 of stage 0"),
        (lambda d: d[0].append(Action("F", 0, 2)), "has unknown F0 of stage 2"),
        (lambda d: d[0].append(Action("F", 0, -1)), "has unknown F0 of stage -1"),
        (lambda d: d[0].append(d[1].pop()), "has stage 1 on devices 0 and 1"),
        (lambda d: d[1].sort(), "deadlock: device 0 stands before B0 of stage 0, which reads B0 of stage 1; device 1 stands before B0 of stage 1"),
        (lambda d: d[0].insert(0, d[0].pop()), "deadlock: device 0 stands before B2 of stage 0, which reads F2 of stage 0"),
    ],
)
def test_broken_schedules_are_refused(change, message):
    with pytest.raises(ScheduleError, match=message):
        validate(changed(make_schedule("PreferBackward", 2, 3), change))


def test_w_needs_its_b():
    schedule = make_schedule("ZeroBubbleH1", 1, 2)
    with pytest.raises(ScheduleError, match="device 0 stands before W1 of stage 0, which reads B1 of stage 0"):
        validate(changed(schedule, lambda d: d[0].sort(reverse=True)))
    with pytest.raises(ScheduleError, match="lacks W1 of stage 0"):
        validate(changed(schedule, lambda d: d[0].pop()))
    with pytest.raises(EplError, match="deadlock"):
        simulate(changed(schedule, lambda d: d[0].sort(reverse=True)))


# Simulation.


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", NAMES)
def test_times_obey_the_machine(name, seed):
    """One action at a time on a device, inputs first, transfers between devices, no needless wait."""
    draw = random.Random(seed)
    devices, micro_batches = draw.randrange(1, 6), draw.randrange(1, 9)
    stages = devices * CHUNKS.get(name, 1)
    costs, transfer = random_costs(seed, stages), [draw.random() for _ in range(stages - 1)]
    schedule = build(name, devices, micro_batches, costs)
    validate(schedule)
    timeline = simulate(schedule, costs, transfer)
    spans = {span.action: span for row in timeline.devices for span in row}
    for device, row in enumerate(timeline.devices):
        assert tuple(span.action for span in row) == schedule.devices[device]
        for at, (action, start, end) in enumerate(row):
            kind, m, c = action
            whole = costs["W", c] if kind == "B" and name not in SPLIT else 0
            assert end == pytest.approx(start + costs[kind, c] + whole)
            ready = [0, row[at - 1].end] if at else [0]
            if kind == "F" and c > 0:
                ready.append(spans["F", m, c - 1].end + transfer[c - 1] * (schedule.device_of(c - 1) != device))
            if kind == "B":
                ready.append(spans["F", m, c].end)
                if c < stages - 1:
                    ready.append(spans["B", m, c + 1].end + transfer[c] * (schedule.device_of(c + 1) != device))
            if kind == "W":
                ready.append(spans["B", m, c].end)
            assert start == max(ready)
        last = "W" if name in SPLIT else "B"
        lives = [(spans["F", m, c].start, spans[last, m, c].end) for m in range(micro_batches) for c in schedule.chunks_of(device)]
        assert timeline.peaks[device] == max(sum(a <= time < b for a, b in lives) for time, _ in lives)
    assert timeline.peaks == peak_activations(schedule)
    assert timeline.makespan == max(span.end for span in spans.values())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", SPLIT)
def test_costs_never_make_it_worse(name, seed):
    """An order made for the costs is at least as short under them, and keeps the bound on memory."""
    draw = random.Random(seed)
    devices, micro_batches = draw.randrange(1, 6), draw.randrange(1, 13)
    costs = random_costs(seed, devices * CHUNKS.get(name, 1))
    plain, adapted = build(name, devices, micro_batches), build(name, devices, micro_batches, costs)
    validate(adapted)
    assert simulate(adapted, costs).period <= simulate(plain, costs).period
    bound = {"ZeroBubbleH1": devices, "ZeroBubbleH2": 2 * devices - 1, "ZeroBubbleV": 2 * devices}[name]
    assert max(peak_activations(adapted)) <= bound


def test_costs_can_make_it_better():
    costs = dict(F=2, B=3, W=1)
    assert simulate(make_schedule("ZeroBubbleV", 8, 12, costs=costs), costs).period < simulate(make_schedule("ZeroBubbleV", 8, 12), costs).period


@pytest.mark.parametrize("name", SPLIT)
def test_costs_may_be_zero(name):
    costs = {"F": 0, "B": 0, "W": 0}
    schedule = build(name, 3, 5, costs)
    validate(schedule)
    timeline = simulate(schedule, costs)
    assert (timeline.makespan, timeline.bubble, timeline.bubble_share) == (0, 0, 0)


def test_costs():
    schedule = make_schedule("PreferBackward", 2, 4)
    assert simulate(schedule) == simulate(schedule, DEFAULT_COSTS) == simulate(schedule, {"F": 1, "B": 2})
    assert simulate(schedule, {"F": 1, "B": 2, ("F", 1): 3}).busy == (12, 20)
    with pytest.raises(ScheduleError, match=r"no cost for B of stage 1; give one as 'B' or \('B', 1\)"):
        simulate(schedule, {"F": 1, ("B", 0): 2})
    with pytest.raises(ScheduleError, match="no cost for W of stage 0"):
        simulate(make_schedule("ZeroBubbleH1", 1, 1), {"F": 1, "B": 2})
    with pytest.raises(ScheduleError, match="cost for F of stage 0 must not be negative: -1"):
        simulate(schedule, {"F": -1, "B": 2})


def test_transfers():
    schedule = make_schedule("PreferForward", 3, 4)
    assert simulate(schedule, transfer=0.5).makespan == 18 + 4 * 0.5
    assert simulate(schedule, transfer=[0.5, 2]).makespan == 18 + 2 * (0.5 + 2)
    assert simulate(make_schedule("ZeroBubbleV", 2, 4), transfer=5).makespan == 24  # both stages on one device
    with pytest.raises(ScheduleError, match="3 stages have 2 boundaries, but there are 3 transfer times"):
        simulate(schedule, transfer=[1, 1, 1])


# Charts.


def chart(*arguments, costs=None, unit=None):
    schedule = make_schedule(*arguments)
    return "\n" + render(schedule, simulate(schedule, costs), unit) + "\n"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            ("PreferForward", 2, 3),
            """
            0 | F0 F1 F2 .  .  .  B0--- B1--- B2---
            1 | .  F0 F1 F2 B0--- B1--- B2---
            """,
        ),
        (
            ("PreferBackward", 2, 4),
            """
            0 | F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---
            1 | .  F0 B0--- F1 B1--- F2 B2--- F3 B3---
            """,
        ),
        (
            ("PreferBackward", 4, 8),
            """
            0 | F0 F1 F2 F3 .  .  .  .  .  .  B0--- F4 B1--- F5 B2--- F6 B3--- F7 B4--- .  B5--- .  B6--- .  B7---
            1 | .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- F5 B3--- F6 B4--- F7 B5--- .  B6--- .  B7---
            2 | .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- F6 B5--- F7 B6--- .  B7---
            3 | .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6--- F7 B7---
            """,
        ),
        (
            ("PreferBackwardOptimizer", 3, 4),
            """
            0 | F0 F1 F2 F3 .  .  .  B0--- .  B1--- .  B2--- .  B3---
            1 | .  F0 F1 F2 .  B0--- F3 B1--- .  B2--- .  B3---
            2 | .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3---
            """,
        ),
        (
            ("Interleaved", 4, 4, 2),
            """
            0 | F0.0 F1.0 F0.2 F1.2 F2.0 .    B0.2----- F3.0 B1.2----- F2.2 B0.0----- F3.2 B1.0----- .    B2.2----- .    B3.2----- B2.0----- B3.0-----
            1 | .    F0.1 F1.1 F0.3 B0.3----- F1.3 B1.3----- F2.1 B0.1----- F3.1 B1.1----- F2.3 B2.3----- F3.3 B3.3----- B2.1----- B3.1-----
            """,
        ),
        (
            ("ZeroBubbleH1", 3, 4),
            """
            0 | F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
            1 | .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
            2 | .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
            """,
        ),
        (
            ("ZeroBubbleH2", 2, 4),
            """
            0 | F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
            1 | .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
            """,
        ),
        (
            ("ZeroBubbleV", 4, 4),
            """
            0 | F0.0 F1.0 F2.0 F0.3 B0.3 W0.3 F1.3 B1.3 W1.3 F3.0 B0.0 W0.0 F2.3 B2.3 W2.3 B1.0 W1.0 F3.3 B3.3 B2.0 W3.3 B3.0 W2.0 W3.0
            1 | .    F0.1 F0.2 F1.1 F1.2 B0.2 W0.2 F2.1 B0.1 W0.1 F2.2 B1.2 W1.2 F3.1 B1.1 W1.1 F3.2 B2.2 B2.1 B3.2 B3.1 W2.2 W2.1 W3.2 W3.1
            """,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_charts(arguments, expected):
    assert chart(*arguments) == textwrap.dedent(expected)


def test_chart_with_other_units():
    assert chart("PreferForward", 1, 11)[:15] == "\n0 | F0  F1  F2"
    costs = {"F": 0.5, "B": 2, "W": 0}
    assert chart("PreferForward", 1, 1, costs=costs) == "\n0 | F0 B0---------\n"
    assert chart("PreferForward", 1, 1, costs=costs, unit=2) == "\n0 | B0\n"


def test_no_tensorflow():
    code = "import sys, epl.planner.schedules; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
