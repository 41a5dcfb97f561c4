"""From the parts of the ranks to one trace.

The ranks write their parts when they like; whoever finds all of them there merges, and
`epl report` does if nobody did. So no rank waits for another one, and parts from several
machines can be brought together by hand.
"""

import glob
import os
import socket
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from epl.profiler.timeline.trace import COLLECTIVE, STEP, TRANSFER, Event, Trace, TraceError

MERGED = "timeline.json"


def part_name(rank: int) -> str:
    """The file of one rank."""
    return "rank%d.json" % rank


def machine() -> str:
    """The same for processes that have one clock: those of one kernel since it was started."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as source:
            return source.read().strip()
    except OSError:
        return socket.gethostname()


class Clock(NamedTuple):
    """How far a machine's clock is ahead of that of rank 0, and by how much that may be wrong; nanoseconds."""

    ahead: int
    error: int


def merge(parts: List[Trace]) -> Trace:
    """One trace of the parts of all ranks, in the time of rank 0.

    What ranks do together begins, in the merged trace, when the last one has come to it.
    How long a rank has waited for that is in the event's "waited_ns".

    Raises:
      TraceError: the parts are not those of one job.
    """
    parts = sorted(parts, key=lambda p: p.header["recorded"][0])
    _check(parts)
    machines = {rank: name for part in parts for rank, name in part.header["machines"].items()}
    clocks = clocks_of([e for part in parts for e in part.events if e.kind in (TRANSFER, COLLECTIVE)], {int(r): m for r, m in machines.items()})
    events = []
    for part in parts:
        for event in part.events:
            ahead = clocks[event.rank].ahead
            events.append(event._replace(start=event.start - ahead, end=event.end - ahead))
    header = dict(parts[0].header, recorded=[p.header["recorded"][0] for p in parts], machines=machines)
    header["memory"] = [row for part in parts for row in part.header.get("memory", ())]
    header["clocks"] = {str(rank): {"ahead_ns": clock.ahead, "error_ns": clock.error} for rank, clock in sorted(clocks.items())}
    return Trace(_without_waiting(events), header)


def _check(parts: List[Trace]) -> None:
    ranks = [p.header["recorded"][0] for p in parts]
    if not parts or ranks != list(range(parts[0].header["ranks"])):
        expected = parts[0].header["ranks"] if parts else 1
        missing = [r for r in range(expected) if r not in ranks]
        raise TraceError("of the job's %d ranks the parts of %s are missing" % (expected, ", ".join(part_name(r) for r in missing) or "some"))
    shapes = [{key: p.header.get(key) for key in ("ranks", "schedule", "stages", "micro_batches")} for p in parts]
    if any(shape != shapes[0] for shape in shapes):
        raise TraceError("the parts are of different jobs: %s" % "; ".join(map(str, shapes)))
    times: Dict[Tuple[str, int], Dict[int, Tuple[int, int]]] = {}
    for part in parts:
        for event in part.events:
            if event.kind == STEP:
                ranks_there = times.setdefault((part.header["machines"][str(event.rank)], event.step), {})
                start, end = ranks_there.get(event.rank, (event.start, event.end))
                ranks_there[event.rank] = min(start, event.start), max(end, event.end)
    # By one clock, the ranks of a job are in a step at the same time.
    if any(max(start for start, _ in there.values()) > min(end for _, end in there.values()) for there in times.values()):
        raise TraceError("the parts are of jobs that ran at different times; remove the old ones")


def clocks_of(together: List[Event], machines: Dict[int, str]) -> Dict[int, Clock]:
    """How far the clock of each rank is ahead of rank 0's.

    What ranks do together ends on none before it has begun on all. In clocks: the end on
    one machine less the begin on another is not less than the difference of the clocks.
    Transfers in both directions thus enclose it, up to the duration of a short transfer.

    Args:
      together: the transfers and collectives of all ranks.
      machines: by rank; ranks of one machine have one clock.
    """
    names = list(dict.fromkeys(machines[rank] for rank in sorted(machines)))
    clocks = {names[0]: Clock(0, 0)}
    if len(names) > 1:
        limits = _limits(together, machines)
        above, below = _shortest(names, limits), _shortest(names, {(b, a): limit for (a, b), limit in limits.items()})
        for name in names[1:]:
            if name in above and name in below:
                clocks[name] = Clock((above[name] - below[name]) // 2, max(0, above[name] + below[name]) // 2)
            else:  # nothing in common: the clocks are believed
                clocks[name] = Clock(0, 10**9)
    return {rank: clocks[name] for rank, name in machines.items()}


Limits = Dict[Tuple[str, str], int]
"""(machine, other machine) -> what the first one's clock is ahead of the other's at most."""


def _limits(together: List[Event], machines: Dict[int, str]) -> Limits:
    meetings: Dict[Tuple[str, int], Dict[str, Tuple[int, int]]] = {}
    for event in together:
        inside = meetings.setdefault((event.name, event.step), {})
        start, end = inside.get(machines[event.rank], (event.start, event.end))
        inside[machines[event.rank]] = max(start, event.start), min(end, event.end)
    limits: Limits = {}
    for inside in meetings.values():
        for one, (_, end) in inside.items():
            for other, (start, _) in inside.items():
                if one != other:
                    limits[one, other] = min(end - start, limits.get((one, other), end - start))
    return limits


def _shortest(names: List[str], limits: Limits) -> Dict[str, int]:
    """The sharpest limit of each machine against the first one (Bellman and Ford)."""
    found = {names[0]: 0}
    for _ in names:
        for (one, other), limit in limits.items():
            if other in found:
                found[one] = min(found.get(one, found[other] + limit), found[other] + limit)
    return found


def _without_waiting(events: List[Event]) -> List[Event]:
    """Transfers and collectives from when all have come to them."""
    begins: Dict[Tuple[str, int], int] = {}
    for event in events:
        if event.kind in (TRANSFER, COLLECTIVE):
            key = event.name, event.step
            begins[key] = max(event.start, begins.get(key, event.start))
    found = []
    for event in events:
        if event.kind in (TRANSFER, COLLECTIVE):
            start = min(begins[event.name, event.step], event.end)
            waited = start - event.start
            event = event._replace(start=start, info=dict(event.info or {}, waited_ns=waited) if waited else event.info)
        found.append(event)
    return found


def merge_folder(folder: str, if_complete: bool = False) -> Optional[Trace]:
    """Merge the parts in a folder and write `timeline.json` there.

    Args:
      if_complete: return None when parts are missing or old ones are among them, instead of an error.

    Raises:
      TraceError: there are none, some are missing, or they are of several jobs.
    """
    paths = glob.glob(os.path.join(folder, "rank*.json"))
    try:
        if not paths:
            raise TraceError("there is no timeline in %s; record one by %s=%s" % (folder, "EPL_TIMELINE", folder))
        # Those of a larger job before this one do not count.
        first = Trace.read(os.path.join(folder, part_name(0))) if os.path.exists(os.path.join(folder, part_name(0))) else None
        if if_complete and first is None:
            return None
        size = first.header["ranks"] if first is not None else len(paths)
        wanted = [os.path.join(folder, part_name(rank)) for rank in range(1, size)]
        if if_complete and not all(map(os.path.exists, wanted)):
            return None
        trace = merge(([first] if first is not None else []) + [Trace.read(path) for path in wanted if os.path.exists(path)])
    except TraceError:
        if if_complete:
            return None
        raise
    trace.write(os.path.join(folder, MERGED))
    return trace


def load_trace(path: str) -> Trace:
    """The trace in a file, or in a folder, whose parts are merged if need be.

    Raises:
      TraceError: there is none, or parts are missing.
    """
    if os.path.isfile(path):
        return Trace.read(path)
    if not os.path.isdir(path):
        raise TraceError("there is no folder or file %s" % path)
    merged = os.path.join(path, MERGED)
    parts: List[Any] = glob.glob(os.path.join(path, "rank*.json"))
    if os.path.exists(merged) and all(os.path.getmtime(part) <= os.path.getmtime(merged) for part in parts):
        return Trace.read(merged)
    merged_now = merge_folder(path)
    assert merged_now is not None
    return merged_now
