"""What an annotated program means: rows 1 to 3, 5, 6, 9, 10, 12."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import judge_variables, raises, regression, scalar, traffic
from tests.harness.context import variables
from tests.harness.parametrize import cases

FAST = 30
"""Seconds within which ranks that do not fit must have been told."""


def unrelated_gradients(run):
    """Rank 1 calls `tf.gradients` for something unrelated first, so that its gradient ops have other names."""
    with run.program():
        if run.rank == 1:
            other = tf.get_variable("other", [], initializer=tf.ones_initializer())
            tf.gradients(tf.square(other), [other])
        w = scalar("w", 1)
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        ((gradient, _),) = pairs = optimizer.compute_gradients(tf.square(w), var_list=[w])
        train = optimizer.apply_gradients(pairs)
        with tf.Session() as session:
            session.run(w.initializer)
            values = []
            for _ in range(2 * run.runs):
                session.run(train)
                values.append(float(session.run(w)))
        return {"gradient": gradient.name, "w": values[run.runs - 1 :: run.runs]}


@cases(unrelated_gradients, "2x1", "2x1-m2")
def test_row_01_other_gradient_names_train(outcome):
    first, second = outcome.ranks
    assert first["gradient"] != second["gradient"], "the names must differ"
    assert first["w"] == second["w"] == pytest.approx([0.8, 0.64], rel=1e-5)


def keras_batch_norm(run):
    """Keras batch normalisation that is switched by a placeholder, which makes conditionals."""
    data = np.random.RandomState(5).randn(3, 8, 3).astype(np.float32)
    with run.program():
        x = tf.placeholder(tf.float32, [None, 3])
        training = tf.placeholder(tf.bool, [])
        layer = tf.keras.layers.BatchNormalization(momentum=0.9, name="bn")
        # by hand in plain TensorFlow: one copy per replica on the same variables
        parts = tf.split(x, run.layout.batches) if run.plain else [x]
        loss = tf.add_n([tf.reduce_mean(tf.square(layer(part, training=training) - 1.0)) for part in parts]) / len(parts)
        updates = [] if run.plain else layer.updates
        run.merge(loss)
        step = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        history = []
        with run.session() as session:
            for batch in data:
                feeds = {x: run.local(batch), training: True}
                fetched = session.run([loss, step] + updates, feeds)
                history.append(float(fetched[0]))
            values = variables(session)
            evaluated = session.run(layer(x, training=training), {x: data[0], training: False})
    return {"losses": history, "variables": values, "evaluated": evaluated}


@cases(keras_batch_norm, "2x1", compare=True)
def test_row_02_conditional_batch_norm_trains(outcome):
    first, second = outcome.ranks
    assert first["losses"] == pytest.approx(outcome.plain["losses"], rel=1e-5)
    for name in ("bn/gamma", "bn/beta"):
        np.testing.assert_allclose(first["variables"][name], outcome.plain["variables"][name], rtol=1e-5, atol=1e-6)
    for name, value in first["variables"].items():
        np.testing.assert_array_equal(value, second["variables"][name], err_msg=name)
    assert np.ptp(first["variables"]["bn/moving_mean"]) > 0
    np.testing.assert_array_equal(first["evaluated"], second["evaluated"])


def other_graph_on_rank_1(run):
    """Rank 1 has one layer more."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, 4])
        h = tf.layers.dense(x, 4, name="common")
        if run.rank == 1:
            h = tf.layers.dense(h, 4, name="surplus")
        train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(h))
        with raises() as caught:
            with run.session() as session:
                session.run(train, {x: np.ones([2, 4], np.float32)})
        return caught


@cases(other_graph_on_rank_1, "2x1", isolated=True)
def test_row_03_other_graphs_are_refused(outcome):
    for rank in outcome.ranks:
        (error,) = rank
        assert "DivergenceError" in error["types"] and error["seconds"] < FAST, error
    assert any("surplus" in rank[0]["text"] for rank in outcome.ranks), outcome.ranks


def graphs_in_turn(run):
    """Train in one graph, then in a second one, then in the first again."""

    def program():
        x, w, _, train, step = regression(run, "momentum")
        return x, w, train, step, run.session()

    def two_steps(model):
        x, w, train, step, session = model
        for start in (1, 5):
            run.step(session, train, {x: np.arange(start, start + 4, dtype=np.float32)})
        return [float(session.run(w)), int(session.run(step))]

    with run.program() as first:
        one = program()
        history = [two_steps(one)]
        with tf.Graph().as_default():
            other = program()
            history.append(two_steps(other))
            with first.as_default():
                history.append(two_steps(one))
            history.append(two_steps(other))
    return history


@cases(graphs_in_turn, "1x2", "2x1", "2x1-m2", compare=True)
def test_row_05_graphs_do_not_disturb_each_other(outcome):
    assert outcome.plain[0] == outcome.plain[1] and outcome.plain[2] == outcome.plain[3]
    for rank in outcome.ranks:
        np.testing.assert_allclose(rank, outcome.plain, rtol=1e-5)


def two_optimizers(run):
    """One step of one optimizer, then two of another."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        d, g = scalar("d", 1), scalar("g", 1)
        train_d = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(d * x)), var_list=[d])
        train_g = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(g * x)), var_list=[g])
        with run.session() as session:
            for train in (train_d, train_g, train_g):
                run.step(session, train, {x: np.float32([1, 2])})
            return [float(value) for value in session.run([d, g])]


@cases(two_optimizers, "1x2", "2x1", "1x1-m2", "1x1-m2run")
def test_row_06_two_optimizers(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx([0.5, 0.25], rel=1e-5)


def adversaries(run, order):
    """A generator and a discriminator with losses that lead through each other's weights, trained in the given order of steps."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        d, g = scalar("d", 1), scalar("g", 1)
        scalar("unused", 1)
        made = g * x
        loss_d = run.merge(tf.reduce_mean(tf.square(d * made)) + tf.reduce_mean(tf.square(d * x - 1.0)))
        loss_g = run.merge(tf.reduce_mean(tf.square(d * made - 1.0)))
        optimizers = {"d": tf.train.MomentumOptimizer(0.1, 0.9), "g": tf.train.AdamOptimizer(0.1)}
        train = {"d": optimizers["d"].minimize(loss_d, var_list=[d]), "g": optimizers["g"].minimize(loss_g, var_list=[g])}
        train["both"] = tf.group(train["d"], train["g"])
        moved, history = [], []
        with run.session() as session:
            for name in order:
                run.step(session, [train[name], loss_d, loss_g], {x: np.float32([1, 2, 1.5, -1])})
                values = variables(session)
                history.append([float(values[name]) for name in ("d", "g", "unused", "d/Momentum", "g/Adam", "g/Adam_1", "beta1_power")])
            for name in ("d", "g", "both"):
                feeds = [{x: run.local(np.float32([1, 2, 1.5, -1]), number)} for number in range(run.runs)]
                moved.append([traffic(session, train[name], feed) for feed in feeds][-1])
        return {"history": history, "moved": moved}


@cases(adversaries, "1x2", "2x1", "1x1-m2run", "2x1-m2run", compare=True, order=("d", "g", "g", "both", "g", "d", "d", "both"))
def test_row_06_adversaries(outcome):
    for rank in outcome.ranks:
        np.testing.assert_allclose(rank["history"], outcome.plain["history"], rtol=1e-5)
    steps = np.array(outcome.plain["history"])
    assert steps[1][0] == steps[0][0] and steps[1][1] != steps[0][1], "the optimizers of the reference are independent"


@cases(adversaries, "2x1", "2x1-m2", "2x1-m2run", order=("d", "g", "both"))
def test_row_06_each_optimizer_sends_its_own_gradients_once(outcome):
    for rank in outcome.ranks:
        for moved, gradients in zip(rank["moved"], (1, 1, 2)):
            assert all(collective in ("allreduce", "groupedallreduce") for collective, _ in moved), moved
            assert sum(len(shapes) for _, shapes in moved) == gradients, moved


def wide_and_deep(run):
    """Two optimizers with variables of their own in one training op, whose gradient for the shared bias is the sum of both uses."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, 3])
        ids = tf.cast(tf.abs(x[:, 0]) * 2.0, tf.int32)
        wide = tf.get_variable("wide", [20], initializer=tf.random_normal_initializer(seed=1))
        bias = scalar("bias", 0)
        deep = tf.layers.dense(x, 4, tf.tanh, kernel_initializer=tf.glorot_uniform_initializer(seed=2), name="deep")
        loss = run.merge(tf.reduce_mean(tf.square(tf.gather(wide, ids) + tf.reduce_sum(deep, 1) + bias - x[:, 1])))
        variables_of = [[wide, bias], [v for v in tf.trainable_variables() if v not in (wide, bias)]]
        step = tf.train.get_or_create_global_step()
        updates = [tf.train.AdagradOptimizer(0.1).minimize(loss, var_list=variables_of[0], name="wide_update"),
                   tf.train.AdamOptimizer(0.05).minimize(loss, var_list=variables_of[1], name="deep_update")]  # fmt: skip
        with tf.control_dependencies(updates):
            train = step.assign_add(1)
        with run.session() as session:
            losses = run.train(session, loss, train, [{x: np.random.RandomState(k).randn(8, 3).astype(np.float32)} for k in range(5)])
            return dict(variables(session), losses=losses)


@cases(wide_and_deep, "1x2", "2x1", "2x1-m2run", "1x1-m2", compare=True)
def test_row_06_wide_and_deep(outcome):
    judge_variables(outcome)


def two_rates(run):
    """Two updates of one shape: only a constant tells them apart."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        w = scalar("w", 1)
        loss = tf.reduce_mean(x * w)
        slow, fast = (tf.train.GradientDescentOptimizer(rate).minimize(loss) for rate in (0.1, 1.0))
        with run.session() as session:
            values = []
            for train in (slow, fast, slow):
                run.step(session, train, {x: np.float32([1, 3])})
                values.append(float(session.run(w)))
            return values


@cases(two_rates, "1x2", "2x1")
def test_row_06_two_updates_of_one_shape(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx([0.8, -1.2, -1.4], rel=1e-5)


def mapped(run, v2):
    """A mapped function with a weight in the loop."""
    with run.program(annotate="scope", control_flow_v2=v2):
        x = tf.placeholder(tf.float32, [None, 3])
        with run.scope():
            w = tf.get_variable("w", [3], initializer=tf.random_normal_initializer(seed=1))
            loss = tf.reduce_mean(tf.square(tf.map_fn(lambda row: row * w, x) - 1.0))
        run.merge(loss)
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        steps = [{x: np.random.RandomState(step).randn(8, 3).astype(np.float32)} for step in range(5)]
        with run.session() as session:
            return dict(variables(session), losses=run.train(session, loss, train, steps), **variables(session))


@cases(mapped, "1x2", "2x1", "1x1-m2run", compare=True, v2=False)
def test_row_09_map_fn_v1(outcome):
    judge_variables(outcome)


@cases(mapped, "1x2", "2x1", "1x1-m2run", compare=True, v2=True)
def test_row_09_map_fn_v2(outcome):
    judge_variables(outcome)


def rnn(run):
    """A dynamic RNN, in the scope of a strategy."""
    with run.program(annotate="scope"):
        x = tf.placeholder(tf.float32, [None, 3, 2])
        with run.scope():
            cell = tf.nn.rnn_cell.BasicRNNCell(2, name="cell")
            tf.get_variable_scope().set_initializer(tf.glorot_uniform_initializer(seed=1))
            _, last = tf.nn.dynamic_rnn(cell, x, dtype=tf.float32)
            loss = tf.reduce_mean(tf.square(last - 1.0))
        run.merge(loss)
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        steps = [{x: np.random.RandomState(step).randn(8, 3, 2).astype(np.float32)} for step in range(5)]
        with run.session() as session:
            losses = run.train(session, loss, train, steps)
            return dict(variables(session), losses=losses)


@cases(rnn, "1x2", "1x4", "1x2-m2", "1x2-m2run", compare=True)
def test_row_10_dynamic_rnn_on_several_devices(outcome):
    judge_variables(outcome)


def pairs(run, varying):
    """Features and labels of one element must meet; every element is used once."""
    total = 4 * run.layout.batches
    with run.program():
        lengths = np.arange(total) % 3 + 1 if varying else np.full(total, 2)

        def element(number, length):
            return tf.fill([length], number), tf.cast(length, tf.float32) * number

        mine = np.array_split(np.arange(total), run.ranks)[run.rank]
        dataset = tf.data.Dataset.from_tensor_slices((mine.astype(np.float32), lengths[mine].astype(np.int32))).map(element)
        features, label = run.next_batch(dataset)
        w = scalar("w", 1)
        mismatch = tf.square(tf.reduce_sum(features) - label)
        run.merge(mismatch)
        number = tf.reshape(features[0], [1])
        run.merge(number, "GLOBAL_CONCAT_OBJECTS")
        train = tf.train.GradientDescentOptimizer(0.1).minimize(mismatch + 0.0 * w)
        found, wrong = [], 0.0
        with run.session() as session:
            runs = total if run.plain else total // (run.layout.batches // run.layout.runs)
            for _ in range(runs):
                values = session.run([number, mismatch, train])
                found += values[0].tolist()
                wrong += float(values[1])
    return {"found": found, "wrong": wrong, "total": total}


@cases(pairs, "1x2", "2x1", "1x1-m2", "1x1-m2run", "2x2-m2run", varying=False)
def test_row_12_features_meet_their_labels(outcome):
    for rank in outcome.ranks:
        assert rank["wrong"] == 0 and sorted(rank["found"]) == list(range(rank["total"]))


@cases(pairs, "1x2", "2x1", "1x1-m2", "1x1-m2run", varying=True)
def test_row_97_also_when_shapes_vary(outcome):
    for rank in outcome.ranks:
        assert rank["wrong"] == 0 and sorted(rank["found"]) == list(range(rank["total"]))
