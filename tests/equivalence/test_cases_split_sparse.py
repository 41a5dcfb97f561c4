"""Rows 59 to 62 where tables are split."""

import numpy as np
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import SPLIT_DEVICES, SPLIT_RANKS, SPLIT_UNEVEN, judge_variables, normal, traffic
from tests.harness.context import variables
from tests.harness.parametrize import cases

WORDS, WIDTH = 50, 4


def lookup(run, optimizer="adam", same=False, dense=False, tied=False, partitions=0):
    """An embedding that is divided: optionally shared with the output layer, or in partitions."""
    with run.program({"communication.sparse_as_dense": dense}):
        ids = tf.placeholder(tf.int32, [None, 3])
        with run.split():
            partitioner = tf.fixed_size_partitioner(partitions) if partitions else None
            table = tf.get_variable("table", [WORDS, WIDTH], initializer=tf.random_normal_initializer(seed=1), partitioner=partitioner)
            h = tf.tanh(tf.matmul(tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1), normal("hidden", WIDTH, WIDTH, seed=2)))
            if tied:
                logits = tf.matmul(h, table, transpose_b=True)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids[:, 0], logits=logits))
            else:
                loss = tf.reduce_mean(tf.square(h - 0.5))
        run.merge(loss)
        rule = {"adam": tf.train.AdamOptimizer(0.05), "momentum": tf.train.MomentumOptimizer(0.1, 0.9), "adagrad": tf.train.AdagradOptimizer(0.1)}
        train = rule[optimizer].minimize(loss, global_step=tf.train.get_or_create_global_step())
        feeds = [{ids: np.random.RandomState(n).randint(0, 1 if same else WORDS, (12, 3)).astype(np.int32)} for n in range(5)]
        with run.session() as session:
            losses = run.train(session, loss, train, feeds)
            return dict(variables(session), losses=losses)


@cases(lookup, SPLIT_RANKS, SPLIT_UNEVEN, compare=True, dense=True)
def test_row_59_sparse_as_dense(outcome):
    judge_variables(outcome)


@cases(lookup, SPLIT_RANKS, SPLIT_DEVICES, compare=True, dense=True, optimizer="momentum")
def test_row_59_sparse_as_dense_leaves_other_rows_alone(outcome):
    judge_variables(outcome)


@cases(lookup, SPLIT_RANKS, SPLIT_UNEVEN, "4x1-p2", compare=True, optimizer="momentum")
def test_row_59_sparse(outcome):
    judge_variables(outcome)


@cases(lookup, SPLIT_RANKS, SPLIT_UNEVEN, "2x1-p2-m2", compare=True, tied=True)
def test_row_60_tied_softmax_and_embedding(outcome):
    judge_variables(outcome)


@cases(lookup, SPLIT_RANKS, compare=True, tied=True, dense=True)
def test_row_60_tied_and_sparse_as_dense(outcome):
    judge_variables(outcome)


@cases(lookup, SPLIT_RANKS, SPLIT_UNEVEN, "2x1-p2-m2", compare=True, same=True, optimizer="adagrad")
def test_row_61_one_row_looked_up_by_all(outcome):
    judge_variables(outcome)


@cases(lookup, "2x1-p2-m2", "1x2-p2-m2", compare=True, optimizer="adagrad")
def test_row_62_sparse_and_accumulation(outcome):
    judge_variables(outcome)


@cases(lookup, SPLIT_RANKS, SPLIT_UNEVEN, "2x1-p2-m2", compare=True, partitions=3)
def test_row_62_partitioned_variable(outcome):
    judge_variables(outcome)


def rows_that_move(run):
    """What one step moves between ranks when all samples look up one row of a divided table."""
    with run.program():
        ids = tf.placeholder(tf.int32, [None])
        with run.split():
            loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(normal("table", 1000, 3), ids) - 0.5))
        train = tf.train.AdagradOptimizer(0.1).minimize(loss)
        with run.session() as session:
            batch = run.local(np.zeros([1024], np.int32))
            session.run(train, {ids: batch})
            return traffic(session, train, {ids: batch})


@cases(rows_that_move, SPLIT_RANKS)
def test_row_61_each_rank_sends_one_row_of_the_gradient(outcome):
    for moved in outcome.ranks:
        assert ["allgather", [[2, 3]]] in moved, "the rows of equal words are added before: %s" % moved


def strings_and_tables(run):
    """A variable of strings and a lookup table in a split scope, whose keys are computed once."""
    calls = []

    def keys():
        calls.append(run.rank)
        return np.array([b"one", b"two", b"three"], object)

    with run.program():
        words = tf.placeholder(tf.string, [None])
        with run.split():
            name = tf.get_variable("name", initializer=tf.constant("a word"), trainable=False, use_resource=True)
            found = tf.py_func(keys, [], tf.string, stateful=True)
            found.set_shape([3])
            table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(found, tf.constant([1.0, 2.0, 3.0])), -1.0)
            loss = tf.reduce_mean(tf.square(tf.matmul(table.lookup(words)[:, None], normal("w", 1, 6)) - 2.0))
        run.merge(loss)
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        with run.session() as session:
            losses = run.train(session, loss, train, [{words: np.array(["one", "two", "three", "none"])}] * 3)
            w = next(v for v in tf.trainable_variables() if v.op.name == "w")
            return {"name": session.run(name), "calls": len(calls), "values": {"w": session.run(w), "losses": losses}}


@cases(strings_and_tables, SPLIT_RANKS, SPLIT_DEVICES, compare=True)
def test_row_62_string_variables_and_tables(outcome):
    for rank in outcome.ranks:
        assert rank["name"] == "a word" and rank["calls"] == outcome.plain["calls"] == 1
        for name, value in outcome.plain["values"].items():
            np.testing.assert_allclose(rank["values"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
