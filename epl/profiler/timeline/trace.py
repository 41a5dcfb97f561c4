"""Events of a trace, and their form as a file for Chrome's tracing view and Perfetto."""

import json
import os
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from epl.errors import EplError

ACTION, BUBBLE, OPTIMIZER, TRANSFER, COLLECTIVE, COMPUTE, STEP = "action", "bubble", "optimizer", "transfer", "collective", "compute", "step"
"""Kinds of events. Only `COMPUTE` events are single ops; an `ACTION` is a pass of the schedule, a `STEP` a `session.run`."""

_LANES = {
    STEP: "steps",
    ACTION: "actions",
    BUBBLE: "actions",
    OPTIMIZER: "optimizer",
    TRANSFER: "transfers",
    COLLECTIVE: "collectives",
    COMPUTE: "ops",
}
_ORDER = tuple(dict.fromkeys(_LANES.values()))
_COLOURS = {"F": "thread_state_running", "B": "rail_response", "W": "rail_animation", BUBBLE: "grey"}
_VERSION = 1


class TraceError(EplError, ValueError):
    """A trace is missing, incomplete or none of EPL's."""


class Event(NamedTuple):
    """Something that took time on a device of a rank.

    Attributes:
      kind: one of the kinds above.
      device: for example "CPU:0"; "" for a `STEP`.
      start, end: nanoseconds of the wall clock.
      step: number of the training step, counted from 0.
      stage: the taskgraph; None for what belongs to none.
      phase: "F", "B", "W" or "optimizer", "" if unknown.
      replica: number in the job.
      info: what else is known, as JSON can express it.
    """

    kind: str
    name: str
    rank: int
    device: str
    start: int
    end: int
    step: int
    stage: Optional[int] = None
    phase: str = ""
    micro_batch: Optional[int] = None
    replica: Optional[int] = None
    info: Optional[Dict[str, Any]] = None

    @property
    def row(self) -> Tuple[int, str]:
        """The device among those of all ranks."""
        return self.rank, self.device


@dataclass
class Trace:
    """The events of some steps, and what they belong to.

    The header has "ranks" (of the job), "recorded" (the ranks whose events are here),
    "schedule", "stages", "micro_batches", "devices" (of a pipeline, 0 for one for each
    stage), "memory" (`epl.profiler.timeline.memory`), "machines" and, in a merged trace,
    "clocks", by rank.
    """

    events: List[Event]
    header: Dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> List[int]:
        """The steps that all recorded ranks have."""
        found: Dict[int, set] = {}
        for event in self.events:
            if event.kind == STEP:
                found.setdefault(event.step, set()).add(event.rank)
        most = max((len(ranks) for ranks in found.values()), default=0)
        return sorted(step for step, ranks in found.items() if len(ranks) == most)

    def of(self, *kinds: str) -> List[Event]:
        """The events of some kinds, by their start."""
        return sorted((e for e in self.events if e.kind in kinds), key=lambda e: (e.start, e.end))

    # As a file.

    def to_chrome(self) -> Dict[str, Any]:
        """The trace in the JSON object format of the Chrome trace viewer, which Perfetto reads too."""
        base = min((e.start for e in self.events), default=0)
        rows = sorted({e.row for e in self.events})
        records: List[Dict[str, Any]] = []
        for number, row in enumerate(rows):
            inside = [e for e in self.events if e.row == row]
            records += _row_records(number, row, inside, base)
        return {"traceEvents": records, "displayTimeUnit": "ms", "otherData": {"epl_timeline": dict(self.header, version=_VERSION, base_ns=base)}}

    @classmethod
    def from_chrome(cls, data: Any) -> "Trace":
        """The trace that `to_chrome` wrote.

        Raises:
          TraceError: it is none of EPL's.
        """
        header = data.get("otherData", {}).get("epl_timeline") if isinstance(data, dict) else None
        if not isinstance(header, dict) or header.get("version") != _VERSION:
            raise TraceError("this is no timeline of EPL, or one of another version of it")
        header = dict(header)
        base = header.pop("base_ns")
        del header["version"]
        events = []
        for record in data["traceEvents"]:
            if record.get("ph") == "X":
                known = dict(record["args"])
                start = base + round(record["ts"] * 1000)
                fields = {name: known.pop(name, None) for name in ("rank", "device", "step", "stage", "phase", "micro_batch", "replica")}
                fields["phase"] = fields["phase"] or ""
                full = known.pop("name", record["name"])
                events.append(Event(record["cat"], full, start=start, end=start + round(record["dur"] * 1000), info=known or None, **fields))
        return cls(events, header)

    def write(self, path: str) -> None:
        """Write the file at once: a reader sees the old one or all of the new one."""
        partial = "%s.%d.tmp" % (path, os.getpid())
        with open(partial, "w", encoding="utf-8") as out:
            json.dump(self.to_chrome(), out, separators=(",", ":"))
        os.replace(partial, path)

    @classmethod
    def read(cls, path: str) -> "Trace":
        try:
            with open(path, encoding="utf-8") as source:
                return cls.from_chrome(json.load(source))
        except (TraceError, ValueError, KeyError, TypeError) as error:
            raise TraceError("%s can't be read: %s" % (path, error)) from error


def _row_records(number: int, row: Tuple[int, str], events: List[Event], base: int) -> List[Dict[str, Any]]:
    """A device as a "process" of the viewer, with a "thread" for each kind of event, and more where events overlap."""
    stages = sorted({e.stage for e in events if e.kind == ACTION and e.stage is not None})
    label = "rank %d %s" % (row[0], row[1] or "session.run")
    if stages:
        label += " (stage %s)" % ", ".join(map(str, stages))
    records = [_meta("process_name", number, 0, name=label), _meta("process_sort_index", number, 0, sort_index=number)]
    threads: Dict[Tuple[str, int], int] = {}
    for lane in _ORDER:
        members = sorted((e for e in events if _LANES[e.kind] == lane), key=lambda e: (e.start, -e.end))
        for event, level in zip(members, _levels(members)):
            if (lane, level) not in threads:
                threads[lane, level] = thread = 100 * _ORDER.index(lane) + min(level, 99)
                records.append(_meta("thread_name", number, thread, name=lane if not level else "%s %d" % (lane, level + 1)))
                records.append(_meta("thread_sort_index", number, thread, sort_index=thread))
            records.append(_record(event, number, threads[lane, level], base))
    return records


def _levels(events: Iterable[Event]) -> List[int]:
    """For each event the first line in which nothing else goes on at that time."""
    ends: List[int] = []
    found = []
    for event in events:
        level = next((i for i, end in enumerate(ends) if end <= event.start), len(ends))
        ends[level:level + 1] = [event.end]  # fmt: skip
        found.append(level)
    return found


def _meta(what: str, row: int, thread: int, **args: Any) -> Dict[str, Any]:
    return {"ph": "M", "name": what, "pid": row, "tid": thread, "args": args}


def _record(event: Event, row: int, thread: int, base: int) -> Dict[str, Any]:
    args: Dict[str, Any] = {"rank": event.rank, "device": event.device, "step": event.step}
    for name in ("stage", "phase", "micro_batch", "replica"):
        value = getattr(event, name)
        if value is not None and value != "":
            args[name] = value
    args.update(event.info or {})
    record = {"ph": "X", "cat": event.kind, "name": event.name, "pid": row, "tid": thread, "args": args}
    record["ts"], record["dur"] = (event.start - base) / 1000, (event.end - event.start) / 1000
    colour = _COLOURS.get(event.phase if event.kind == ACTION else event.kind)
    if colour:
        record["cname"] = colour
    return record
