"""Pipeline schedules as data: for each device the order of its forward and backward passes.

The same lists drive the runtime, the simulator and the memory model. Nothing here
knows TensorFlow.
"""

from epl.planner.schedules.base import DEFAULT_COSTS, Action, Costs, Schedule, ScheduleError, data_dependencies, execution_order, validate
from epl.planner.schedules.classic import optimizer_edges
from epl.planner.schedules.factory import NAMES, canonical_name, chunks_of_stages, make_schedule
from epl.planner.schedules.timeline import Span, Timeline, peak_activations, render, simulate

__all__ = [
    "DEFAULT_COSTS",
    "NAMES",
    "Action",
    "Costs",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "canonical_name",
    "chunks_of_stages",
    "data_dependencies",
    "execution_order",
    "make_schedule",
    "optimizer_edges",
    "peak_activations",
    "render",
    "simulate",
    "validate",
]
