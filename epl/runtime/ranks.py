"""Which rank of which job is this process?

The answer comes from the environment alone, so that it is known before
TensorFlow, MPI or Horovod are loaded.
"""

import os
import re
from dataclasses import dataclass
from typing import List, Mapping, NamedTuple, Optional, Tuple

from epl.cluster.hosts import machine_of
from epl.cluster.tf_config import parse_tf_config
from epl.errors import ClusterError


@dataclass(frozen=True)
class RankInfo:
    """One process among those of its job.

    `local_rank` and `local_size` count the processes of the same machine. When
    nothing tells them they equal `rank` and `size`, as if all were on one machine.
    `launcher` is "mpi", "horovod", "tf_config" or "none".
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str


class _Source(NamedTuple):
    """The variables that one kind of launcher sets; `local_pairs` are (rank, size) names to try in turn."""

    launcher: str
    rank: str
    size: str
    local_pairs: Tuple[Tuple[str, str], ...]


_PMI = _Source("mpi", "PMI_RANK", "PMI_SIZE", (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")))
_SOURCES = (
    _Source("horovod", "HOROVOD_RANK", "HOROVOD_SIZE", (("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),)),
    _Source("mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", (("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),)),
    _Source("mpi", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", (("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),)),
    _PMI,
)


class _Found(NamedTuple):
    """What one source says; `local` is (local rank, local size) or None."""

    source: _Source
    rank: int
    size: int
    local: Optional[Tuple[int, int]]


def detect_ranks(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """The rank of this process by its launcher, else by TF_CONFIG, else rank 0 of 1.

    Raises ClusterError when the variables are incomplete or contradict each other.
    """
    launched = launched_ranks(environ)
    if launched is not None:
        return launched
    member = parse_tf_config(environ.get("TF_CONFIG"))
    if member is None:
        return RankInfo(0, 1, 0, 1, "none")
    machine = machine_of(member.hosts[member.index])
    neighbours = [index for index, host in enumerate(member.hosts) if machine_of(host) == machine]
    return RankInfo(member.index, len(member.hosts), neighbours.index(member.index), len(neighbours), "tf_config")


def launched_ranks(environ: Mapping[str, str] = os.environ) -> Optional[RankInfo]:
    """The rank that mpirun, srun or horovodrun gave to this process; None without them.

    Raises ClusterError when the variables are incomplete or contradict each other.
    """
    found = [item for item in (_read(source, environ) for source in _SOURCES) if item is not None]
    if any(item.size > 1 for item in found):
        # A shell that itself runs in a one-task step hands its PMI variables on to the mpirun started in it.
        found = [item for item in found if not (item.source is _PMI and item.size == 1)]
    if not found:
        return _pmix(environ)
    first = found[0]
    for other in found[1:]:
        _agree(first, other)
    local = next((item.local for item in found if item.local is not None), None)
    if local is None:
        local = _slurm_local(first.rank, first.size, environ)
    return _checked(first.rank, first.size, local, first.source.launcher, first.source.rank)


def _read(source: _Source, environ: Mapping[str, str]) -> Optional[_Found]:
    """What `source` says, or None when it is absent."""
    pair = _pair(source.rank, source.size, environ)
    if pair is None:
        return None
    local = None
    for rank, size in source.local_pairs:
        local = local or _pair(rank, size, environ)
    return _Found(source, pair[0], pair[1], local)


def _pair(rank_name: str, size_name: str, environ: Mapping[str, str]) -> Optional[Tuple[int, int]]:
    """Both numbers, or None when both are absent. Raises ClusterError for one alone."""
    rank, size = _number(rank_name, environ), _number(size_name, environ)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        there, missing = (size_name, rank_name) if rank is None else (rank_name, size_name)
        raise ClusterError("%s is set but %s is not; set both (the launcher does) or neither" % (there, missing))
    return rank, size


def _number(name: str, environ: Mapping[str, str]) -> Optional[int]:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not re.match(r"^[0-9]+$", text):
        raise ClusterError("%s = %r is not a number from 0; the launcher sets it, so don't set it by hand" % (name, text))
    return int(text)


def _agree(first: _Found, other: _Found) -> None:
    if (first.rank, first.size) != (other.rank, other.size):
        raise ClusterError(
            "the environment contradicts itself: %s says rank %d of %d, %s says rank %d of %d; start the job with one launcher and unset "
            "the variables of the other" % (first.source.rank, first.rank, first.size, other.source.rank, other.rank, other.size)
        )
    if first.local and other.local and first.local != other.local:
        raise ClusterError(
            "the environment contradicts itself: by the variables beside %s this is local rank %d of %d, by those beside %s %d of %d; "
            "unset the wrong ones" % ((first.source.rank,) + first.local + (other.source.rank,) + other.local)
        )


def _checked(rank: int, size: int, local: Optional[Tuple[int, int]], launcher: str, name: str) -> RankInfo:
    """The RankInfo, after its numbers are found to be possible. Raises ClusterError."""
    if rank >= size:
        raise ClusterError("%s = %d does not fit a job of %d ranks; expected 0 to %d" % (name, rank, size, size - 1))
    local_rank, local_size = local or (rank, size)
    if local_rank >= local_size or local_size > size or local_rank > rank:
        raise ClusterError(
            "rank %d of %d can't be local rank %d of %d on its machine; the launcher's variables (found by %s) are inconsistent"
            % (rank, size, local_rank, local_size, name)
        )
    return RankInfo(rank, size, local_rank, local_size, launcher)


def _pmix(environ: Mapping[str, str]) -> Optional[RankInfo]:
    """The rank by PMIX_RANK and, since PMIx exports no size, Slurm's task count."""
    rank = _number("PMIX_RANK", environ)
    if rank is None:
        return None
    size = _slurm_size(environ)
    if size is None:
        raise ClusterError(
            "PMIX_RANK = %d is set but nothing tells the number of ranks; start the job with srun, mpirun or horovodrun, or unset PMIX_RANK" % rank
        )
    task = _number("SLURM_PROCID", environ)
    if task is not None and task != rank:
        raise ClusterError("the environment contradicts itself: PMIX_RANK = %d, SLURM_PROCID = %d; unset the stale one" % (rank, task))
    return _checked(rank, size, _slurm_local(rank, size, environ), "mpi", "PMIX_RANK")


def _slurm_size(environ: Mapping[str, str]) -> Optional[int]:
    """The tasks of the job step, or of the job."""
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"):
        size = _number(name, environ)
        if size is not None:
            return size
    return None


def _slurm_local(rank: int, size: int, environ: Mapping[str, str]) -> Optional[Tuple[int, int]]:
    """(local rank, local size) by Slurm, if its task is this very rank; else None.

    Under an mpirun inside a Slurm job the task is a daemon or the batch script.
    """
    local_rank, node = _number("SLURM_LOCALID", environ), _number("SLURM_NODEID", environ)
    if local_rank is None or node is None or _number("SLURM_PROCID", environ) != rank or _slurm_size(environ) != size:
        return None
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "")
    if node >= len(tasks):
        return None
    return local_rank, tasks[node]


def _tasks_per_node(text: str) -> List[int]:
    """Slurm's short form spelled out: "2(x3),1" -> [2, 2, 2, 1]; [] for anything else."""
    tasks: List[int] = []
    for part in text.split(","):
        match = re.match(r"^(\d+)(?:\(x(\d+)\))?$", part.strip())
        if match is None:
            return []
        tasks += [int(match.group(1))] * int(match.group(2) or 1)
    return tasks
