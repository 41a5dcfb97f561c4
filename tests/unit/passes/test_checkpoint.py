"""Checkpoint: the chief alone writes files."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.passes.checkpoint import WRITES, Checkpoint
from tests.unit.graph_text import expect, fingerprint
from tests.unit.machine import Machine, user_graph
from tests.unit.passes.steps import apply, before, task, training

SAVE = """
    name = Const() {value: "path"}
    w = VarHandleOp() {shape: [2]}
    read = ReadVariableOp(w)
    keys = Const() {value: ["w"]}
    slices = Const() {value: [""]}
    save = SaveV2(name, keys, slices, read, ^done) {dtypes: [float]}
    done = NoOp()
    path = Identity(name, ^save)
    fetches: path:0
"""


def checkpoint(rank, text=SAVE, **options):
    job = task(ranks=2, rank=rank, parallel=False, **options)
    program = before(Checkpoint, text, job)
    return program, apply(Checkpoint(), program, job)


def test_the_chief_writes():
    program, result = checkpoint(0)
    assert result is program


def test_other_ranks_do_not_even_read():
    _, result = checkpoint(1)
    expect(
        result,
        """
        name = Const()
        save = NoOp(^done)
        done = NoOp()
        path = Identity(name, ^save)
        fetches: path:0
        """,
    )


def test_a_program_that_writes_nothing_is_left_as_it_is():
    job = task(ranks=2, rank=1)
    program = before(Checkpoint, training(), job)
    assert fingerprint(apply(Checkpoint(), program, job)) == fingerprint(program)


def test_restoring_is_for_all():
    assert not [op for op in WRITES if op.startswith("Restore")]


@pytest.mark.parametrize("layout", [dict(ranks=2), dict(ranks=2, devices=2, m=2)], ids=str)
def test_all_ranks_take_part_in_what_the_chief_writes(layout, tmp_path):
    """A summary of an average over all replicas needs all ranks, though one writes it."""
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None], "x")
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        mean = tf.reduce_mean(x * (w + 1.0))
        train = tf.train.GradientDescentOptimizer(1.0).minimize(mean)
        writer = tf.raw_ops.SummaryWriter(shared_name="writer")
        create = tf.raw_ops.CreateSummaryFileWriter(writer=writer, logdir=str(tmp_path), max_queue=1, flush_millis=1, filename_suffix="")
        with tf.control_dependencies([train]):
            step = tf.constant(7, tf.int64)
            wrote = tf.raw_ops.WriteScalarSummary(writer=writer, step=step, tag="mean", value=mean)
            with tf.control_dependencies([wrote]):
                tf.raw_ops.FlushSummaryWriter(writer=writer, name="train")
        tf.group(tf.global_variables_initializer(), create, name="start")
        whole = index()
    machine = Machine(whole, **layout)
    machine.run("start")
    machine.run("train", {"x:0": np.arange(8, dtype=np.float32)})
    machine.session.close()
    written = [(e.step, v.simple_value) for path in tmp_path.iterdir() for e in tf.train.summary_iterator(str(path)) for v in e.summary.value]
    assert written == [(7, 3.5)]
