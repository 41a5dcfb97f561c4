"""Recomputation changes no result: H3, H4 and rows 53, 70 to 75, and training in other layouts against plain TensorFlow."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.test_cases_batch_norm import batch_norm, judge_one_device
from tests.harness.context import variables
from tests.harness.parametrize import cases, together
from tests.harness.pool import request

STEPS, ROWS, WIDTH = 5, 16, 6
KINDS = ("auto", "collection")
SIMPLE = ("PreferForward", "PreferBackwardOptimizer", "ZeroBubbleH1", "ZeroBubbleH2")


def keep(tensor):
    """Name a tensor that is kept; plain TensorFlow has no use for that."""
    tf.add_to_collection("checkpoints", tensor)
    return tensor


def weights(name, shape, seed):
    return tf.get_variable(name, shape, initializer=tf.glorot_uniform_initializer(seed=seed))


# H3.


def masks(run, kind, seed):
    with run.program({"gradient_checkpoint.type": kind}, seed=seed):
        v = tf.get_variable("v", [], initializer=tf.ones_initializer())
        h = keep(v * tf.constant(np.arange(1, 1001, dtype=np.float32) / 1000))
        d = tf.nn.dropout(h, rate=0.5)
        h = keep(tf.identity(d) * 1.0)
        loss = tf.reduce_sum(tf.square(h))
        (gradient,) = tf.gradients(loss, v)
        with run.session() as session:
            return [[float(value) for value in session.run([loss, gradient])] for _ in range(5)]


@together(**{kind or "plain": request(masks, "1x1", plain=not kind, kind=kind, seed=7) for kind in ("",) + KINDS})
def test_h3_seeded_masks_are_those_without_recomputation(outcomes):
    plain = outcomes["plain"].ranks[0]
    assert len({loss for loss, _ in plain}) == 5
    for kind in KINDS:
        assert outcomes[kind].ranks[0] == plain


@together(**{kind: request(masks, "1x1", kind=kind, seed=0) for kind in KINDS})
def test_h3_the_gradient_is_that_of_the_mask_of_the_loss(outcomes):
    for kind in KINDS:
        found = outcomes[kind].ranks[0]
        assert len({loss for loss, _ in found}) == 5
        for loss, gradient in found:
            assert gradient == pytest.approx(2 * loss, rel=1e-5)


# H4.


@cases(batch_norm, "1x1", steps=2, recompute="auto")
def test_h4_statistics_move_once(outcome):
    judge_one_device(outcome)


@cases(batch_norm, "1x1", steps=2, recompute="collection")
def test_h4_statistics_move_once_between_checkpoints(outcome):
    judge_one_device(outcome)


# Training.


def block(run, h, number, width=WIDTH):
    """A residual block with a dropout of fixed seed, and a layer without variables."""
    inner = tf.nn.tanh(tf.matmul(h, weights("in_%d" % number, [width, 2 * width], number)))
    inner = tf.nn.softplus(tf.matmul(inner, weights("out_%d" % number, [2 * width, width], 100 + number)))
    return keep(h + inner * tf.sigmoid(inner))


def residual(run, x):
    depth = max(4, 2 * run.layout.stages)
    h = x
    for number in range(depth):
        with run.stage(number * run.layout.stages // depth) if run.layout.stages > 1 else contextlib.nullcontext():
            h = block(run, h, number)
    return h


def normalised(run, x):
    """Convolutions with fused batch normalisation."""
    h = tf.reshape(tf.matmul(x, weights("spread", [WIDTH, 32], 1)), [-1, 4, 4, 2])
    for number in range(3):
        h = tf.nn.conv2d(h, weights("kernel_%d" % number, [3, 3, 2, 2], number), strides=[1, 1, 1, 1], padding="SAME")
        h = tf.layers.batch_normalization(h, momentum=0.9, training=True, fused=True, name="norm_%d" % number)
        h = keep(tf.nn.relu(h))
    return tf.reshape(h, [-1, 32])


def keras_normalised(run, x):
    """Batch normalisation of Keras, which asks in a conditional whether it trains."""
    training = tf.placeholder_with_default(True, [], name="training")
    h = x
    for number in range(3):
        h = tf.nn.tanh(tf.matmul(h, weights("layer_%d" % number, [WIDTH, WIDTH], number)))
        h = keep(tf.keras.layers.BatchNormalization(momentum=0.9, name="norm_%d" % number)(h, training=training))
    return h


def recurrent(run, x):
    """A loop between layers, with layers in it."""
    h = keep(tf.nn.tanh(tf.matmul(x, weights("before", [WIDTH, WIDTH], 1))))
    steps, inner = tf.stack([h, 2 * h, tf.nn.softplus(h)]), weights("loop", [WIDTH, WIDTH], 5)
    outputs = tf.scan(lambda state, given: tf.nn.tanh(given + tf.matmul(state, inner)), steps, h)
    h = keep(tf.nn.softplus(tf.reduce_sum(outputs, 0)))
    h = keep(tf.nn.tanh(tf.matmul(h, weights("after", [WIDTH, WIDTH], 2))))
    return tf.nn.softplus(tf.matmul(h, weights("last", [WIDTH, WIDTH], 3)))


def embedded(run, x):
    """A table with sparse gradients and a tensor that all layers use."""
    ids = tf.cast(tf.argmax(x, 1), tf.int32)
    table = weights("table", [WIDTH, WIDTH], 1)
    h = keep(tf.nn.embedding_lookup(table, ids) + x)
    gate = tf.sigmoid(x)
    for number in range(4):
        h = keep(tf.nn.softplus(tf.matmul(h, weights("layer_%d" % number, [WIDTH, WIDTH], number))) * gate)
    return h


MODELS = {f.__name__: f for f in (residual, normalised, keras_normalised, recurrent, embedded)}


def trained(run, model, kind, checked=False, schedule="PreferBackward", v2=False):
    """The losses of some steps, and all variables."""
    options = {"gradient_checkpoint.type": kind, "gradient_checkpoint.check_gradients": checked, "pipeline.strategy": schedule}
    options["communication.sync_batch_norm"] = "normalised" in model
    with run.program(options, control_flow_v2=v2):
        x, t = tf.placeholder(tf.float32, [None, WIDTH]), tf.placeholder(tf.float32, [None])
        with run.split():
            h = MODELS[model](run, x)
            with run.stage(run.layout.stages - 1) if run.layout.stages > 1 else contextlib.nullcontext():
                loss = run.merge(tf.reduce_mean(tf.square(tf.reduce_sum(h, 1) - t)))
        optimizer = tf.train.AdamOptimizer(0.01)
        gradients, trainable = zip(*optimizer.compute_gradients(loss))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = optimizer.apply_gradients(zip(tf.clip_by_global_norm(gradients, 5.0)[0], trainable))
        draws = [np.random.RandomState(step) for step in range(STEPS)]
        feeds = [{x: draw.randn(ROWS, WIDTH).astype(np.float32), t: draw.randn(ROWS).astype(np.float32)} for draw in draws]
        with run.session() as session:
            losses = run.train(session, loss, train, feeds)
            found = {name: value for name, value in variables(session).items() if "accum" not in name}
            return dict(found, losses=np.float32(losses), copies=copies(run))


def copies(run):
    if run.plain:
        return 0
    import epl

    operations = epl.Graph.get().operations
    return sum(op.name.split("/")[0] == "EPL_GRADIENT_CHECKPOINTS" for op in getattr(operations, "values", lambda: operations)())


def judge(outcome):
    plain = dict(outcome.plain)
    plain.pop("copies")
    assert sum(rank["copies"] for rank in outcome.ranks) > 0, "nothing was computed again"
    for rank in outcome.ranks:
        for name, value in plain.items():
            np.testing.assert_allclose(rank[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def each(layout, **options):
    """A case for each way to choose what is kept."""
    return [request(trained, layout, kind=kind, compare=True, **options) for kind in KINDS]


ONE_DEVICE = {"%s-%s" % (model, kind): one for model in MODELS for kind, one in zip(KINDS, each("1x1", model=model, checked=True))}


@pytest.mark.parametrize("outcome", [pytest.param(one, id=name) for name, one in ONE_DEVICE.items()], indirect=True)
def test_one_device(outcome):
    judge(outcome)


@cases(trained, "1x2", "2x1-m2run", "2x1-m2", "2x1-p2", "1x2-a2", "1x2-s2-m4", "2x1-s2-m4", model="residual", kind="auto", compare=True)
def test_layouts(outcome):
    judge(outcome)


@cases(trained, "1x2-s2-m2", "2x1-s2-m4", "1x2-p2", model="residual", kind="collection", compare=True, checked=True)
def test_layouts_with_checkpoints(outcome):
    judge(outcome)


@cases(trained, "1x1", "1x2", model="recurrent", kind="collection", v2=True, compare=True)
def test_row_53_loops_of_functions_are_kept(outcome):
    judge(outcome)


PLACES = {"2x1-s2-m4": SIMPLE, "1x4-s4-m4": SIMPLE, "2x2-s2-m2": SIMPLE, "2x1-s4v2-m4": ("Interleaved", "ZeroBubbleV")}
SCHEDULED = {
    "%s-%s-%s" % (layout, schedule, kind): one
    for layout, schedules in PLACES.items()
    for schedule in schedules
    for kind, one in zip(KINDS, each(layout, model="residual", schedule=schedule))
}


@pytest.mark.slow
@pytest.mark.parametrize("outcome", [pytest.param(one, id=name) for name, one in SCHEDULED.items()], indirect=True)
def test_schedules(outcome):
    judge(outcome)
