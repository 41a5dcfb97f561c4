"""Initializers of shards."""

import math

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from epl.ops import initializers

SOURCES = {
    "tf1 glorot uniform": lambda **k: tf.glorot_uniform_initializer(**k),
    "tf1 glorot normal": lambda **k: tf.glorot_normal_initializer(**k),
    "tf1 he": lambda **k: tf.initializers.he_uniform(**k),
    "tf1 lecun": lambda **k: tf.initializers.lecun_normal(**k),
    "tf1 scaling": lambda **k: tf.variance_scaling_initializer(0.5, "fan_out", "untruncated_normal", **k),
    "keras glorot uniform": lambda **k: tf2.keras.initializers.GlorotUniform(**k),
    "keras he": lambda **k: tf2.keras.initializers.HeNormal(**k),
    "keras lecun": lambda **k: tf2.keras.initializers.LecunUniform(**k),
    "keras scaling": lambda **k: tf2.keras.initializers.VarianceScaling(0.5, "fan_out", "untruncated_normal", **k),
}


def draw(initializer, shape, **arguments):
    with tf.Graph().as_default():
        value = initializer(shape, **arguments)
        with tf.Session() as sess:
            return sess.run(value)


def test_contract():
    source = tf.keras.initializers.glorot_uniform()
    ours = initializers.get(source, fan_in=9, fan_out=10)
    for attribute in ("mode", "scale", "distribution", "dtype"):
        assert getattr(ours, attribute) == getattr(source, attribute)
    assert (ours.fan_in, ours.fan_out) == (9, 10)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_same_values_as_the_source_when_the_fans_are_the_shape(name):
    source = SOURCES[name](seed=3)
    ours = initializers.get(source, fan_in=30, fan_out=50)
    np.testing.assert_array_equal(draw(ours, [30, 50]), draw(source, [30, 50]))
    np.testing.assert_array_equal(draw(initializers.get(source), [30, 50]), draw(source, [30, 50]))


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_spread_follows_from_the_given_fans(name):
    source = SOURCES[name](seed=3)
    ours = initializers.get(source, fan_in=1000, fan_out=4000)
    units = {"fan_in": 1000.0, "fan_out": 4000.0, "fan_avg": 2500.0}[source.mode]
    values = draw(ours, [1000, 100])  # a 40th of the columns
    assert np.std(values) == pytest.approx(math.sqrt(source.scale / units), rel=0.02)
    if source.distribution == "uniform":
        assert np.abs(values).max() <= math.sqrt(3 * source.scale / units)


def test_window_of_a_convolution_counts():
    source = tf.initializers.he_normal(seed=1)
    np.testing.assert_allclose(draw(initializers.get(source, fan_in=9 * 64), [3, 3, 16, 8]), draw(source, [3, 3, 16, 8]) / 2.0, rtol=1e-5)


def test_one_fan_may_be_left_to_the_shape():
    source = tf.variance_scaling_initializer(1.0, "fan_avg", "uniform", seed=1)
    both = draw(initializers.get(source, fan_in=20, fan_out=60), [20, 5])
    np.testing.assert_array_equal(draw(initializers.get(source, fan_out=60), [20, 5]), both)


def test_dtype_comes_from_the_source_or_the_call():
    ours = initializers.get(tf.variance_scaling_initializer(dtype=tf.float64), 3, 4)
    assert ours.dtype == tf.float64
    assert draw(ours, [3, 4]).dtype == np.float64
    assert draw(ours, [3, 4], dtype=tf.float32).dtype == np.float32
    assert draw(initializers.get(tf2.keras.initializers.HeNormal(), 3, 4), [3, 4]).dtype == np.float32


def test_names_classes_and_the_default():
    assert initializers.get("glorot_uniform", 9, 10).distribution == "uniform"
    assert initializers.get(tf.glorot_normal_initializer, 9, 10).mode == "fan_avg"
    assert initializers.get({"class_name": "VarianceScaling", "config": {"scale": 3.0}}, 9, 10).scale == 3.0
    default = initializers.get(None, 9, 10)
    assert (default.scale, default.mode, default.distribution) == (1.0, "fan_avg", "uniform")
    with pytest.raises(ValueError):
        initializers.get("no such initializer")


def test_initializers_without_fans_are_returned_as_they_are():
    for source in (tf.zeros_initializer(), tf.random_normal_initializer(), tf2.keras.initializers.Orthogonal(), len):
        assert initializers.get(source, 9, 10) is source


def test_variables_take_it():
    ours = initializers.get(tf.glorot_uniform_initializer(seed=1), fan_in=8, fan_out=400)
    with tf.Graph().as_default():
        plain = tf.get_variable("plain", [8, 4], initializer=ours)
        parts = tf.get_variable("parts", [8, 4], initializer=ours, partitioner=tf.fixed_size_partitioner(2))
        layer = tf.keras.layers.Dense(4, kernel_initializer=ours)
        layer(tf.ones([2, 8]))
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            values = sess.run([plain, layer.kernel] + list(parts))
    limit = math.sqrt(3.0 / 204)
    for value in values:
        assert 0.3 * limit < np.abs(value).max() <= limit


def test_configuration():
    config = initializers.get(tf.glorot_uniform_initializer(seed=5), 9, 10).get_config()
    expected = {"scale": 1.0, "mode": "fan_avg", "distribution": "uniform", "seed": 5, "dtype": "float32", "fan_in": 9, "fan_out": 10}
    assert config == expected


@pytest.mark.parametrize("fans", [{"fan_in": 0}, {"fan_out": -1}])
def test_fans_below_one_are_refused(fans):
    with pytest.raises(ValueError, match="1 or more"):
        initializers.get(tf.glorot_uniform_initializer(), **fans)
