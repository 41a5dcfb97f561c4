"""Simulation of training: a plan as numbers goes in, the times, the memory and the price of one iteration come out.

`closed_forms` has what the literature says for simple cases, `draw` the pictures.
"""

from epl.planner.simulate.candidate import Candidate
from epl.planner.simulate.congestion import LinkFailures, ecmp_slowdown
from epl.planner.simulate.iteration import DeviceUse, Iteration
from epl.planner.simulate.job import simulate
from epl.planner.simulate.memory import Memory
from epl.planner.simulate.network import Message, Network
from epl.planner.simulate.scaling import Point, grow, repeat, scaling_curve

__all__ = [
    "Candidate",
    "DeviceUse",
    "Iteration",
    "LinkFailures",
    "Memory",
    "Message",
    "Network",
    "Point",
    "ecmp_slowdown",
    "grow",
    "repeat",
    "scaling_curve",
    "simulate",
]
