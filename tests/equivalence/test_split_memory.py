"""What processes hold of a large variable that is split: while it is initialised or restored, and afterwards."""

import os
import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import held
from tests.harness.parametrize import cases, together
from tests.harness.pool import request

ROWS, COLUMNS = 34000, 1000
WHOLE = 4 * ROWS * COLUMNS
"""Bytes of a whole table: 136 MB. A quarter is more than the 32 MB up to which the C library keeps what is freed."""


def resident():
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """How much more this process held at most than at the beginning, and how much more it holds at the end: parts of the whole variable."""

    def __enter__(self):
        self._before = self._most = resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over.is_set():
            self._most = max(self._most, resident())
            time.sleep(0.001)

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        self.left = (resident() - self._before) / WHOLE
        self.peak = max((self._most - self._before) / WHOLE, self.left)

    def __iter__(self):
        return iter((self.peak, self.left))


INITIALIZERS = {
    "uniform": tf.glorot_uniform_initializer(seed=3),
    "truncated": tf.truncated_normal_initializer(stddev=0.1, seed=4),
    "constant": tf.constant_initializer(0.01),
    "unseeded": tf.random_normal_initializer(stddev=0.1),
}


def model(columns, initializer):
    """A table, divided along rows or columns, with a slot: what is fed, the table, the training op."""
    ids, x = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, COLUMNS])
    table = tf.get_variable("table", [ROWS, COLUMNS] if not columns else [COLUMNS, ROWS], initializer=INITIALIZERS[initializer])
    logits = tf.matmul(x, table, transpose_b=not columns)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=logits))
    feeds = {ids: np.arange(8), x: np.random.RandomState(1).randn(8, COLUMNS).astype(np.float32)}
    return feeds, table, loss


def corners(session, table):
    """Some values, from all parts."""
    return session.run([table[:3, :3], table[-3:, -3:], table[::4999, ::499]])


def plain_checkpoint(run, columns=False, initializer="uniform"):
    """A checkpoint of plain TensorFlow, which has whole tensors."""
    with run.program():
        _, table, loss = model(columns, initializer)
        tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        with run.session() as session:
            return {"path": tf.train.Saver().save(session, run.path("model.ckpt")), "corners": corners(session, table)}


def life(run, columns=False, initializer="uniform"):
    """What is held, in whole tables, while a program starts, trains and saves."""
    with run.program():
        with run.split():
            feeds, table, loss = model(columns, initializer)
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        saver, init, found = tf.train.Saver(), tf.global_variables_initializer(), {}
        with tf.Session() as session:
            session.run(tf.no_op())
            with Memory() as found["initialised"]:
                session.run(init)
            first = corners(session, table)
            for when in ("trained", "trained on"):
                with Memory() as found[when]:
                    for _ in range(2):
                        run.step(session, train, feeds)
            with Memory() as found["saved"]:
                path = saver.save(session, run.path("model.ckpt"))
            return {"memory": measured(found), "held": shapes(run, session), "first": first, "corners": corners(session, table), "path": path}


def second_life(run, earlier, columns=False):
    """The same of a process that starts from a checkpoint."""
    with run.program():
        with run.split():
            feeds, table, loss = model(columns, "uniform")
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        saver, found = tf.train.Saver(), {}
        with tf.Session() as session:
            session.run(tf.no_op())
            with Memory() as found["restored"]:
                saver.restore(session, earlier["path"])
            first = corners(session, table)
            with Memory() as found["trained"]:
                run.step(session, train, feeds)
            return {"memory": measured(found), "held": shapes(run, session), "first": first}


def measured(found):
    return {when: list(memory) for when, memory in found.items()}


def shapes(run, session):
    return [] if run.plain else held(session, "table") + held(session, "table/Momentum")


def judge(rank, first, shards=4, peaks=("initialised", "restored", "trained", "trained on", "saved"), slack=0.25):
    assert [np.prod(shape) for shape in rank["held"]] == [ROWS * COLUMNS // shards] * 2
    for value, wanted in zip(rank["first"], first):
        np.testing.assert_array_equal(value, wanted)
    for when, (peak, left) in rank["memory"].items():
        # The table and its slot, each a part, where they come into being.
        kept = 2 / shards if when in ("initialised", "restored") else 0
        assert left < kept + slack, "%s: %.2f of a whole table are left in a process: %s" % (when, left, rank["memory"])
        assert peak < 0.9 or when not in peaks, "%s: at some time a process has held %.2f of a whole table: %s" % (when, peak, rank["memory"])


LAYOUT = dict(isolated=True, timeout=240)
FIRST = request(life, "4x1-p4", **LAYOUT)
PLAIN = request(plain_checkpoint, "1x1", plain=True)


@pytest.mark.slow
@together(life=FIRST, plain=PLAIN, again=request(second_life, "4x1-p4", inputs={"earlier": FIRST}, **LAYOUT))
def test_no_process_ever_holds_a_whole_variable(outcomes):
    for rank in outcomes["life"].ranks:
        judge(rank, outcomes["plain"].ranks[0]["corners"])
    for rank in outcomes["again"].ranks:
        judge(rank, outcomes["life"].ranks[0]["corners"])


@pytest.mark.slow
@together(plain=PLAIN, life=request(second_life, "4x1-p4", inputs={"earlier": PLAIN}, **LAYOUT))
def test_of_a_plain_checkpoint_a_part_is_left(outcomes):
    """TensorFlow reads a whole tensor to take a slice of it, and frees it."""
    for rank in outcomes["life"].ranks:
        judge(rank, outcomes["plain"].ranks[0]["corners"], peaks=("trained",))


PIECES = 0.45
"""Columns are drawn in pieces, which are small enough for the C library to keep their memory."""
COLUMN_WISE = request(life, "4x1-p4", columns=True, **LAYOUT)


@pytest.mark.slow
@together(
    life=COLUMN_WISE,
    plain=request(plain_checkpoint, "1x1", plain=True, columns=True),
    again=request(second_life, "4x1-p4", columns=True, inputs={"earlier": COLUMN_WISE}, **LAYOUT),
)
def test_no_process_ever_holds_all_columns(outcomes):
    for rank in outcomes["life"].ranks:
        judge(rank, outcomes["plain"].ranks[0]["corners"], slack=PIECES)
    for rank in outcomes["again"].ranks:
        judge(rank, outcomes["life"].ranks[0]["corners"])


@pytest.mark.slow
@together(
    life=request(life, "4x1-p4", columns=True, initializer="truncated", **LAYOUT),
    plain=request(plain_checkpoint, "1x1", plain=True, columns=True, initializer="truncated"),
)
def test_no_process_ever_holds_all_truncated_numbers(outcomes):
    for rank in outcomes["life"].ranks:
        judge(rank, outcomes["plain"].ranks[0]["corners"], slack=PIECES)


@pytest.mark.slow
@cases(life, "4x1-p4", initializer="constant", **LAYOUT)
def test_no_process_ever_holds_a_whole_constant(outcome):
    for rank in outcome.ranks:
        # TensorFlow computes constants once more when it optimizes a graph: some parts for a moment.
        judge(rank, [np.float32(0.01)] * 3, peaks=("trained", "trained on", "saved"))


@pytest.mark.slow
@cases(life, "4x1-p4", initializer="unseeded", **LAYOUT)
def test_no_process_ever_holds_all_unseeded_numbers(outcome):
    for rank in outcome.ranks:
        judge(rank, outcome.ranks[0]["first"])
