"""What each run of consecutive layers costs: tables that the balancers of stages search."""

from typing import Callable, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from epl.cluster.hardware.spec import Device, Link
from epl.errors import PlanError
from epl.planner.cost.model import Model
from epl.planner.schedules import canonical_name, make_schedule, peak_activations

InFlight = Callable[[int], float]
"""For a stage, counted from 0: of how many micro-batches it holds activations at most."""


Schedule = Union[str, InFlight]
"""The name of a pipeline schedule, or what it holds."""


def in_flight(schedule: str, stages: int, micro_batches: int) -> InFlight:
    """That of a schedule by name: m for GPipe, min(m, p - i) for 1F1B, and what the lists of the others say.

    Where a device holds several chunks (interleaved and V schedules), a stage here is all that one device
    holds, and its chunks count as equal: two chunks in flight of four are half a micro-batch.
    """
    name = canonical_name(schedule)
    if name == "PreferForward":
        return lambda stage: micro_batches
    if name == "PreferBackward":
        return lambda stage: min(micro_batches, stages - stage)
    chunks = 2 if name == "ZeroBubbleV" or (name == "Interleaved" and stages > 1) else 1
    made = make_schedule(name, stages * chunks, micro_batches, stages if name == "Interleaved" else None)
    peaks = [peak / chunks for peak in peak_activations(made)]
    return lambda stage: peaks[stage]


def held_by(schedule: Schedule, stages: int, micro_batches: int) -> InFlight:
    """`in_flight` of a name; what is given otherwise."""
    return in_flight(schedule, stages, micro_batches) if isinstance(schedule, str) else schedule


def all_reduce_seconds(moved: float, devices: int, link: Optional[Link]) -> float:
    """Ring all-reduce of some bytes: 2 (n - 1) messages of 1 / n of them. Without a link, no time.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69(2), 2009.
    """
    if link is None or devices < 2:
        return 0.0
    return 2 * (devices - 1) * link.seconds(moved / devices)


class Tables:
    """Matrices [L + 1, L + 1] for layers a to b - 1: entry [a, b]. Where a >= b, seconds are infinite and the others 0.

    Each entry is a sum from a on, not a difference of sums from 0 on: what fits exactly, fits.
    """

    def __init__(self, model: Model):
        self.model = model
        self.layers = len(model.layers)
        self.parameters = self._distinct_parameters()
        self.activations = self._sums([layer.activation for layer in model.layers])
        self.workspace = self._largest([layer.workspace for layer in model.layers])
        self._kinds: List[Device] = []
        self._seconds: Dict[Tuple[int, int], np.ndarray] = {}

    def kind(self, device: Device) -> int:
        """A number for all devices that are alike."""
        for number, known in enumerate(self._kinds):
            if known is device or known == device:
                return number
        self._kinds.append(device)
        return len(self._kinds) - 1

    def seconds(self, device: Device, samples: int) -> np.ndarray:
        """Forward and backward pass of so many samples; none take no time."""
        key = self.kind(device), samples
        if key not in self._seconds:
            dtype = self.model.dtype
            each = [layer.forward_seconds(device, samples, dtype) + layer.backward_seconds(device, samples, dtype) for layer in self.model.layers]
            runs = np.triu(np.ones((self.layers + 1, self.layers + 1), bool), 1)
            self._seconds[key] = np.where(runs, self._sums(each if samples else [0.0] * self.layers), np.inf)
        return self._seconds[key]

    def line(self, device: Device) -> Tuple[np.ndarray, np.ndarray]:
        """(fixed, each): seconds are fixed + each * samples, for all runs. Layers are timed by the roofline or by measured seconds of a sample."""
        one, two = self.seconds(device, 1), self.seconds(device, 2)
        with np.errstate(invalid="ignore"):
            each = np.where(np.isfinite(one), two - one, 0.0)
        return np.where(np.isfinite(one), np.maximum(one - each, 0.0), np.inf), each

    def memory(self, samples: Union[int, np.ndarray], held: float) -> np.ndarray:
        """Bytes of a device with so many samples of each micro-batch, which holds activations of `held` micro-batches."""
        return self.parameters * self.model.bytes_per_parameter + held * samples * self.activations + samples * self.workspace

    def most_samples(self, device: Device, held: float, limit: int) -> np.ndarray:
        """The largest number up to a limit that fits a device, for all runs; 0 where not even the weights do."""
        each = held * self.activations + self.workspace
        room = device.memory - self.parameters * self.model.bytes_per_parameter
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.clip(np.nan_to_num(np.floor(room / each), nan=0.0), 0, limit)
        # Divisions round; what decides is `memory`.
        most = np.where((most < limit) & (self.memory(most + 1, held) <= device.memory), most + 1, most)
        return np.where((most > 0) & (self.memory(most, held) > device.memory), most - 1, most).astype(int)

    def memory_of(self, first: int, last: int, samples: int, held: float) -> float:
        """One entry of `memory`."""
        own = self.parameters[first, last] * self.model.bytes_per_parameter
        return float(own + held * samples * self.activations[first, last] + samples * self.workspace[first, last])

    def hops(self, samples: int, link: Optional[Link]) -> np.ndarray:
        """[L + 1]: seconds of what crosses each cut for a micro-batch, in one direction."""
        found = np.zeros(self.layers + 1)
        if link is not None:
            for cut in range(1, self.layers):
                found[cut] = link.seconds(self.model.crossing(cut) * samples)
        return found

    def _distinct_parameters(self) -> np.ndarray:
        found = np.zeros((self.layers + 1, self.layers + 1))
        for a in range(self.layers):
            tied, total = set(), 0.0
            for b, layer in enumerate(self.model.layers[a:], a + 1):
                if not layer.tied or layer.tied not in tied:
                    total += layer.parameters
                tied.add(layer.tied)
                found[a, b] = total
        return found

    def _sums(self, values: Sequence[float]) -> np.ndarray:
        found = np.zeros((self.layers + 1, self.layers + 1))
        for a in range(self.layers):
            found[a, a + 1 :] = np.cumsum(values[a:])
        return found

    def _largest(self, values: Sequence[float]) -> np.ndarray:
        found = np.zeros((self.layers + 1, self.layers + 1))
        for a in range(self.layers):
            found[a, a + 1 :] = np.maximum.accumulate(values[a:])
        return found


def check_stages(model: Model, stages: int, micro_batches: int) -> None:
    """Refuse numbers that can't be."""
    if stages < 1 or stages > len(model.layers):
        raise PlanError("%d layers can't be cut into %d stages; use between 1 and %d" % (len(model.layers), stages, len(model.layers)))
    if micro_batches < 1:
        raise PlanError("a step has at least 1 micro-batch, not %d" % micro_batches)
