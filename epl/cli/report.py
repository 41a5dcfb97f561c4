"""`epl report`: the measured timeline and memory of training steps beside what is predicted.

    EPL_TIMELINE=trace mpirun -np 2 python train.py
    epl report trace -o report.html

Works from the trace alone, on any machine.
"""

import argparse
import contextlib
import html
import io
import json
import os
import sys
from typing import Any, Dict, List, Sequence

from epl.errors import EplError

FORMATS = (".html", ".svg", ".png", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="DIR", help="the folder that EPL_TIMELINE named, or a trace file in it")
    parser.add_argument("-o", "--output", metavar="FILE", help="also draw both timelines: %s" % ", ".join(FORMATS))
    parser.add_argument("--step", metavar="N", type=int, help="the step that is drawn (default: the last one); the table is of all")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        ending = os.path.splitext(args.output or "")[1].lower()
        if args.output and ending not in FORMATS:
            raise EplError("%s: expected a name that ends in %s" % (args.output, ", ".join(FORMATS)))
        from epl.profiler.timeline import load_trace

        trace = load_trace(args.trace)
        if args.step is not None and args.step not in trace.steps:
            raise EplError("there is no step %d in the trace; it has the steps %s" % (args.step, ", ".join(map(str, trace.steps))))
        numbers = summary(trace)
        if args.output:
            write_picture(trace, args.step, args.output, ending, text(numbers))
    except (EplError, OSError) as error:
        print("epl report: %s" % error, file=sys.stderr)
        return 1
    print(json.dumps(numbers, indent=1) if args.json else text(numbers))
    return 0


def summary(trace: Any) -> Dict[str, Any]:
    """The numbers of a trace: means over its steps, in milliseconds."""
    from epl.profiler.timeline import costs_of, measured, predicted, transfers_of
    from epl.profiler.timeline.measure import actions_of, bubble_shares, expected_of, replicas_of, rows_of, step_seconds
    from epl.profiler.timeline.trace import TraceError

    steps, replicas = trace.steps, replicas_of(trace)
    if not steps or not replicas:
        raise TraceError("the trace has no complete training step")
    theory = predicted(trace)
    shares = bubble_shares(theory)
    devices = []
    for replica in replicas:
        times = [measured(trace, step, replica) for step in steps]
        for device, row in enumerate(rows_of(trace, steps[-1], replica)):
            devices.append(
                {
                    "rank": row[0].rank,
                    "device": row[0].device,
                    "replica": replica,
                    "stages": sorted({e.stage for e in row if e.stage is not None}),
                    "busy_ms": _ms(t.busy[device] for t in times),
                    "bubble": _mean(bubble_shares(t)[device] for t in times),
                    "predicted_busy_ms": 1e3 * theory.busy[device],
                    "predicted_bubble": shares[device],
                }
            )
    all_times = [measured(trace, step, replica) for step in steps for replica in replicas]
    return {
        "schedule": trace.header["schedule"] if trace.header.get("ordered", True) else None,
        "stages": trace.header["stages"],
        "micro_batches": trace.header["micro_batches"],
        "ranks": trace.header["ranks"],
        "steps": steps,
        "in_order": all(actions_of(trace, step, replica) == expected_of(trace) for step in steps for replica in replicas),
        "step_ms": _ms(step_seconds(trace).values()),
        "period_ms": _ms(t.period for t in all_times),
        "predicted_period_ms": 1e3 * theory.period,
        "bubble": _mean(t.bubble_share for t in all_times),
        "predicted_bubble": theory.bubble_share,
        "transfer_ms": [1e3 * seconds for seconds in transfers_of(trace)],
        "costs_ms": {"%s of stage %d" % key: 1e3 * seconds for key, seconds in sorted(costs_of(trace).items(), key=lambda i: (i[0][1], i[0][0]))},
        "clock_error_ms": 1e-6 * max((c["error_ns"] for c in trace.header.get("clocks", {}).values()), default=0),
        "devices": devices,
        "memory": trace.header.get("memory", []),
    }


def _mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found)


def _ms(seconds: Any) -> float:
    return 1e3 * _mean(seconds)


def text(numbers: Dict[str, Any]) -> str:
    """The tables."""
    from epl.profiler.timeline import memory

    kept = "kept in all steps" if numbers["in_order"] else "NOT kept"
    lines = [
        "%d ranks, %d stages, %d micro-batches, steps %s" % (numbers["ranks"], numbers["stages"], numbers["micro_batches"], _list(numbers["steps"])),
        "order of actions: " + ("schedule %s, %s" % (numbers["schedule"], kept) if numbers["schedule"] else "no schedule"),
        "",
    ]
    rows: List[Sequence[str]] = [("device", "stages", "busy ms", "bubbles", "predicted")]
    for one in numbers["devices"]:
        name = "rank %d %s" % (one["rank"], one["device"]) + (" replica %d" % one["replica"] if one["replica"] else "")
        rows.append((name, _list(one["stages"]), "%.1f" % one["busy_ms"], _percent(one["bubble"]), _percent(one["predicted_bubble"])))
    rows.append(("all", "", "", _percent(numbers["bubble"]), _percent(numbers["predicted_bubble"])))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join([row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]) for row in rows]
    lines += [
        "",
        "first to last action: %.1f ms, predicted %.1f ms; whole step: %.1f ms (with the tracing)"
        % (numbers["period_ms"], numbers["predicted_period_ms"], numbers["step_ms"]),
        "durations in ms: " + ", ".join("%s %.2f" % item for item in numbers["costs_ms"].items()),
    ]
    if any(numbers["transfer_ms"]):
        lines.append("transfers between stages in ms: " + ", ".join("%.2f" % value for value in numbers["transfer_ms"]))
    if numbers["clock_error_ms"]:
        lines.append("the clocks of the machines are known within %.2f ms" % numbers["clock_error_ms"])
    table = memory.text(numbers["memory"])
    if table:
        lines += ["", table]
    return "\n".join(lines)


def _list(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _percent(share: float) -> str:
    return "%.1f %%" % (100 * share)


def write_picture(trace: Any, step: Any, path: str, ending: str, table: str) -> None:
    """Draw both timelines into a file; a page also has the table."""
    from epl.profiler.timeline.draw import draw

    figure = draw(trace, step)
    # A reader sees the old file or all of the new one.
    partial = "%s.%d.tmp" % (path, os.getpid())
    try:
        if ending == ".html":
            _write_page(figure, partial, table)
        else:
            figure.savefig(partial, dpi=120, format=ending[1:])
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def _write_page(figure: Any, path: str, table: str) -> None:
    image = io.StringIO()
    figure.savefig(image, format="svg")
    picture = image.getvalue()
    with open(path, "w", encoding="utf-8") as out:
        out.write("<!DOCTYPE html>\n<html><head><meta charset='utf-8'><title>EPL timeline</title></head>\n<body style='font-family: sans-serif'>\n")
        out.write("<h1>Timeline</h1>\n<pre>%s</pre>\n%s\n</body></html>\n" % (html.escape(table), picture[picture.index("<svg") :]))
