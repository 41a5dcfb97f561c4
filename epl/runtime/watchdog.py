"""Ends this process when the job is broken and it can't end by itself.

A rank that is blocked inside a Horovod collective can't be interrupted, and neither
Horovod's own stall check nor `hvd.shutdown` ends a collective of a process set that a
dead rank belongs to. So the process is ended with `os._exit`.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
from typing import Callable

from epl.runtime.control import ControlChannel
from epl.runtime.judge import Trouble
from epl.runtime.speak import say

PEER_FAILED_EXIT_CODE = 70
"""Exit code of a rank that ended because of another rank, or because the ranks diverged (EX_SOFTWARE of sysexits.h)."""

GRACE_SECONDS = 1.0
"""Between the report and the end: Horovod often raises in the blocked call itself, and Python's own traceback says more."""

ENDING_SECONDS = 10.0
"""How long a process that has got an exception, or has failed itself, may take to end in its own way."""

LINGER_SECONDS = 1.5
"""How long a failing rank lives on after telling the others. Its exit makes a launcher such as mpirun kill them, and
they shall first say on their own logs why they end."""

FIRST_SECONDS = 5.0
"""How long the others then wait for its end, so that launchers see the exit code of the rank that broke the job first."""


class Watchdog(threading.Thread):
    """A daemon thread that waits for the job's trouble."""

    def __init__(self, control: ControlChannel, end: Callable[[int], None] = os._exit):
        """Args:
        control: the open channel.
        end: ends the process with an exit code; tests pass their own.
        """
        super().__init__(name="epl-watchdog", daemon=True)
        self._control = control
        self._end = end
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._reported = False

    def run(self) -> None:
        trouble = self._control.wait_for_trouble()
        if trouble is None or os.getpid() != self._pid:
            return
        news = time.monotonic()
        # At once: mpirun, or Horovod by an abort in a process set of its Gloo, may end this process any moment.
        if not self._may_end_itself():
            self.report(trouble)
        time.sleep(GRACE_SECONDS)
        while self._may_end_itself() and time.monotonic() - news < ENDING_SECONDS:
            time.sleep(0.1)
        self.report(trouble)
        linger(self._control)
        flush_stdio()
        self._end(1 if self._control.caused(trouble) else PEER_FAILED_EXIT_CODE)

    def _may_end_itself(self) -> bool:
        """Whether an exception is on its way up the stack, or the interpreter is ending."""
        return self._control.raised or self._control.failed_here or self._control.waiters > 0

    def report(self, trouble: Trouble) -> None:
        """Tell the user, once, why this process ends."""
        with self._lock:
            if self._reported:
                return
            self._reported = True
        number, program, step, since = self._control.place
        if program is not None:
            here = "this rank was in program %r, step %d, for %.0f s" % (program, step, time.monotonic() - since)
        else:
            last = self._control.last_entry
            # A call that the end of the other rank has broken off is over already.
            here = "this rank was outside of parallel programs" + (" (the last was %r, step %d)" % last[1:] if last else "")
        say(self._control.rank, "the job is broken; %s\n%s" % (here, trouble.text))


def linger(control: ControlChannel) -> None:
    """Stay until the other ranks have told why they end; the rank that broke the job goes first."""
    trouble = control.trouble
    if trouble is None or control.caused(trouble):
        time.sleep(LINGER_SECONDS)
    elif trouble.kind in ("failed", "left"):
        control.wait_for_end_of(trouble.ranks, LINGER_SECONDS + FIRST_SECONDS)
        time.sleep(0.2)


def flush_stdio() -> None:
    """Write out what Python still holds back; `os._exit` would drop it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def exit_hard_at_the_end(code: int) -> None:
    """Skip the destructors of libraries when the interpreter has ended.

    Horovod's waits there for its background thread, which may wait for dead peers, and
    by then no Python thread is left to end it. Python's own exit handlers still run.
    `code` is the exit code where only an immediate exit is possible.
    """
    with contextlib.suppress(Exception):
        libc = ctypes.CDLL(None)
        # glibc passes the exit status on to the handler, which comes before the destructors.
        if libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None) == 0:
            return
    flush_stdio()
    os._exit(code)
