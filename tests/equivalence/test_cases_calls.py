"""Ways to write a script: callables, graphs that grow after the first run, Keras layers; against plain TensorFlow."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, judge_variables, regression, scalar
from tests.harness.context import variables
from tests.harness.parametrize import cases


def callables(run):
    """Training, and what else is asked for, by `Session.make_callable`."""
    with run.program():
        x, w, loss, train, step = regression(run, "momentum")
        doubled = run.merge(2.0 * x, "GLOBAL_CONCAT_OBJECTS")
        with run.session() as session:
            train_on = session.make_callable([loss, train], [x], accept_options=True)
            weight, fixed = session.make_callable(w), session.make_callable(loss, [x, w])
            losses = []
            for number in range(4):
                parts = [train_on(run.local(X + number, part)) for part in range(run.runs)]
                assert all(part[1] is None for part in parts)
                losses.append(np.mean([part[0] for part in parts]))
            metadata = tf.RunMetadata()
            traced = [train_on(run.local(X, part), options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)[0]
                      for part in range(run.runs)]  # fmt: skip
            by_name = session.make_callable({"step": step, "pair": (w, w)})()
            found = {"losses": np.float32(losses + [np.mean(traced)]), "weight": weight(), "by_name": by_name["pair"][1], "step": by_name["step"],
                     "fixed": np.mean([fixed(run.local(X, part), 1.0) for part in range(run.runs)])}  # fmt: skip
            with pytest.raises((TypeError, ValueError, tf.errors.InvalidArgumentError)):
                train_on()
            with pytest.raises(TypeError):
                weight(run_metadata=tf.RunMetadata())
            rows = session.make_callable(doubled, [x])(run.local(X))
            return {"values": dict(variables(session), **found), "traced": len(metadata.step_stats.dev_stats) > 0, "rows": rows.tolist()}


@cases(callables, "1x2", "1x2-m2", "2x1", compare=True)
def test_callables(outcome):
    assert outcome.plain["traced"] and outcome.plain["values"]["step"] == 5
    judge_variables(outcome._replace(ranks=[rank["values"] for rank in outcome.ranks], plain=outcome.plain["values"]))
    assert all(rank["traced"] for rank in outcome.ranks)


def drawing_callable(run):
    """A callable without feeds, whose input is a dataset."""
    steps = [{"x": np.random.RandomState(step).randn(8).astype(np.float32)} for step in range(4)]
    with run.program():
        x = run.next_batch(run.dataset(steps))["x"]
        w = scalar("w", 0)
        loss = tf.reduce_mean(tf.square(w * x - 3.0 * x))
        run.merge(loss)
        train = tf.train.AdamOptimizer(0.1).minimize(loss)
        with run.session() as session:
            call = session.make_callable([train, loss])
            losses = [np.mean([call()[1] for _ in range(run.runs)]) for _ in steps]
            with pytest.raises(tf.errors.OutOfRangeError):
                call()
            return dict(variables(session), losses=np.float32(losses))


@cases(drawing_callable, "1x2", "1x2-m2", "2x1", compare=True)
def test_callables_without_feeds(outcome):
    judge_variables(outcome)


def growing(run, again):
    """After some steps the graph gets another layer, another loss and another optimizer; both are trained then, in one session or a new one."""
    random = np.random.RandomState(1)
    batches = [random.randn(8, 3).astype(np.float32) for _ in range(7)]
    dense = dict(use_bias=True, kernel_initializer=tf.glorot_uniform_initializer(seed=1))
    with run.program():
        x = tf.placeholder(tf.float32, [None, 3])
        h = tf.layers.dense(x, 4, tf.tanh, name="first", **dense)
        loss = run.merge(tf.reduce_mean(tf.square(h - 1.0)))
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        with run.session() as session:
            losses = run.train(session, loss, train, [{x: batch} for batch in batches[:2]])
            before = set(tf.global_variables())
            y = tf.layers.dense(h, 2, name="second", **dense)
            other = run.merge(tf.reduce_mean(tf.square(y + h[:, :2] - 2.0)))
            update = tf.train.AdamOptimizer(0.05).minimize(other)
            new = [variable for variable in tf.global_variables() if variable not in before]
            kept = session.run(tf.global_variables_initializer() if again else tf.variables_initializer(new))
            assert kept is None
            losses += run.train(session, other, update, [{x: batch} for batch in batches[2:4]])
            losses += run.train(session, loss, train, [{x: batch} for batch in batches[4:6]])
            losses += run.train(session, other, update, [{x: batch} for batch in batches[6:]])
            return dict(variables(session), losses=np.float32(losses), new=np.int32(len(new)))


@cases(growing, "1x2", "2x1", "2x1-m2run", compare=True, again=False)
def test_a_graph_that_grows(outcome):
    assert outcome.plain["new"] == 12, "a kernel, a bias, two slots for each of the four variables, two powers"
    judge_variables(outcome)


@cases(growing, "2x1", compare=True, again=True)
def test_a_graph_that_grows_and_begins_anew(outcome):
    judge_variables(outcome)


def keras_layers(run):
    """Keras layers inside of a graph: convolution, normalisations, pooling, dense, an embedding."""
    layers = tf.keras.layers
    batches = [np.random.RandomState(step).randn(8, 6, 6, 2).astype(np.float32) for step in range(3)]

    def initial(seed):
        return tf.keras.initializers.glorot_uniform(seed=seed)

    with run.program():
        x = tf.placeholder(tf.float32, [None, 6, 6, 2])
        h = layers.Conv2D(4, 3, activation="relu", padding="same", kernel_initializer=initial(1), name="conv")(x)
        norm = layers.BatchNormalization(name="norm", moving_mean_initializer=tf.constant_initializer(0.3), epsilon=0.1)
        h = norm(h, training=False)
        h = layers.MaxPooling2D()(h)
        h = layers.Flatten()(h)
        h = layers.LayerNormalization(name="layer_norm")(h)
        h = layers.Dense(5, activation="tanh", kernel_initializer=initial(2), kernel_regularizer=tf.keras.regularizers.l2(0.01), name="dense")(h)
        output = layers.Dense(1, kernel_initializer=initial(3), name="output")(layers.Dropout(0.5)(h, training=False))
        loss = tf.reduce_mean(tf.square(output[:, 0] - tf.reduce_sum(x, [1, 2, 3])))
        run.merge(loss)
        train = tf.train.AdamOptimizer(0.01).minimize(loss)
        rows = run.merge(output, "GLOBAL_CONCAT_OBJECTS")
        with run.session() as session:
            losses = run.train(session, loss, train, [{x: batch} for batch in batches])
            return {"values": dict(variables(session), losses=np.float32(losses)), "rows": session.run(rows, {x: run.local(batches[0])})}


@cases(keras_layers, "1x2", "2x1", "2x1-m2run", compare=True)
def test_keras_layers(outcome):
    plain = outcome.plain["values"]
    assert {"conv/kernel", "norm/gamma", "norm/moving_mean", "layer_norm/beta", "dense/bias", "output/kernel"} <= set(plain)
    assert np.ptp(plain["norm/gamma"]) > 0 and np.all(plain["norm/moving_mean"] == np.float32(0.3))
    judge_variables(outcome._replace(ranks=[rank["values"] for rank in outcome.ranks], plain=plain))
    for number, rank in enumerate(outcome.ranks):
        np.testing.assert_allclose(rank["rows"], outcome.plain["rows"], rtol=1e-5, atol=1e-6, err_msg="output on rank %d" % number)
