"""Two ranks with savers, writers and checkpoints of other layouts: rows 16, 24, 25, 34.

All cases run in one job with those of `test_ranks_hooks.py` and `test_ranks_estimators.py`.
"""

import glob
import os
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.behaviour.models import Recorder, W, drawn, steps_of
from tests.equivalence.scripts import X
from tests.harness.context import variables
from tests.harness.parametrize import cases
from tests.harness.pool import request

# --- who writes ---------------------------------------------------------------------------


def own_folders(run):
    """Every rank gives all writers a folder of its own: what each rank has written."""
    mine = run.path("of rank %d" % run.rank)
    with run.program() as graph:
        w, loss, train, step = drawn(run)
        tf.summary.scalar("loss", loss)
        hooks = [
            tf.train.CheckpointSaverHook(mine, save_steps=2),
            tf.train.SummarySaverHook(save_steps=1, output_dir=mine, summary_op=tf.summary.merge_all()),
            tf.train.StepCounterHook(every_n_steps=1, output_dir=mine),
            tf.train.ProfilerHook(save_steps=2, output_dir=mine),
            tf.train.StopAtStepHook(last_step=3),
        ]
        with tf.summary.FileWriter(os.path.join(mine, "direct"), graph) as writer:
            writer.add_summary(tf.Summary(value=[tf.Summary.Value(tag="direct", simple_value=1.0)]), 1)
        tf.train.write_graph(graph, mine, "written.pbtxt")
        saver = tf.train.Saver([w])
        with tf.train.SingularMonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run(train)
            saver.save(session.raw_session(), os.path.join(mine, "by-hand"))
            tf.train.export_meta_graph(os.path.join(mine, "exported.meta"), graph=graph)
    return sorted({name.split(".out.")[0] for name in os.listdir(mine)}) if os.path.exists(mine) else []


@cases(own_folders, "2x1")
def test_row_24_only_rank_0_writes_whatever_the_hooks(outcome):
    assert outcome.ranks[1] == []
    written = set(outcome.ranks[0])
    assert written >= {"checkpoint", "direct", "events", "exported.meta", "graph.pbtxt", "written.pbtxt", "by-hand.index", "model.ckpt-3.index"}
    assert any(name.startswith("timeline-") for name in written)


def other_arguments(run):
    """Rank 1 has neither a checkpoint folder nor the role of a chief, as scripts for other tools have it."""
    folder = run.path("model") if run.rank == 0 else None
    with run.program():
        w, loss, train, step = drawn(run)
        tf.summary.scalar("loss", loss)
        recorder = Recorder(step)
        hooks = [tf.train.StopAtStepHook(num_steps=3), recorder]
        with tf.train.MonitoredTrainingSession(
            is_chief=run.rank == 0, checkpoint_dir=folder, save_checkpoint_steps=2, save_summaries_steps=1, hooks=hooks
        ) as session:
            while not session.should_stop():
                value = session.run([w, train])[0]
    return {"steps": recorder.seen, "w": float(value), "kept": steps_of(run.path("model"))}


@cases(other_arguments, "2x1")
def test_ranks_other_than_0_need_no_folder(outcome):
    for rank in outcome.ranks:
        assert rank["steps"] == [1, 2, 3] and rank["w"] == pytest.approx(W[2], rel=1e-5)
    assert outcome.ranks[0]["kept"] == [0, 2, 3]


def newer_summaries(run):
    """Summaries of the newer API, whose writer is a resource of the graph."""
    mine = run.path("of rank %d" % run.rank)
    with run.program():
        w, loss, train, step = drawn(run)
        writer = tf.compat.v2.summary.create_file_writer(mine)
        with writer.as_default():
            tf.compat.v2.summary.scalar("loss", loss, step=step)
        with run.session() as session:
            session.run(writer.init())
            for _ in range(3):
                session.run([train, tf.summary.all_v2_summary_ops()])
            session.run(writer.flush())
    return len(glob.glob(os.path.join(mine, "events*")))


@cases(newer_summaries, "2x1")
def test_newer_summaries_are_written_by_rank_0(outcome):
    assert outcome.ranks == [1, 0]


def last_checkpoints(run):
    """Every rank saves four times and keeps two: what each saver believes, and the files."""
    with run.program():
        _, _, train, step = drawn(run)
        saver = tf.train.Saver(max_to_keep=2)
        with run.session() as session:
            paths = []
            for _ in range(4):
                session.run(train)
                paths.append(saver.save(session, run.path("model"), global_step=step))
            latest = tf.train.latest_checkpoint(run.folder)
            return {"paths": paths, "kept": saver.last_checkpoints, "latest": latest, "steps": steps_of(run.folder)}


@cases(last_checkpoints, "2x1")
def test_all_savers_believe_the_same(outcome):
    first, second = outcome.ranks
    assert first == second
    assert first["kept"] == first["paths"][2:] and first["latest"] == first["paths"][3] and first["steps"] == [3, 4]


# --- saving and restoring -----------------------------------------------------------------


def chief_saves_alone(run):
    """Rank 0 alone saves between the steps."""
    with run.program():
        w, loss, train, step = drawn(run)
        saver = tf.train.Saver()
        with run.session() as session:
            for _ in range(3):
                session.run(train)
                if run.rank == 0:
                    saver.save(session, run.path("model"), global_step=step)
            return float(session.run(w))


@cases(chief_saves_alone, "2x1")
def test_rank_0_may_save_alone(outcome):
    assert outcome.ranks == [pytest.approx(W[3], rel=1e-5)] * 2


def saved_and_restored(run):
    """All ranks save under one name again and again, and restore it at once elsewhere."""
    found = []
    with run.program():
        w, loss, train, step = drawn(run)
        saver = tf.train.Saver()
        with run.session() as session:
            for _ in range(3):
                session.run(train)
                if run.rank == 0:
                    time.sleep(0.3)  # the other rank must wait for the file
                path = saver.save(session, run.path("model"))
                loaded = float(tf.train.load_variable(path, "w"))
                with tf.Session() as other:
                    saver.restore(other, path)
                    found.append([loaded, float(other.run(w))])
    return found


@cases(saved_and_restored, "2x1")
def test_what_a_rank_has_saved_it_can_restore(outcome):
    for rank in outcome.ranks:
        np.testing.assert_allclose(rank, [[W[i]] * 2 for i in (1, 2, 3)], rtol=1e-5)


def only_rank_0_prepares(run):
    """Rank 0 restores; rank 1 does not even initialise. Later rank 0 and rank 1 initialise differently."""
    with tf.Graph().as_default(), tf.Session() as session:
        if run.rank == 0:
            for name, value in (("w", 5.0), ("unused", 1.0)):
                tf.get_variable(name, initializer=value)
            session.run(tf.global_variables_initializer())
            tf.train.Saver().save(session, run.path("five"))
    with run.program():
        w = tf.get_variable("w", [], initializer=tf.random_normal_initializer())
        x = run.next_batch(tf.data.Dataset.from_tensors(run.local(X)).repeat())
        train = tf.train.GradientDescentOptimizer(0.01).minimize(tf.reduce_mean(tf.square(w * x - 3.0 * x)))
        with tf.Session() as session:
            session.run(tf.tables_initializer())
            if run.rank == 0:
                tf.train.Saver([w]).restore(session, run.path("five"))
            session.run(train)
            return float(session.run(w))


@cases(only_rank_0_prepares, "2x1")
def test_row_25_rank_0_may_prepare_for_all(outcome):
    assert outcome.ranks == [pytest.approx(5 - 0.01 * 2 * 7.5 * 2, rel=1e-5)] * 2


def unseeded(run):
    """Variables that begin at random, after the session has been created and after one step."""
    with run.program(seed=0):
        x = run.next_batch(tf.data.Dataset.from_tensors(np.ones([2, 3], np.float32) * (run.rank + 1)).repeat())
        loss = tf.reduce_mean(tf.square(tf.layers.dense(tf.layers.dense(x, 4), 1)))
        step = tf.train.get_or_create_global_step()
        train = tf.train.MomentumOptimizer(0.01, 0.9).minimize(loss, global_step=step)
        with tf.train.SingularMonitoredSession() as session:
            before = variables(session.raw_session())
            session.run(train)
            after = variables(session.raw_session())
    return {"before": before, "after": after}


@cases(unseeded, "2x1")
def test_row_16_unseeded_variables_are_equal(outcome):
    first, second = outcome.ranks
    for when in ("before", "after"):
        for name in first[when]:
            np.testing.assert_array_equal(first[when][name], second[when][name], err_msg=name)
    assert np.abs(first["before"]["dense/kernel"]).max() > 0


def save_three_steps(run):
    with run.program():
        w, loss, train, step = drawn(run)
        with tf.train.MonitoredTrainingSession(checkpoint_dir=run.folder, save_checkpoint_steps=3, save_summaries_steps=None) as session:
            for _ in range(3):
                session.run(train)
    return run.folder


def continue_from(run, folder):
    """One more step from a folder that another layout has written."""
    with run.program():
        w, loss, train, step = drawn(run)
        with tf.train.MonitoredTrainingSession(checkpoint_dir=folder, save_checkpoint_steps=1000, save_summaries_steps=None) as session:
            begin = int(session.run(step))
            session.run(train)
            return [begin, float(session.run(w))]


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(request(continue_from, "1x2", inputs={"folder": request(save_three_steps, "4x1")}), id="4x1-then-1x2"),
        pytest.param(request(continue_from, "2x1", inputs={"folder": request(save_three_steps, "1x2")}), id="1x2-then-2x1"),
    ],
    indirect=True,
)
def test_row_34_another_layout_goes_on(outcome):
    for begin, w in outcome.ranks:
        assert begin == 3 and w == pytest.approx(0.39908516, rel=1e-5)
