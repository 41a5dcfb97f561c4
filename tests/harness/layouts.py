"""A layout: how a global batch is spread over ranks, local devices and micro-batches."""

import re
from typing import List, NamedTuple


class Layout(NamedTuple):
    """`ranks` processes with `devices` devices each, every device a replica with `m` micro-batches per step.

    A user's batch `(replica, micro-batch)` has the number `replica * m + micro-batch` in the global batch.
    """

    ranks: int = 1
    devices: int = 1
    m: int = 1
    accumulate_in_run: bool = False

    @property
    def replicas(self) -> int:
        return self.ranks * self.devices

    @property
    def batches(self) -> int:
        """Number of user batches in the global batch of a step."""
        return self.replicas * self.m

    @property
    def runs(self) -> int:
        """Number of `session.run` calls that make one step."""
        return 1 if self.accumulate_in_run else self.m

    @property
    def name(self) -> str:
        micro = "" if self.m == 1 else "-m%d%s" % (self.m, "run" if self.accumulate_in_run else "")
        return "%dx%d%s" % (self.ranks, self.devices, micro)

    @classmethod
    def parse(cls, name: str) -> "Layout":
        """The inverse of `name`: "2x1", "2x1-m4" (consecutive runs) or "2x1-m4run" (within one run)."""
        found = re.fullmatch(r"(\d+)x(\d+)(?:-m(\d+)(run)?)?", name)
        if not found:
            raise ValueError("layout %r is not of the form RANKSxDEVICES, RANKSxDEVICES-mM or RANKSxDEVICES-mMrun" % name)
        return cls(int(found[1]), int(found[2]), int(found[3] or 1), bool(found[4]))

    def batches_of(self, rank: int, run: int = 0) -> List[int]:
        """Numbers of the user batches that `rank` consumes in the `run`-th run of a step, in its own order."""
        return [number for replica in self.replicas_of(rank) for number in self._batches_of_replica(replica, run)]

    def batches_of_run(self, run: int = 0) -> List[int]:
        """Numbers of the user batches that all ranks together consume in the `run`-th run of a step."""
        return [number for rank in range(self.ranks) for number in self.batches_of(rank, run)]

    def replicas_of(self, rank: int) -> range:
        return range(rank * self.devices, (rank + 1) * self.devices)

    def _batches_of_replica(self, replica: int, run: int) -> List[int]:
        if self.runs == 1:
            return [replica * self.m + micro for micro in range(self.m)]
        return [replica * self.m + run]
