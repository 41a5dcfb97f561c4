"""What one training iteration of a plan takes: time, memory, money."""

import dataclasses
from typing import Optional, Sequence, Tuple

from epl.cluster.hardware.spec import Place
from epl.planner.schedules import Timeline
from epl.planner.simulate.candidate import Candidate
from epl.planner.simulate.memory import Memory
from epl.planner.simulate.sync import Exchange, Period

MEMORY, COMPUTE, COMMUNICATION, BUBBLE, IMBALANCE = "memory", "compute", "communication", "bubble", "imbalance"


@dataclasses.dataclass(frozen=True)
class DeviceUse:
    """Where the time of one device goes: all seconds together are those of the iteration.

    Attributes:
      compute: forward and backward passes, with what is computed again.
      exchange: what it sends inside of a pass: for split layers, for weights and gradients that are divided (zero 2 and 3).
      sync: collectives of gradients and weights after its last pass.
      transfer: waits for what other stages send, which it would not have without transfer times.
      update: the optimizer.
      idle: the rest: bubbles of the schedule, and waits for slower devices.
      memory, capacity: bytes held at most, and bytes that there are.
    """

    place: Place
    kind: str
    compute: float
    exchange: float
    sync: float
    transfer: float
    update: float
    idle: float
    memory: Memory
    capacity: float

    @property
    def communication(self) -> float:
        """Seconds of communication that nothing hides."""
        return self.exchange + self.sync + self.transfer


@dataclasses.dataclass(frozen=True)
class Iteration:
    """What one iteration of a candidate takes.

    Attributes:
      seconds: from one iteration to the next, each device starting as soon as it can (`Timeline.period`).
      devices: by place, in the order of `Candidate.used`.
      timelines: of the pipeline of each replica.
      exchanges: the collectives after the passes, with their times.
      flops: of the model for all samples, without what is computed again.
      peak: FLOP/s that all devices could reach.
      price: US dollars an hour of the devices and their nodes; None where one is not known.
    """

    candidate: Candidate
    seconds: float
    devices: Tuple[DeviceUse, ...]
    timelines: Tuple[Timeline, ...]
    exchanges: Tuple[Tuple[Exchange, Period], ...]
    flops: float
    peak: float
    price: Optional[float]

    def _mean(self, seconds: Sequence[float]) -> float:
        return sum(seconds) / len(seconds) / self.seconds if self.seconds else 0.0

    @property
    def utilisation(self) -> Tuple[float, ...]:
        """For each device, the part of the time in which it computes."""
        return tuple((use.compute + use.update) / self.seconds if self.seconds else 0.0 for use in self.devices)

    @property
    def compute_share(self) -> float:
        """The part of the time in which the average device computes."""
        return self._mean([use.compute + use.update for use in self.devices])

    @property
    def communication_share(self) -> float:
        """The part of the time in which the average device does nothing but communicate."""
        return self._mean([use.communication for use in self.devices])

    @property
    def bubble_share(self) -> float:
        """The part of the time in which the average device neither computes nor communicates."""
        return self._mean([use.idle for use in self.devices])

    @property
    def imbalance_share(self) -> float:
        """The part of the time by which the average device computes less than the busiest one; it is in the bubble."""
        most = max(use.compute for use in self.devices)
        return min(self.bubble_share, self._mean([most - use.compute for use in self.devices]))

    @property
    def overfull(self) -> Tuple[DeviceUse, ...]:
        """The devices whose memory is too small."""
        return tuple(use for use in self.devices if use.memory.total > use.capacity)

    @property
    def fits(self) -> bool:
        return not self.overfull

    @property
    def bound(self) -> str:
        """What to change first: memory that is too small, else what most of the time goes to."""
        if self.overfull:
            return MEMORY
        shares = {
            COMPUTE: self.compute_share,
            COMMUNICATION: self.communication_share,
            BUBBLE: self.bubble_share - self.imbalance_share,
            IMBALANCE: self.imbalance_share,
        }
        return max(shares, key=lambda name: shares[name])

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.candidate.batch / self.seconds if self.seconds else float("inf")

    @property
    def flops_per_second(self) -> float:
        """FLOP/s reached, of the model."""
        return self.flops / self.seconds if self.seconds else float("inf")

    @property
    def mfu(self) -> float:
        """FLOP/s reached, as a part of the peak. Source: Chowdhery et al., PaLM, 2022, section 4.1."""
        return self.flops_per_second / self.peak

    @property
    def dollars_per_million(self) -> Optional[float]:
        """US dollars of a million samples."""
        return None if self.price is None else self.price / 3600 / self.throughput * 1e6

    @property
    def tflops_per_dollar(self) -> Optional[float]:
        """RCC, the ratio of computing and cost: TFLOP/s reached for each US dollar an hour; infinite where it costs nothing."""
        if self.price is None:
            return None
        return self.flops_per_second / 1e12 / self.price if self.price else float("inf")
