"""A layout: how a global batch is spread over ranks, local devices, stages and micro-batches."""

import re
from typing import List, NamedTuple

_FORM = re.compile(
    r"(?P<ranks>\d+)x(?P<devices>\d+)(?:-(?P<kind>[pan])(?P<lanes>\d+))?(?:-s(?P<stages>\d+)(?:v(?P<chunks>\d+))?)?(?:-m(?P<m>\d+)(?P<run>run)?)?"
)


class Layout(NamedTuple):
    """`ranks` processes with `devices` devices each; `stages / chunks` neighbouring devices are a replica with `m` micro-batches per step.

    A device holds `chunks` stages; `lanes` neighbouring devices share what is split; with `together` they compute one batch, and with
    `narrow` too the first stage is on one device alone. A user's batch `(replica, micro-batch)` has the number `replica * m + micro-batch` in the
    global batch.
    """

    ranks: int = 1
    devices: int = 1
    m: int = 1
    accumulate_in_run: bool = False
    stages: int = 1
    chunks: int = 1
    lanes: int = 1
    together: bool = False
    narrow: bool = False

    @property
    def width(self) -> int:
        """Devices that compute one batch."""
        if self.narrow:
            return 1 + (self.stages - 1) * self.lanes
        return self.stages // self.chunks * (self.lanes if self.together else 1)

    @property
    def replicas(self) -> int:
        return self.ranks * self.devices // self.width

    @property
    def batches(self) -> int:
        """Number of user batches in the global batch of a step."""
        return self.replicas * self.m

    @property
    def runs(self) -> int:
        """Number of `session.run` calls that make one step."""
        return 1 if self.accumulate_in_run or self.stages > 1 or self.lanes > 1 else self.m

    @property
    def name(self) -> str:
        stages = "" if self.stages == 1 else "-s%d%s" % (self.stages, "" if self.chunks == 1 else "v%d" % self.chunks)
        micro = "" if self.m == 1 else "-m%d%s" % (self.m, "run" if self.accumulate_in_run else "")
        lanes = "" if self.lanes == 1 else "-%s%d" % ("n" if self.narrow else "a" if self.together else "p", self.lanes)
        return "%dx%d%s%s%s" % (self.ranks, self.devices, lanes, stages, micro)

    @classmethod
    def parse(cls, name: str) -> "Layout":
        """The inverse of `name`.

        "2x1", "2x1-m4" (consecutive runs), "2x1-m4run" (within one run), "2x1-s2-m4" (two stages), "2x1-s4v2", "2x1-p2" (split),
        "2x1-a2" (split alone), "3x1-n2-s2" (a stage on one device, and a split one on two).
        """
        found = _FORM.fullmatch(name)
        if not found:
            raise ValueError("layout %r is not of the form RANKSxDEVICES, then perhaps -pLANES or -aLANES, -sSTAGES[vCHUNKS], -mM or -mMrun" % name)
        stages, chunks = int(found["stages"] or 1), int(found["chunks"] or 1)
        layout = cls(int(found["ranks"]), int(found["devices"]), int(found["m"] or 1), bool(found["run"]), stages, chunks, int(found["lanes"] or 1))
        layout = layout._replace(together=found["kind"] in ("a", "n"), narrow=found["kind"] == "n")
        group = layout.width if layout.together else layout.width * layout.lanes
        if stages % chunks or layout.ranks * layout.devices % group:
            raise ValueError("layout %r: replicas of %d stages, %d on a device, do not fit on the devices" % (name, stages, chunks))
        return layout

    @property
    def data_parallel(self) -> "Layout":
        """The layout with the same replicas and micro-batches, each replica on one device, all within one process and run."""
        return Layout(1, self.replicas, self.m, True)

    def batches_of(self, rank: int, run: int = 0) -> List[int]:
        """Numbers of the user batches that `rank` consumes in the `run`-th run of a step, in its own order."""
        return [number for replica in self.replicas_of(rank) for number in self._batches_of_replica(replica, run)]

    def batches_of_run(self, run: int = 0) -> List[int]:
        """Numbers of the user batches that all ranks together consume in the `run`-th run of a step."""
        return [number for rank in range(self.ranks) for number in self.batches_of(rank, run)]

    def seen_by(self, rank: int, run: int = 0) -> List[int]:
        """Numbers of the user batches of the replica whose values `rank` sees; for a rank with whole replicas those of all of them."""
        whole = [replica for replica in self.replicas_of(rank) if self._rank_of(self._devices_of(replica)[-1]) == rank]
        held = [replica for replica in range(self.replicas) if rank in map(self._rank_of, self._devices_of(replica))]
        return [number for replica in whole or held[:1] for number in self._batches_of_replica(replica, run)]

    def replicas_of(self, rank: int) -> List[int]:
        """The replicas whose first stage lies on `rank`: it draws and is fed for them."""
        return [replica for replica in range(self.replicas) if self._rank_of(self._devices_of(replica)[0]) == rank]

    def _devices_of(self, replica: int) -> List[int]:
        """The devices of a replica, first those of its first stage; of lanes with batches of their own, those of the lane."""
        stages = self.stages // self.chunks
        if self.together:
            return [replica * self.width + device for device in range(self.width)]
        group, lane = divmod(replica, self.lanes)
        return [(group * stages + stage) * self.lanes + lane for stage in range(stages)]

    def _rank_of(self, device: int) -> int:
        return device // self.devices

    def _batches_of_replica(self, replica: int, run: int) -> List[int]:
        if self.runs == 1:
            return [replica * self.m + micro for micro in range(self.m)]
        return [replica * self.m + run]
