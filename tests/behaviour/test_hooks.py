"""Hooks of monitored sessions on local devices and in accumulation, and that EPL leaves TensorFlow as it was."""

import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.behaviour.models import Recorder, steps_of
from tests.equivalence.scripts import X, raises, regression
from tests.harness.parametrize import cases

LOSSES = [67.5, 63.075005, 58.80432]
W3 = 0.29961747


class Spy(tf.train.SessionRunHook):
    """A user's hook with fetches, feeds and runs of its own."""

    def __init__(self, loss, w, step):
        self.loss, self.w, self.step = loss, w, step
        self.fetched, self.calls = [], []

    def begin(self):
        self.calls.append("begin")
        self.added = tf.identity(self.w, "added_in_begin")

    def after_create_session(self, session, coord):
        self.calls.append("created at %d" % session.run(self.step))

    def before_run(self, run_context):
        return tf.train.SessionRunArgs({"loss": self.loss, "more": [self.added]})

    def after_run(self, run_context, run_values):
        inside = run_context.session.run([self.step, self.w])
        self.fetched.append([float(run_values.results["loss"]), int(inside[0]), float(inside[1])])

    def end(self, session):
        self.calls.append("end at %d" % session.run(self.step))


def all_hooks(run):
    """The hooks of TensorFlow together, and one of the user's."""
    lines = []
    with run.program():
        x, w, loss, train, step = regression(run, "adam")
        tf.summary.scalar("loss", loss)
        spy, final = Spy(loss, w, step), tf.train.FinalOpsHook({"w": w, "loss": loss}, {x: run.local(X)})
        hooks = [
            tf.train.FeedFnHook(lambda: {x: run.local(X)}),
            tf.train.StopAtStepHook(num_steps=3),
            tf.train.LoggingTensorHook({"loss": loss}, every_n_iter=1, formatter=lambda v: lines.append(float(v["loss"])) or ""),
            tf.train.NanTensorHook(loss),
            tf.train.StepCounterHook(every_n_steps=2, output_dir=run.folder),
            tf.train.SummarySaverHook(save_steps=1, output_dir=run.folder, summary_op=tf.summary.merge_all()),
            tf.train.ProfilerHook(save_steps=2, output_dir=run.folder),
            tf.train.CheckpointSaverHook(run.folder, save_secs=0.001),
            spy,
            final,
        ]
        with tf.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run(train)
    values = final.final_ops_values
    return {"lines": lines, "fetched": spy.fetched, "calls": spy.calls, "final": [float(values["w"]), float(values["loss"])],
            "kept": steps_of(run.folder), "profiles": len([n for n in os.listdir(run.folder) if n.startswith("timeline")])}  # fmt: skip


@cases(all_hooks, "1x1", "1x2", "1x2-m2run")
def test_all_hooks_together(outcome):
    (found,) = outcome.ranks
    assert found["lines"] == pytest.approx(LOSSES, rel=1e-5)
    assert [row[0] for row in found["fetched"]] == pytest.approx(LOSSES, rel=1e-5)
    assert [row[1] for row in found["fetched"]] == [1, 2, 3] and found["fetched"][2][2] == pytest.approx(W3, rel=1e-5)
    assert found["calls"] == ["begin", "created at 0", "end at 3"]
    assert found["final"] == pytest.approx([W3, 54.690495], rel=1e-5)
    assert found["kept"][-1] == 3 and len(found["kept"]) >= 2 and found["profiles"] >= 1


def accumulation(run):
    """Two runs make a step: what hooks see, and which checkpoints come of it."""
    with run.program():
        x, w, loss, train, step = regression(run, "adam")
        recorder = Recorder(step)
        hooks = [tf.train.StopAtStepHook(last_step=3), recorder]
        runs = 0
        with tf.train.MonitoredTrainingSession(checkpoint_dir=run.folder, save_checkpoint_steps=2, hooks=hooks) as session:
            while not session.should_stop():
                session.run(train, {x: run.local(X, runs % 2)})
                runs += 1
    return {"steps": recorder.seen, "kept": steps_of(run.folder), "w": float(tf.train.load_variable(run.folder, "w"))}


@cases(accumulation, "1x1-m2", "1x2-m2")
def test_steps_advance_once_per_accumulation(outcome):
    (found,) = outcome.ranks
    assert found["steps"] == [0, 1, 1, 2, 2, 3] and found["kept"] == [0, 2, 3]
    assert found["w"] == pytest.approx(W3, rel=1e-5)


def not_a_number(run, fail):
    """A loss that is not a number ends the training, with or without an error."""
    with run.program():
        x, w, loss, train, step = regression(run)
        with raises() as caught, tf.train.MonitoredSession(hooks=[tf.train.NanTensorHook(loss, fail_on_nan_loss=fail)]) as session:
            runs = 0
            while not session.should_stop() and runs < 10:
                session.run(train, {x: run.local(X if runs < 2 else X * np.nan)})
                runs += 1
    return {"runs": runs, "caught": [error["types"][0] for error in caught]}


@cases(not_a_number, "1x2", fail=True)
def test_not_a_number_is_an_error(outcome):
    assert outcome.ranks == [{"runs": 2, "caught": ["NanLossDuringTrainingError"]}]


@cases(not_a_number, "1x2", fail=False)
def test_not_a_number_may_be_the_end(outcome):
    assert outcome.ranks == [{"runs": 3, "caught": []}]


def options(run):
    """Monitored sessions give run options with every run: how often a call is made anew for that."""
    from epl import compat

    made, original = [], compat.raw_callable
    compat.raw_callable = lambda *args: made.append(args) or original(*args)
    try:
        with run.program():
            x, w, loss, train, step = regression(run)
            with tf.train.MonitoredSession() as session:
                session.run(train, {x: run.local(X)})
                before = len(made)
                for _ in range(10):
                    session.run(train, {x: run.local(X)})
                plain = len(made) - before
                metadata = [tf.RunMetadata(), tf.RunMetadata()]
                for one in metadata:
                    session.run(train, {x: run.local(X)}, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), one)
                return {"plain": plain, "traced": len(made) - before - plain, "stats": [len(m.step_stats.dev_stats) > 0 for m in metadata]}
    finally:
        compat.raw_callable = original


@cases(options, "1x2")
def test_run_options_cost_nothing_anew(outcome):
    assert outcome.ranks == [{"plain": 0, "traced": 1, "stats": [True, True]}]


def by_the_clock(run):
    """Checkpoints every half second, while steps take 0.1 s."""
    with run.program():
        x, w, loss, train, step = regression(run)
        started = time.time()
        with tf.train.MonitoredTrainingSession(checkpoint_dir=run.folder, save_checkpoint_secs=0.5, save_summaries_steps=None) as session:
            for _ in range(15):
                session.run(train, {x: run.local(X)})
                time.sleep(0.1)
    return {"kept": steps_of(run.folder), "seconds": time.time() - started}


@cases(by_the_clock, "1x2")
def test_savers_by_the_clock(outcome):
    (found,) = outcome.ranks
    assert found["kept"][-1] == 15 and 3 <= len(found["kept"]) <= found["seconds"] / 0.5 + 3


RESTORED = """
    import epl, os
    from epl.env import Env
    import tensorflow.compat.v1 as tf

    missing = object()
    epl.init()
    epl.init()
    undo = list(Env.get().adapters.patches._undo)
    before = {}
    for owner, name, value in undo:
        before.setdefault((owner, name), (value, vars(owner)[name]))
    epl.shutdown()
    wrong = [n for (o, n), (value, ours) in before.items() if vars(o).get(n, missing) is ours]
    assert len(before) > 40 and wrong == [], wrong

    tf.disable_v2_behavior()
    folder = os.path.join(os.environ["FOLDER"], "model")
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
    step = tf.train.get_or_create_global_step()
    train = tf.train.GradientDescentOptimizer(0.5).minimize(tf.square(w - 1.0), global_step=step)
    with tf.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=[tf.train.StopAtStepHook(last_step=2)]) as session:
        while not session.should_stop():
            session.run(train)
    assert tf.train.load_variable(folder, "w") == 1.0
    assert not Env.get().epl_graphs
"""


def test_shutdown_leaves_tensorflow_as_it_was(tmp_path):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_", "HOROVOD_", "EPL_", "TF_CONFIG"))}
    clean.update(PYTHONPATH=root, FOLDER=str(tmp_path))
    command = [sys.executable, "-c", textwrap.dedent(RESTORED)]
    done = subprocess.run(command, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
