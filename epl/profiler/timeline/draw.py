"""A picture of a measured step above the predicted one."""

from typing import Any, Dict, List, Sequence, Tuple

from epl.errors import EplError
from epl.planner.schedules import Timeline
from epl.profiler.timeline.measure import last_step, measured, predicted, replicas_of, rows_of
from epl.profiler.timeline.trace import BUBBLE, COLLECTIVE, OPTIMIZER, TRANSFER, Trace

COLOURS = {"F": "#7aa6d9", "B": "#e8a05c", "W": "#9cc48a", OPTIMIZER: "#b48ec9", TRANSFER: "#5f6f7a", COLLECTIVE: "#c65b5b", BUBBLE: "#eceff1"}
_NAMES = {"F": "forward", "B": "backward", "W": "weights' gradients"}
_MS = 1e3
_LABELS = 400
"""With more actions than these in a panel their labels would be unreadable."""


def draw(trace: Trace, step: Any = None) -> Any:
    """A matplotlib `Figure`: a panel of the measured step, and one of the prediction, with a row for each device.

    Raises:
      EplError: matplotlib is missing.
    """
    try:
        # Without pyplot: it would pick a display and keep every figure.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EplError("The picture needs matplotlib (%s); install it with: pip install matplotlib. The table needs nothing" % error) from error
    step = last_step(trace) if step is None else step
    replicas = replicas_of(trace)
    rows = [(replica, device) for replica in replicas for device in range(len(rows_of(trace, step, replica)))]
    labels = [_label(trace, step, replica, device) for replica, device in rows]
    theory = predicted(trace)
    figure = Figure(figsize=(14, 2.6 + 1.1 * len(rows)))
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    _measured_panel(upper, trace, step, rows)
    _bars(lower, [(at, theory.devices[device]) for at, (_, device) in enumerate(rows)])
    times = [measured(trace, step, replica) for replica in replicas]
    upper.set_title("measured, step %d: %s" % (step, _numbers(times)), loc="left", fontsize=10)
    by = " by %s" % trace.header["schedule"] if trace.header.get("ordered", True) else ""
    lower.set_title("predicted%s with the mean durations: %s" % (by, _numbers([theory])), loc="left", fontsize=10)
    for panel in (upper, lower):
        panel.set_yticks(range(len(rows)), labels, fontsize=9)
        panel.set_ylim(len(rows) - 0.4, -0.6)
        panel.spines[["top", "right"]].set_visible(False)
    lower.set_xlabel("ms")
    _legend(figure, trace)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def _label(trace: Trace, step: int, replica: int, device: int) -> str:
    row = rows_of(trace, step, replica)[device]
    stages = sorted({e.stage for e in row if e.stage is not None})
    return "rank %d %s\nstage %s%s" % (row[0].rank, row[0].device, ", ".join(map(str, stages)), ", replica %d" % replica if replica else "")


def _numbers(timelines: Sequence[Timeline]) -> str:
    share = sum(t.bubble_share for t in timelines) / len(timelines)
    return "%.1f ms, bubbles %.0f %%" % (max(t.period for t in timelines) * _MS, 100 * share)


def _measured_panel(panel: Any, trace: Trace, step: int, rows: Sequence[Tuple[int, int]]) -> None:
    begins = []
    places: Dict[Tuple[int, str], int] = {}
    for at, (replica, device) in enumerate(rows):
        events = rows_of(trace, step, replica)[device]
        begins.append(events[0].start)
        places.setdefault(events[0].row, at)
    begin = min(begins)
    shift = {replica: (min(e[0].start for e in rows_of(trace, step, replica)) - begin) * 1e-9 for replica in {r for r, _ in rows}}
    _bars(panel, [(at, [s._replace(start=s.start + shift[r], end=s.end + shift[r]) for s in measured(trace, step, r).devices[d]])
                  for at, (r, d) in enumerate(rows)])  # fmt: skip
    for kind, height in ((OPTIMIZER, 0.36), (TRANSFER, 0.45), (COLLECTIVE, 0.54)):
        for event in trace.of(kind):
            # What was before the first action, the inputs' transfers for instance, would shift the picture.
            if event.step == step and event.row in places and event.end > begin:
                at, start = places[event.row], max(event.start, begin)
                span = [((start - begin) * 1e-9 * _MS, (event.end - start) * 1e-9 * _MS)]
                panel.broken_barh(span, (at + height - 0.04, 0.08), facecolors=COLOURS[kind], linewidth=0)


def _bars(panel: Any, rows: Sequence[Tuple[int, Sequence[Any]]]) -> None:
    crowded = sum(len(spans) for _, spans in rows) > _LABELS
    for at, spans in rows:
        first, last = spans[0].start * _MS, spans[-1].end * _MS
        panel.broken_barh([(first, last - first)], (at - 0.32, 0.6), facecolors=COLOURS[BUBBLE], linewidth=0)
        for span in spans:
            start, width = span.start * _MS, (span.end - span.start) * _MS
            panel.broken_barh([(start, width)], (at - 0.32, 0.6), facecolors=COLOURS[span.action.kind], edgecolors="white", linewidth=0.5)
            if width and not crowded:
                text = "%s%d" % (span.action.kind, span.action.micro_batch)
                panel.text(start + width / 2, at - 0.02, text, ha="center", va="center", fontsize=7, clip_on=True)


def _legend(figure: Any, trace: Trace) -> None:
    from matplotlib.patches import Patch

    kinds: List[Tuple[str, str]] = [(k, _NAMES[k]) for k in ("F", "B", "W") if any(e.phase == k for e in trace.events)]
    kinds += [(BUBBLE, "bubble")] + [(k, k) for k in (OPTIMIZER, TRANSFER, COLLECTIVE) if any(e.kind == k for e in trace.events)]
    figure.legend(handles=[Patch(color=COLOURS[k], label=name) for k, name in kinds], loc="lower center", ncol=len(kinds), fontsize=8, frameon=False)
