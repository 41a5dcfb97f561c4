"""Sparse gradients, partitioned variables and tables in two stages: rows 59 to 62."""

import numpy as np
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import judge_variables
from tests.equivalence.test_cases_sparse import VOCABULARY, ids_of
from tests.equivalence.test_cases_stages import REPLICAS, STAGES
from tests.harness.context import variables
from tests.harness.parametrize import cases


def lookup(run, optimizer="adam", kind="random", dense=False, tied=False, partitions=0, far=False):
    """Train an embedding of the first stage: optionally shared with the output of the second one, in partitions, or looked up there (`far`)."""
    with run.program({"communication.sparse_as_dense": dense}):
        ids = tf.placeholder(tf.int32, [None, 3])
        partitioner = tf.fixed_size_partitioner(partitions) if partitions else None
        with run.stage(0):
            table = tf.get_variable("table", [VOCABULARY, 4], initializer=tf.random_normal_initializer(seed=1), partitioner=partitioner)
            h = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1)
        with run.stage(1):
            if far:
                h += tf.nn.embedding_lookup(table, ids[:, 1])
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


@cases(lookup, *STAGES, "4x1-s2", compare=True, dense=True)
def test_row_59_sparse_as_dense(outcome):
    judge_variables(outcome)


@cases(lookup, "2x1-s2-m2", "1x2-s2-m2", *REPLICAS, compare=True, optimizer="momentum")
def test_row_59_sparse(outcome):
    judge_variables(outcome)


@cases(lookup, *STAGES, "4x1-s2", compare=True, tied=True)
def test_row_60_tied_softmax_and_embedding(outcome):
    judge_variables(outcome)


@cases(lookup, "2x1-s2-m2", "4x1-s2", compare=True, tied=True, dense=True)
def test_row_60_tied_and_sparse_as_dense(outcome):
    judge_variables(outcome)


@cases(lookup, "2x1-s2", "2x1-s2-m2", "4x1-s2", compare=True, kind="same", optimizer="adagrad")
def test_row_61_one_row_looked_up_by_all(outcome):
    judge_variables(outcome)


@cases(lookup, "2x1-s2-m2", "4x1-s2", compare=True, optimizer="adagrad", far=True)
def test_row_62_a_table_that_both_stages_look_up_in(outcome):
    judge_variables(outcome)


@cases(lookup, *STAGES, "4x1-s2", compare=True, partitions=3)
def test_row_62_partitioned_variable(outcome):
    judge_variables(outcome)


def strings_and_tables(run):
    """A variable of strings and a lookup table in each stage."""
    with run.program():
        words = tf.placeholder(tf.string, [None])

        def numbers(stage, given):
            keys = tf.constant(["one", "two", "three"] if stage == 0 else [1, 2, 3], tf.string if stage == 0 else tf.int64)
            values = tf.constant([1.0, 2.0, 3.0] if stage == 0 else [0.5, 0.25, -1.0])
            return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1.0).lookup(given)

        with run.stage(0):
            name = tf.get_variable("name", initializer=tf.constant("a word"), trainable=False, use_resource=True)
            number = numbers(0, words)
            y = tf.get_variable("w", [], initializer=tf.zeros_initializer()) * number
        with run.stage(1):
            other = tf.get_variable("other", initializer=tf.constant("another"), trainable=False, use_resource=True)
            target = numbers(1, tf.cast(number, tf.int64))
            v = tf.get_variable("v", [], initializer=tf.ones_initializer())
            loss = run.merge(tf.reduce_mean(tf.square(v * y - target)))
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        with run.session() as session:
            losses = run.train(session, loss, train, [{words: np.array(["one", "two", "three", "none"])}] * 3)
            values = {one.op.name: session.run(one) for one in (v, *tf.trainable_variables())}
            found = {"values": values, "losses": losses}
            if run.ranks == 1:  # strings do not travel
                found["names"] = [session.run(name), session.run(other)]
            return found


@cases(strings_and_tables, *STAGES, "4x1-s2", compare=True)
def test_row_62_string_variables_and_tables(outcome):
    assert outcome.plain["names"] == ["a word", "another"]
    for rank in outcome.ranks:
        assert len(outcome.ranks) > 1 or rank["names"] == outcome.plain["names"]
        np.testing.assert_allclose(rank["losses"], outcome.plain["losses"], rtol=1e-5)
        for name, value in outcome.plain["values"].items():
            np.testing.assert_allclose(rank["values"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
