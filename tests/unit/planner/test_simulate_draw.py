"""Pictures of predictions: what is drawn is what was computed."""

import dataclasses

import pytest

from epl.cluster.hardware import Device, Hardware, Link, Node, Place
from epl.errors import PlanError
from epl.planner.cost.model import Layer, Model, Work
from epl.planner.schedules.picture import COLOURS
from epl.planner.simulate import Candidate, simulate
from epl.planner.simulate.draw import draw_memory, draw_prices, draw_scaling, draw_timeline
from epl.planner.simulate.scaling import scaling_curve
from tests.unit.planner.ring_network import Ring

GPU = Device("gpu", {"float32": 1e12}, 1e9, 1e12, price=2.0)
HARDWARE = Hardware((Node("n", (GPU,) * 8, Link(1e10), Link(1e9)),))
MODEL = Model((Layer("l", Work(1e9), Work(2e9), Work(1e9), parameters=1e7, activation=2e7),) * 4)


def iteration(schedule="1F1B", **more):
    places = tuple(tuple((Place(0, 2 * replica + stage),) for stage in range(2)) for replica in range(2))
    return simulate(Candidate((0, 2, 4), places, (1.0, 1.0), 4, schedule, **more), MODEL, HARDWARE, Ring(HARDWARE))


def facecolours(panel):
    from matplotlib.colors import to_hex

    return [to_hex(colour) for collection in panel.collections for colour in collection.get_facecolors()]


def test_a_timeline_shows_each_action_once_and_the_collectives():
    found = iteration()
    figure = draw_timeline(found)
    (panel,) = figure.axes
    assert "%.1f ms" % (found.seconds * 1e3) in panel.get_title(loc="left")
    labels = [label.get_text() for label in panel.get_yticklabels()]
    assert labels == ["node 0 gpu:0\nstage 0, replica 0", "node 0 gpu:1\nstage 1, replica 0"], "the replicas are alike"
    assert sorted(text.get_text() for text in panel.texts) == sorted(2 * ["%s%d" % (kind, n) for kind in "FB" for n in range(4)])
    colours = facecolours(panel)
    assert colours.count(COLOURS["collective"]) == 2 and colours.count(COLOURS["optimizer"]) == 2
    ends = [path.get_extents().x1 for collection in panel.collections for path in collection.get_paths()]
    assert max(ends) == pytest.approx(found.seconds * 1e3)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["forward", "backward", "bubble", "collective", "optimizer"]


def test_a_split_backward_pass_has_a_colour_of_its_own():
    figure = draw_timeline(iteration("ZB-H1"))
    assert COLOURS["W"] in facecolours(figure.axes[0])
    assert "weights' gradients" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_memory_bars_end_at_what_is_held():
    found = iteration()
    (panel,) = draw_memory(found).axes
    # Stage 0 holds two micro-batches, stage 1 one; devices that hold the same are one bar.
    assert [label.get_text() for label in panel.get_yticklabels()] == ["gpu:0 on node 0 and 1 more", "gpu:1 on node 0 and 1 more"]
    held = [found.devices[0].memory.total / 1e9, found.devices[1].memory.total / 1e9]
    assert [max(bar.get_x() + bar.get_width() for bar in panel.patches if abs(bar.get_y() + 0.3 - at) < 0.1) for at in (0, 1)] == pytest.approx(held)
    assert [line.get_xdata()[0] for line in panel.lines] == [1.0, 1.0]
    assert not any("too much" in text.get_text() for text in panel.texts)
    small = Hardware((dataclasses.replace(HARDWARE.nodes[0], devices=(dataclasses.replace(GPU, memory=1e8),) * 8),))
    full = simulate(found.candidate, MODEL, small, Ring(small))
    assert full.bound == "memory" and all("too much" in text.get_text() for text in draw_memory(full).axes[0].texts)


def test_curves():
    one = Candidate((0, 4), (((Place(0, 0),),),), (8.0,))
    sizes = [1, 8, 64, 2048]
    curves = {name: scaling_curve(one, MODEL, HARDWARE, Ring, sizes, slowdown=slowdown) for name, slowdown in (("even", 1.0), ("hashed", 2.0))}
    left, right = draw_scaling(curves).axes
    assert list(left.lines[0].get_ydata()) == [point.throughput for point in curves["even"]]
    assert left.lines[1].get_ydata()[-1] == pytest.approx(2048 * curves["even"][0].throughput), "dashed: no loss"
    assert list(right.lines[1].get_ydata()) == [point.speedup for point in curves["hashed"]]
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["even", "hashed"]
    left, right = draw_prices(curves).axes
    assert list(left.lines[0].get_ydata()) == [point.dollars_per_million for point in curves["even"]]
    assert list(right.lines[1].get_ydata()) == [point.iteration.tflops_per_dollar for point in curves["hashed"]]


def test_what_can_not_be_drawn():
    with pytest.raises(PlanError, match="nothing to draw"):
        draw_scaling({})
    free = Hardware((dataclasses.replace(HARDWARE.nodes[0], devices=(dataclasses.replace(GPU, price=None),) * 8),))
    points = scaling_curve(Candidate((0, 4), (((Place(0, 0),),),), (8.0,)), MODEL, free, Ring, [1, 2])
    with pytest.raises(PlanError, match="devices of ours have no price"):
        draw_prices({"ours": points})
