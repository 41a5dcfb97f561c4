"""Checkpoints move between plain TensorFlow, data parallelism and pipeline stages, and training goes on as if nothing had happened.

Three layouts do two steps each, one after the other from checkpoint to checkpoint; the reference does
six steps without a break. Every rank uses a monitored session with the same folder.
"""

import glob
import os
import shutil
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import maker, umask_of
from tests.harness.context import variables
from tests.harness.parametrize import cases
from tests.harness.pool import request
from tests.harness.stages import at

LAYOUTS = ("plain", "2x1", "2x1-s2-m2", "4x1-s4-m2", "2x2-s2")
ROWS, STEPS = 8, 2


def model(inputs):
    """A table that the first and the last quarter share, dense layers, and an Adam with clipping and a schedule: (loss, train)."""
    initial = tf.glorot_uniform_initializer
    table = tf.get_variable("table", [6, 4], initializer=initial(seed=1))
    h = tf.gather(table, inputs["ids"])
    at(1)
    h = tf.layers.dense(h, 4, tf.tanh, kernel_initializer=initial(seed=2), name="second")
    at(2)
    h = tf.layers.dense(h, 4, tf.tanh, kernel_initializer=initial(seed=3), name="third")
    at(3)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["word"], logits=tf.matmul(h, table, transpose_b=True)))


def train(run, earlier=None, first=0, steps=STEPS, summaries=False, seconds=None):
    """Some steps from a checkpoint or from the beginning: losses, all variables before and after, the checkpoints and who has made the files."""
    folder = run.path("model")
    with run.program(), umask_of(run):
        inputs = {name: tf.placeholder(tf.int32, [None], name) for name in ("ids", "word")}
        with run.scope():
            loss = run.merge(model(inputs))
        step = tf.train.get_or_create_global_step()
        optimizer = tf.train.AdamOptimizer(tf.train.exponential_decay(0.05, step, 1, 0.9))
        gradients, trained = zip(*optimizer.compute_gradients(loss))
        update = optimizer.apply_gradients(zip(tf.clip_by_global_norm(gradients, 0.5)[0], trained), step)
        if summaries:
            tf.summary.scalar("loss", loss)
        if earlier is not None and run.rank == 0:
            # All ranks restore from the folder that they write to, as after a restart.
            shutil.copytree(earlier["folder"], folder + ".new")
            os.rename(folder + ".new", folder)
        while earlier is not None and not os.path.exists(folder):
            time.sleep(0.05)
        saving = {"save_checkpoint_steps": STEPS} if seconds is None else {"save_checkpoint_secs": seconds}
        session = tf.train.MonitoredTrainingSession(checkpoint_dir=folder, log_step_count_steps=None,
                                                    save_summaries_steps=1 if summaries else None, **saving)  # fmt: skip
        losses = []
        with session:
            before = variables(session._tf_sess())  # past the hooks
            for number in range(first, first + steps):
                random = np.random.RandomState(number)
                feeds = {tensor: random.randint(0, 6, ROWS).astype(np.int32) for tensor in inputs.values()}
                losses.append(float(run.step(session, [loss, update], feeds)[-1][0]))
            after = variables(session._tf_sess())
    open(run.path("rank %d is through" % run.rank), "w").close()
    while len(glob.glob(run.path("rank * is through"))) < run.ranks:
        time.sleep(0.05)
    files = {os.path.basename(name): maker(name) for name in glob.glob(os.path.join(folder, "*")) if os.path.isfile(name)}
    latest = tf.train.latest_checkpoint(folder)
    keys = {name: tf.train.load_variable(latest, name) for name, _ in tf.train.list_variables(latest)}
    return {"folder": folder, "before": before, "losses": losses, "after": after, "saved": keys, "files": files}


def one(layout, **options):
    return request(train, "1x1" if layout == "plain" else layout, plain=layout == "plain", **options)


WHOLE = one("plain", steps=2 * STEPS)
SAVED = {layout: one(layout) for layout in LAYOUTS}
PAIRS = [(before, after) for before in LAYOUTS for after in LAYOUTS if before != "plain" or after != "plain"]


def moved(before, after):
    again = one(after, first=STEPS, inputs={"earlier": SAVED[before]})
    return pytest.param({"whole": WHOLE, "before": SAVED[before], "after": again}, id="%s-then-%s" % (before, after))


def close(actual, expected, what):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=what)


@pytest.mark.parametrize("outcomes", [moved(*pair) for pair in PAIRS], indirect=True)
def test_training_goes_on_in_another_layout(outcomes):
    whole, before = outcomes["whole"].ranks[0], outcomes["before"].ranks[0]
    close(before["losses"], whole["losses"][:STEPS], "losses before")
    assert set(before["saved"]) == set(whole["saved"]), "a checkpoint has the variables of the plain script"
    for number, rank in enumerate(outcomes["after"].ranks):
        for name, value in before["saved"].items():
            np.testing.assert_array_equal(rank["before"][name], value, err_msg="%s is restored on rank %d" % (name, number))
            close(rank["saved"][name], whole["saved"][name], "%s in the checkpoint that rank %d reads" % (name, number))
        close(rank["losses"], whole["losses"][STEPS:], "losses on rank %d" % number)
        for name, value in whole["after"].items():
            close(rank["after"][name], value, "%s on rank %d" % (name, number))


@cases(train, "2x1-s2-m2", "4x1-s4-m2", "2x2-s2", "4x1-s2", compare=True, summaries=True)
def test_row_24_the_chief_alone_writes_what_is_no_part_of_stages(outcome):
    """All ranks name the same folder: one file of events and one state, and nothing is left of the parts of a checkpoint."""
    for rank in outcome.ranks:
        files = rank["files"]
        events = [name for name in files if name.startswith("events")]
        assert len(events) == 1 and files[events[0]] == files["checkpoint"] == files["graph.pbtxt"] == 0, files
        # The variables of a checkpoint may come from any rank; its index, which makes it one, is the chief's.
        assert all(owner == 0 for name, owner in files.items() if name.endswith((".index", ".meta"))), files
        left = [name for name in files if "tmp" in name or "part-" in name]
        assert not left, left
        assert sorted(name for name in files if name.endswith(".index")) == sorted(
            name for name in outcome.plain["files"] if name.endswith(".index")
        )


@cases(train, "2x1-s2-m2", "2x2-s2", compare=True, seconds=100000, steps=3)
def test_row_24_the_last_checkpoint_has_all_stages(outcome):
    """No checkpoint falls due in between: the first and the last one are there, written by all and published by the chief."""
    for rank in outcome.ranks:
        indexes = sorted(name for name in rank["files"] if name.endswith(".index"))
        assert indexes == ["model.ckpt-0.index", "model.ckpt-3.index"] == sorted(name for name in outcome.plain["files"] if name.endswith(".index"))
        assert not [name for name in rank["files"] if "tmp" in name or "part-" in name], rank["files"]
        for name, value in outcome.plain["saved"].items():
            close(rank["saved"][name], value, name)
            np.testing.assert_array_equal(rank["saved"][name], rank["after"][name], err_msg="%s is saved as it is" % name)
