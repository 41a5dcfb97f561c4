"""Pictures of predictions: when devices work, what they hold, how jobs scale and what they cost. They return matplotlib figures."""

from typing import Any, Dict, List, Mapping, Sequence, Tuple

from epl.errors import PlanError
from epl.planner.schedules import Span
from epl.planner.schedules.picture import draw_legend, draw_rows, draw_strip, label_rows, new_figure
from epl.planner.simulate.iteration import DeviceUse, Iteration
from epl.planner.simulate.network import ALL_GATHER
from epl.planner.simulate.scaling import Point

_ROWS = 32
_GB = 1e9
_PARTS = {"weights": "#7aa6d9", "gradients": "#e8a05c", "state": "#9cc48a", "activations": "#b48ec9", "workspace": "#5f6f7a"}
_LINES = ("#3f78b5", "#d17f2f", "#5c9a46", "#8c5fb0", "#c65b5b", "#5f6f7a")


def draw_timeline(iteration: Iteration) -> Any:
    """The predicted iteration: a row for each device of a pipeline, its collectives and the optimizer below its actions.

    Replicas with the same pipeline have the same picture, so only the first of them is
    drawn; the devices of one stage share a row.
    """
    candidate, rows_of_stages = iteration.candidate, iteration.candidate.rows()
    distinct = list({id(timeline): replica for replica, timeline in reversed(list(enumerate(iteration.timelines)))}.values())
    uses = {use.place: use for use in iteration.devices}
    rows: List[Tuple[int, Sequence[Span]]] = []
    labels: List[str] = []
    strips: List[Tuple[float, str, float, float]] = []
    for replica in sorted(distinct):
        for device, spans in enumerate(iteration.timelines[replica].devices):
            stages = [stage for stage, row in enumerate(rows_of_stages) if row == device]
            places = candidate.places[replica][stages[0]]
            many = " and %d more" % (len(places) - 1) if len(places) > 1 else ""
            head = "node %d %s:%d%s" % (places[0].node, uses[places[0]].kind, places[0].slot, many)
            labels.append("%s\nstage %s, replica %d" % (head, ", ".join(map(str, stages)), replica))
            strips += [(len(rows) + 0.45, *strip) for strip in _strips(iteration, uses[places[0]], spans[-1].end)]
            rows.append((len(rows), spans))
    rows, labels = rows[:_ROWS], labels[:_ROWS]
    figure = new_figure(14, 1.6 + 1.0 * len(rows))
    panel = figure.subplots()
    draw_rows(panel, rows)
    for at, kind, start, end in strips:
        if at < len(rows):
            draw_strip(panel, at, kind, start, end)
    label_rows(panel, labels)
    share = "computes %.0f %%, communicates %.0f %%, idles %.0f %%" % tuple(
        100 * part for part in (iteration.compute_share, iteration.communication_share, iteration.bubble_share)
    )
    panel.set_title("predicted iteration: %.1f ms, the average device %s" % (iteration.seconds * 1e3, share), loc="left", fontsize=10)
    panel.set_xlabel("ms")
    shown = {span.action.kind for _, spans in rows for span in spans}
    draw_legend(figure, [kind for kind in ("F", "B", "W") if kind in shown] + ["bubble"] + sorted({kind for _, kind, _, _ in strips}))
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def _strips(iteration: Iteration, use: DeviceUse, passed: float) -> List[Tuple[str, float, float]]:
    """Collectives and optimizer of a device: kind, start, end."""
    found = []
    ready = passed
    for exchange, period in iteration.exchanges:
        if use.place in exchange.members:
            found.append(("collective", period.start, period.end))
            if exchange.messages[0][0] != ALL_GATHER:
                ready = max(ready, period.end)
    if use.update:
        found.append(("optimizer", ready, ready + use.update))
    return found


def draw_memory(iteration: Iteration) -> Any:
    """What devices hold at most, against what they have. Devices that hold the same are one bar."""
    alike: Dict[Tuple[object, ...], List[DeviceUse]] = {}
    for use in iteration.devices:
        alike.setdefault((use.kind, use.capacity, use.memory), []).append(use)
    groups = sorted(alike.values(), key=lambda group: -group[0].memory.total / group[0].capacity)[:_ROWS]
    figure = new_figure(10, 1.4 + 0.45 * len(groups))
    panel = figure.subplots()
    for at, group in enumerate(groups):
        left = 0.0
        for part, colour in _PARTS.items():
            width = getattr(group[0].memory, part) / _GB
            panel.barh(at, width, left=left, height=0.6, color=colour)
            left += width
        limit = group[0].capacity / _GB
        panel.plot([limit, limit], [at - 0.42, at + 0.42], color="#c65b5b", linewidth=2)
        panel.text(left, at, " %.1f of %.1f GB%s" % (left, limit, ": too much" if left > limit else ""), va="center", fontsize=8)
    label_rows(panel, [_devices(group) for group in groups])
    panel.set_xlim(0, 1.25 * max(max(group[0].capacity, group[0].memory.total) for group in groups) / _GB)
    panel.set_xlabel("GB; red: capacity")
    handles = [panel.barh(0, 0, color=colour, label=part) for part, colour in _PARTS.items()]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.3 / (1.4 + 0.45 * len(groups)), 1, 1))
    return figure


def _devices(group: Sequence[DeviceUse]) -> str:
    first = "%s:%d on node %d" % (group[0].kind, group[0].place.slot, group[0].place.node)
    return first if len(group) == 1 else "%s and %d more" % (first, len(group) - 1)


def draw_scaling(curves: Mapping[str, Sequence[Point]]) -> Any:
    """Throughput and speed-up S(N) of jobs by number of devices; dashed is what each would reach without loss."""
    figure, (left, right) = _panels(curves, 2)
    for colour, (name, points) in zip(_colours(curves), curves.items()):
        devices = [point.devices for point in points]
        left.plot(devices, [point.throughput for point in points], marker="o", markersize=3, color=colour, label=name)
        ideal = points[0].throughput / points[0].devices / points[0].speedup
        left.plot(devices, [ideal * count for count in devices], linestyle="--", linewidth=0.8, color=colour)
        right.plot(devices, [point.speedup for point in points], marker="o", markersize=3, color=colour, label=name)
    left.set_yscale("log")
    left.set_ylabel("samples per second")
    right.set_ylabel("throughput of N / (N times throughput of one)")
    right.set_ylim(0, None)
    _finish(figure, (left, right), len(curves))
    return figure


def draw_prices(curves: Mapping[str, Sequence[Point]]) -> Any:
    """US dollars of a million samples, and TFLOP/s reached for each dollar an hour, by number of devices.

    Raises:
      PlanError: a price is not known.
    """
    for name, points in curves.items():
        if any(point.dollars_per_million is None for point in points):
            raise PlanError("devices of %s have no price; give each kind of device its US dollars an hour" % name)
    figure, (left, right) = _panels(curves, 2)
    for colour, (name, points) in zip(_colours(curves), curves.items()):
        devices = [point.devices for point in points]
        left.plot(devices, [point.dollars_per_million for point in points], marker="o", markersize=3, color=colour, label=name)
        right.plot(devices, [point.iteration.tflops_per_dollar for point in points], marker="o", markersize=3, color=colour, label=name)
    left.set_ylabel("US dollars per million samples")
    right.set_ylabel("TFLOP/s per US dollar an hour")
    for panel in (left, right):
        panel.set_ylim(0, None)
    _finish(figure, (left, right), len(curves))
    return figure


def _panels(curves: Mapping[str, Sequence[Point]], count: int) -> Tuple[Any, Any]:
    if not curves or not all(curves.values()):
        raise PlanError("there is nothing to draw; give at least one curve, each with points")
    figure = new_figure(6 * count, 4.5)
    return figure, figure.subplots(1, count)


def _colours(curves: Mapping[str, Sequence[Point]]) -> List[str]:
    return [_LINES[at % len(_LINES)] for at in range(len(curves))]


def _finish(figure: Any, panels: Sequence[Any], curves: int) -> None:
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xlabel("devices")
        panel.grid(True, linewidth=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    if curves > 1:
        panels[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
