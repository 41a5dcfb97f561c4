"""How throughput and price grow with the number of devices."""

import dataclasses
from typing import Callable, Iterable, List, NamedTuple, Optional, Tuple

from epl.cluster.hardware.spec import Hardware, Place
from epl.errors import PlanError
from epl.planner.cost.model import Model
from epl.planner.simulate.candidate import Candidate
from epl.planner.simulate.iteration import Iteration
from epl.planner.simulate.job import simulate
from epl.planner.simulate.network import Network


class Point(NamedTuple):
    """A job of some size.

    Attributes:
      devices: how many it uses.
      speedup: S(N) = throughput of N / (N * throughput of one), 1 if nothing is lost.
    """

    devices: int
    speedup: float
    iteration: Iteration

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.iteration.throughput

    @property
    def dollars_per_million(self) -> Optional[float]:
        """US dollars of a million samples."""
        return self.iteration.dollars_per_million


def grow(hardware: Hardware, nodes: int) -> Hardware:
    """A cluster of more nodes: those of `hardware` again and again, with names of their own."""
    pattern = hardware.nodes
    return Hardware(tuple(dataclasses.replace(pattern[n % len(pattern)], name="%s.%d" % (pattern[n % len(pattern)].name, n)) for n in range(nodes)))


def repeat(candidate: Candidate, hardware: Hardware, replicas: int, batch: Optional[float] = None) -> Candidate:
    """A candidate with more replicas: its own again and again, on the devices that follow.

    Args:
      replicas: a multiple of what the candidate has.
      batch: samples of one iteration of all replicas together, which the replicas share (strong scaling);
        absent, each replica does what it did (weak scaling).

    Raises:
      PlanError: the replicas do not come out even, or the cluster is too small.
    """
    own = len(candidate.places)
    if replicas < 1 or replicas % own:
        raise PlanError("%d replicas are no multiple of the candidate's %d" % (replicas, own))
    order = hardware.places
    number = {place: at for at, place in enumerate(order)}
    first, step = _span(candidate, hardware)
    if first + step * (replicas // own) > len(order):
        raise PlanError("%d replicas need %d devices, the cluster has %d; `grow` it" % (replicas, first + step * (replicas // own), len(order)))

    def moved(place: Place, turn: int) -> Place:
        return order[number[place] + turn * step]

    places = tuple(
        tuple(tuple(moved(place, turn) for place in stage) for stage in replica) for turn in range(replicas // own) for replica in candidate.places
    )
    samples = candidate.samples * (replicas // own)
    if batch is not None:
        factor = batch / (sum(samples) * candidate.micro_batches)
        samples = tuple(count * factor for count in samples)
    return dataclasses.replace(candidate, places=places, samples=samples)


def _span(candidate: Candidate, hardware: Hardware) -> Tuple[int, int]:
    """The number of a candidate's first device in the cluster, and how many there are from it to the last one."""
    number = {place: at for at, place in enumerate(hardware.places)}
    used = [number[place] for place in candidate.used()]
    return min(used), max(used) - min(used) + 1


def scaling_curve(
    candidate: Candidate,
    model: Model,
    hardware: Hardware,
    network_of: Callable[[Hardware], Network],
    replicas: Iterable[int],
    strong: bool = False,
    single: Optional[float] = None,
    overlap: bool = False,
    slowdown: float = 1.0,
) -> List[Point]:
    """Simulate a job with more and more replicas of a candidate, on a cluster of the same nodes that is as large as need be.

    Args:
      hardware: what the candidate runs on; its nodes repeat.
      network_of: the network of a cluster.
      replicas: their numbers, multiples of the candidate's.
      strong: the batch stays that of the candidate; else each replica's does.
      single: samples per second of one device; absent, what a device of the first job does.
    """
    points: List[Point] = []
    first, step = _span(candidate, hardware)
    for count in replicas:
        needed = first + step * -(-count // len(candidate.places))
        cluster = grow(hardware, len(hardware.nodes) * -(-needed // len(hardware.places)))
        job = repeat(candidate, cluster, count, candidate.batch if strong else None)
        iteration = simulate(job, model, cluster, network_of(cluster), overlap, slowdown)
        devices = len(iteration.devices)
        if single is None:
            single = iteration.throughput / devices
        points.append(Point(devices, iteration.throughput / devices / single, iteration))
    return points
