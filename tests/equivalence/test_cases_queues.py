"""Input by queue runners, and lookup tables of all kinds, against plain TensorFlow."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import judge_variables, scalar
from tests.harness import data
from tests.harness.context import variables
from tests.harness.layouts import Layout
from tests.harness.parametrize import cases

STEPS = 4


def trained(run, x, optimizer):
    """y = 3x with the mean square as loss: (loss, train)."""
    w = scalar("w", 0)
    loss = tf.reduce_mean(tf.square(w * x - 3.0 * x))
    run.merge(loss)
    return loss, optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())


def write_whole(path, rank, lines):
    """Write the same file on every rank, without a moment in which another rank sees half of it."""
    own = "%s.%d" % (path, rank)
    with open(own, "w") as file:
        file.write("".join("%s\n" % line for line in lines))
    os.replace(own, path)


def rows_of(run):
    """What this process reads over all steps, in the order in which it draws it, and the size of its batches."""
    steps = [{"x": np.random.RandomState(step).randn(8).astype(np.float32)} for step in range(STEPS)]
    stream, size = data.local_stream(steps, Layout() if run.plain else run.layout, run.rank)
    return stream["x"], size


def until_end(run, fetches):
    """Run in a monitored session until the input ends: what was fetched, and the variables after each run."""
    found, values = [], {}
    with tf.train.MonitoredTrainingSession(log_step_count_steps=None) as session:
        while not session.should_stop():
            found.append(session.run(fetches))
            values = variables(session)
    return found, values


def batched(run, capacity=32):
    """`tf.train.batch` behind a producer of single samples; both have queues that threads fill."""
    rows, size = rows_of(run)
    with run.program():
        (row,) = tf.train.slice_input_producer([rows], num_epochs=1, shuffle=False, capacity=capacity)
        x = tf.train.batch([row], size, capacity=capacity)
        loss, train = trained(run, x, tf.train.MomentumOptimizer(0.05, 0.9))
        found, values = until_end(run, [loss, train])
    return {"losses": [float(one[0]) for one in found], "values": values}


def judge_batches(outcome):
    assert len(outcome.plain["losses"]) == STEPS
    for number, rank in enumerate(outcome.ranks):
        losses = np.reshape(rank["losses"], [STEPS, -1]).mean(1)
        np.testing.assert_allclose(losses, outcome.plain["losses"], rtol=1e-5, atol=1e-6, err_msg="losses of rank %d" % number)
    judge_variables(outcome._replace(ranks=[rank["values"] for rank in outcome.ranks], plain=outcome.plain["values"]))


@cases(batched, "2x1", "1x2", "2x1-m2", "1x1-m2run", compare=True)
def test_queue_runners_and_batch(outcome):
    judge_batches(outcome)


@cases(batched, "2x1", compare=True, capacity=1)
def test_queues_that_are_full(outcome):
    judge_batches(outcome)


def shuffled(run):
    """`tf.train.shuffle_batch`. Whatever the order, one pass moves the weight by the sum of all samples, since the loss is linear in it."""
    rows, size = rows_of(run)
    with run.program():
        (row,) = tf.train.slice_input_producer([rows], num_epochs=1, shuffle=True, seed=3)
        x = tf.train.shuffle_batch([row], size, capacity=16, min_after_dequeue=8, seed=4)
        w = scalar("w", 0)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(w * x), global_step=tf.train.get_or_create_global_step())
        found, values = until_end(run, [x, train])
    seen = np.concatenate([one[0] for one in found])
    return {"seen": seen, "mine": rows, "w": values["w"], "global_step": values["global_step"]}


@cases(shuffled, "2x1", "1x1-m2", compare=True)
def test_shuffled_batches_have_every_sample_once(outcome):
    for rank in [outcome.plain] + outcome.ranks:
        np.testing.assert_array_equal(np.sort(rank["seen"]), np.sort(rank["mine"]))
        assert not np.array_equal(rank["seen"], rank["mine"]), "nothing was shuffled"
        np.testing.assert_allclose(rank["w"], outcome.plain["w"], rtol=1e-5, atol=1e-6)
        assert rank["global_step"] == STEPS


def lines_of_files(run, sliced):
    """Files by `tf.train.string_input_producer`, read by lines. The loss is linear: the order in which lines come does not matter."""
    names = [run.path("part%d.txt" % number) for number in range(4)]
    for number, name in enumerate(names):
        write_whole(name, run.rank, range(10 * number, 10 * number + 4))
    with run.program({"io.slicing": sliced}):
        mine = names if sliced else names[run.rank :: run.ranks]
        _, line = tf.TextLineReader().read(tf.train.string_input_producer(mine, num_epochs=1, shuffle=False))
        x = tf.train.batch([tf.strings.to_number(line)], 4 if run.plain else 2)
        w = scalar("w", 0)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(w * x), global_step=tf.train.get_or_create_global_step())
        found, values = until_end(run, [x, train])
    return {"read": np.concatenate([one[0] for one in found]).astype(int).tolist(), "w": float(values["w"]), "step": int(values["global_step"])}


def judge_lines(outcome):
    parts = [[10 * number + line for line in range(4)] for number in range(4)]
    assert outcome.plain["read"] == sum(parts, [])
    assert outcome.ranks[0]["read"] == parts[0] + parts[2] and outcome.ranks[1]["read"] == parts[1] + parts[3]
    for rank in outcome.ranks:
        assert rank["step"] == outcome.plain["step"] == 4
        assert rank["w"] == pytest.approx(outcome.plain["w"], rel=1e-5)


@cases(lines_of_files, "2x1", compare=True, sliced=True)
def test_a_producer_of_files_deals_them_to_the_ranks(outcome):
    judge_lines(outcome)


@cases(lines_of_files, "2x1", compare=True, sliced=False)
def test_a_producer_of_files_that_the_script_has_divided(outcome):
    judge_lines(outcome)


# --- tables -------------------------------------------------------------------------------

WORDS = ["one", "two", "three", "four"]


def static_tables(run):
    """A constant table, one from a file, one from a file with buckets for unknown words, and one from numbers to words."""
    path = run.path("words")  # the same on all ranks: it is in the graph
    write_whole(path, run.rank, WORDS)
    batch = np.array(["one", "three", "none", "four", "two", "two", "one", "nothing"])
    with run.program():
        words = tf.placeholder(tf.string, [None])
        constant = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(WORDS[:3], [1.0, 2.0, 3.0]), -1.0)
        lines = tf.lookup.TextFileInitializer(path, tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER)
        from_file = tf.lookup.StaticHashTable(lines, -1)
        buckets = tf.lookup.StaticVocabularyTable(lines, 3)
        names = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.range(4, dtype=tf.int64), tf.constant(WORDS)), "?")
        ids = from_file.lookup(words)
        rows = tf.gather(tf.get_variable("embedding", [7, 3], initializer=tf.random_normal_initializer(seed=1)), buckets.lookup(words))
        loss = tf.reduce_mean(tf.square(rows - constant.lookup(words)[:, None]) + tf.cast(ids, tf.float32)[:, None] * rows)
        run.merge(loss)
        train = tf.train.AdamOptimizer(0.1).minimize(loss)
        # Strings can't be merged over ranks; what comes of them can.
        back = run.merge(from_file.lookup(names.lookup(ids)), "GLOBAL_CONCAT_OBJECTS")
        with run.session() as session:
            losses = run.train(session, loss, train, [{words: batch}] * 3)
            values = dict(variables(session), losses=np.float32(losses))
            return {"values": values, "back": session.run(back, {words: run.local(batch)}).tolist(),
                    "sizes": [int(session.run(constant.size())), int(session.run(buckets.size()))]}  # fmt: skip


@cases(static_tables, "1x2", "2x1", "2x1-m2run", compare=True)
def test_static_tables_and_tables_from_files(outcome):
    judge_variables(outcome._replace(ranks=[rank["values"] for rank in outcome.ranks], plain=outcome.plain["values"]))
    for rank in outcome.ranks:
        assert rank["back"] == outcome.plain["back"] == [0, 2, -1, 3, 1, 1, 0, -1]
        assert rank["sizes"] == outcome.plain["sizes"] == [3, 7]


def mutable_table(run, kind):
    """A table that the script fills between steps; a step looks up in it."""
    keys = np.array([0, 1, 2, 3, 0, 1, 2, 7], np.int64)
    with run.program():
        key, value, ids = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None]), tf.placeholder(tf.int64, [None])
        if kind == "hash":
            table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, -1.0)
        else:
            table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, -1.0, empty_key=-1, deleted_key=-2)
        insert = table.insert(key, value)
        x = table.lookup(ids)
        loss, train = trained(run, x, tf.train.MomentumOptimizer(0.05, 0.9))
        with run.session() as session:
            losses = []
            for step in range(3):
                session.run(insert, {key: np.arange(step + 1), value: np.arange(step + 1, dtype=np.float32) + step})
                losses += run.train(session, loss, train, [{ids: keys}])
            found, numbers = session.run(table.export())
            return {"values": dict(variables(session), losses=np.float32(losses)), "size": int(session.run(table.size())),
                    "table": sorted([int(key), float(number)] for key, number in zip(found, numbers) if key >= 0)}  # fmt: skip


def judge_mutable(outcome):
    assert outcome.plain["table"] == [[0, 2.0], [1, 3.0], [2, 4.0]]
    for rank in outcome.ranks:
        assert rank["size"] == outcome.plain["size"] == 3 and rank["table"] == outcome.plain["table"]
    judge_variables(outcome._replace(ranks=[rank["values"] for rank in outcome.ranks], plain=outcome.plain["values"]))


@cases(mutable_table, "2x1", "1x2", "1x1-m2run", compare=True, kind="hash")
def test_mutable_tables(outcome):
    judge_mutable(outcome)


@cases(mutable_table, "2x1", "1x2", compare=True, kind="dense")
def test_dense_tables(outcome):
    judge_mutable(outcome)
