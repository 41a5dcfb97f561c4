"""Slices of saved tensors, as TensorFlow describes them."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.planner.sharding.slices import slice_text


@pytest.mark.parametrize(
    "given, shape, dim, begin, length, text",
    [
        ("", [4, 10], 1, 5, 5, "4 10 -:5,5"),
        ("", [4, 10], 0, 1, 2, "4 10 1,2:-"),
        ("8 10 4,4:-", [4, 10], 1, 0, 3, "8 10 4,4:0,3"),
        ("8 10 4,4:-", [4, 10], 0, 2, 2, "8 10 6,2:-"),
        ("", [5], 0, 0, 5, "5 -"),
    ],
)
def test_a_part_of_a_tensor_or_of_a_slice(given, shape, dim, begin, length, text):
    assert slice_text(given, shape, dim, begin, length) == text


def test_tensorflow_reads_it(tmp_path):
    value = np.arange(40, dtype=np.float32).reshape(4, 10)
    with tf.Graph().as_default(), tf.Session() as session:
        prefix = str(tmp_path / "saved")
        halves = [value[:, :7], value[:, 7:]]
        texts = [slice_text("", [4, 10], 1, 0, 7), slice_text("", [4, 10], 1, 7, 3)]
        session.run(tf.raw_ops.SaveV2(prefix=prefix, tensor_names=["v", "v"], shape_and_slices=texts, tensors=halves))
        part = tf.raw_ops.RestoreV2(prefix=prefix, tensor_names=["v"], shape_and_slices=[slice_text("", [4, 10], 0, 1, 2)], dtypes=[tf.float32])
        np.testing.assert_array_equal(session.run(part[0]), value[1:3])
        np.testing.assert_array_equal(tf.train.load_variable(prefix, "v"), value)
