"""Mixed precision and loss scales in the cases of users: rows 39, 77, 78, 80, 82, 83, 84, and what is not or can't be skipped."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.test_amp import ROWS, WIDTH, layer, loss_scale, near, options
from tests.harness.context import variables
from tests.harness.parametrize import cases
from tests.harness.pool import request, without_epl

AMP = options()
KEY = "EPL_AMP/state"


def batch(step, bad=False):
    """A batch of random rows; with `bad` the last one is infinite."""
    x = np.random.RandomState(step).randn(ROWS, WIDTH).astype(np.float32)
    if bad:
        x[-1] = np.inf
    return x


def network(run, x):
    """Two layers, one in each stage, and the loss."""
    h = x
    for number in range(2):
        if run.layout.stages > 1:
            with run.stage(number):
                h = layer(h, number)
                loss = tf.reduce_mean(0.02 * tf.square(tf.reduce_sum(h, 1) - 1.0)) if number else None
        else:
            h = layer(h, number)
            loss = tf.reduce_mean(0.02 * tf.square(tf.reduce_sum(h, 1) - 1.0)) if number else None
    return run.merge(loss)


# Row 39: the state is in the checkpoint.


def scaled(run):
    x = tf.placeholder(tf.float32, [None, WIDTH])
    loss = network(run, x)
    return x, loss, tf.train.AdamOptimizer(0.01).minimize(loss), tf.train.Saver()


def save_scale(run):
    """Three steps that overflow and two that do not; what is saved."""
    with run.program(dict(AMP)):
        x, loss, train, saver = scaled(run)
        with run.session() as session:
            for step in range(5):
                run.train(session, loss, train, [{x: batch(step, step < 3)}])
            path = saver.save(session, run.path("model.ckpt"))
            return {"path": path, "scale": loss_scale(run), "values": variables(session)}


def resume_scale(run, earlier):
    with run.program(dict(AMP)):
        x, loss, train, saver = scaled(run)
        with run.session() as session:
            before = loss_scale(run)
            saver.restore(session, earlier["path"])
            restored = loss_scale(run)
            run.train(session, loss, train, [{x: batch(5)}])
            return {"before": before, "restored": restored, "after": loss_scale(run)}


@without_epl
def resume_plain(run, earlier):
    """Plain TensorFlow restores the checkpoint, and writes one without a scale."""
    with tf.Graph().as_default():
        x, loss, train, saver = scaled(run)
        with run.session() as session:
            saver.restore(session, earlier["path"])
            values = variables(session)
            session.run(train, {x: batch(5)})
            names = [name for name, _ in tf.train.list_variables(earlier["path"])]
            return {"values": values, "names": names, "path": saver.save(session, run.path("plain.ckpt"))}


def moved(layout):
    """Saved in one layout; resumed in it, in another one, and by plain TensorFlow."""
    saved = request(save_scale, layout)
    plain = request(resume_plain, "1x1", plain=True, inputs={"earlier": saved})
    again, other = (request(resume_scale, name, inputs={"earlier": saved}) for name in (layout, "1x2"))
    return pytest.param({"saved": saved, "plain": plain, "again": again, "other": other}, id=layout)


@pytest.mark.parametrize("outcomes", [moved("1x1"), moved("2x1"), moved("2x1-s2-m2")], indirect=True)
def test_row_39_the_scale_is_in_the_checkpoint(outcomes):
    for rank in outcomes["saved"].ranks:
        assert rank["scale"] == [2.0**12, 2]
    for rank in outcomes["again"].ranks + outcomes["other"].ranks:
        assert rank == {"before": None, "restored": [2.0**12, 2], "after": [2.0**12, 3]}
    found = outcomes["plain"].ranks[0]
    assert KEY in found["names"] and len(found["names"]) == len(found["values"]) + 1
    for name, value in outcomes["saved"].ranks[0]["values"].items():
        np.testing.assert_array_equal(found["values"][name], value)


PLAIN = request(resume_plain, "1x1", plain=True, inputs={"earlier": request(save_scale, "1x1")})


@cases(resume_scale, "2x1", inputs={"earlier": PLAIN})
def test_row_39_a_checkpoint_without_a_scale(outcome):
    for rank in outcome.ranks:
        assert rank == {"before": None, "restored": [2.0**15, 0], "after": [2.0**15, 1]}


# Rows 77 and 78: a loss scale that the user brings.


def own_scale(run, dynamic, steps=4):
    """Training with TensorFlow's optimizer with a loss scale; in the third step one row overflows."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, WIDTH])
        loss = network(run, x)
        scale = tf.mixed_precision.DynamicLossScale(2.0**10, 2) if dynamic else tf.mixed_precision.FixedLossScale(128.0)
        optimizer = tf.mixed_precision.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(0.01), scale)
        train = optimizer.minimize(loss)
        history = []
        with run.session() as session:
            for step in range(steps):
                run.train(session, loss, train, [{x: batch(step, dynamic and step == 2)}])
                history.append({"loss": 0.0, "variables": variables(session)})
        return {"history": history}


@cases(own_scale, "1x2", "2x1", "2x1-m2run", compare=True, dynamic=True)
def test_row_77_a_users_dynamic_scale_decides_the_same_everywhere(outcome):
    for rank in outcome.ranks:
        near(rank, outcome.plain, 1e-5, 1e-6)
    before, after = (outcome.plain["history"][step]["variables"]["w0"] for step in (1, 2))
    assert np.array_equal(before, after)


@cases(own_scale, "1x2", "2x1", "2x1-m2", "2x1-s2-m2", compare=True, dynamic=False)
def test_row_78_a_users_fixed_scale(outcome):
    for rank in outcome.ranks:
        near(rank, outcome.plain, 1e-5, 1e-6)


# Row 80: an Estimator, whose model is built twice.


def estimate(run):
    with run.program(dict(AMP)):

        def model_fn(features, labels, mode):
            h = layer(layer(features["x"], 0), 1)
            loss = tf.reduce_mean(0.02 * tf.square(tf.reduce_sum(h, 1) - labels))
            train = tf.train.AdamOptimizer(0.01).minimize(loss, tf.train.get_global_step())
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)

        def input_fn():
            return tf.data.Dataset.from_tensor_slices(({"x": batch(0)}, np.ones(ROWS, np.float32))).batch(4).repeat(2)

        config = tf.estimator.RunConfig(model_dir=run.path("model"), log_step_count_steps=None)
        estimator = tf.estimator.Estimator(model_fn, config=config)
        estimator.train(input_fn, max_steps=3)
        trained_scale = loss_scale(run)
        found = estimator.evaluate(input_fn)
        estimator.train(input_fn, max_steps=5)
        return {"trained": trained_scale, "evaluated": float(found["loss"]), "step": int(found["global_step"]), "resumed": loss_scale(run)}


@cases(estimate, "1x2", "2x1")
def test_row_80_an_estimator_trains_evaluates_and_goes_on(outcome):
    for rank in outcome.ranks:
        assert rank["trained"] == [2.0**15, 3] and rank["resumed"] == [2.0**15, 5]
        assert rank["step"] == 3 and np.isfinite(rank["evaluated"])


# Rows 82 and 83.


def fetched(run):
    """Loss and a hidden layer of each stage on every rank, and their types."""
    with run.program(dict(AMP)):
        x = tf.placeholder(tf.float32, [None, WIDTH])
        with run.stage(0):
            h = layer(x, 0)
        with run.stage(1):
            loss = run.merge(tf.reduce_mean(0.02 * tf.square(tf.reduce_sum(layer(h, 1), 1) - 1.0)))
        step = tf.train.get_or_create_global_step()
        train = tf.train.GradientDescentOptimizer(tf.train.exponential_decay(0.1, step, 1, 0.5)).minimize(loss, step)
        rate = tf.train.exponential_decay(0.1, step, 1, 0.5)
        with run.session() as session:
            found = []
            for number in range(3):
                values = session.run([loss, h, train], {x: run.local(batch(number, number == 1))})
                found.append([float(values[0]), values[0].dtype.name, values[1].dtype.name, int(session.run(step)), float(session.run(rate))])
            return found


@cases(fetched, "2x1-s2-m2", "1x2-s2-m2")
def test_rows_82_and_83_all_ranks_see_one_loss_and_a_skipped_step_is_no_step(outcome):
    first = outcome.ranks[0]
    for rank in outcome.ranks:
        for number, (value, dtype, hidden, _, _) in enumerate(rank):
            assert (dtype, hidden) == ("float32", "float32") and np.isfinite(value) == (number != 1)
            np.testing.assert_equal(value, first[number][0])
        assert [row[3] for row in rank] == [1, 1, 2]
        assert [row[4] for row in rank] == pytest.approx([0.05, 0.05, 0.025])


# Row 84: variables in float16.


def mixed_variables(run):
    """A variable in float16 and one in float32, clipped together: without `amp`."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, WIDTH])
        half = tf.get_variable("half", [WIDTH, WIDTH], tf.float16, initializer=tf.constant_initializer(0.125))
        whole = tf.get_variable("whole", [WIDTH], initializer=tf.ones_initializer())
        h = tf.cast(tf.matmul(tf.cast(x, tf.float16), half), tf.float32) * whole
        loss = run.merge(tf.reduce_mean(tf.square(tf.reduce_mean(h, 1) - 1.0)))
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        gradients, trainable = zip(*optimizer.compute_gradients(loss))
        clipped, _ = tf.clip_by_global_norm([tf.cast(g, tf.float32) for g in gradients], 0.1)
        train = optimizer.apply_gradients([(tf.cast(g, v.dtype.base_dtype), v) for g, v in zip(clipped, trainable)])
        history = []
        with run.session() as session:
            for step in range(4):
                losses = run.train(session, loss, train, [{x: batch(step)}])
                history.append({"loss": losses[0], "variables": {n: v.astype(np.float32) for n, v in variables(session).items()}})
        return {"history": history}


@cases(mixed_variables, "1x2", "2x1", "2x1-m2", compare=True)
def test_row_84_gradients_of_two_types_are_clipped_together(outcome):
    for rank in outcome.ranks:
        near(rank, outcome.plain, 2e-3, 1e-3)


# What a scale must not spoil.


def penalty(run, config):
    """A loss with the norm of a gradient: only the outer gradients may be scaled."""
    with run.program(dict(config)):
        x = tf.placeholder(tf.float32, [None, WIDTH])
        h = tf.reduce_sum(tf.nn.tanh(layer(x, 0)), 1)
        (inner,) = tf.gradients(tf.reduce_sum(h), x)
        loss = run.merge(0.02 * tf.reduce_mean(tf.square(h - 1.0) + tf.reduce_sum(tf.square(inner), 1)))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        history = []
        with run.session() as session:
            for step in range(4):
                losses = run.train(session, loss, train, [{x: batch(step)}])
                history.append({"loss": losses[0], "variables": variables(session)})
        return {"history": history}


@cases(penalty, "1x1", "1x2", compare=True, config=AMP)
def test_a_gradient_in_a_loss_is_not_scaled(outcome):
    near(outcome.ranks[0], outcome.plain, 0.02, 0.02)


def in_a_branch(run, config):
    """The optimizer runs every second step only, in a conditional of the user's."""
    with run.program(dict(config)):
        x = tf.placeholder(tf.float32, [None, WIDTH])
        now = tf.placeholder(tf.bool, [])
        loss = network(run, x)
        optimizer = tf.train.AdamOptimizer(0.01)
        pairs = optimizer.compute_gradients(loss)
        optimizer._create_slots([variable for _, variable in pairs])
        optimizer._prepare()
        count = tf.get_variable("count", [], initializer=tf.zeros_initializer(), trainable=False)

        def update():
            with tf.control_dependencies([optimizer.apply_gradients(pairs)]):
                return tf.identity(tf.assign_add(count, 1.0))

        train = tf.cond(now, update, lambda: tf.identity(count))
        history = []
        with run.session() as session:
            for step in range(6):
                losses = run.train(session, loss, train, [{x: batch(step, config and step == 3), now: step % 2 == 1}])
                history.append({"loss": losses[0], "variables": variables(session)})
        return {"history": history, "scale": loss_scale(run)}


@cases(in_a_branch, "1x1", "2x1", config=AMP)
def test_a_skipped_step_in_a_conditional(outcome):
    for rank in outcome.ranks:
        counts = [float(step["variables"]["count"]) for step in rank["history"]]
        assert counts == [0, 1, 1, 1, 1, 2]
        values = [step["variables"]["w0"] for step in rank["history"]]
        assert [bool(np.array_equal(one, other)) for one, other in zip(values, values[1:])] == [False, True, True, True, False]
        assert rank["scale"] == [2.0**14, 2]


def unskippable(run, kind):
    """Programs whose steps can't be skipped: the text of the error."""
    with run.program(dict(AMP)):
        x = tf.placeholder(tf.float32, [None, WIDTH])
        loss = network(run, x)
        count = tf.get_variable("count", [], initializer=tf.zeros_initializer(), trainable=False, use_resource=True)
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        pairs = optimizer.compute_gradients(loss)
        applied = optimizer.apply_gradients(pairs)
        total = tf.add_n([tf.reduce_sum(gradient) for gradient, _ in pairs])
        if kind == "loop":

            def body(i, s):
                with tf.control_dependencies([tf.assign_add(count, s)]):
                    return i + 1, s

            other = tf.while_loop(lambda i, _: i < 2, body, (0, total))[1]
        else:
            other = tf.function(lambda s: count.assign_add(s))(total)
        with run.session() as session:
            try:
                session.run([applied, other], {x: batch(0)})
            except Exception as error:  # noqa: BLE001: the test judges it
                return [type(error).__name__, str(error)]
    return None


@cases(unskippable, "1x1", kind="loop")
def test_a_write_in_a_loop_is_refused(outcome):
    kind, text = outcome.ranks[0]
    assert kind == "ProgramError" and "writes 'count' in a loop after the gradients" in text and "Set `amp.loss_scale` to a number" in text


@cases(unskippable, "1x1", kind="call")
def test_a_call_that_writes_and_returns_is_refused(outcome):
    kind, text = outcome.ranks[0]
    assert kind == "ProgramError" and "writes 'count' and returns values that others use" in text
