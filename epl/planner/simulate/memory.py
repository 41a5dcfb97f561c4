"""What each device of a candidate holds at most."""

import dataclasses
from typing import Dict, List, Sequence

from epl.planner.cost.model import Model
from epl.planner.schedules import Schedule, peak_activations
from epl.planner.simulate.candidate import Candidate
from epl.planner.simulate.costs import Copies


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, at its peak."""

    weights: float = 0.0
    gradients: float = 0.0
    state: float = 0.0
    activations: float = 0.0
    workspace: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.state + self.activations + self.workspace


def memory(candidate: Candidate, model: Model, schedule: Schedule, replica: int, kept: Sequence[Copies]) -> List[Memory]:
    """The memory of each schedule device of a replica, which is that of each of its places.

    Weights, gradients and optimizer state: a level of zero divides them by the number of
    copies (ZeRO, SC'20, section 5). Activations: those of the micro-batches that are in
    flight by the schedule. With recompute these are only what the layers read, and the
    largest layer is there as a whole while its backward pass runs. Workspace: that of the
    largest layer, with the gathered weights of that layer at level 3.

    Args:
      kept: the weights, from `copies`.
    """
    rows = candidate.rows()
    share = [candidate.samples[replica] / len(places) for places in candidate.places[replica]]
    held: List[float] = []
    work: Dict[int, float] = {}
    for stage in range(candidate.stages):
        held.append(0.0)
        for number in candidate.layers(stage):
            layer, degree = model.layers[number], candidate.degree(number)
            read = model.crossing(number) if number == candidate.bounds[stage] and number else model.layers[number - 1].output if number else 0.0
            activation = layer.activation * share[stage]
            if candidate.recompute:
                held[stage] += read * share[stage] * degree
            else:
                # Each part of a split layer keeps the whole of what the layer reads.
                held[stage] += activation + read * share[stage] * (degree - 1)
            extra = layer.workspace * share[stage] + (activation if candidate.recompute else 0)
            extra += layer.parameters / degree * model.weight_bytes if candidate.zero == 3 else 0
            work[rows[stage]] = max(work.get(rows[stage], 0), extra)
    peaks = peak_activations(schedule, held)
    sizes = [[0.0, 0.0, 0.0] for _ in peaks]
    for entry in kept:
        for row in {rows[stage] for stage in entry.stages}:
            levels = ((model.weight_bytes, 3), (model.gradient_bytes, 2), (model.state_bytes, 1))
            for at, (size, level) in enumerate(levels):
                sizes[row][at] += entry.parameters * size / (entry.count if candidate.zero >= level else 1)
    return [Memory(size[0], size[1], size[2], peaks[row], work[row]) for row, size in enumerate(sizes)]
