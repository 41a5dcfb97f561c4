"""Mixed precision: what holds whether or not anything computes in half precision."""

import numpy as np
import tensorflow.compat.v1 as tf

import epl
from epl.ir.graph import Graph
from tests.contract.models import data, dense, device, minimize, run


def test_loop_and_unknown_key(gpus):
    """`loss_scale` is no key: scripts in the wild have it, and it is ignored."""
    gpus(1)
    epl.init(epl.Config({"amp.level": "o1", "loss_scale": 128}))
    epl.set_default_strategy(epl.replicate(1))
    array = tf.TensorArray(tf.float32, 4)
    array = tf.while_loop(lambda i, _: i < 4, lambda i, a: (i + 1, a.write(i, tf.ones([10]) * tf.cast(i, tf.float32))), (0, array))[1]
    x = array.stack()
    for _ in range(10):
        x = dense(x, 16)
    loss = tf.reduce_mean(x)
    values = run([loss, minimize(loss)], 3)
    assert len(values) == 3 and np.isfinite([value[0] for value in values]).all()


def block(x, filters, strides):
    """A residual block with batch normalisation."""
    shortcut = tf.layers.conv2d(x, filters, 1, strides) if strides > 1 or int(x.shape[-1]) != filters else x
    for index in range(2):
        x = tf.layers.conv2d(x, filters, 3, strides if index == 0 else 1, padding="same", use_bias=False)
        x = tf.layers.batch_normalization(x, training=True)
        x = x if index else tf.nn.relu(x)
    return tf.nn.relu(x + shortcut)


def test_residual_network(gpus):
    """A small one instead of the contract's ResNet-50: the same ops, options and one-shot iterator."""
    gpus(1)
    options = {"gradient_checkpoint.type": "auto", "amp.level": "o1", "amp.loss_scale": 1000, "amp.debug_log": True}
    epl.init(epl.Config(options))
    epl.set_default_strategy(epl.replicate(1))
    images = np.random.RandomState(1).rand(4, 32, 32, 3).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((images, np.array([0, 1, 2, 3]))).batch(2)
    x, labels = tf.data.make_one_shot_iterator(dataset).get_next()
    for filters, strides in ((8, 1), (16, 2), (16, 1)):
        x = block(x, filters, strides)
    logits = tf.layers.dense(tf.reduce_mean(x, [1, 2]), 10)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    (value, _), = run([loss, minimize(loss, tf.train.AdamOptimizer())], 1)
    assert np.isfinite(value)


def test_two_stages(gpus):
    gpus(2)
    epl.init(epl.Config({"amp.level": "O1", "amp.loss_scale": 128, "amp.debug_log": True}))
    x, _ = data()
    with epl.replicate(1):
        x = dense(dense(x, 16, name="stage1_dense1"), 16, name="stage1_dense2")
    with epl.replicate(1):
        loss = tf.reduce_mean(dense(dense(x, 16, name="stage2_dense3"), 10, name="stage2_dense4"))
    optimizer = tf.train.AdamOptimizer()
    train = optimizer.minimize(loss)
    assert optimizer.get_slot_names() == ["m", "v"]
    assert len(run(train, 5)) == 5
    for op in Graph.get().operations.values():
        if "UNSCALE_GRADIENTS" in op.name:
            index = 0 if "stage1" in op.name else 1
            assert op.device == device(index) and op.taskgraph.index == index
    for name, index in (("gradients/stage1_dense2/MatMul_grad/MatMul_1", 0), ("gradients/stage2_dense3/MatMul_grad/MatMul_1", 1)):
        assert Graph.get().operations[name].device == device(index)
        assert Graph.get().operations[name].taskgraph.index == index

