"""Recording: a few training steps are run with TensorFlow's tracing, and written once the last one has ended."""

import atexit
import os
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from absl import logging

from epl.env import UNKNOWN, Env
from epl.errors import ConfigError
from epl.planner.plan import FIRST, LAST, WHOLE, Task
from epl.profiler.timeline.merge import MERGED, machine, merge_folder, part_name
from epl.profiler.timeline.trace import STEP, Event, Trace

VARIABLE = "EPL_TIMELINE"
STEPS, SKIP = 3, 2


class _Run(NamedTuple):
    """A recorded run as TensorFlow told it."""

    executable: Any
    names: Mapping[str, str]
    metadata: Any
    step: int
    position: int
    begin: int
    end: int


class TracedRun:
    """A run to be traced: pass `options` and `metadata` to TensorFlow inside of `with`."""

    def __init__(self, recorder: "Recorder", executable: Any, store: Any, step: int, position: int):
        import tensorflow.compat.v1 as tf

        task: Task = executable.task
        gpus = any("GPU" in d for row in (task.devices,) + task.stages for d in row)
        # Only the full trace knows when kernels run; on CPUs it would add nothing but time.
        self.options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE if gpus else tf.RunOptions.SOFTWARE_TRACE)
        self.metadata = tf.RunMetadata()
        self._recorder = recorder
        self._executable = executable
        self._store = store
        self._step = step
        self._position = position
        self._begin = 0

    def __enter__(self) -> "TracedRun":
        self._begin = time.time_ns()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        run = None
        if kind is None:
            names = self._store.names(self._executable.program, self._executable.task.key)
            run = _Run(self._executable, names, self.metadata, self._step, self._position, self._begin, time.time_ns())
        self._recorder.add(run)


class Recorder:
    """Counts the training steps of this process and records some of them.

    Every rank counts the same steps, so nothing needs to be agreed on.
    """

    def __init__(self, folder: str, steps: int = STEPS, skip: int = SKIP):
        for name, value, least in (("steps", steps, 1), ("skip", skip, 0)):
            if not isinstance(value, int) or value < least:
                raise ConfigError("%s=%r of a timeline: expected a whole number from %d" % (name, value, least))
        self.folder = folder
        self.steps = steps
        self.skip = skip
        self.done = False
        self._count = -1
        self._position = 0
        self._inside = False
        self._runs: List[_Run] = []
        self._cleared = False

    def next_run(self, executable: Any, store: Any, options: Any, metadata: Any) -> Optional[TracedRun]:
        """Called before every run; the run to be traced, or None."""
        facts = executable.program.facts
        if self._inside or self.done or facts is None or not facts.gradients:
            return None
        if executable.task.part in (WHOLE, FIRST):
            self._count += 1
            self._position = 0
        else:
            self._position += 1
        # A monitored session gives empty options, and metadata, to every run: without options there is nothing in them.
        own = metadata is not None and options is None or options is not None and options.ByteSize() > 0
        if self._count < self.skip - 1 or self._count >= self.skip + self.steps or own:
            return None
        if not self._cleared:
            self._clear(executable.task)
        self._inside = True
        return TracedRun(self, executable, store, self._count, self._position)

    def _clear(self, task: Task) -> None:
        """Remove what an earlier job has left. No rank can have written yet: the steps of all ranks end together."""
        self._cleared = True
        os.makedirs(self.folder, exist_ok=True)
        for name in [part_name(task.rank)] + ([MERGED] if task.rank == 0 else []):
            path = os.path.join(self.folder, name)
            if os.path.exists(path):
                os.remove(path)
        atexit.register(self.close)  # for a script that ends before

    def add(self, run: Optional[_Run]) -> None:
        """A traced run has ended; None if it has failed."""
        self._inside = False
        # The last run before those that are kept is traced too: the first traced one pays for its preparation.
        if run is None or run.step < self.skip:
            return
        self._runs.append(run)
        if run.step == self.skip + self.steps - 1 and run.executable.task.part in (WHOLE, LAST):
            self.close()

    def close(self) -> None:
        """Stop, and write what was recorded."""
        if Env.get().recorder is self:
            Env.get().recorder = None
        self.done = True
        atexit.unregister(self.close)
        runs, self._runs = self._runs, []
        if not runs:
            return
        try:
            trace = trace_of(runs)
            trace.write(os.path.join(self.folder, part_name(runs[0].executable.task.rank)))
            if merge_folder(self.folder, if_complete=True) is not None:
                logging.info("The timeline is in %s", os.path.join(self.folder, MERGED))
        except Exception:  # pylint: disable=broad-except
            # A picture of the training is not worth the training.
            logging.exception("The timeline can't be written to %s", self.folder)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()


def trace_of(runs: List[_Run]) -> Trace:
    """The trace of this rank."""
    from epl.profiler.timeline.collect import Where, bubbles_of, events_of
    from epl.profiler.timeline.memory import memory_of

    events: List[Event] = []
    for run in runs:
        task = run.executable.task
        events += events_of(run.metadata.step_stats, run.executable.program, run.names, task, Where(run.step, run.position))
        events.append(Event(STEP, "step %d" % run.step, task.rank, "", run.begin, run.end, run.step))
    events += bubbles_of(events)
    task = runs[0].executable.task
    memory = memory_of(((run.executable.program, run.names, run.metadata) for run in runs), task)
    return Trace(events, dict(_shape(task), ranks=task.ranks, recorded=[task.rank], machines={str(task.rank): machine()}, memory=memory))


def _shape(task: Task) -> Dict[str, Any]:
    """The part of a header that tells the schedule."""
    from epl.passes.schedule import schedule_of

    schedule = schedule_of(task)
    stages = len(task.stages[0]) if task.stages else 1
    name, devices = (schedule.name, len(schedule.devices)) if schedule else ("PreferForward", 0)
    return {"schedule": name, "stages": stages, "micro_batches": task.plan.micro_batches, "devices": devices, "ordered": schedule is not None}


def timeline(directory: str, steps: int = STEPS, skip: int = SKIP) -> Recorder:
    """Record the timeline of training steps from now on, instead of what `EPL_TIMELINE` says.

    Call it on all ranks. The result can be used in a `with` statement, at whose end the
    recording ends. When `steps` steps are recorded it ends by itself.

    Args:
      directory: where `rank<r>.json` of each rank and `timeline.json` of the job are written.
      steps: how many steps are recorded.
      skip: how many steps come before, which are slower than others. At least one is
        advisable: if there is one, the last of them prepares the tracing.
    """
    recorder = Recorder(directory, steps, skip)
    Env.get().recorder = recorder
    return recorder


def next_run(executable: Any, store: Any, options: Any, metadata: Any) -> Optional[TracedRun]:
    """The run to be traced if this is one, else None. Takes no time to speak of when nothing is recorded."""
    env = Env.get()
    if env.recorder is UNKNOWN:
        folder, numbers = _from_environment(os.environ)
        env.recorder = Recorder(folder, *numbers) if folder else None
    return None if env.recorder is None else env.recorder.next_run(executable, store, options, metadata)


def _from_environment(environ: Mapping[str, str]) -> Tuple[str, Tuple[int, int]]:
    numbers = []
    for name, default in (("_STEPS", STEPS), ("_SKIP", SKIP)):
        text = environ.get(VARIABLE + name, str(default))
        if not text.isdigit():
            raise ConfigError("%s%s=%r: expected a whole number" % (VARIABLE, name, text))
        numbers.append(int(text))
    return environ.get(VARIABLE, ""), (numbers[0], numbers[1])
