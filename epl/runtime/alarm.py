"""Ends a step that has failed on this rank but waits for what other ranks can't send any more.

A thread asks the loop that `epl.passes.alarm` has put into the step. It asks only steps
that take long, so the others cost it nothing. When a step that has begun to talk to other
ranks answers no more, all collectives of the job are ended: that step returns with the
error of its op, those of the other ranks with an error of Horovod's, which is turned into
one that names the rank.
"""

import contextlib
import threading
import time
from typing import Callable, Iterator, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from epl.passes.alarm import QUEUE, ask_program, look_program, reset_program
from epl.runtime.compiler import Executable
from epl.runtime.control import ControlChannel
from epl.runtime.store import Store

POLL_SECONDS = 0.25
PATIENCE_SECONDS = 1.0
"""The age from which on a step is asked."""

PROMPT_SECONDS = 0.1
"""How fast TensorFlow tells the size of a queue if a thread is free, which could answer for the step too."""

MISSES = 8
"""So many prompt looks in a row, with a question still in the queue, tell a failed step from a slow one."""

RELEASE_SECONDS = 10.0
"""How long a step may take to return after its collectives have ended."""

CAUSE_SECONDS = 5.0
"""How long a rank whose collectives have ended waits to hear which rank is the cause."""

_ENDED_BY_ANOTHER = ("Horovod has been shut down", "Horovod has not been initialized")


class _Flight(NamedTuple):
    """A step under way."""

    program: str
    begin: float


class Alarm:
    """Watches the steps of one session."""

    def __init__(self, store: Store, end_collectives: Callable[[], None], give_up: Callable[[str], None]):
        """Args:
        store: holds the programs of the session.
        end_collectives: ends everything that waits for other ranks, here and there.
        give_up: ends this process with a reason, when the step still does not return.
        """
        self._look, self._ask, self._reset = (
            store.callable_of(store.load(program, "alarm")) for program in (look_program(), ask_program(), reset_program())
        )
        self._end_collectives = end_collectives
        self._give_up = give_up
        self._flight: Optional[_Flight] = None
        self._asked: Optional[_Flight] = None
        self._misses = 0
        self._rung: Optional[_Flight] = None
        self._over = threading.Event()
        self._reset(np.int32(0))
        threading.Thread(target=self._run, name="epl-alarm", daemon=True).start()

    @contextlib.contextmanager
    def watching(self, program: str) -> Iterator[Callable[[], bool]]:
        """While it lasts a step is watched; yields a function that says whether the alarm has ended its collectives."""
        flight = self._flight = _Flight(program, time.monotonic())
        try:
            yield lambda: self._rung is flight
        except BaseException:
            self._flight = None
            self._clear()
            raise
        finally:
            self._flight = None

    def close(self) -> None:
        """Watch no more."""
        self._over.set()

    def _clear(self) -> None:
        """Forget what a failed step has left: its end, which the next one would take for its own."""
        with contextlib.suppress(tf.errors.OpError, RuntimeError):  # the session may be closed
            self._reset(self._look()[0])

    def _run(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            flight = self._flight
            if flight is not self._asked:
                self._asked, self._misses = flight, 0
            if flight is None or time.monotonic() - flight.begin < PATIENCE_SECONDS:
                continue
            with contextlib.suppress(tf.errors.OpError, RuntimeError):
                self._poll()
            if self._misses >= MISSES and self._flight is flight:
                self._misses = 0
                self._ring(flight)

    def _poll(self) -> None:
        start = time.monotonic()
        questions, begun = self._look()
        if not begun or not questions or time.monotonic() - start > PROMPT_SECONDS:
            self._misses = 0
        else:
            self._misses += 1
        if begun and not questions:
            self._ask()

    def _ring(self, flight: _Flight) -> None:
        self._rung = flight
        threading.Thread(target=self._end_collectives, name="epl-alarm-end", daemon=True).start()
        deadline = time.monotonic() + RELEASE_SECONDS
        while self._flight is flight and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._flight is flight:
            self._over.set()
            self._give_up("an op of program %r has failed, but the step waits for other ranks and does not return to tell which" % flight.program)


def is_watched(executable: Executable) -> bool:
    """Whether a program has the loop."""
    return QUEUE in executable.program.nodes


def tell_failure(error: tf.errors.OpError, control: ControlChannel) -> None:
    """Tell the other ranks, whose collectives have been ended, which op has failed here."""
    if not control.failed_here:
        control.fail("%s: %s" % (type(error).__name__, error))


def raise_for_another(error: tf.errors.OpError, control: ControlChannel, place: str) -> None:
    """Raise the job's trouble if an error only says that another rank has ended the collectives.

    Args:
      place: where this rank was.
    """
    if any(text in (error.message or "") for text in _ENDED_BY_ANOTHER):
        trouble = control.wait_for_trouble(CAUSE_SECONDS)
        if trouble is not None and not control.caused(trouble):
            control.raised = True
            raise trouble.error(place) from None
