"""Hooks of several ranks in step: what depends on the clock is decided by the chief, and the end is common.

The ranks of a job make the same runs. A hook that asks for other fetches because its
own clock says so, or that ends the loop of its own rank, would break that.
"""

import threading
import time
from typing import Any, Dict, List, Optional

import tensorflow.compat.v1 as tf

from epl import compat
from epl.env import Env
from epl.ir.graph import Graph
from epl.runtime import chief
from epl.runtime.adapters.sessions import rank_session

END = "the end of training, for which a hook, the coordinator or step_fn of this rank has asked"
_LONGEST_PAUSE = 10.0
_MOST_QUIET_CALLS = 1000
_UNUSED = 1 << 30

_current = threading.local()


def trains_together(graph: tf.Graph) -> bool:
    """True for a graph that several ranks train."""
    if not chief.several_ranks():
        return False
    annotated = Graph.of(graph)
    return annotated is not None and annotated.gradient_calls > 0 and annotated.need_parallel


def synchronize(session: Any) -> None:
    """Make the variables of all ranks equal to the chief's if the session's graph is trained by several; collective."""
    if trains_together(session.graph):
        ranked = rank_session(session)
        if ranked is not None:
            ranked.synchronize()


class SharedTimer:
    """A timer of seconds: the chief says when it triggers, and for how many calls it surely does not."""

    def __init__(self, timer: tf.train.SecondOrStepTimer, topic: str):
        self.timer = timer
        self._topic = topic
        self._quiet = 0
        self._asked: Optional[float] = None
        self._calls = 0

    def due(self, step: Any, own: Any) -> bool:
        """Whether to trigger at this step; `own` is the local answer, which only counts on the chief."""
        self._calls += 1
        if self._quiet > 0:
            self._quiet -= 1
            return False
        control = chief.job_control()
        said = None
        if control.rank == 0:
            due = bool(own(self.timer, step))
            said = [due, 0 if due else self._calls_until_check()]
            self._asked, self._calls = time.time(), 0
        decided, self._quiet = control.decide(self._topic, said)
        return decided

    def retire(self) -> None:
        """On the chief: answer what the others may still ask."""
        control = chief.job_control()
        if control.rank == 0:
            control.decide(self._topic, [False, _UNUSED])

    def _calls_until_check(self) -> int:
        """How many calls fit in half of the time that is left; the steps may become longer."""
        seconds, last = compat.timer_state(self.timer)
        if self._asked is None or seconds is None or last is None:
            return 0
        now = time.time()
        each = max((now - self._asked) / self._calls, 1e-6)
        left = min((last + seconds - now) / 2, _LONGEST_PAUSE)
        return max(0, min(int(left / each), _MOST_QUIET_CALLS))


class Together(tf.train.SessionRunHook):
    """The last hook of a session whose graph is trained by several ranks."""

    def __init__(self) -> None:
        env = Env.get()
        env.training_sessions += 1
        self._number = env.training_sessions
        self._timers: Dict[int, SharedTimer] = {}
        self._session: Any = None
        self._coordinator: Any = None
        self.over = False
        """Whether the end has been told, or has come from the others."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._session, self._coordinator = session, coord

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if run_context.stop_requested:
            self.tell_end()

    def end(self, session: Any) -> None:
        if self._coordinator is not None and self._coordinator.should_stop():
            self.tell_end()

    def tell_end(self) -> None:
        """Let no rank wait for this one: those in the next step end there, as when an input has ended."""
        ranked = rank_session(self._session) if self._session is not None else None
        if self.over or ranked is None or not ranked.has_trained:
            return
        self.over = True
        for timer in self._timers.values():
            timer.retire()
        if not ranked.end_input():
            # Fed programs have no such end: ranks that go on make this an error.
            chief.job_control().agree(END, {})

    def timer(self, timer: tf.train.SecondOrStepTimer) -> SharedTimer:
        """The shared side of a hook's timer; the ranks' timers meet by their seconds and order of use."""
        known = self._timers.get(id(timer))
        if known is None:
            seconds = compat.timer_state(timer)[0]
            order = 1 + sum(compat.timer_state(t.timer)[0] == seconds for t in self._timers.values())
            known = SharedTimer(timer, "timer %d of %g s in training session %d" % (order, seconds or 0.0, self._number))
            self._timers[id(timer)] = known
        return known


def _stack() -> List[Optional[Together]]:
    if not hasattr(_current, "stack"):
        _current.stack = []
    return _current.stack


def enter(hooks: Any) -> Optional[Together]:
    """A session runs its hooks; timers asked until `leave` are the chief's if several ranks train in it."""
    found = next((h for h in hooks if isinstance(h, Together)), None)
    _stack().append(found)
    return found


def leave() -> None:
    """The innermost session is through with its hooks."""
    _stack().pop()


def current() -> Optional[Together]:
    """The innermost running session's common hook, if several ranks train in it."""
    stack = _stack()
    return stack[-1] if stack else None
