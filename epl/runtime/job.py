"""Joining and leaving the job of several ranks, once per process."""

import threading
from typing import Any, Optional, Tuple

from epl.env import Env
from epl.errors import ClusterError
from epl.runtime.backend import Backend
from epl.runtime.control import ControlChannel
from epl.runtime.exits import ExitHooks
from epl.runtime.ranks import detect_ranks
from epl.runtime.watchdog import Watchdog

_lock = threading.RLock()


def check_started(cluster: Any) -> None:
    """Refuse to run on a cluster that is not the one this process was started in.

    Raises ClusterError that names both.
    """
    ranks = detect_ranks()
    if (cluster.worker_num, cluster.worker_index) != (ranks.size, ranks.rank):
        raise ClusterError(
            "The cluster has %d workers and this process is number %d of them, but it was started as rank %d of %d (%s). Start one process for each "
            "worker with epl-launch, mpirun, horovodrun or TF_CONFIG, and let epl.Cluster take hosts and index from there"
            % (cluster.worker_num, cluster.worker_index, ranks.rank, ranks.size, "no launcher" if ranks.launcher == "none" else ranks.launcher)
        )


def connect_job(config: Any) -> Tuple[Optional[Backend], Optional[ControlChannel]]:
    """Connect this process with the other ranks of its job; collective.

    Starts Horovod, opens the control channel, starts the watchdog and installs the exit
    hooks. The result is kept in `Env.get().backend` and `.control`, and returned again
    by later calls. A job of one process needs none of it: (None, None).

    Raises ClusterError and BackendError that say why the ranks can't connect.
    """
    env = Env.get()
    with _lock:
        if env.backend is not None:
            return env.backend, env.control
        ranks = detect_ranks()
        if ranks.size == 1:
            return None, None
        if env.horovod is None:
            env.horovod = Backend.connect(ranks, config)
        control = ControlChannel(env.horovod, config.cluster.stall_timeout)
        vigil = env.horovod.vigil
        try:
            control.start()
        except BaseException as error:
            if vigil is not None:
                vigil.failed(error)
            control.close(orderly=False)
            raise
        if vigil is not None:
            vigil.started()
        watchdog = Watchdog(control)
        watchdog.start()
        env.exit_hooks = ExitHooks(control, watchdog, _leave_for_good, env.horovod.forget_exit_handler)
        env.exit_hooks.install()
        env.backend, env.control = env.horovod, control
        return env.horovod, control


def disconnect_job() -> None:
    """Leave the job in good order: waits until all ranks do; collective. Nothing happens without a connection.

    `connect_job` may follow. Horovod keeps running until the process ends.
    Raises the job's error when another rank fails meanwhile.
    """
    env = Env.get()
    with _lock:
        if env.control is None:
            return
        env.control.close()
        if env.exit_hooks is not None:
            env.exit_hooks.remove()
            env.exit_hooks = None
        env.backend = env.control = None


def _leave_for_good() -> None:
    """At the end of the interpreter: leave the job and stop Horovod."""
    env = Env.get()
    with _lock:
        disconnect_job()
        if env.horovod is not None:
            # All ranks have said goodbye, which is what a barrier before the shutdown is for;
            # unlike a barrier of Horovod's it ends when a rank fails.
            env.horovod.shutdown(wait=False)
            env.horovod = None
