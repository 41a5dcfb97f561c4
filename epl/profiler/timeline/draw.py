"""A picture of a measured step above the predicted one."""

from typing import Any, Dict, Sequence, Tuple

from epl.planner.schedules import Timeline
from epl.planner.schedules.picture import draw_legend, draw_rows, draw_strip, label_rows, new_figure
from epl.profiler.timeline.measure import last_step, measured, predicted, replicas_of, rows_of
from epl.profiler.timeline.trace import BUBBLE, COLLECTIVE, OPTIMIZER, TRANSFER, Trace


def draw(trace: Trace, step: Any = None) -> Any:
    """A matplotlib `Figure`: a panel of the measured step, and one of the prediction, with a row for each device.

    Raises:
      EplError: matplotlib is missing.
    """
    step = last_step(trace) if step is None else step
    replicas = replicas_of(trace)
    rows = [(replica, device) for replica in replicas for device in range(len(rows_of(trace, step, replica)))]
    labels = [_label(trace, step, replica, device) for replica, device in rows]
    theory = predicted(trace)
    figure = new_figure(14, 2.6 + 1.1 * len(rows))
    upper, lower = figure.subplots(2, 1, sharex=True)
    _measured_panel(upper, trace, step, rows)
    draw_rows(lower, [(at, theory.devices[device]) for at, (_, device) in enumerate(rows)])
    times = [measured(trace, step, replica) for replica in replicas]
    upper.set_title("measured, step %d: %s" % (step, _numbers(times)), loc="left", fontsize=10)
    by = " by %s" % trace.header["schedule"] if trace.header.get("ordered", True) else ""
    lower.set_title("predicted%s with the mean durations: %s" % (by, _numbers([theory])), loc="left", fontsize=10)
    for panel in (upper, lower):
        label_rows(panel, labels)
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
    return "%.1f ms, bubbles %.0f %%" % (max(t.period for t in timelines) * 1e3, 100 * share)


def _measured_panel(panel: Any, trace: Trace, step: int, rows: Sequence[Tuple[int, int]]) -> None:
    begins = []
    places: Dict[Tuple[int, str], int] = {}
    for at, (replica, device) in enumerate(rows):
        events = rows_of(trace, step, replica)[device]
        begins.append(events[0].start)
        places.setdefault(events[0].row, at)
    begin = min(begins)
    shift = {replica: (min(e[0].start for e in rows_of(trace, step, replica)) - begin) * 1e-9 for replica in {r for r, _ in rows}}
    draw_rows(panel, [(at, [s._replace(start=s.start + shift[r], end=s.end + shift[r]) for s in measured(trace, step, r).devices[d]])
                      for at, (r, d) in enumerate(rows)])  # fmt: skip
    for kind, height in ((OPTIMIZER, 0.36), (TRANSFER, 0.45), (COLLECTIVE, 0.54)):
        for event in trace.of(kind):
            # What was before the first action, the inputs' transfers for instance, would shift the picture.
            if event.step == step and event.row in places and event.end > begin:
                at, start = places[event.row], max(event.start, begin)
                draw_strip(panel, at + height, kind, (start - begin) * 1e-9, (event.end - begin) * 1e-9)


def _legend(figure: Any, trace: Trace) -> None:
    kinds = [kind for kind in ("F", "B", "W") if any(event.phase == kind for event in trace.events)]
    kinds += [BUBBLE] + [kind for kind in (OPTIMIZER, TRANSFER, COLLECTIVE) if any(event.kind == kind for event in trace.events)]
    draw_legend(figure, kinds)
