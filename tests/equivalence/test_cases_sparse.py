"""Sparse gradients, partitioned variables, tables: rows 59 to 62."""

import numpy as np
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import judge_variables, traffic
from tests.harness.context import variables
from tests.harness.parametrize import cases

VOCABULARY = 50


def ids_of(step, kind):
    """[8, 3] word numbers of a global batch."""
    if kind == "same":
        return np.zeros([8, 3], np.int32)
    return np.random.RandomState(step).randint(0, VOCABULARY, (8, 3)).astype(np.int32)


def lookup(run, optimizer="adam", kind="random", dense=False, tied=False, partitions=0):
    """Train an embedding: optionally shared with the output layer, or in partitions."""
    with run.program({"communication.sparse_as_dense": dense}):
        ids = tf.placeholder(tf.int32, [None, 3])
        partitioner = tf.fixed_size_partitioner(partitions) if partitions else None
        table = tf.get_variable("table", [VOCABULARY, 4], initializer=tf.random_normal_initializer(seed=1), partitioner=partitioner)
        h = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1)
        h = tf.layers.dense(h, 4, tf.tanh, kernel_initializer=tf.glorot_uniform_initializer(seed=2), name="hidden")
        if tied:
            logits = tf.matmul(h, table, transpose_b=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids[:, 0], logits=logits))
        else:
            loss = tf.reduce_mean(tf.square(h - 0.5))
        run.merge(loss)
        rule = {"adam": tf.train.AdamOptimizer(0.05), "momentum": tf.train.MomentumOptimizer(0.1, 0.9), "adagrad": tf.train.AdagradOptimizer(0.1)}
        train = rule[optimizer].minimize(loss, global_step=tf.train.get_or_create_global_step())
        with run.session() as session:
            losses = run.train(session, loss, train, [{ids: ids_of(step, kind)} for step in range(5)])
            return dict(variables(session), losses=losses)


@cases(lookup, "1x2", "2x1", "2x1-m2run", compare=True, dense=True)
def test_row_59_sparse_as_dense(outcome):
    judge_variables(outcome)


@cases(lookup, "1x2", "2x1", "2x1-m2", compare=True, dense=True, optimizer="momentum")
def test_row_59_sparse_as_dense_leaves_other_rows_alone(outcome):
    judge_variables(outcome)


@cases(lookup, "1x2", "2x1", "4x1", compare=True, dense=False, optimizer="momentum")
def test_row_59_sparse(outcome):
    judge_variables(outcome)


@cases(lookup, "1x2", "2x1", "2x1-m2", "2x1-m2run", compare=True, tied=True)
def test_row_60_tied_softmax_and_embedding(outcome):
    judge_variables(outcome)


@cases(lookup, "2x1", compare=True, tied=True, dense=True)
def test_row_60_tied_and_sparse_as_dense(outcome):
    judge_variables(outcome)


@cases(lookup, "1x2", "2x1", "2x1-m2run", compare=True, kind="same", optimizer="adagrad")
def test_row_61_one_row_looked_up_by_all(outcome):
    judge_variables(outcome)


@cases(lookup, "1x1-m2", "1x1-m2run", "2x1-m2", compare=True, optimizer="adagrad")
def test_row_62_sparse_and_accumulation(outcome):
    judge_variables(outcome)


@cases(lookup, "1x2", "2x1", "2x1-m2", compare=True, partitions=3)
def test_row_62_partitioned_variable(outcome):
    judge_variables(outcome)


def strings_and_tables(run):
    """A variable of strings, and a lookup table on the way to the loss."""
    with run.program():
        words = tf.placeholder(tf.string, [None])
        name = tf.get_variable("name", initializer=tf.constant("a word"), trainable=False, use_resource=True)
        keys = tf.lookup.KeyValueTensorInitializer(tf.constant(["one", "two", "three"]), tf.constant([1.0, 2.0, 3.0]))
        numbers = tf.lookup.StaticHashTable(keys, -1.0).lookup(words)
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        loss = tf.reduce_mean(tf.square(w * numbers - 2.0))
        run.merge(loss)
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        with run.session() as session:
            batch = np.array(["one", "two", "three", "none"])
            losses = run.train(session, loss, train, [{words: batch}] * 3)
            return {"name": session.run(name), "values": {"w": np.float32(session.run(w)), "losses": losses}}


@cases(strings_and_tables, "1x2", "2x1", "2x1-m2run", compare=True)
def test_row_62_string_variables_and_tables(outcome):
    for rank in outcome.ranks:
        assert rank["name"] == "a word"
        for name, value in outcome.plain["values"].items():
            np.testing.assert_allclose(rank["values"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def counted_tables(run, monitored):
    """How often the keys of a lookup table were computed: before, right after its initialisation and after three steps; the losses, the weight.

    monitored: a monitored session runs the table's initializer.
    """
    calls = []

    def keys():
        calls.append(run.rank)
        return np.array([b"one", b"two", b"three"], object)

    with run.program():
        words = tf.placeholder(tf.string, [None])
        # stateful, so that a copy in the graph would be another call
        found = tf.py_func(keys, [], tf.string, stateful=True)
        found.set_shape([3])
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(found, tf.constant([1.0, 2.0, 3.0])), -1.0)
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        loss = run.merge(tf.reduce_mean(tf.square(w * table.lookup(words) - 2.0)))
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        counts = [len(calls)]
        steps = [{words: np.array(["one", "two", "three", "none"])}] * 3
        with tf.train.MonitoredTrainingSession(log_step_count_steps=None) if monitored else run.session() as session:
            counts.append(len(calls))
            losses = run.train(session, loss, train, steps)
            weight = session.run(w)
        counts.append(len(calls))
        return {"counts": counts, "ranks": sorted(set(calls)), "values": {"w": np.float32(weight), "losses": np.float32(losses)}}


def judge_counted(outcome):
    for number, rank in enumerate(outcome.ranks):
        assert rank["counts"] == outcome.plain["counts"] == [0, 1, 1], "the initializer runs once in each process"
        assert rank["ranks"] == [number]
        for name, value in outcome.plain["values"].items():
            np.testing.assert_allclose(rank["values"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@cases(counted_tables, "1x2", "1x4", "2x1", "2x1-m2", "2x1-m2run", compare=True, monitored=False)
def test_row_62_tables_are_initialised_once(outcome):
    judge_counted(outcome)


@cases(counted_tables, "1x2", "2x1", compare=True, monitored=True)
def test_row_62_a_monitored_session_initialises_tables_once(outcome):
    judge_counted(outcome)


# --- what travels -------------------------------------------------------------------------

WORDS, WIDTH = 1000, 4


def wire(run, kind, dense=False, tied="", resource=True):
    """What each run of one step moves between ranks, and how many different words this rank looks up; then training goes on."""
    same = np.zeros([1024], np.int32)
    batches = [same if kind == "same" else np.random.RandomState(step).randint(0, 60, 1024).astype(np.int32) for step in range(3)]
    with run.program({"communication.sparse_as_dense": dense}, resource=resource):
        ids = tf.placeholder(tf.int32, [None])
        table = tf.get_variable("table", [WORDS, WIDTH], initializer=tf.random_normal_initializer(seed=1))
        h = tf.nn.embedding_lookup(table, ids)
        if tied:
            output = table if tied == "matmul" else tf.gather(table, tf.range(WORDS))
            logits = tf.matmul(h, output, transpose_b=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=logits))
        else:
            loss = tf.reduce_mean(tf.square(h - 0.5))
        optimizer = tf.train.MomentumOptimizer(0.5, 0.9) if tied else tf.train.AdamOptimizer(0.05)  # Adam magnifies the noise of tiny gradients
        train = optimizer.minimize(loss)
        with run.session() as session:
            run.step(session, train, {ids: batches[0]})
            mine = [run.local(batches[1], number) for number in range(run.runs)]
            moved = [traffic(session, train, {ids: part}) for part in mine]
            run.step(session, train, {ids: batches[2]})
            return {"moved": moved, "words": len(np.unique(mine)), "variables": variables(session)}


def judge_table(outcome):
    for rank in outcome.ranks:
        for name, value in outcome.plain["variables"].items():
            np.testing.assert_allclose(rank["variables"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def judge_rows(outcome):
    """All runs of a step but the last move nothing; the last one moves each rank's different words once, and nothing else."""
    rows = sum(rank["words"] for rank in outcome.ranks)
    for rank in outcome.ranks:
        assert all(moved == [] for moved in rank["moved"][:-1]), rank["moved"]
        assert rank["moved"][-1] == [["allgather", [[rows]]], ["allgather", [[rows, WIDTH]]]]
    judge_table(outcome)


@cases(wire, "2x1", "2x2", "2x1-m2", "2x1-m2run", compare=True, kind="same")
def test_row_61_each_rank_sends_one_row(outcome):
    assert [rank["words"] for rank in outcome.ranks] == [1, 1]
    judge_rows(outcome)


@cases(wire, "2x1", "2x2", "2x1-m2", "2x1-m2run", compare=True, kind="random")
def test_row_61_each_word_is_sent_once(outcome):
    assert all(1 < rank["words"] <= 60 for rank in outcome.ranks)
    judge_rows(outcome)


@cases(wire, "2x1", compare=True, kind="random", resource=False)
def test_row_61_reference_variables(outcome):
    judge_rows(outcome)


@cases(wire, "2x1", "2x1-m2run", compare=True, kind="random", dense=True)
def test_row_59_the_table_is_sent_instead(outcome):
    for rank in outcome.ranks:
        ((collective, shapes),) = rank["moved"][-1]
        assert collective in ("allreduce", "groupedallreduce") and shapes.count([WORDS, WIDTH]) == 1, rank["moved"]
        assert sum(np.prod(shape) for shape in shapes) <= WORDS * WIDTH + WORDS, "besides at most a number for each word"
    judge_table(outcome)


@cases(wire, "2x1", "2x1-m2", "2x1-m2run", compare=True, kind="random", tied="matmul")
def test_row_60_no_more_rows_than_the_table_and_the_words(outcome):
    judge_tied(outcome)


@cases(wire, "2x1", compare=True, kind="random", tied="matmul", resource=False)
def test_row_60_reference_variables(outcome):
    judge_tied(outcome)


@cases(wire, "2x1", compare=True, kind="random", tied="gather")
def test_row_60_a_gradient_whose_rows_are_more_than_the_table(outcome):
    judge_tied(outcome)


def judge_tied(outcome):
    """As many rows as the table and the looked up words have reach a rank at most."""
    words = sum(rank["words"] for rank in outcome.ranks)
    for rank in outcome.ranks:
        assert all(moved == [] for moved in rank["moved"][:-1]), rank["moved"]
        rows = sum(shape[0] for collective, shapes in rank["moved"][-1] for shape in shapes if shape[1:] == [WIDTH])
        assert WORDS <= rows <= WORDS + words, rank["moved"]
    judge_table(outcome)
