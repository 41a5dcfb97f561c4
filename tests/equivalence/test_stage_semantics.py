"""What a program with stages means, whoever holds them: rows 1, 2, 5, 13, 14, 22, 55, 66, 91, 109, 111."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import judge_variables, raises, scalar
from tests.equivalence.test_cases_accumulation import apply_groups
from tests.equivalence.test_cases_numerics import twice
from tests.equivalence.test_cases_semantics import FAST, graphs_in_turn
from tests.equivalence.test_cases_stages import REPLICAS, STAGES
from tests.harness.context import variables
from tests.harness.parametrize import cases


def unrelated_gradients(run):
    """Row 1: rank 1 calls `tf.gradients` for something unrelated first, so that its gradient ops have other names."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        with run.stage(0):
            w = scalar("w", 1)
            if run.rank == 1:
                other = tf.get_variable("other", [], initializer=tf.ones_initializer())
                tf.gradients(tf.square(other), [other])
            y = w * x
        with run.stage(1):
            v = scalar("v", 1)
            loss = tf.reduce_mean(tf.square(v * y))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=[w, v])
        with raises() as caught:
            with tf.Session() as session:
                session.run([w.initializer, v.initializer])
                session.run(train, {x: np.ones([4], np.float32)})
                return {"values": [float(value) for value in session.run([w, v])]}
        return caught[0]


@cases(unrelated_gradients, "2x1-s2-m2", isolated=True)
def test_row_01_other_gradient_names_train_or_are_refused(outcome):
    if all("values" in rank for rank in outcome.ranks):
        assert [rank["values"] for rank in outcome.ranks] == [pytest.approx([0.8, 0.8])] * 2
    else:
        for rank in outcome.ranks:
            assert "EplError" in rank["types"] and rank["seconds"] < FAST, rank


def keras_batch_norm(run):
    """Row 2: Keras batch normalisation in the second stage, switched by a placeholder, which makes conditionals."""
    data = np.random.RandomState(5).randn(3, 8, 3).astype(np.float32)
    with run.program():
        x = tf.placeholder(tf.float32, [None, 3])
        training = tf.placeholder(tf.bool, [])
        with run.stage(0):
            w = tf.get_variable("w", [3], initializer=tf.ones_initializer())
            h = x * w
        layer = tf.keras.layers.BatchNormalization(momentum=0.9, name="bn")
        with run.stage(1):
            # by hand in plain TensorFlow: one copy per replica and micro-batch on the same variables
            parts = tf.split(h, run.layout.batches) if run.plain else [h]
            loss = tf.add_n([tf.reduce_mean(tf.square(layer(part, training=training) - 1.0)) for part in parts]) / len(parts)
            out = layer(h, training=training)
        updates = [] if run.plain else layer.updates[:2]
        run.merge(loss)
        step = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        losses = []
        with run.session() as session:
            for batch in data:
                ((value, *_),) = run.step(session, [loss, step] + updates, {x: batch, training: True})
                losses.append(float(value))
            values = variables(session)
            evaluated = session.run(out, {x: data[0], training: False})
    return {"losses": losses, "variables": values, "evaluated": evaluated}


@cases(keras_batch_norm, *STAGES, "4x1-s2", compare=True)
def test_row_02_conditional_batch_norm_trains(outcome):
    first = outcome.ranks[0]
    for rank in outcome.ranks:
        assert rank["losses"] == pytest.approx(outcome.plain["losses"], rel=1e-5)
        for name in ("w", "bn/gamma", "bn/beta"):
            np.testing.assert_allclose(rank["variables"][name], outcome.plain["variables"][name], rtol=1e-5, atol=1e-6)
        for name, value in first["variables"].items():
            np.testing.assert_array_equal(rank["variables"][name], value, err_msg=name)
        np.testing.assert_array_equal(rank["evaluated"], first["evaluated"])
    assert np.ptp(first["variables"]["bn/moving_mean"]) > 0


@cases(graphs_in_turn, *STAGES, "4x1-s2", compare=True)
def test_row_05_graphs_do_not_disturb_each_other(outcome):
    assert outcome.plain[0] == outcome.plain[1] and outcome.plain[2] == outcome.plain[3]
    for rank in outcome.ranks:
        np.testing.assert_allclose(rank, outcome.plain, rtol=1e-5)


def gradients(run, method):
    """Rows 13, 14: loss = mean(w x + v x^2), x = [1, 3, 5, 7]: the gradients that are fetched, and those that are applied."""
    with run.program({"communication.gradients_reduce_method": method}):
        x = tf.placeholder(tf.float32, [None])
        with run.stage(0):
            w = scalar("w", 1)
            y = w * x
        with run.stage(1):
            v = scalar("v", 1)
            loss = tf.reduce_mean(y + v * tf.square(x))
        optimizer = tf.train.GradientDescentOptimizer(1.0)
        pairs = optimizer.compute_gradients(loss)
        train = optimizer.apply_gradients(pairs)
        with run.session() as session:
            ((found, _),) = run.step(session, [[gradient for gradient, _ in pairs], train], {x: np.float32([1, 3, 5, 7])})
            return {"fetched": [float(one) for one in found], "applied": [1 - float(one) for one in session.run([w, v])]}


def judge_gradients(outcome, expected):
    for rank in outcome.ranks:
        assert rank["fetched"] == pytest.approx(expected, rel=1e-5) and rank["applied"] == pytest.approx(expected, rel=1e-5)


@cases(gradients, *STAGES, *REPLICAS, method="mean")
def test_row_13_fetched_and_applied_gradients_are_global(outcome):
    judge_gradients(outcome, [4, 21])


@cases(gradients, *REPLICAS, method="sum")
def test_row_14_sum_over_two_replicas(outcome):
    judge_gradients(outcome, [8, 42])


@cases(gradients, *STAGES, method="sum")
def test_row_14_one_replica_is_no_sum(outcome):
    judge_gradients(outcome, [4, 21])


def evaluated(run):
    """Row 22: train a net with batch normalisation, then evaluate with the moving statistics on data that all ranks share."""
    random = np.random.RandomState(3)
    with run.program():
        x = tf.placeholder(tf.float32, [None, 4])

        def net(training):
            with tf.variable_scope("net", reuse=tf.AUTO_REUSE):
                with run.stage(0):
                    h = tf.layers.dense(x, 4, tf.nn.relu, kernel_initializer=tf.glorot_uniform_initializer(seed=1), name="hidden")
                    h = tf.layers.batch_normalization(h, momentum=0.9, training=training, name="bn1")
                with run.stage(1):
                    h = tf.layers.batch_normalization(tf.tanh(h), momentum=0.9, training=training, name="bn2")
                    return tf.reduce_mean(tf.square(h - 1.0))

        loss, evaluation = net(True), net(False)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.AdamOptimizer(0.01).minimize(loss)
        with run.session() as session:
            for _ in range(5):
                run.step(session, train, {x: random.randn(8, 4).astype(np.float32)})
            return float(session.run(evaluation, {x: np.ones([8, 4], np.float32)}))


@cases(evaluated, "2x1-s2-m2", *REPLICAS)
def test_row_22_ranks_evaluate_alike(outcome):
    first = outcome.ranks[0]
    assert np.isfinite(first) and all(rank == first for rank in outcome.ranks)


@cases(evaluated, "2x1-s2", compare=True)
def test_row_22_one_batch_evaluates_as_plain_tensorflow(outcome):
    assert outcome.ranks == pytest.approx([outcome.plain] * 2, rel=1e-5)


def updates_in_loop(run):
    """Row 55: batch normalisation inside `map_fn` with its updates as control inputs: a mistake that plain TensorFlow reports."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, 4, 2])
        with run.stage(0):
            out = tf.map_fn(lambda part: tf.layers.batch_normalization(part, training=True, name="bn"), x)
        with run.stage(1):
            loss = tf.reduce_mean(out)
        with raises() as caught:
            with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
                train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
            with run.session() as session:
                run.step(session, train, {x: np.ones([4, 4, 2], np.float32)})
    return caught


def judge_failed_loop(outcome):
    """The process that has the first stage fails as plain TensorFlow does; one with nothing but the second is told that the job is broken."""
    assert outcome.plain, "plain TensorFlow accepts this"
    (first,), *others = outcome.ranks
    assert first["types"] == outcome.plain[0]["types"]
    for found in others:
        # In TensorFlow 2.13 the second stage has no part in this step: the gradient of its mean needs nothing of it.
        assert found or tf.__version__.startswith(("2.12.", "2.13."))
        assert all("EplError" in error["types"] and error["seconds"] < FAST for error in found), found


@cases(updates_in_loop, "1x2-s2-m2", compare=True)
def test_row_55_updates_in_a_loop_fail_as_in_plain_tensorflow(outcome):
    judge_failed_loop(outcome)


@cases(updates_in_loop, "2x1-s2-m2", compare=True, isolated=True)
def test_row_55_updates_in_a_loop_fail_on_all_ranks(outcome):
    judge_failed_loop(outcome)


def same_seed(run):
    """Row 66: with one graph seed: the initial weights (drawn by ops without own seeds), and the numbers of the records that are read."""
    with run.program(seed=1):
        first = run.layout.replicas_of(run.rank)
        records = tf.data.Dataset.range(32)
        records = records.shard(run.layout.replicas, first[0]) if first and not run.plain else records
        number = run.next_batch(records.shuffle(32, seed=5).batch(4))
        with run.stage(0):
            w = tf.get_variable("w", [3, 3], initializer=tf.glorot_uniform_initializer())
            h = w * tf.reduce_mean(tf.cast(number, tf.float32))
        with run.stage(1):
            v = tf.get_variable("v", [3, 3], initializer=tf.glorot_uniform_initializer())
            loss = tf.reduce_mean(tf.matmul(h, v))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with run.session() as session:
            before = session.run([w, v])
            read = [session.run([number, train])[0].tolist() for _ in range(3)]
        return {"before": before, "read": read}


@cases(same_seed, "2x1-s2-m2", "4x1-s2", compare=True)
def test_row_66_same_weights_other_data(outcome):
    for rank in outcome.ranks:
        for value, plain in zip(rank["before"], outcome.plain["before"]):
            np.testing.assert_array_equal(value, plain)
    assert np.any(outcome.plain["before"][0] != outcome.plain["before"][1])
    # The two ranks of a replica see the same records.
    for one, other in zip(outcome.ranks[::2], outcome.ranks[1::2]):
        assert one["read"] == other["read"]
    numbers = [number for rank in outcome.ranks[::2] for number in np.ravel(rank["read"])]
    assert len(set(numbers)) == len(numbers) == 24


@cases(apply_groups, *STAGES, compare=True, clip="norm", groups=3)
def test_row_91_apply_groups_keep_the_clip_by_norm(outcome):
    judge_variables(outcome)


@cases(apply_groups, *STAGES, "4x1-s2", compare=True, clip="global", groups=3)
def test_row_91_apply_groups_keep_the_global_clip(outcome):
    judge_variables(outcome)


def branches(run, steps):
    """Row 109: six branches over both stages, ready in an order that differs from rank to rank and from step to step."""
    random, order = np.random.RandomState(run.rank), []

    def slowly(value, number):
        def dawdle(given):
            time.sleep(random.rand() * 0.004)
            order.append(number)
            return given

        # A custom gradient: a Python function has none of its own.
        @tf.custom_gradient
        def passed(given):
            result = tf.py_func(dawdle, [given], tf.float32, stateful=False)
            result.set_shape([None])
            return result, tf.identity

        return passed(value)

    with run.program():
        x = tf.placeholder(tf.float32, [None, 6])
        ids = tf.placeholder(tf.int32, [None])
        losses, updates = [], []
        for number in range(6):
            with run.stage(0):
                w = tf.get_variable("w%d" % number, [1] if number < 4 else [5, 1], initializer=tf.ones_initializer())
                h = slowly(x[:, number] * (w if number < 4 else tf.gather(w, ids)[:, 0]), number)
            with run.stage(1):
                v = scalar("v%d" % number, 1)
                losses.append(run.merge(tf.reduce_mean(tf.square(slowly(v * h, number) - 2.0))))
            updates.append(tf.train.MomentumOptimizer(0.01, 0.9).minimize(losses[-1], var_list=[w, v]))
        with run.stage(1):
            loss = run.merge(tf.add_n(losses))
        rows = [np.random.RandomState(step).randn(8, 6).astype(np.float32) for step in range(steps)]
        feeds = [{x: rows[step], ids: np.int32([step % 5, 1, 2, 2, 0, 4, 4, 3])} for step in range(steps)]
        with run.session() as session:
            values = run.train(session, loss, updates, feeds)
            found = dict(variables(session), losses=np.float32(values))
            return found if run.plain else dict(found, **{"/order": order})


@pytest.mark.slow
@cases(branches, "2x1-s2-m2", "4x1-s2", compare=True, steps=25)
def test_row_109_independent_branches_in_any_order(outcome):
    judge_variables(outcome)
    for rank in outcome.ranks:
        calls = np.reshape(rank["/order"], [25, -1])
        assert len({tuple(row) for row in calls}) > 5, "the branches end in orders that vary"
    assert outcome.ranks[0]["/order"] != outcome.ranks[1]["/order"]


@cases(twice, *STAGES, "4x1-s2")
def test_row_111_two_inits_in_one_process(outcome):
    for rank in outcome.ranks:
        for history in rank:
            assert history == pytest.approx([67.5, 63.075005, 58.80432, 0.29961747], rel=1e-5)
