"""Joining and leaving the job of several ranks, once per process."""

import threading
from typing import Any, Optional, Tuple

from epl.env import Env
from epl.runtime.backend import Backend
from epl.runtime.control import ControlChannel
from epl.runtime.exits import ExitHooks
from epl.runtime.ranks import detect_ranks
from epl.runtime.watchdog import Watchdog

_lock = threading.Lock()
_hooks: Optional[ExitHooks] = None


def connect_job(config: Any) -> Tuple[Optional[Backend], Optional[ControlChannel]]:
    """Connect this process with the other ranks of its job; collective.

    Starts Horovod, opens the control channel, starts the watchdog and installs the exit
    hooks. The result is kept in `Env.get().backend` and `.control`, and returned again
    by later calls. A job of one process needs none of it: (None, None).

    Raises ClusterError and BackendError that say why the ranks can't connect.
    """
    global _hooks
    env = Env.get()
    with _lock:
        if env.backend is not None:
            return env.backend, env.control
        ranks = detect_ranks()
        if ranks.size == 1:
            return None, None
        backend = Backend.connect(ranks, config)
        control = ControlChannel(backend, config.cluster.stall_timeout)
        try:
            control.start()
        except BaseException:
            control.close(orderly=False)
            backend.shutdown(wait=False)
            raise
        watchdog = Watchdog(control)
        watchdog.start()
        _hooks = ExitHooks(control, watchdog, disconnect_job, backend.forget_exit_handler)
        _hooks.install()
        env.backend, env.control = backend, control
        return backend, control


def disconnect_job() -> None:
    """Leave the job in good order: waits until all ranks do; collective. Nothing happens without a connection.

    Raises the job's error when another rank fails meanwhile.
    """
    global _hooks
    env = Env.get()
    with _lock:
        backend, control = env.backend, env.control
        if backend is None or control is None:
            return
        # All ranks are past their last collective after this, which is what a barrier before
        # the shutdown is for; unlike a barrier of Horovod's it ends when a rank fails.
        control.leave_job()
        backend.shutdown(wait=False)
        control.close()
        if _hooks is not None:
            _hooks.remove()
            _hooks = None
        env.backend = env.control = None
