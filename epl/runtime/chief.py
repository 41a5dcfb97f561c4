"""Who writes files: the chief, rank 0, alone. The others do without, and wait before they read what it wrote."""

import collections
import os
import time
from typing import Any, Tuple

import tensorflow.compat.v1 as tf

from epl.env import Env

_MOST_EXPECTED = 16
"""Paths that are remembered; the chief writes in order, so the last ones are enough."""

_PATIENCE = 60.0
"""Seconds to wait for a file when the ranks are not connected."""

_expected: "collections.OrderedDict[str, Tuple[int, bool]]" = collections.OrderedDict()
"""Path -> (how often this rank was to write it since it last read, whether the ranks were connected)."""


def several_ranks() -> bool:
    """True under EPL in a job of several processes."""
    env = Env.get()
    return env.initialized and env.cluster is not None and env.cluster.worker_num > 1


def is_chief() -> bool:
    """True on rank 0, and wherever EPL is not at work."""
    return not several_ranks() or Env.get().cluster.worker_index == 0


def job_control() -> Any:
    """The control channel of a job of several ranks; collective when the ranks are not connected yet."""
    from epl.runtime.job import connect_job

    return connect_job(Env.get().config)[1]


def written(path: str) -> None:
    """Tell the others that the chief has written a checkpoint or an export."""
    control = Env.get().control
    if several_ranks() and control is not None:
        control.decide(_topic(_normal(path)), True)


def expect(path: str) -> None:
    """Remember that the chief is writing what this rank was to write too."""
    control = Env.get().control
    if control is not None and not control.runs_programs_here():
        return  # a background thread saves when it likes, so the chief's is another path
    path = _normal(path)
    count = _expected.pop(path, (0, True))[0]
    _expected[path] = (count + 1, control is not None)
    while len(_expected) > _MOST_EXPECTED:
        _expected.popitem(last=False)


def forget() -> None:
    """Forget what was expected of an earlier job."""
    _expected.clear()


def settle(target: str) -> None:
    """Wait until the chief has written what this rank was to write at a path, or in a folder.

    Not for what lies in a folder that is not there: the chief's disk is another one, or
    this rank was given a folder of its own, in which nobody writes.
    """
    target = _normal(target)
    for path in [p for p in _expected if target in (p, os.path.dirname(p))]:
        count, connected = _expected.pop(path)
        if not tf.gfile.IsDirectory(os.path.dirname(path) or "."):
            continue
        control = Env.get().control
        if connected and control is not None:
            for _ in range(count):
                control.decide(_topic(path))
        else:
            _wait_for_file(path)


def _normal(path: str) -> str:
    return tf.compat.as_str_any(path).rstrip("/")


def _topic(path: str) -> str:
    return "'%s', which rank 0 alone writes" % path


def _wait_for_file(path: str) -> None:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if tf.gfile.Exists(path + ".index") or tf.gfile.Exists(path):
            return
        time.sleep(0.05)
