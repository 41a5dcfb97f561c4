"""The alarm on steps whose collective is a Python function that can't be cancelled either."""

import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl import compat
from epl.errors import RankFailedError
from epl.ir.program import program_from_graph_def
from epl.passes.agree import Agreement
from epl.passes.alarm import Alarm as AlarmPass
from epl.passes.alarm import look_program
from epl.runtime import alarm as module
from epl.runtime.alarm import Alarm, raise_for_another
from epl.runtime.store import Store
from tests.unit.passes.steps import task
from tests.unit.test_control import job

pytestmark = pytest.mark.timeout(60)
LONG = 1.5
"""Seconds, many times what the alarm needs here."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in (("POLL_SECONDS", 0.02), ("PATIENCE_SECONDS", 0.1), ("RELEASE_SECONDS", 0.3)):
        monkeypatch.setattr(module, name, value)


class Step:
    """A step with a collective that lasts until `release`, and an op that fails for an x above 1."""

    def __init__(self, gate=None, release_by_alarm=True, threads=0):
        self.release, self.given_up, self.rung = threading.Event(), [], 0
        self._release_by_alarm = release_by_alarm
        with tf.Graph().as_default() as self.graph:
            x = tf.placeholder(tf.int32, [], "x")
            tf.identity(tf.py_func(self._wait, [x], tf.int32), name="stuck")
            tf.gather(tf.constant([1, 2]), x, name="chosen")
            if gate is not None:
                tf.py_func(lambda value: time.sleep(gate), [x], [], name="gate")
        program = program_from_graph_def(self.graph.as_graph_def(), ["chosen"], ["stuck"])
        waiting = program.nodes["PyFunc"]
        nodes = dict(program.nodes, PyFunc=waiting.replace(op="HorovodAlltoall"))
        if gate is not None:
            program = program.replace(agreement=Agreement(gate="gate"))
        program = AlarmPass().run(program.replace(nodes=nodes), task(ranks=2, places=((0, 1),)))
        self.program = program.replace(nodes=dict(program.nodes, PyFunc=program.nodes["PyFunc"].replace(op="PyFunc")))
        options = tf.ConfigProto(inter_op_parallelism_threads=threads, use_per_session_threads=threads > 0)
        self.store = Store(options)
        self.alarm = Alarm(self.store, self._end, self.given_up.append)
        loaded = self.store.load(self.program, "step")
        self._call = compat.raw_callable(self.store.session, ["x:0"], list(loaded.fetches), list(loaded.targets))

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.release.set()
        self.alarm.close()
        self.store.close()

    def _wait(self, value):
        self.release.wait(20)
        return value

    def _end(self):
        self.rung += 1
        if self._release_by_alarm:
            self.release.set()

    def run(self, x):
        with self.alarm.watching("step") as rung:
            try:
                return self._call(np.int32(x))
            finally:
                self.was_rung = rung()

    def left(self):
        """The number of elements in the queue, and the flag."""
        return [value.item() for value in self.store.callable_of(self.store.load(look_program(), "look"))()]


def test_a_failed_step_returns_with_its_own_error():
    with Step() as step:
        with pytest.raises(tf.errors.InvalidArgumentError, match="indices = 9 is not in"):
            step.run(9)
        assert step.was_rung and step.rung == 1 and not step.given_up
        assert step.left() == [0, False]
        assert step.run(1) == [2] and not step.was_rung
        assert step.left() == [0, False]


def test_an_op_that_fails_in_a_long_step_is_found_too():
    with Step(gate=0.5) as step:
        with pytest.raises(tf.errors.InvalidArgumentError):
            step.run(9)


def test_a_slow_step_is_left_alone():
    with Step() as step:
        threading.Timer(LONG, step.release.set).start()
        assert step.run(1) == [2]
        assert not step.was_rung and not step.rung and step.left()[1] is False
        assert step.run(0) == [1]


def test_so_is_one_that_has_no_data_yet():
    with Step(gate=LONG) as step:
        step.release.set()
        assert step.run(1) == [2] and not step.rung


def test_so_is_one_that_leaves_no_thread_to_answer():
    with Step(threads=1) as step:
        threading.Timer(LONG, step.release.set).start()
        assert step.run(1) == [2] and not step.rung


def test_what_does_not_return_ends_the_process():
    with Step(release_by_alarm=False) as step:
        threading.Timer(LONG, step.release.set).start()
        with pytest.raises(tf.errors.InvalidArgumentError):
            step.run(9)
        assert len(step.given_up) == 1 and "an op of program 'step' has failed" in step.given_up[0]


def test_the_thread_ends_with_the_session():
    with Step() as step:
        step.alarm.close()
        time.sleep(0.2)
        assert not [t for t in threading.enumerate() if t.name == "epl-alarm"]


def test_the_echo_of_another_failure_names_it():
    with job(2) as channels:
        channels[1].fail("InvalidArgumentError: bad")
        error = tf.errors.UnknownError(None, None, "Horovod has been shut down. This was caused by an exception on one of the ranks")
        with pytest.raises(RankFailedError, match="(?s)rank 1.*failed.*InvalidArgumentError: bad.*I was here"):
            raise_for_another(error, channels[0], "I was here")
        raise_for_another(error, channels[1], "it is its own failure")
        raise_for_another(tf.errors.UnknownError(None, None, "something else"), channels[0], "")
