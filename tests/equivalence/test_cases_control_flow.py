"""Control flow: rows 54, 55, 57."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import judge_variables, raises, scalar
from tests.harness.context import variables
from tests.harness.parametrize import cases

PREDICATE = [True, False]


def lstm(run):
    """A masked LSTM whose variables are made while the loop is built."""
    with run.program(annotate="scope"):
        x, length = tf.placeholder(tf.float32, [None, 5, 3]), tf.placeholder(tf.int32, [None])
        with run.scope(), tf.variable_scope("net", initializer=tf.glorot_uniform_initializer(seed=1)):
            cell = tf.nn.rnn_cell.BasicLSTMCell(4, name="cell")
            states, _ = tf.nn.dynamic_rnn(cell, x, sequence_length=length, dtype=tf.float32)
            loss = tf.reduce_mean(tf.square(tf.reduce_sum(states, [1, 2]) - 1.0))
        run.merge(loss)
        train = tf.train.AdamOptimizer(0.01).minimize(loss)
        steps = []
        for step in range(5):
            random = np.random.RandomState(step)
            steps.append({x: random.randn(8, 5, 3).astype(np.float32), length: random.randint(1, 6, 8).astype(np.int32)})
        with run.session() as session:
            losses = run.train(session, loss, train, steps)
            return dict(variables(session), losses=losses)


@cases(lstm, "1x2", "2x1", "1x4", compare=True)
def test_row_54_lstm(outcome):
    judge_variables(outcome)


def updates_in_loop(run):
    """Batch normalisation inside `map_fn` with its updates as control inputs: a mistake that plain TensorFlow reports."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, 4, 2])
        out = tf.map_fn(lambda part: tf.layers.batch_normalization(part, training=True, name="bn"), x)
        with raises() as caught:
            with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
                train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(out))
            with run.session() as session:
                run.step(session, train, {x: np.ones([4, 4, 2], np.float32)})
    return [error["types"] for error in caught]


@cases(updates_in_loop, "1x2", "2x1", compare=True)
def test_row_55_updates_in_a_loop_fail_as_in_plain_tensorflow(outcome):
    assert outcome.plain, "plain TensorFlow accepts this"
    for rank in outcome.ranks:
        assert rank == outcome.plain


def branch(run, v2):
    """Each replica takes another branch: a = b = 1, x = [2 | 4]."""
    with run.program(control_flow_v2=v2):
        x, p = tf.placeholder(tf.float32, [None]), tf.placeholder(tf.bool, [None])
        a, b = scalar("a", 1), scalar("b", 1)
        loss = tf.reduce_mean(tf.cond(p[0], lambda: a * x, lambda: b * x))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with run.session() as session:
            run.step(session, train, {x: np.float32([2, 4]), p: np.array(PREDICATE)})
            return [float(value) for value in session.run([a, b])]


@cases(branch, "1x2", "2x1", "1x1-m2", "1x1-m2run", v2=False)
def test_row_57_untaken_branches_count_as_zero_v1(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx([0.9, 0.8], rel=1e-5)


@cases(branch, "1x2", "2x1", "1x1-m2", "1x1-m2run", v2=True)
def test_row_57_untaken_branches_count_as_zero_v2(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx([0.9, 0.8], rel=1e-5)


def python_branch(run):
    """A branch in Python, so that rank 1 has no gradient for `b`."""
    with run.program():
        a, b = scalar("a", 1), scalar("b", 1)
        x = tf.placeholder(tf.float32, [None])
        loss = tf.reduce_mean((a * x) if run.rank == 0 else (b * x))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=[a, b])
        with raises() as caught:
            with run.session() as session:
                session.run(train, {x: np.float32([2])})
        return caught


@cases(python_branch, "2x1", isolated=True)
def test_row_57_a_python_branch_is_refused(outcome):
    for number, rank in enumerate(outcome.ranks):
        (error,) = rank
        assert "DivergenceError" in error["types"] and error["seconds"] < 30, error
        mine, other = ("ab", "ba")[number]
        for text in ("Rank %d does not run the program that rank %d runs" % (number, 1 - number), "first difference is node",
                     "'%s' (VarHandleOp) here" % mine, "'%s' (VarHandleOp) there" % other, "Every rank must build the same graph"):  # fmt: skip
            assert text in error["text"], error


def guarded_update(run):
    """An update in a branch that is taken when the gradients are finite; what is run is the conditional's output."""
    found = {}
    for how in ("tensor", "behind", "op", "group"):
        with run.program():
            w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
            x = tf.placeholder(tf.float32, [None])
            with run.scope():
                loss = tf.reduce_mean(tf.square(w * x - 3.0 * x))
            run.merge(loss)
            optimizer = tf.train.GradientDescentOptimizer(0.01)
            pairs = optimizer.compute_gradients(loss)
            finite = tf.reduce_all(tf.is_finite(pairs[0][0]))
            train = tf.cond(finite, lambda: optimizer.apply_gradients(pairs), tf.no_op)  # noqa: B023
            fetched = {"tensor": train, "behind": tf.identity(train), "op": train.op, "group": tf.group(train)}[how]
            with run.session() as session:
                losses = run.train(session, loss, fetched, [{x: np.array([1.0, 3.0, 2.0, 4.0], np.float32)}] * 4)
                found[how] = dict(variables(session), losses=losses)
    return found


@cases(guarded_update, "1x2", "1x4", "2x1", "2x2", compare=True)
def test_an_update_in_a_branch_is_made_on_all_replicas(outcome):
    for rank in outcome.ranks:
        for how, values in rank.items():
            assert values["losses"] == pytest.approx(outcome.plain[how]["losses"], rel=1e-5), how
            assert values["w"] == pytest.approx(outcome.plain[how]["w"], rel=1e-5), how
