"""A plan as numbers: what the simulator prices."""

import dataclasses
from typing import Dict, List, Tuple

from epl.cluster.hardware.spec import Hardware, Place
from epl.errors import PlanError
from epl.planner.cost.model import Model
from epl.planner.schedules import Costs, Schedule, make_schedule

Places = Tuple[Place, ...]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """How a model is trained on a cluster: pipeline x data parallelism x split layers.

    The devices of a stage share its samples: each of `d` devices does 1 / d of the
    stage's work. A layer of degree 1 is on all of them, and each computes its own samples.
    A layer of degree k is on groups of k neighbours: each has 1 / k of the weights, and
    the group computes the samples of all its members.

    Attributes:
      bounds: the first layer of each stage, and at the end the number of layers: stage s has layers bounds[s] to bounds[s + 1] - 1.
      places: for each replica, for each of its stages, the devices that hold it. Several
        stages on the same devices are the chunks of schedules such as interleaved 1F1B.
      samples: of one micro-batch, for each replica.
      micro_batches: of one iteration, in each replica.
      schedule: name of the pipeline schedule.
      recompute: the forward pass keeps only what layers read; the backward pass computes the rest again.
      zero: what is divided over the copies of a weight: 1 optimizer state, 2 also gradients, 3 also weights.
      split: the degree of each layer; () if none is split.
    """

    bounds: Tuple[int, ...]
    places: Tuple[Tuple[Places, ...], ...]
    samples: Tuple[float, ...]
    micro_batches: int = 1
    schedule: str = "PreferBackward"
    recompute: bool = False
    zero: int = 0
    split: Tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def batch(self) -> float:
        """Samples of one iteration, of all replicas."""
        return sum(self.samples) * self.micro_batches

    def layers(self, stage: int) -> range:
        """The numbers of a stage's layers."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def degree(self, layer: int) -> int:
        """Into how many parts a layer is split."""
        return self.split[layer] if self.split else 1

    def rows(self) -> List[int]:
        """For each stage, which device of the schedule it is on: places that come for the first time are the next device."""
        known: Dict[Places, int] = {}
        return [known.setdefault(places, len(known)) for places in self.places[0]]

    def used(self) -> List[Place]:
        """All devices, each once, replica by replica."""
        return list(dict.fromkeys(place for replica in self.places for places in replica for place in places))

    def make_schedule(self, costs: Costs) -> Schedule:
        """The order of work in each replica. Raises ScheduleError if the stages, devices and micro-batches do not fit it."""
        return make_schedule(self.schedule, self.stages, self.micro_batches, max(self.rows()) + 1, costs)

    def outline(self) -> Schedule:
        """The schedule of a single micro-batch: where stages are, and which kinds of actions there are."""
        return make_schedule(self.schedule, self.stages, 1, max(self.rows()) + 1)


def check(candidate: Candidate, model: Model, hardware: Hardware) -> None:
    """Raise PlanError unless a candidate fits itself, the model and the cluster."""
    _check_layers(candidate, model)
    _check_numbers(candidate)
    _check_places(candidate, hardware)
    schedule = candidate.outline()
    rows = candidate.rows()
    for stage in range(candidate.stages):
        if schedule.device_of(stage) != rows[stage]:
            text = "schedule %s has stage %d on device %d of %d, but the places of the candidate put it on device %d; "
            advice = "give the stages of one schedule device the same places, in the order %s"
            order = [schedule.device_of(other) for other in range(candidate.stages)]
            raise PlanError((text + advice) % (schedule.name, stage, schedule.device_of(stage), max(rows) + 1, rows[stage], order))


def _check_layers(candidate: Candidate, model: Model) -> None:
    bounds = candidate.bounds
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(model.layers) or any(a >= b for a, b in zip(bounds, bounds[1:])):
        raise PlanError("bounds %r do not cut %d layers; they must rise from 0 to %d" % (bounds, len(model.layers), len(model.layers)))
    if candidate.split and len(candidate.split) != len(model.layers):
        raise PlanError("split has %d degrees for %d layers; give one for each, or () for none" % (len(candidate.split), len(model.layers)))
    for number, degree in enumerate(candidate.split):
        layer = model.layers[number]
        if not 1 <= degree <= max(1, layer.split_by):
            raise PlanError("layer %d, %s, can't be split by %d; its degree may be 1 to %d" % (number, layer.name, degree, layer.split_by))


def _check_numbers(candidate: Candidate) -> None:
    replicas = len(candidate.places)
    if len(candidate.samples) != replicas or not replicas:
        raise PlanError("there are samples for %d replicas, but places for %d; give each replica both" % (len(candidate.samples), replicas))
    if min(candidate.samples) <= 0 or candidate.micro_batches < 1:
        text = "replicas have %r samples in each of %d micro-batches; each must have more than 0 samples, in 1 micro-batch or more"
        raise PlanError(text % (candidate.samples, candidate.micro_batches))
    if candidate.zero not in (0, 1, 2, 3):
        raise PlanError("there is no zero level %r; it is 0, 1, 2 or 3" % (candidate.zero,))


def _check_places(candidate: Candidate, hardware: Hardware) -> None:
    rows, counts = candidate.rows(), [len(node.devices) for node in hardware.nodes]
    owner: Dict[Place, Tuple[int, int]] = {}
    for number, replica in enumerate(candidate.places):
        if len(replica) != candidate.stages:
            raise PlanError("replica %d has places for %d stages; there are %d" % (number, len(replica), candidate.stages))
        for stage, places in enumerate(replica):
            if not places or len(set(places)) < len(places):
                raise PlanError("stage %d of replica %d has places %r; name at least one, each once" % (stage, number, places))
            first = replica[rows.index(rows[stage])]
            if places != first:
                raise PlanError("stages that share devices in replica 0 must do so in replica %d; stage %d has %r" % (number, stage, places))
            for place in places:
                if not (0 <= place.node < len(counts) and 0 <= place.slot < counts[place.node]):
                    raise PlanError("there is no device %d on node %d in this cluster of %d nodes" % (place.slot, place.node, len(counts)))
                if owner.setdefault(place, (number, rows[stage])) != (number, rows[stage]):
                    text = "device %d of node %d is in replica %d and in replica %d with other stages; use it once"
                    raise PlanError(text % (place.slot, place.node, owner[place][0], number))
            for layer in candidate.layers(stage):
                if len(places) % candidate.degree(layer):
                    text = "layer %d is split by %d, which does not divide the %d devices of stage %d in replica %d"
                    raise PlanError(text % (layer, candidate.degree(layer), len(places), stage, number))
