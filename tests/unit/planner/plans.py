"""Small clusters, models and plans of tests, in units in which seconds can be worked out by hand."""

from epl.cluster.hardware import Device, Hardware, Link, Node, Place
from epl.planner.cost.model import Layer, Work
from epl.planner.simulate import Candidate, simulate
from tests.unit.planner.ring_network import Ring

FREE = float("inf")
UNIT = Device("unit", {"float32": 1.0}, 1000.0, FREE)
"""One FLOP/s; its optimizer takes no time."""


def cluster(*counts, device=UNIT, intra=100.0, inter=10.0, **more):
    return Hardware(tuple(Node("n%d" % n, (device,) * count, Link(intra), Link(inter), **more) for n, count in enumerate(counts)))


def layers(count, forward=1, backward=2, **more):
    return (Layer("l", Work(forward), Work(backward), Work(backward / 2), **more),) * count


def pipeline(bounds, *replicas, samples=None, **more):
    """Replicas that are lists of slots on node 0 or of places; one device for each stage."""
    places = tuple(tuple((slot if isinstance(slot, Place) else Place(0, slot),) for slot in replica) for replica in replicas)
    return Candidate(bounds, places, samples or (1.0,) * len(replicas), **more)


def of(candidate, model, hardware, **more):
    return simulate(candidate, model, hardware, Ring(hardware), **more)
