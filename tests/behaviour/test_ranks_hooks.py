"""Two ranks with hooks, monitored sessions and supervisors: clocks, the end of a loop, rows 43 and 92.

How ranks that do not do quite the same go on, end together, or are told what differs.
"""

import os
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.behaviour.models import Recorder, W, drawn, steps_of
from tests.equivalence.scripts import X, raises, regression, scalar
from tests.harness.parametrize import cases
from tests.harness.pool import CaseFailed, request

# --- clocks -------------------------------------------------------------------------------


def clocks(run):
    """Hooks that go by the clock, on ranks whose clocks disagree; how often rank 0 was asked."""
    from epl.env import Env

    asked = []
    with run.program():
        w, loss, train, step = drawn(run)
        tf.summary.scalar("loss", loss)
        hooks = [
            tf.train.CheckpointSaverHook(run.folder, save_secs=0.5),
            tf.train.SummarySaverHook(save_secs=0.3, output_dir=run.folder, summary_op=tf.summary.merge_all()),
            tf.train.LoggingTensorHook({"w": w}, every_n_secs=100),
            tf.train.StepCounterHook(every_n_secs=0.4, every_n_steps=None, output_dir=run.folder),
            tf.train.StopAtStepHook(last_step=60),
        ]
        before = time.time
        try:
            if run.rank == 1:
                time.time = lambda: before() * 3
            with tf.train.SingularMonitoredSession(hooks=hooks) as session:
                control = Env.get().control
                decide = control.decide
                control.decide = lambda topic, *rest: asked.append(topic) or decide(topic, *rest)
                start = before()
                while not session.should_stop():
                    session.run(train)
                    time.sleep(0.02 if session.raw_session().run(step) % 2 == run.rank else 0.0)
            del control.decide
        finally:
            time.time = before
    asked = [topic for topic in asked if "of 100 s" in topic]
    return {"asked": len(asked), "kept": len(steps_of(run.folder)), "seconds": before() - start}


@cases(clocks, "2x1")
def test_timers_are_those_of_rank_0(outcome):
    first, second = outcome.ranks
    assert 2 <= first["kept"] <= first["seconds"] / 0.5 + 3
    assert 1 <= second["asked"] <= 30, "60 steps, and a timer that is not near its end"
    assert first["asked"] == second["asked"] + 1, "at the end rank 0 answers what might still be asked"


def hook_on_one_rank(run):
    """Rank 0 alone has a hook with a fetch."""
    with run.program():
        w, _, train, _ = drawn(run)
        hooks = [tf.train.LoggingTensorHook({"w": w}, every_n_iter=1)] if run.rank == 0 else []
        with raises() as caught, tf.train.MonitoredSession(hooks=hooks) as session:
            session.run(train)
        return caught


@cases(hook_on_one_rank, "2x1")
def test_other_hooks_are_refused(outcome):
    for (error,) in outcome.ranks:
        assert "DivergenceError" in error["types"] and "'w/Read/ReadVariableOp:0' is fetched only" in error["text"]


# --- the end ------------------------------------------------------------------------------


class StopAlone(tf.train.SessionRunHook):
    """Stops in the third run, on one rank only."""

    def __init__(self, mine, how):
        self.mine, self.how, self.runs = mine, how, 0

    def after_create_session(self, session, coord):
        self.coord = coord

    def after_run(self, run_context, run_values):
        self.runs += 1
        if self.mine and self.runs == 3:
            (self.coord if self.how == "coordinator" else run_context).request_stop()


def one_stops(run, stopping, how):
    """One rank ends the loop alone: how many steps each has made."""
    with run.program():
        w, loss, train, step = drawn(run)
        recorder = Recorder(step)
        hooks = [tf.train.LoggingTensorHook({"w": w}, every_n_secs=1000), StopAlone(run.rank == stopping, how), recorder]
        with tf.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run(train)
        # The ranks are in step afterwards.
        with tf.train.SingularMonitoredSession() as session:
            session.run(train)
            after = int(session.raw_session().run(step))
    return {"seen": recorder.seen, "after": after}


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(request(one_stops, "2x1", stopping=stopping, how=how), id="%s of rank %d" % (how, stopping))
        for how in ("hook", "coordinator")
        for stopping in (0, 1)
    ],
    indirect=True,
)
def test_when_one_rank_stops_all_stop(outcome):
    for rank in outcome.ranks:
        assert rank == {"seen": [1, 2, 3], "after": 1}


def step_function(run, stopping):
    """A step function with steps of its own, which asks for the end on one rank only."""
    with run.program():
        w, loss, train, step = drawn(run)
        seen = []

        def work(step_context):
            step_context.session.run(w)
            step_context.run_with_hooks(train)
            seen.append(int(step_context.session.run(step)))
            if len(seen) == 3 and run.rank == stopping:
                step_context.request_stop()

        with tf.train.MonitoredSession(hooks=[tf.train.StopAtStepHook(last_step=6)]) as session:
            while not session.should_stop():
                session.run_step_fn(work)
    return seen


@cases(step_function, "2x1", stopping=1)
def test_when_one_step_function_stops_all_stop(outcome):
    assert outcome.ranks == [[1, 2, 3]] * 2


@cases(step_function, "2x1", stopping=None)
def test_step_functions_run_to_the_end(outcome):
    assert outcome.ranks == [[1, 2, 3, 4, 5, 6]] * 2


def all_stop_fed(run):
    """Fed steps, and a hook that stops all ranks in the same step; a worker's hook that waits for other workers."""
    with run.program():
        x, w, _, train, step = regression(run, "adam")
        final = tf.train.FinalOpsHook(w)
        hooks = [tf.train.StopAtStepHook(last_step=3), tf.train.GlobalStepWaiterHook(wait_until_step=2 * run.rank), final]
        with tf.train.MonitoredSession(session_creator=None if run.rank == 0 else tf.train.WorkerSessionCreator(), hooks=hooks) as session:
            while not session.should_stop():
                session.run(train, {x: run.local(X)})
        return float(final.final_ops_values)


@cases(all_stop_fed, "2x1")
def test_fed_ranks_stop_together(outcome):
    assert outcome.ranks == [pytest.approx(W[3], rel=1e-5)] * 2


def one_stops_fed(run):
    """Fed steps, which one rank leaves alone."""
    with run.program():
        x, _, _, train, _ = regression(run)
        with tf.train.MonitoredSession(hooks=[StopAlone(run.rank == 1, "hook")]) as session:
            while not session.should_stop():
                session.run(train, {x: run.local(X)})


@pytest.mark.ranks
def test_when_one_fed_rank_stops_the_job_fails(pool):
    started = time.time()
    with pytest.raises(CaseFailed) as caught:
        pool.outcome(request(one_stops_fed, "2x1", isolated=True))
    from epl.runtime.lockstep import END  # plain cases of other files import this one, and must not import EPL

    assert END in str(caught.value) and "DivergenceError" in str(caught.value)
    assert time.time() - started < 60


def unequal_data(run):
    """Rank 1 has data for two steps only."""
    with run.program():
        w, loss, train, step = drawn(run, total=5 if run.rank == 0 else 2)
        recorder = Recorder(step)
        with tf.train.MonitoredTrainingSession(checkpoint_dir=run.folder, save_summaries_steps=None, hooks=[recorder]) as session:
            while not session.should_stop():
                session.run(train)
    return {"seen": recorder.seen, "kept": steps_of(run.folder) if run.rank == 0 else []}


@cases(unequal_data, "2x1")
def test_row_92_the_end_of_data_ends_all(outcome):
    assert [rank["seen"] for rank in outcome.ranks] == [[1, 2]] * 2
    assert outcome.ranks[0]["kept"] == [0, 2]


# --- supervisors --------------------------------------------------------------------------


def supervised(run):
    """A loop as in slim: a supervisor with a queue and its services, whose threads go by the clock."""
    tf.disable_eager_execution()  # else the supervisor's threads take themselves for eager ones
    with run.program():
        mine = run.local(X)
        queue = tf.FIFOQueue(8, [tf.float32], [[len(mine)]])
        tf.train.add_queue_runner(tf.train.QueueRunner(queue, [queue.enqueue(tf.constant(mine))]))
        value = queue.dequeue()
        w = scalar("w", 0)
        loss = tf.reduce_mean(tf.square(w * value - 3.0 * value))
        run.merge(loss)
        tf.summary.scalar("loss", loss)
        step = tf.train.get_or_create_global_step()
        train = tf.train.AdamOptimizer(0.1).minimize(loss, global_step=step)
        supervisor = tf.train.Supervisor(
            is_chief=run.rank == 0, logdir=run.path("log of %d" % run.rank), save_summaries_secs=0.1, save_model_secs=0.2
        )
        with supervisor.managed_session() as session:
            for _ in range(20):
                if supervisor.should_stop():
                    break
                number, weight, _ = session.run([step, w, train])
                time.sleep(0.02 * run.rank)
            result = [int(session.run(step)), float(session.run(w))]
    folder = run.path("log of %d" % run.rank)
    return {"result": result, "files": sorted({n.split(".")[0] for n in os.listdir(folder)}) if os.path.exists(folder) else []}


@cases(supervised, "2x1", isolated=True)
def test_row_43_supervisors(outcome):
    first, second = outcome.ranks
    assert first["result"] == second["result"] and first["result"][0] == 20
    assert second["files"] == []
    assert {"checkpoint", "events", "graph", "model"} <= set(first["files"])


def not_a_number(run, fail, where):
    """After two steps the data of some ranks is not a number: what `NanTensorHook` makes of it, and with which weights."""
    with run.program():
        x, w, loss, train, step = regression(run, "adam")
        recorder, runs = Recorder(step), 0
        bad = run.plain or where == "everywhere" or run.rank == 1
        hooks = [recorder, tf.train.NanTensorHook(loss, fail_on_nan_loss=fail)]
        with raises() as caught, tf.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop() and runs < 10:
                session.run(train, {x: run.local(X) * (np.nan if bad and runs >= 2 else 1.0)})
                runs += 1
    return {"runs": runs, "steps": recorder.seen, "caught": [error["types"][0] for error in caught]}


@cases(not_a_number, "2x1", compare=True, fail=True, where="everywhere")
def test_not_a_number_is_an_error_on_all_ranks(outcome):
    assert outcome.plain == {"runs": 2, "steps": [1, 2, 3], "caught": ["NanLossDuringTrainingError"]}
    assert outcome.ranks == [outcome.plain] * 2


@cases(not_a_number, "2x1", compare=True, fail=True, where="on rank 1")
def test_not_a_number_of_one_rank_is_an_error_on_all(outcome):
    """The loss is merged: all see what is not a number."""
    assert outcome.ranks == [outcome.plain] * 2


@cases(not_a_number, "2x1", compare=True, fail=False, where="on rank 1")
def test_not_a_number_may_be_the_end_of_all_ranks(outcome):
    assert outcome.plain == {"runs": 3, "steps": [1, 2, 3], "caught": []}
    assert outcome.ranks == [outcome.plain] * 2
