"""One training iteration of a plan, in time and memory, before anything runs.

Each replica is a pipeline, simulated action by action; replicas whose numbers are equal
are simulated once. The copies of a stage's weights sum their gradients as soon as the
last of them has its own, while other stages still work. Then the optimizer runs.
"""

import dataclasses
from typing import Dict, List, Sequence, Tuple

from epl.cluster.hardware.spec import Hardware, Place
from epl.planner.cost.model import Model
from epl.planner.schedules import Costs, Schedule, Span, Timeline
from epl.planner.schedules import simulate as run_schedule
from epl.planner.simulate.candidate import Candidate, check
from epl.planner.simulate.congestion import Stretched
from epl.planner.simulate.costs import Copies, Pricing, StageCost, copies
from epl.planner.simulate.iteration import DeviceUse, Iteration
from epl.planner.simulate.memory import Memory, memory
from epl.planner.simulate.network import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Network
from epl.planner.simulate.sync import Exchange, Period, run


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """One replica, and those that are like it.

    Attributes:
      replica: the first of them.
      costs: of each stage.
      delay: how much longer it takes than without transfers.
    """

    replica: int
    costs: Tuple[StageCost, ...]
    schedule: Schedule
    timeline: Timeline
    delay: float

    def last(self, stage: int) -> Span:
        """The action that completes the gradients of a stage."""
        row = self.timeline.devices[self.schedule.device_of(stage)]
        return next(span for span in reversed(row) if span.action.chunk == stage and span.action.kind == self.schedule.release)


def simulate(candidate: Candidate, model: Model, hardware: Hardware, network: Network, overlap: bool = False, slowdown: float = 1.0) -> Iteration:
    """One training iteration of a candidate.

    Transfers between stages are asynchronous and queue on their link; what split layers
    exchange blocks. Gradients are summed after a stage's last backward pass, by one
    collective for each stage, while other stages still work.

    Args:
      overlap: sum gradients layer by layer during the last backward pass; with zero 2 and 3 also
        hide the collectives of each micro-batch behind the computation of the same pass.
      slowdown: stretches everything that leaves a node, see `epl.planner.simulate.congestion`.

    Raises:
      PlanError: the candidate does not fit the model, the cluster or itself.
      ScheduleError: its stages, devices or micro-batches do not fit its schedule.
    """
    check(candidate, model, hardware)
    if slowdown != 1:
        network = Stretched(network, slowdown)
    pricing = Pricing(candidate, model, hardware, network, overlap)
    pipelines = _pipelines(candidate, pricing)
    kept = copies(candidate, model)
    begun, passed = _ends(candidate, pipelines)
    done = dict(passed)
    exchanges = _run(_reduce(candidate, model, pipelines, pricing, overlap), network, done)
    updates = _updates(candidate, model, hardware, kept)
    for place, seconds in updates.items():
        done[place] += seconds
    exchanges += _run(_gather(candidate, model, kept, done), network, done)
    seconds = max(done[place] - begun[place] for place in done)
    synced = dict.fromkeys(done, 0.0)
    for exchange, period in exchanges:
        for place in exchange.members:
            synced[place] += max(0.0, period.end - max(period.start, passed[place]))
    used = candidate.used()
    return Iteration(
        candidate=candidate,
        seconds=seconds,
        devices=tuple(_uses(candidate, model, hardware, pipelines, kept, seconds, synced, updates)),
        timelines=tuple(pipeline.timeline for pipeline in pipelines),
        exchanges=tuple(exchanges),
        flops=sum(layer.forward.flops + layer.backward.flops for layer in model.layers) * candidate.batch,
        peak=sum(device.flops.get(model.dtype, device.flops["float32"]) for device in map(hardware.device, used)),
        price=hardware.price(used),
    )


def _pipelines(candidate: Candidate, pricing: Pricing) -> List[_Pipeline]:
    """The pipeline of each replica; equal ones are the same object."""
    known: Dict[object, _Pipeline] = {}
    result = []
    for replica, transfers in enumerate(pricing.transfers()):
        costs = tuple(pricing.stage(replica, stage) for stage in range(candidate.stages))
        key = (costs, tuple(transfers))
        if key not in known:
            table: Costs = {name: value for stage, cost in enumerate(costs) for name, value in cost.table(stage).items()}
            schedule = candidate.make_schedule(table)
            timeline = run_schedule(schedule, table, transfers, queued=True)
            delay = max(0.0, timeline.period - run_schedule(schedule, table).period) if any(transfers) else 0.0
            known[key] = _Pipeline(replica, costs, schedule, timeline, delay)
        result.append(known[key])
    return result


def _ends(candidate: Candidate, pipelines: Sequence[_Pipeline]) -> Tuple[Dict[Place, float], Dict[Place, float]]:
    """For each device when its first pass starts and its last one ends."""
    begun, passed = {}, {}
    rows = candidate.rows()
    for stages, pipeline in zip(candidate.places, pipelines):
        for row, places in zip(rows, stages):
            spans = pipeline.timeline.devices[row]
            for place in places:
                begun[place], passed[place] = spans[0].start, spans[-1].end
    return begun, passed


def _reduce(candidate: Candidate, model: Model, pipelines: Sequence[_Pipeline], pricing: Pricing, overlap: bool) -> List[Exchange]:
    """The sums of gradients over their copies. At zero 2 and 3 they are parts of the passes."""
    if candidate.zero >= 2:
        return []
    kind = REDUCE_SCATTER if candidate.zero else ALL_REDUCE
    distinct = list({id(pipeline): pipeline for pipeline in pipelines}.values())
    ready = [0.0] * len(model.layers)
    for pipeline in distinct:
        for stage in range(candidate.stages):
            span, layers = pipeline.last(stage), candidate.layers(stage)
            parts = pricing.layer_seconds(pipeline.replica, stage) if overlap else [0.0] * len(layers)
            total, after = sum(parts), 0.0
            # The backward pass ends with the first layer.
            for number, part in zip(layers, parts):
                ready[number] = max(ready[number], span.end - (after / total * (span.end - span.start) if total else 0.0))
                after += part
    return [
        Exchange(
            entry.stages,
            max(ready[number] for number in entry.layers),
            tuple((kind, group, entry.parameters * model.gradient_bytes) for group in entry.groups),
        )
        for entry in copies(candidate, model, each=overlap)
        if entry.count > 1
    ]


def _gather(candidate: Candidate, model: Model, kept: Sequence[Copies], done: Dict[Place, float]) -> List[Exchange]:
    """With zero 1 and 2 each device has updated its part of the weights, which all copies need."""
    if candidate.zero not in (1, 2):
        return []
    return [
        Exchange(
            entry.stages,
            max(done[place] for group in entry.groups for place in group),
            tuple((ALL_GATHER, group, entry.parameters * model.weight_bytes) for group in entry.groups),
        )
        for entry in kept
        if entry.count > 1
    ]


def _run(exchanges: List[Exchange], network: Network, done: Dict[Place, float]) -> List[Tuple[Exchange, Period]]:
    """Run exchanges, and note when each device has done its last one."""
    periods = run(exchanges, network)
    for exchange, period in zip(exchanges, periods):
        for place in exchange.members:
            done[place] = max(done[place], period.end)
    return list(zip(exchanges, periods))


def _updates(candidate: Candidate, model: Model, hardware: Hardware, kept: Sequence[Copies]) -> Dict[Place, float]:
    """Seconds of the optimizer on each device: it reads the gradients, and reads and writes the weights and its state."""
    rows = candidate.rows()
    parameters = [0.0] * (max(rows) + 1)
    for entry in kept:
        for row in {rows[stage] for stage in entry.stages}:
            parameters[row] += entry.parameters / (entry.count if candidate.zero else 1)
    moved = model.gradient_bytes + 2 * (model.weight_bytes + model.state_bytes)
    return {
        place: parameters[row] * moved / hardware.device(place).bandwidth
        for stages in candidate.places
        for row, places in zip(rows, stages)
        for place in places
    }


def _uses(
    candidate: Candidate,
    model: Model,
    hardware: Hardware,
    pipelines: Sequence[_Pipeline],
    kept: Sequence[Copies],
    seconds: float,
    synced: Dict[Place, float],
    updates: Dict[Place, float],
) -> List[DeviceUse]:
    """What each device does with its time and memory."""
    rows, count = candidate.rows(), candidate.micro_batches
    held: Dict[object, List[Memory]] = {}
    computes: Dict[Place, float] = {}
    exchanges: Dict[Place, float] = {}
    memories: Dict[Place, Memory] = {}
    delays: Dict[Place, float] = {}
    for replica, (stages, pipeline) in enumerate(zip(candidate.places, pipelines)):
        key = (id(pipeline.schedule), tuple(candidate.samples[replica] / len(places) for places in stages))
        if key not in held:
            held[key] = memory(candidate, model, pipeline.schedule, replica, kept)
        for row, places, cost in zip(rows, stages, pipeline.costs):
            for place, own in zip(places, cost.own):
                computes[place] = computes.get(place, 0.0) + sum(own) * count
                exchanges[place] = exchanges.get(place, 0.0) + sum(cost.exchanged) * count
                memories[place], delays[place] = held[key][row], pipeline.delay
    uses = []
    for place in candidate.used():
        device = hardware.device(place)
        rest = max(0.0, seconds - computes[place] - exchanges[place] - synced[place] - updates[place])
        transfer = min(rest, delays[place])
        times = (computes[place], exchanges[place], synced[place], transfer, updates[place], rest - transfer)
        uses.append(DeviceUse(place, device.kind, *times, memory=memories[place], capacity=device.memory))
    return uses
