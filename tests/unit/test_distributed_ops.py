"""The ops for `split` scopes as what they are without one: plain ops with checks."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.errors import ConfigError
from epl.ops import DistributedDense, distributed_argmax, distributed_dense, distributed_equal
from epl.ops import distributed_sparse_softmax_cross_entropy_with_logits as cross_entropy

ROWS, COLUMNS, CLASSES = 6, 5, 1001


def values(*shape, seed=0):
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def run(tensors):
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return session.run(tensors)


def test_names_of_the_original():
    from epl.ops.distributed_dense import DistributedDense as Layer
    from epl.ops.distributed_dense import distributed_dense as dense
    from epl.ops.distributed_losses import distributed_sparse_softmax_cross_entropy_with_logits as loss
    from epl.ops.distributed_ops import distributed_argmax as argmax
    from epl.ops.distributed_ops import distributed_equal as equal

    ours = (DistributedDense, distributed_dense, cross_entropy, distributed_argmax, distributed_equal)
    assert (Layer, dense, loss, argmax, equal) == ours
    assert (epl.ops.DistributedDense, epl.ops.distributed_dense) == ours[:2]
    for name in epl.ops.__all__:
        assert callable(getattr(epl.ops, name))


@pytest.mark.filterwarnings("ignore:`tf.layers")
@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (ROWS, 3, COLUMNS), (ROWS, 2, 3, COLUMNS)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_bias": False, "activation": tf.nn.relu},
        {"activation": "tanh", "bias_initializer": tf.ones_initializer(), "kernel_regularizer": tf.keras.regularizers.l2(0.1)},
        {"activity_regularizer": tf.keras.regularizers.l1(0.1), "trainable": False},
    ],
    ids=["default", "no bias", "regularized", "activity"],
)
def test_the_layer_is_a_dense_layer(shape, options):
    found = []
    for layer in (tf.layers.dense, distributed_dense):
        with tf.Graph().as_default():
            outputs = layer(tf.constant(values(*shape)), CLASSES, name="fc", kernel_initializer=tf.glorot_uniform_initializer(seed=1), **options)
            losses = tf.losses.get_regularization_losses()
            names = [v.op.name for v in tf.global_variables()], [v.op.name for v in tf.trainable_variables()]
            found.append((names, outputs.shape.as_list(), run([outputs, losses])))
    assert found[0][:2] == found[1][:2]
    for ours, plain in zip(tf.nest.flatten(found[1][2]), tf.nest.flatten(found[0][2])):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_default_names_reuse_and_unknown_shapes():
    with tf.Graph().as_default():
        for shape in ([None, COLUMNS], [None, 3, COLUMNS], [None, None, COLUMNS]):
            x = tf.placeholder(tf.float32, shape)
            with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
                assert distributed_dense(x, 7).shape.as_list() == shape[:-1] + [7]
                distributed_dense(x, 7, name="again")
        layer = DistributedDense(7, name="class")
        outputs = [layer(x), layer(x)]
        names = [v.op.name for v in tf.global_variables()]
        assert names == ["model/%s/%s" % (scope, v) for scope in ("distributed_dense", "again") for v in ("kernel", "bias")] + [
            "class/kernel",
            "class/bias",
        ]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert [value.shape for value in session.run(outputs, {x: values(2, 4, COLUMNS)})] == [(2, 4, 7)] * 2


@pytest.mark.parametrize("units", [0, -1, 2.5, "3", True, None])
def test_units(units):
    with tf.Graph().as_default(), pytest.raises(ConfigError, match="units"):
        distributed_dense(tf.zeros([2, 3]), units)


@pytest.mark.parametrize("inputs", [tf.int32, [3], [2, None], None])
def test_inputs_of_the_layer(inputs):
    with tf.Graph().as_default(), pytest.raises(ConfigError, match="expected"):
        distributed_dense(tf.zeros([2, 3], inputs) if isinstance(inputs, tf.DType) else tf.placeholder(tf.float32, inputs), 4)


@pytest.mark.parametrize("weights", [1.0, None, 0.5, [1, 0, 2, 0, 1, 1]], ids=str)
@pytest.mark.parametrize("itype", [tf.int32, tf.int64])
def test_the_loss_is_that_of_tf_losses(weights, itype):
    with tf.Graph().as_default():
        logits, labels = tf.constant(values(ROWS, CLASSES)), tf.constant(np.arange(ROWS) * 200, itype)
        plain = tf.losses.sparse_softmax_cross_entropy(labels, logits, 1.0 if weights is None else weights)
        ours = cross_entropy(labels, logits, weights=weights, strategy="name")
        assert ours.op.name.startswith("name/") and tf.losses.get_losses() == [plain, ours]
        np.testing.assert_allclose(*run([ours, plain]), rtol=1e-6)
        each = cross_entropy(labels, logits, reduction=tf.losses.Reduction.NONE, loss_collection=None)
        assert each.shape.as_list() == [ROWS] and len(tf.losses.get_losses()) == 2
        of_words = cross_entropy(tf.zeros([ROWS, 3], itype), tf.zeros([ROWS, 3, 7]))
        assert run(of_words) == pytest.approx(np.log(7))


@pytest.mark.parametrize(
    "labels, logits, text",
    [
        (None, tf.float32, "labels=None"),
        (tf.int64, None, "logits=None"),
        (tf.float32, tf.float32, "labels .* of type float32"),
        (tf.int64, tf.int32, "logits .* of type int32"),
    ],
)
def test_arguments_of_the_loss(labels, logits, text):
    with tf.Graph().as_default(), pytest.raises(ConfigError, match=text):
        cross_entropy(labels and tf.zeros([2], labels), logits and tf.zeros([2, 3], logits))


def test_rows_without_a_label():
    with tf.Graph().as_default(), pytest.raises(ConfigError, match="one label for each row"):
        cross_entropy(tf.zeros([3], tf.int64), tf.zeros([2, 5]))


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("output_type", [tf.int32, tf.int64])
def test_arg_max(axis, output_type):
    x = values(ROWS, COLUMNS)
    x[2] = x[0]
    with tf.Graph().as_default():
        found = run([distributed_argmax(x, axis, output_type=output_type), distributed_argmax(x, dimension=axis, output_type=output_type)])
    for value in found:
        assert value.dtype == output_type.as_numpy_dtype
        np.testing.assert_array_equal(value, np.argmax(x, axis or 0))


@pytest.mark.parametrize(
    "options, text", [(dict(axis=0, dimension=0), "two names"), (dict(axis=2), "2 dimensions"), (dict(output_type=tf.uint8), "int32")]
)
def test_arguments_of_arg_max(options, text):
    with tf.Graph().as_default(), pytest.raises(ConfigError, match=text):
        distributed_argmax(tf.zeros([2, 3]), **options)


def test_equal():
    with tf.Graph().as_default():
        predictions = tf.constant([1, 2, 3], tf.int64)
        for dtype in (tf.int32, tf.int64, tf.float32):
            found = distributed_equal(predictions, tf.constant([1, 0, 3], dtype), name="hits_%s" % dtype.name)
            assert found.op.name == "hits_%s" % dtype.name and run(found).tolist() == [True, False, True]
        with pytest.raises(ConfigError, match="one shape"):
            distributed_equal(predictions, tf.zeros([4]))
        for arguments in ((None, predictions), (predictions, None)):
            with pytest.raises(ConfigError, match="expected two tensors"):
                distributed_equal(*arguments)
