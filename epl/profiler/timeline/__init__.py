"""The timeline of some training steps: recorded on all ranks, one trace for the whole job, compared with the schedule.

`EPL_TIMELINE=dir`, or `timeline(dir)` in the script, records. `epl report dir` shows.
"""

from epl.profiler.timeline.measure import actions_of, costs_of, expected_of, measured, predicted, schedule_of, transfers_of
from epl.profiler.timeline.merge import load_trace, merge
from epl.profiler.timeline.record import timeline
from epl.profiler.timeline.trace import Event, Trace, TraceError

__all__ = [
    "Event",
    "Trace",
    "TraceError",
    "actions_of",
    "costs_of",
    "expected_of",
    "load_trace",
    "measured",
    "merge",
    "predicted",
    "schedule_of",
    "timeline",
    "transfers_of",
]
