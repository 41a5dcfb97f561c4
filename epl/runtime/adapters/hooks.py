"""Adapter of monitored sessions, supervisors, hooks and summary writers.

Every rank initialises itself as a chief does and runs all hooks, since their fetches
are part of the step. Files are written by rank 0 alone.
"""

import contextlib
import functools
import inspect
import os
from typing import Any, Callable, Dict, Optional

import tensorflow.compat.v1 as tf
from absl import logging

from epl import compat
from epl.runtime import chief, lockstep
from epl.runtime.adapters import Patches
from epl.runtime.adapters.sessions import rank_session

_CHIEFS = (
    "checkpoint_dir",
    "save_checkpoint_secs",
    "save_checkpoint_steps",
    "save_summaries_steps",
    "save_summaries_secs",
    "log_step_count_steps",
    "summary_dir",
    "save_graph_def",
)
"""Arguments of MonitoredTrainingSession that make hooks: the chief's hold everywhere."""


def install(patches: Patches) -> None:
    module = compat.monitored_session()
    patches.replace(tf.train.SessionManager, "prepare_session", _prepare_session)
    patches.replace(tf.train.WorkerSessionCreator, "create_session", _create_worker_session)
    for owner in compat.modules_with("MonitoredTrainingSession", module.MonitoredTrainingSession):
        patches.replace(owner, "MonitoredTrainingSession", _monitored_training_session)
    patches.replace(module._MonitoredSession, "__init__", _monitored_session_init)
    patches.replace(module._MonitoredSession, "__exit__", _monitored_session_exit)
    patches.replace(module._HookedSession, "run", _hooked_run)
    patches.replace(tf.train.Supervisor, "__init__", _supervisor_init)
    patches.replace(compat.supervisor_summary_thread(), "run_loop", _supervisor_summaries)
    patches.replace(tf.train.SecondOrStepTimer, "should_trigger_for_step", _should_trigger)
    patches.replace(tf.train.GlobalStepWaiterHook, "before_run", _do_not_wait)
    patches.replace(tf.train.SummarySaverHook, "before_run", _at_the_end_of_a_step)
    patches.replace(*compat.profiler_hook_writer(), _chief_saves)
    patches.replace(tf.summary.FileWriter, "__init__", _file_writer_init)


# Sessions.


def _prepare_session(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_session(*args: Any, **kwargs: Any) -> Any:
        session = original(*args, **kwargs)
        lockstep.synchronize(session)
        return session

    return prepare_session


def _create_worker_session(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_session(self: Any) -> Any:
        # A rank has its own variables: there is nobody else to initialise them.
        return compat.as_chief_creator(self).create_session() if chief.several_ranks() else original(self)

    return create_session


def _monitored_training_session(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def monitored_training_session(*args: Any, **kwargs: Any) -> Any:
        if not chief.several_ranks():
            return original(*args, **kwargs)
        given: Dict[str, Any] = dict(signature.bind(*args, **kwargs).arguments)
        given["is_chief"] = True
        if lockstep.trains_together(tf.get_default_graph()):
            mine = {name: _plain(given[name]) for name in _CHIEFS if name in given}
            decided = chief.job_control().decide("arguments of MonitoredTrainingSession", mine)
            given = dict({name: value for name, value in given.items() if name not in _CHIEFS}, **decided)
        return original(**given)

    return monitored_training_session


def _plain(value: Any) -> Any:
    """An argument as JSON has it."""
    if isinstance(value, (bytes, os.PathLike)):
        return tf.compat.as_str_any(os.fspath(value))
    return value.item() if hasattr(value, "item") else value


def _monitored_session_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, session_creator: Any, hooks: Any, *args: Any, **kwargs: Any) -> None:
        if lockstep.trains_together(tf.get_default_graph()):
            hooks = list(hooks or []) + [lockstep.Together()]
            if session_creator is not None and not isinstance(session_creator, (tf.train.ChiefSessionCreator, tf.train.WorkerSessionCreator)):
                session_creator = _SynchronizedCreator(session_creator)
        original(self, session_creator, hooks, *args, **kwargs)

    return init


class _SynchronizedCreator(tf.train.SessionCreator):
    """A session creator of the user's, whose sessions begin with the chief's variables."""

    def __init__(self, creator: Any):
        self._creator = creator

    def create_session(self) -> Any:
        session = self._creator.create_session()
        lockstep.synchronize(session)
        return session


def _monitored_session_exit(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def leave(self: Any, exception_type: Any, exception_value: Any, traceback: Any) -> Any:
        if exception_type is StopIteration:  # of step_context.request_stop
            together = next((h for h in self._hooks if isinstance(h, lockstep.Together)), None)
            if together is not None:
                together.tell_end()
        return original(self, exception_type, exception_value, traceback)

    return leave


def _hooked_run(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        together = lockstep.enter(self._hooks)
        try:
            return original(self, *args, **kwargs)
        except tf.errors.OutOfRangeError:
            if together is not None:
                together.over = True  # the runtime has told the others
            raise
        finally:
            lockstep.leave()

    return run


def _supervisor_init(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        if chief.several_ranks():
            given.arguments["is_chief"] = True
        original(*given.args, **given.kwargs)

    return init


def _supervisor_summaries(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def run_loop(self: Any) -> None:
        if not chief.several_ranks():
            original(self)
        elif chief.is_chief():
            # The thread runs when it likes, so it must not need the other ranks: summaries show the chief's own values.
            ranked = rank_session(self._sess)
            with ranked.locally() if ranked is not None else contextlib.nullcontext():
                original(self)

    return run_loop


# Hooks.


def _should_trigger(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def should_trigger_for_step(self: Any, step: Any) -> bool:
        together = lockstep.current()
        by_clock = compat.timer_state(self)[0] is not None and self.last_triggered_step() not in (None, step)
        if together is None or not by_clock:
            return original(self, step)  # the same on all ranks
        return together.timer(self).due(step, original)

    return should_trigger_for_step


def _do_not_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def before_run(self: Any, run_context: Any) -> Any:
        # All ranks make each step together: waiting for the others' steps would have no end.
        return original(self, run_context) if lockstep.current() is None else None

    return before_run


def _at_the_end_of_a_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def before_run(self: Any, run_context: Any) -> Any:
        ranked = rank_session(run_context.session)
        if ranked is None or ranked.ends_step:
            return original(self, run_context)
        # A step of several runs has one summary, that of its last run.
        return tf.train.SessionRunArgs({"global_step": compat.without_summary(self)})

    return before_run


def _chief_saves(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> None:
        if chief.is_chief():
            original(*args, **kwargs)

    return save


# Event files.


class SilentWriter:
    """The event writer of a rank that writes no event files."""

    def __init__(self, logdir: Any):
        self._logdir = logdir

    def get_logdir(self) -> Any:
        return self._logdir

    def add_event(self, event: Any) -> None:
        """Drop the event."""

    def flush(self) -> None:
        """Nothing to write out."""

    def close(self) -> None:
        """Nothing to close."""

    def reopen(self) -> None:
        """Nothing to open."""


def _file_writer_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, logdir: Any, graph: Optional[tf.Graph] = None, max_queue: int = 10, flush_secs: int = 120, graph_def: Any = None,
             filename_suffix: Optional[str] = None, session: Any = None) -> None:  # fmt: skip
        if chief.is_chief():
            original(self, logdir, graph, max_queue, flush_secs, graph_def, filename_suffix, session)
            return
        logging.log_first_n(logging.INFO, "Event files are written by rank 0 alone; this rank writes none to '%s'", 1, logdir)
        compat.event_writer_of(self, SilentWriter(logdir), graph, graph_def)

    return init
