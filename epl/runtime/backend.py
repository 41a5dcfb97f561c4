"""The connected job: Horovod, started once per process, and what EPL asks of it outside of programs."""

import atexit
import contextlib
import os
import struct
import threading
from typing import Any, Dict, List, MutableMapping, Optional, Sequence, Tuple

from epl.cluster.tf_config import parse_tf_config
from epl.errors import BackendError
from epl.runtime.aborts import held_back
from epl.runtime.gloo import GLOO_TIMEOUT_SECONDS
from epl.runtime.ranks import RankInfo
from epl.runtime.rendezvous import Rendezvous
from epl.runtime.vigil import Vigil

CYCLE_TIME_MS = "0.5"
"""Horovod's pause between two rounds of its background loop, which is the latency of a small collective.

Measured with 2 ranks over MPI: 1 ms gives 1.08 ms, 0.5 gives 0.57, 0.3 gives 0.37, 0.2 gives 0.27. An idle rank takes
20 % of a core at 1 ms, 23 % at 0.5 and 30 % below: half the latency at almost no cost.
"""

_HEADER = struct.Struct("<q")
_INSTALL = (
    "install it with: pip install 'pyepl[horovod]' (it is compiled against the installed TensorFlow; EPL's repository does it by `make -s python`), "
    "or start one process only"
)


class Backend:
    """A started Horovod whose ranks are those that the launcher announced.

    All methods but the properties are collective: every rank calls them, in the same order.
    """

    def __init__(self, horovod: Any, rendezvous: Optional[Rendezvous] = None):
        """Use `Backend.connect`."""
        self._hvd = horovod
        self._rendezvous = rendezvous
        self._lock = threading.RLock()
        self._sets: Dict[Tuple[int, ...], int] = {}
        self._exchange: Optional[_Exchange] = None
        self._open = True

    @classmethod
    def connect(cls, ranks: RankInfo, config: Any) -> "Backend":
        """Start Horovod for a job of several ranks.

        Args:
          ranks: what the launcher announced (`detect_ranks`).
          config: the `epl.Config`; `communication.num_communicators` and `cluster.stall_timeout` are read.

        Raises BackendError when Horovod is missing, does not start or sees another
        number of ranks, and ClusterError when TF_CONFIG's workers don't find each other.
        """
        hvd = _import_horovod(ranks)
        _set_defaults(os.environ, config)
        rendezvous = None
        if ranks.launcher == "tf_config":
            if hvd.is_initialized():
                raise BackendError("the script calls hvd.init() before EPL has told Horovod about the workers of TF_CONFIG; remove the call")
            rendezvous = _meet(ranks, os.environ, float(config.cluster.stall_timeout))
        backend = cls(hvd, rendezvous)
        try:
            backend._start(ranks)
            backend._check(ranks)
        except BackendError as error:
            backend._give_up(error)
            raise
        return backend

    def _start(self, ranks: RankInfo) -> None:
        try:
            with held_back(self.vigil.hold) if self.vigil is not None else contextlib.nullcontext():
                self._hvd.init()
        except Exception as error:
            raise BackendError("Horovod does not start on rank %d of %d: %s" % (ranks.rank, ranks.size, error)) from error

    def _give_up(self, error: BackendError) -> None:
        if self.vigil is not None:
            self.vigil.failed(error)
        if self._hvd.is_initialized():
            self.shutdown(wait=False)
        elif self._rendezvous is not None:
            self._rendezvous.stop()

    def _check(self, ranks: RankInfo) -> None:
        found = (self.rank, self.size)
        if found == (ranks.rank, ranks.size):
            return
        raise BackendError(
            "the launcher announced rank %d of %d (found by %s), but Horovod is rank %d of %d: it was built without this launcher's MPI, or another "
            "MPI is loaded. Use the mpirun that Horovod was built with (`horovodrun --check-build` lists what it can do), or epl-launch, which needs "
            "no MPI" % ((ranks.rank, ranks.size, ranks.launcher) + found)
        )

    @property
    def rank(self) -> int:
        return int(self._hvd.rank())

    @property
    def size(self) -> int:
        return int(self._hvd.size())

    @property
    def local_rank(self) -> int:
        return int(self._hvd.local_rank())

    @property
    def vigil(self) -> Optional[Vigil]:
        """Watches over the ranks of TF_CONFIG until it is told `started`, when something else does."""
        return self._rendezvous.vigil if self._rendezvous is not None else None

    @property
    def single_machine(self) -> bool:
        """Whether all ranks are on this machine."""
        return int(self._hvd.local_size()) == self.size

    def allgather_bytes(self, data: bytes) -> List[bytes]:
        """The data of all ranks, by rank."""
        with self._lock:
            if self._exchange is None:
                self._exchange = _Exchange(self._hvd)
            return self._exchange.run(data, self.size)

    def broadcast_bytes(self, data: bytes, root: int) -> bytes:
        """The data of rank `root`; what the others pass is ignored."""
        if not 0 <= root < self.size:
            raise BackendError("rank %d can't be the root of a broadcast among %d ranks" % (root, self.size))
        # One collective of unequal lengths; a broadcast would first have to tell the length.
        return self.allgather_bytes(data if self.rank == root else b"")[root]

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.allgather_bytes(b"")

    def process_set(self, ranks: Sequence[int]) -> int:
        """Horovod's id of the process set of these ranks; 0, the global set, for all of them.

        Every rank must ask for the same sets in the same order, also for sets it is not in.
        """
        key = tuple(sorted(int(rank) for rank in ranks))
        if not key or len(set(key)) != len(key) or key[0] < 0 or key[-1] >= self.size:
            raise BackendError("%r is no set of ranks among 0 to %d" % (list(ranks), self.size - 1))
        if len(key) == self.size:
            return 0
        with self._lock:
            if key not in self._sets:
                # Adding a set that the user's script has added already would raise.
                known = {tuple(members): number for number, members in self._hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items()}
                self._sets[key] = known[key] if key in known else self._add(key)
            return self._sets[key]

    def _add(self, key: Tuple[int, ...]) -> int:
        try:
            return int(self._hvd.add_process_set(list(key)).process_set_id)
        except Exception as error:
            raise BackendError("Horovod can't form a process set of the ranks %s: %s" % (list(key), error)) from error

    def shutdown(self, wait: bool = True) -> None:
        """Stop Horovod, after a barrier unless `wait` is False (this rank fails, or all have already met).

        All must have ended their collectives before: the first rank that leaves takes the process sets of all others with it.
        """
        with self._lock:
            if not self._open:
                return
            self._open = False
            if wait:
                self.barrier()
            if self._exchange is not None:
                self._exchange.close()
                self._exchange = None
            self._sets.clear()
            self._hvd.shutdown()
            if self._rendezvous is not None:
                self._rendezvous.stop()

    def end_collectives(self) -> None:
        """Break off what any rank waits for in a collective, by stopping Horovod on all ranks; they get an error. From any thread, not collective."""
        self._hvd.shutdown()

    def forget_exit_handler(self) -> None:
        """Keep Horovod from shutting down at the interpreter's exit, where it can wait forever for dead peers."""
        atexit.unregister(self._hvd.shutdown)


class _Exchange:
    """Byte strings by one all-gather in a graph and session of its own: works with and without eager execution."""

    def __init__(self, hvd: Any):
        import tensorflow.compat.v1 as tf

        graph = tf.Graph()
        with graph.as_default(), graph.device("/device:CPU:0"):
            # A placeholder, because Grappler folds Horovod's ops when their input is constant.
            self._input = tf.placeholder(tf.uint8, [None])
            self._output = hvd.allgather(self._input, name="epl_exchange")
        # Without GPUs: a session that sees them would take their memory before the user's session is configured.
        options = tf.ConfigProto(device_count={"GPU": 0}, inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
        self._session = tf.Session(graph=graph, config=options)

    def run(self, data: bytes, size: int) -> List[bytes]:
        import numpy as np

        message = np.frombuffer(_HEADER.pack(len(data)) + data, np.uint8)
        joined = self._session.run(self._output, {self._input: message}).tobytes()
        parts = []
        position = 0
        for _ in range(size):
            length = _HEADER.unpack_from(joined, position)[0]
            position += _HEADER.size
            parts.append(joined[position : position + length])
            position += length
        return parts

    def close(self) -> None:
        self._session.close()


def _import_horovod(ranks: RankInfo) -> Any:
    """horovod.tensorflow. Raises BackendError: several ranks without it would train as many separate models."""
    job = "this is rank %d of %d (found by %s), and the ranks talk by Horovod" % (ranks.rank, ranks.size, ranks.launcher)
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise BackendError("%s, which can't be loaded (%s); %s" % (job, error, _INSTALL)) from error
    except Exception as error:  # a Horovod built against another TensorFlow fails in many ways
        raise BackendError("%s, which is broken: %s: %s; %s" % (job, type(error).__name__, error, _INSTALL)) from error
    return hvd


def _set_defaults(environ: MutableMapping[str, str], config: Any) -> None:
    """Options that Horovod reads when it starts; what the user has set stays, except what EPL can't do without."""
    environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    stall = float(config.cluster.stall_timeout)
    defaults = {
        "HOROVOD_CYCLE_TIME": CYCLE_TIME_MS,
        "HOROVOD_NUM_NCCL_STREAMS": str(config.communication.num_communicators),
        # Its report names the tensors, ours the ranks and programs: let both come at the same time.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, int(stall))),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(GLOO_TIMEOUT_SECONDS, int(2 * stall))),
    }
    for name, value in defaults.items():
        environ.setdefault(name, value)


def _meet(ranks: RankInfo, environ: MutableMapping[str, str], stall_timeout: float) -> Rendezvous:
    """Find the other workers of TF_CONFIG and tell Horovod where they are. Raises ClusterError."""
    member = parse_tf_config(environ.get("TF_CONFIG"))
    if member is None or (member.index, len(member.hosts)) != (ranks.rank, ranks.size):
        raise BackendError("TF_CONFIG has changed since this process found itself to be rank %d of %d" % (ranks.rank, ranks.size))
    rendezvous = Rendezvous(member.hosts, member.index, stall_timeout=stall_timeout)
    for name, value in rendezvous.join().items():
        if name == "HOROVOD_GLOO_IFACE":
            environ.setdefault(name, value)
        else:
            environ[name] = value
    return rendezvous
