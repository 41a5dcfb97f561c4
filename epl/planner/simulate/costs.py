"""Seconds of the actions of a pipeline: what each device computes, and what its stage exchanges meanwhile."""

import dataclasses
from collections import Counter
from typing import Dict, List, NamedTuple, Sequence, Tuple

from epl.cluster.hardware.spec import Device, Hardware, Place
from epl.planner.cost.model import Model
from epl.planner.schedules import Costs
from epl.planner.simulate.candidate import Candidate, Places
from epl.planner.simulate.network import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, TRANSFER, Message, Network


class Seconds(NamedTuple):
    """Of one micro-batch: forward pass, gradients of inputs, gradients of weights."""

    forward: float
    backward: float
    weights: float

    def __add__(self, other: tuple) -> "Seconds":
        return Seconds(*(a + b for a, b in zip(self, other)))


class StageCost(NamedTuple):
    """What a stage takes for one micro-batch: the slowest device's computation, each device's own, and what travels."""

    slowest: Seconds
    own: Tuple[Seconds, ...]
    exchanged: Seconds

    def table(self, stage: int) -> Costs:
        """As schedules want it."""
        return {(kind, stage): a + b for kind, a, b in zip("FBW", self.slowest, self.exchanged)}


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies of some weights: where they are, and how large one is.

    Attributes:
      stages: that have these weights; several for a tied variable.
      layers: their numbers.
      degree: into how many parts the weights are split.
      groups: for each part, the devices that have a copy of it.
      parameters: of one part.
    """

    stages: Tuple[int, ...]
    layers: Tuple[int, ...]
    degree: int
    groups: Tuple[Places, ...]
    parameters: float

    @property
    def count(self) -> int:
        """How many copies of each part there are."""
        return len(self.groups[0])


def copies(candidate: Candidate, model: Model, each: bool = False) -> List[Copies]:
    """All weights of a candidate, gathered by stage and degree; those of tied layers are apart.

    Args:
      each: one entry for each layer instead.
    """
    stage_of = [stage for stage in range(candidate.stages) for _ in candidate.layers(stage)]
    found: Dict[object, List[int]] = {}
    for number, layer in enumerate(model.layers):
        if layer.parameters:
            degree = candidate.degree(number)
            key = (layer.tied, degree) if layer.tied else (number,) if each else (stage_of[number], degree)
            found.setdefault(key, []).append(number)
    result = []
    for layers in found.values():
        stages = tuple(sorted({stage_of[number] for number in layers}))
        degree = candidate.degree(layers[0])
        groups: List[Dict[Place, None]] = [{} for _ in range(degree)]
        for replica in candidate.places:
            for stage in stages:
                for at, place in enumerate(replica[stage]):
                    groups[at % degree][place] = None
        tied = bool(model.layers[layers[0]].tied)
        parameters = sum(model.layers[number].parameters for number in (layers[:1] if tied else layers))
        result.append(Copies(stages, tuple(layers), degree, tuple(map(tuple, groups)), parameters / degree))
    return result


class Pricing:
    """The costs of all stages of a candidate. What is alike, in whatever replica, is computed once."""

    def __init__(self, candidate: Candidate, model: Model, hardware: Hardware, network: Network, overlap: bool) -> None:
        self._candidate, self._model, self._hardware, self._network = candidate, model, hardware, network
        self._overlap = overlap
        self._split_backward = candidate.outline().split_backward
        self._kinds: List[Device] = []
        self._known: Dict[int, int] = {}
        self._computed: Dict[Tuple[int, int, float], Seconds] = {}
        self._exchanged = self._exchanges()
        self._sharded = self._zero() if candidate.zero >= 2 else [Seconds(0, 0, 0)] * candidate.stages

    def stage(self, replica: int, stage: int) -> StageCost:
        """What one stage of one replica takes for a micro-batch."""
        places = self._candidate.places[replica][stage]
        samples = self._candidate.samples[replica] / len(places)
        own = tuple(self._compute(stage, self._kind(place), samples) for place in places)
        slowest = Seconds(*(max(times) for times in zip(*own)))
        exchanged, sharded = self._exchanged[replica][stage], self._sharded[stage]
        if self._overlap:
            passes = slowest if self._split_backward else Seconds(slowest.forward, slowest.backward + slowest.weights, 0)
            sharded = Seconds(*(max(0, a - b) for a, b in zip(sharded, passes)))
        return StageCost(slowest, own, exchanged + sharded)

    def layer_seconds(self, replica: int, stage: int) -> List[float]:
        """For each layer of a stage, how long its part of the action takes that ends with its weights' gradients."""
        places = self._candidate.places[replica][stage]
        samples = self._candidate.samples[replica] / len(places)
        device = max((self._hardware.device(place) for place in places), key=lambda d: sum(self._compute(stage, self._index(d), samples)))
        times = []
        for number in self._candidate.layers(stage):
            forward, backward, weights = self._layer(number, device, samples)
            times.append(weights if self._split_backward else backward + weights)
        return times

    def transfers(self) -> List[List[float]]:
        """For each replica, the seconds of a micro-batch over each boundary of stages, while all replicas send."""
        candidate = self._candidate
        result: List[List[float]] = [[] for _ in candidate.places]
        for stage in range(candidate.stages - 1):
            messages: List[Message] = []
            senders: List[int] = []
            moved = self._model.crossing(candidate.bounds[stage + 1])
            degree = candidate.degree(candidate.bounds[stage + 1])
            for replica, places in enumerate(candidate.places):
                sources, targets = places[stage], places[stage + 1]
                most = max(len(sources), len(targets))
                for at in range(most):
                    source, target = sources[at * len(sources) // most], targets[at * len(targets) // most]
                    if source != target and moved and sources != targets:
                        messages.append((TRANSFER, (source, target), moved * candidate.samples[replica] * degree / most))
                        senders.append(replica)
            times = [0.0] * len(candidate.places)
            for replica, seconds in zip(senders, self._network.together(messages) if messages else ()):
                times[replica] = max(times[replica], seconds)
            for replica, seconds in enumerate(times):
                result[replica].append(seconds)
        return result

    def _index(self, device: Device) -> int:
        if id(device) not in self._known:
            if device not in self._kinds:
                self._kinds.append(device)
            self._known[id(device)] = self._kinds.index(device)
        return self._known[id(device)]

    def _kind(self, place: Place) -> int:
        return self._index(self._hardware.device(place))

    def _compute(self, stage: int, kind: int, samples: float) -> Seconds:
        key = (stage, kind, samples)
        if key not in self._computed:
            total = Seconds(0, 0, 0)
            for number in self._candidate.layers(stage):
                total += self._layer(number, self._kinds[kind], samples)
            self._computed[key] = total
        return self._computed[key]

    def _layer(self, number: int, device: Device, samples: float) -> Seconds:
        layer, dtype = self._model.layers[number], self._model.dtype
        samples *= layer.divided + (1 - layer.divided) * self._candidate.degree(number)
        forward, backward = layer.forward_seconds(device, samples, dtype), layer.backward_seconds(device, samples, dtype)
        weights = backward * layer.weight_share()
        return Seconds(forward, backward - weights + (forward if self._candidate.recompute else 0), weights)

    def _exchanges(self) -> List[List[Seconds]]:
        """What the devices of each stage send each other for split layers, while those of all stages and replicas do."""
        candidate = self._candidate
        terms = [self._terms(stage) for stage in range(candidate.stages)]
        result = [[Seconds(0, 0, 0) for _ in range(candidate.stages)] for _ in candidate.places]
        for term in dict.fromkeys(term for pair in terms for counts in pair for term in counts):
            kind, degree, moved = term
            messages, owners = [], []
            for replica, row in enumerate(candidate.places):
                for stage, places in enumerate(row):
                    if term in terms[stage][0] or term in terms[stage][1]:
                        size = moved * candidate.samples[replica] * degree / len(places)
                        messages += [(kind, places[at : at + degree], size) for at in range(0, len(places), degree)]
                        owners += [(replica, stage)] * (len(places) // degree)
            slowest: Dict[Tuple[int, int], float] = {}
            for owner, seconds in zip(owners, self._network.together(messages)):
                slowest[owner] = max(slowest.get(owner, 0), seconds)
            for (replica, stage), seconds in slowest.items():
                forward, backward = (counts[term] * seconds for counts in terms[stage])
                result[replica][stage] += (forward, backward + (forward if candidate.recompute else 0), 0)
        return result

    def _terms(self, stage: int) -> Tuple[Counter, Counter]:
        """How often a stage exchanges (kind, devices, bytes of a sample) in the forward and in the backward pass.

        A split layer sums what its parts have computed. In front of a layer of higher
        degree a bridge gathers the samples of the group; behind it each device keeps its own,
        and the backward pass does the opposite. Source: Whale, ATC 2022, section 3.2.3.
        """
        forward: Counter = Counter()
        backward: Counter = Counter()
        layers = self._candidate.layers(stage)
        for number in layers:
            layer, degree = self._model.layers[number], self._candidate.degree(number)
            if degree > 1 and layer.exchanged:
                forward[ALL_REDUCE, degree, layer.exchanged] += 1
                backward[ALL_REDUCE, degree, layer.exchanged] += 1
            if number == layers[0]:
                continue
            before, moved = self._candidate.degree(number - 1), self._model.layers[number - 1].output
            if moved and degree > before:
                forward[ALL_GATHER, degree, moved] += 1
                backward[REDUCE_SCATTER, degree, moved] += 1
            elif moved and degree < before:
                backward[ALL_GATHER, before, moved] += 1
        return forward, backward

    def _zero(self) -> List[Seconds]:
        """What dividing gradients (level 2) and weights (3) adds to each micro-batch of each stage.

        Gradients that are not kept whole must be summed in each micro-batch; weights are
        gathered before the forward and before the backward pass. Source: ZeRO, SC'20, sections 5 and 7.
        """
        model, candidate = self._model, self._candidate
        result = [Seconds(0, 0, 0)] * candidate.stages
        kept = [entry for entry in copies(candidate, model) if entry.count > 1]
        for kind, size in ((REDUCE_SCATTER, model.gradient_bytes), (ALL_GATHER, model.weight_bytes if candidate.zero == 3 else 0)):
            if not size:
                continue
            seconds = bundle_seconds(self._network, [[(kind, group, entry.parameters * size) for group in entry.groups] for entry in kept])
            for entry, time in zip(kept, seconds):
                for stage in entry.stages:
                    if kind == ALL_GATHER:
                        result[stage] += (time, time, 0)
                    else:
                        result[stage] += (0, 0, time) if self._split_backward else (0, time, 0)
        return result


def bundle_seconds(network: Network, bundles: Sequence[Sequence[Message]]) -> List[float]:
    """The seconds of each bundle, until its slowest message has arrived, when all of them are on their way."""
    seconds = iter(network.together([message for bundle in bundles for message in bundle]))
    return [max(next(seconds) for _ in bundle) for bundle in bundles]
