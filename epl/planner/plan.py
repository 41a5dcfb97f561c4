"""The plan: what goes where. Pure data, the same on every rank."""

import dataclasses
import hashlib
import json
from typing import Any, Dict, Optional, Tuple

WHOLE, FIRST, MIDDLE, LAST = "whole", "first", "middle", "last"
"""Parts of a training step: all of it in one run, or one of several consecutive runs."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one annotated graph is laid out over the job.

    Attributes:
      ranks: number of processes.
      devices_per_rank: local replicas of each process.
      micro_batches: micro-batches M of a replica and step.
      accumulate_in_run: the M micro-batches are taken within one run; otherwise M
        consecutive runs of a training program make one step.
      reduce_method: "mean" or "sum" over replicas.
      aggregate_at: "raw" or "apply", where gradients are reduced.
      statistics_reduce: "mean" or "first", for variables written in the forward pass.
      sparse_as_dense: sparse gradients travel as dense ones.
      max_splits: most fused groups of dense gradients.
      fp16, fp16_scale: compressed all-reduce.
    """

    ranks: int = 1
    devices_per_rank: int = 1
    micro_batches: int = 1
    accumulate_in_run: bool = False
    reduce_method: str = "mean"
    aggregate_at: str = "raw"
    statistics_reduce: str = "mean"
    sparse_as_dense: bool = False
    max_splits: int = 5
    fp16: bool = False
    fp16_scale: float = 128.0

    @property
    def replicas(self) -> int:
        """Replicas of the model in the whole job."""
        return self.ranks * self.devices_per_rank

    @property
    def runs_per_step(self) -> int:
        """Consecutive runs of a training program that make one step."""
        return 1 if self.accumulate_in_run else self.micro_batches

    @property
    def batches_per_run(self) -> int:
        """Micro-batches that a replica consumes in one run of a training program."""
        return self.micro_batches if self.accumulate_in_run else 1

    def to_json(self) -> Dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Dict[str, Any]) -> "Plan":
        return cls(**data)

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Task:
    """What one rank compiles: its part of one program under a plan.

    Attributes:
      plan: the plan of the graph.
      rank: this process.
      devices: runtime names of the local devices, one per local replica.
      stages: for each local replica the runtime name of each taskgraph's device; empty
        when all taskgraphs of a replica share one device.
      host: runtime name of the device that holds shared inputs and tables.
      parallel: False for a program that runs on the first local replica alone
        (initialisation, evaluation, saving).
      part: which run of a training step this is.
      key: the same on all ranks for the same program; part of collective names.
    """

    plan: Plan
    rank: int = 0
    devices: Tuple[str, ...] = ("/device:CPU:0",)
    stages: Tuple[Tuple[str, ...], ...] = ()
    host: str = "/device:CPU:0"
    parallel: bool = True
    part: str = WHOLE
    key: str = "0"

    @property
    def chief(self) -> bool:
        return self.rank == 0

    @property
    def local_replicas(self) -> int:
        """Replicas of this program in this process."""
        return len(self.devices) if self.parallel else 1

    def device_of(self, replica: int, taskgraph: Optional[int]) -> str:
        """The device of a taskgraph of a local replica; the replica's first one for what belongs to no taskgraph."""
        if taskgraph is None or not self.stages:
            return self.devices[replica]
        return self.stages[replica][taskgraph]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this program in one run."""
        return self.plan.batches_per_run if self.parallel else 1

    @property
    def ranks(self) -> int:
        """Processes that take part in this program."""
        return self.plan.ranks if self.parallel else 1

    def global_index(self, replica: int, micro_batch: Optional[int]) -> int:
        """Position of a local instance among all instances of the job, replica-major."""
        batches = self.micro_batches
        return (self.rank * len(self.devices) + replica) * batches + (micro_batch or 0)
