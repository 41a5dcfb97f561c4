"""The plan: what goes where. Pure data, the same on every rank."""

import dataclasses
import functools
import hashlib
import json
import math
from typing import Any, Dict, List, Optional, Tuple

from epl.planner.sharding.spec import Group

WHOLE, FIRST, MIDDLE, LAST = "whole", "first", "middle", "last"
"""Parts of a training step: all of it in one run, or one of several consecutive runs."""


_LISTS = ("split", "narrow", "shares", "batch_shares")


class _Index:
    """What is asked of the places of a plan for each gradient and transfer: found in one pass over the replicas.

    Attributes:
      members: replica -> the processes that hold stages of it.
      of_rank: process -> the replicas of which it holds a part.
      first: process -> the replica whose values it sees.
      seen: the replicas whose values some process sees.
      columns: taskgraph -> the processes that hold it.
    """

    def __init__(self, places: Tuple[Tuple[int, ...], ...]):
        self.members = tuple(tuple(sorted(set(row))) for row in places)
        self.of_rank: Dict[int, List[int]] = {}
        for replica, ranks in enumerate(self.members):
            for rank in ranks:
                self.of_rank.setdefault(rank, []).append(replica)
        self.first = {rank: min(replicas, key=lambda g: (len(self.members[g]), g)) for rank, replicas in self.of_rank.items()}
        self.seen = frozenset(self.first.values())
        self.columns = tuple(tuple(sorted(set(column))) for column in zip(*places))


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
      apply_groups: groups in which the optimizer updates the variables, one after the other.
      schedule: name of the pipeline schedule.
      places: for each replica (each lane of each group), by taskgraph, the process that holds that
        stage; empty when every replica lies within one process.
      pipeline_devices: devices of one replica when some hold several stages; 0 when each
        stage has its own.
      lanes: devices of a group that hold the taskgraphs of `split` scopes together; each of
        them is a replica of all other taskgraphs.
      split: the taskgraphs of `split` scopes.
      recompute: "collection" or "auto" where activations are computed again, else "".
      recompute_last: the last taskgraph that does so for "auto"; -1 for all.
      recompute_limit: megabytes that the activations of a device may take; 0 for as little as possible.
      offload: "v0" or "v1" where variables stay in host memory, "v2" where activations wait there too, else "".
      amp: "float16" or "bfloat16" for mixed precision, else "".
      loss_scale: with it, the fixed factor of the loss; 0 for a dynamic one.
      zero: "v0", "v1" or "v2" where the replicas are the lanes of one group that divides what the optimizer writes, else "".
      check_gradients: compute the gradients without that too, and compare.
      copies: lanes of a group that compute the same batch, which the first of them draws and is
        fed: 1 when each lane has batches of its own, else all lanes.
      narrow: taskgraphs that the first lane of each group computes alone.
      shares: how much of what is divided each lane gets, as weights; empty for equal parts.
      batch_shares: how much of a step's samples each stream takes, as weights; empty for equal parts.
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
    apply_groups: int = 1
    schedule: str = "PreferBackward"
    places: Tuple[Tuple[int, ...], ...] = ()
    pipeline_devices: int = 0
    lanes: int = 1
    split: Tuple[int, ...] = ()
    copies: int = 1
    narrow: Tuple[int, ...] = ()
    shares: Tuple[int, ...] = ()
    batch_shares: Tuple[int, ...] = ()
    recompute: str = ""
    recompute_last: int = -1
    recompute_limit: int = 0
    check_gradients: bool = False
    amp: str = ""
    loss_scale: float = 0.0
    offload: str = ""
    zero: str = ""

    _index: "_Index" = dataclasses.field(init=False, repr=False, compare=False)

    @property
    def replicas(self) -> int:
        """Replicas of the model in the whole job; each lane of a group counts as one."""
        return len(self.places) or self.ranks * self.devices_per_rank

    @property
    def group(self) -> Group:
        """The lanes with their shares."""
        return Group(self.shares) if self.shares else Group.of(self.lanes)

    @property
    def streams(self) -> int:
        """Replicas with batches of their own in the whole job."""
        return self.replicas // self.copies

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", _Index(self.places))

    def streams_of(self, rank: int) -> List[int]:
        """The streams whose batches a process draws and is fed, in the order in which it does."""
        here = range(rank * self.devices_per_rank, (rank + 1) * self.devices_per_rank)
        first = [g for g, row in enumerate(self.places) if row[0] == rank] if self.places else here
        return [replica // self.copies for replica in first if replica % self.copies == 0]

    def shares_of(self, rank: int) -> Tuple[int, ...]:
        """How the batch of a process is divided over its streams: weights in lowest terms."""
        if not self.batch_shares:
            return (1,) * len(self.streams_of(rank))
        shares = [self.batch_shares[stream] for stream in self.streams_of(rank)]
        divisor = functools.reduce(math.gcd, shares, 0)
        return tuple(share // divisor for share in shares)

    def process(self, replica: int, taskgraph: Optional[int]) -> int:
        """The process that holds a taskgraph of a replica; of what belongs to none, and is in all of its processes, the first."""
        return self.places[replica][taskgraph or 0] if self.places else replica // self.devices_per_rank

    def lane_processes(self, group: int, taskgraph: Optional[int]) -> List[int]:
        """The process of each lane of a group that holds a taskgraph."""
        return [self.process(group * self.lanes + lane, taskgraph) for lane in range(self.lanes)]

    def peers(self, lane: int, taskgraph: Optional[int]) -> Tuple[int, ...]:
        """The processes that hold a taskgraph of one lane of any group."""
        return tuple(sorted({self.process(first + lane, taskgraph) for first in range(0, self.replicas, self.lanes)}))

    def lane_groups(self, taskgraph: Optional[int]) -> List[Tuple[int, ...]]:
        """The processes that hold a taskgraph of each group of lanes."""
        return [tuple(sorted(set(self.lane_processes(group, taskgraph)))) for group in range(self.replicas // self.lanes)]

    def members(self, replica: int) -> Tuple[int, ...]:
        """The processes that hold stages of a replica."""
        return self._index.members[replica]

    def holders(self, taskgraph: Optional[int]) -> Tuple[int, ...]:
        """The processes that hold a taskgraph of any replica; all of them for what belongs to none."""
        if taskgraph is None or not self.places:
            return tuple(range(self.ranks))
        return self._index.columns[taskgraph]

    def first_replica(self, rank: int) -> int:
        """The replica whose values a process sees: one that it holds as a whole if there is any."""
        return self._index.first[rank]

    def is_seen(self, replica: int) -> bool:
        """Whether some process sees the values of a replica, or of another lane of its group."""
        first = replica - replica % self.lanes
        return not self._index.seen.isdisjoint(range(first, first + self.lanes))

    def held(self, rank: int) -> Tuple[int, ...]:
        """The replicas of which a process holds a part: first the one whose values it sees, then those that others see."""
        first = self._index.first[rank]
        return tuple(sorted(self._index.of_rank[rank], key=lambda g: (g != first, not self.is_seen(g), g)))

    @property
    def is_shared(self) -> bool:
        """Whether several processes hold one copy of the model together, so that no process can run it alone."""
        return bool(self.places) or self.lanes > 1 and (self.lanes > self.devices_per_rank or self.devices_per_rank % self.lanes > 0)

    @property
    def runs_per_step(self) -> int:
        """Consecutive runs of a training program that make one step."""
        return 1 if self.accumulate_in_run else self.micro_batches

    @property
    def batches_per_run(self) -> int:
        """Micro-batches that a replica consumes in one run of a training program."""
        return self.micro_batches if self.accumulate_in_run else 1

    def to_json(self) -> Dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return dict(fields, places=[list(row) for row in self.places], **{name: list(fields[name]) for name in _LISTS})

    @classmethod
    def from_json(cls, data: Dict[str, Any]) -> "Plan":
        lists = {name: tuple(data.get(name, ())) for name in _LISTS}
        return cls(**dict(data, places=tuple(tuple(row) for row in data.get("places", ())), **lists))

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Task:
    """What one rank compiles: its part of one program under a plan.

    Attributes:
      plan: the plan of the graph.
      rank: this process.
      devices: runtime names of the local devices: for each local replica the first one
        that it has here.
      stages: for each local replica the runtime name of each taskgraph's device, "" for
        one that another process holds; empty when all taskgraphs of a replica share one
        device.
      replicas: number of each local replica in the job, as `Plan.held` orders them; empty
        when every process has as many whole replicas.
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
    replicas: Tuple[int, ...] = ()
    host: str = "/device:CPU:0"
    parallel: bool = True
    part: str = WHOLE
    key: str = "0"

    @property
    def chief(self) -> bool:
        return self.rank == 0

    @property
    def spread(self) -> bool:
        """Whether stages of one replica lie in several processes."""
        return bool(self.plan.places)

    @property
    def local_replicas(self) -> int:
        """Replicas of this program of which this process holds a part."""
        return len(self.devices) if self.parallel or self.spread or self.plan.lanes > 1 else 1

    def lane(self, replica: int) -> int:
        """The place of a local replica in its group."""
        return self.replica_id(replica) % self.plan.lanes

    def stream(self, replica: int) -> int:
        """The stream of batches that a local replica computes."""
        return self.replica_id(replica) // self.plan.copies

    def draws(self, replica: int) -> bool:
        """Whether a local replica draws batches and is fed; else it is given those of the first lane of its group."""
        return self.replica_id(replica) % self.plan.copies == 0

    def group_of(self, replica: int) -> int:
        """The group that a local replica is a lane of."""
        return self.replica_id(replica) // self.plan.lanes

    def lanes_here(self, taskgraph: Optional[int], lane: int) -> List[int]:
        """The local replicas that are one lane of their groups and of which this process holds a taskgraph."""
        return [replica for replica in self.holding(taskgraph) if self.lane(replica) == lane]

    def replica_id(self, replica: int) -> int:
        """Number in the job of a local replica."""
        return self.replicas[replica] if self.replicas else self.rank * len(self.devices) + replica

    def has(self, replica: int, taskgraph: Optional[int]) -> bool:
        """Whether this process holds a taskgraph of a local replica; what belongs to none is everywhere."""
        return taskgraph is None or not self.spread or self.owner(replica, taskgraph) == self.rank

    def owner(self, replica: int, taskgraph: int) -> int:
        """The process that holds a taskgraph of a local replica."""
        return self.plan.places[self.replica_id(replica)][taskgraph] if self.spread else self.rank

    def members(self, replica: int) -> Tuple[int, ...]:
        """The processes that hold stages of a local replica."""
        return self.plan.members(self.replica_id(replica)) if self.spread else (self.rank,)

    def holding(self, taskgraph: Optional[int]) -> List[int]:
        """The local replicas of which this process holds a taskgraph, in the order of the job's replicas."""
        return sorted((r for r in range(self.local_replicas) if self.has(r, taskgraph)), key=self.replica_id)

    def first_holder(self, taskgraph: Optional[int]) -> int:
        """The process that holds a taskgraph of the first replica of the job."""
        return self.plan.places[0][taskgraph] if self.spread and taskgraph is not None else 0

    def group(self, taskgraph: Optional[int]) -> Tuple[int, ...]:
        """The processes over which the replicas of a taskgraph meet in this program."""
        return self.plan.holders(taskgraph) if self.parallel else (self.rank,)

    def device_of(self, replica: int, taskgraph: Optional[int]) -> str:
        """The device of a taskgraph of a local replica; the replica's first one for what belongs to no taskgraph."""
        if taskgraph is None or not self.stages:
            return self.devices[replica]
        return self.stages[replica][taskgraph]

    def state_device(self, replica: int, taskgraph: Optional[int]) -> str:
        """The device of the variables of a taskgraph of a local replica."""
        return self.host if self.plan.offload else self.device_of(replica, taskgraph)

    def home(self, taskgraph: Optional[int]) -> str:
        """The device where the local replicas of a taskgraph meet; its first one here."""
        holding = self.holding(taskgraph)
        return self.device_of(holding[0], taskgraph) if holding else self.devices[0]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this program in one run."""
        return self.plan.batches_per_run if self.parallel else 1

    @property
    def ranks(self) -> int:
        """Processes that take part in this program."""
        return self.plan.ranks if self.parallel else 1

    def global_index(self, replica: int, micro_batch: Optional[int]) -> int:
        """Position of a local instance's batch among all batches of the job, replica-major."""
        return self.stream(replica) * self.micro_batches + (micro_batch or 0)

    def alone(self) -> "Task":
        """The task of a program that is not `parallel`: only the replicas that some process sees the values of."""
        if not self.spread:
            lanes = self.devices[: self.plan.lanes] if self.plan.lanes > 1 else self.devices
            return dataclasses.replace(self, parallel=False, devices=lanes, replicas=self.replicas or tuple(map(self.replica_id, range(len(lanes)))))
        count = sum(self.plan.is_seen(g) for g in self.replicas)
        return dataclasses.replace(
            self, parallel=False, devices=self.devices[:count], stages=self.stages[:count], replicas=self.replicas[:count]
        )  # fmt: skip
