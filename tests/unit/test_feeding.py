"""How a fed value is used, and whether it fits."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from epl.errors import FeedError
from epl.runtime.feeding import DIVIDE, EACH, SAME, FeedSpec, as_array, check, modes_of

FLOAT, INT, STRING = np.dtype(np.float32), np.dtype(np.int32), np.dtype(object)


def spec(shape, dtype=FLOAT, name="x:0"):
    return FeedSpec(name, dtype, shape)


def test_values_become_arrays_of_the_tensors_type():
    given_array = np.zeros([2], np.float32)
    assert as_array(spec((2,)), given_array) is given_array
    assert as_array(spec((2,)), [1, 2]).dtype == np.float32
    assert as_array(spec((), INT), 3.7) == 3
    assert as_array(spec((None,), STRING), np.array(["a", "bc"])).tolist() == ["a", "bc"]


@pytest.mark.parametrize("value, text", [("word", "can't be converted to float32: could not"), ([[1], [1, 2]], "can't be converted to float32")])
def test_a_value_of_another_kind_is_refused(value, text):
    with pytest.raises(FeedError, match="The value fed to 'x:0' " + text):
        as_array(spec((None,)), value)


def test_a_tensor_is_no_value():
    with tf.Graph().as_default():
        with pytest.raises(TypeError, match="The value of a feed can't be a tf.Tensor; feed 'x:0' a Python or numpy value"):
            as_array(spec(()), tf.constant(1.0))


@pytest.mark.parametrize(
    "shape, value_shape, parts, mode",
    [
        ((None, 2), (8, 2), 4, DIVIDE),
        ((None, 2), (8, 2), 1, DIVIDE),
        ((4, 2), (4, 2), 4, EACH),  # a table that every instance needs, or the batch of each
        ((4, 2), (16, 2), 4, DIVIDE),
        ((4, 2), (4, 2), 1, DIVIDE),
        ((), (), 4, SAME),
        ((None,), (), 4, SAME),  # does not fit; `check` says so
        (None, (8, 2), 4, DIVIDE),
        (None, (6, 2), 4, EACH),
        (None, (), 4, SAME),
    ],
)
@pytest.mark.parametrize("dtype", [FLOAT, STRING])
def test_modes(shape, value_shape, parts, mode, dtype):
    assert modes_of([spec(shape, dtype)], [np.zeros(value_shape, dtype)], parts) == (mode,)


def test_a_batch_of_strings_is_divided_like_any_other():
    specs = [spec((None,), STRING, "words:0"), spec((None,), FLOAT, "y:0"), spec((), STRING, "file:0")]
    arrays = [np.array(["a", "b"], object), np.zeros(2, np.float32), np.array("path", object)]
    assert modes_of(specs, arrays, 2) == (DIVIDE, DIVIDE, SAME)


def test_a_value_of_unknown_rank_follows_the_batch():
    specs = [spec((None, 2)), spec(None)]
    arrays = [np.zeros([8, 2]), np.zeros([8, 5])]
    assert modes_of(specs, arrays, 4) == (DIVIDE, DIVIDE)
    assert modes_of(specs, [arrays[0], np.zeros([4, 5])], 4) == (DIVIDE, EACH)


@pytest.mark.parametrize(
    "shape, value_shape, mode, parts",
    [
        ((None, 2), (8, 2), DIVIDE, 4),
        ((4, None), (16, 9), DIVIDE, 4),
        ((4,), (4,), EACH, 4),
        (None, (8, 1), DIVIDE, 4),
        ((), (), SAME, 4),
        ((None,), (0,), DIVIDE, 1),
    ],
)
def test_values_that_fit(shape, value_shape, mode, parts):
    check(spec(shape), np.zeros(value_shape), mode, parts)


@pytest.mark.parametrize(
    "shape, value_shape, mode, parts, text",
    [
        ((None, 2), (6, 2), DIVIDE, 4, "The 6 rows fed to 'x:0' can't be divided evenly over 4 replicas x micro-batches of this process; feed a"),
        ((None, 2), (0, 2), DIVIDE, 4, "An empty batch is fed to 'x:0'; a training step needs at least one row for each of 4 replicas"),
        ((None, 2), (8, 3), DIVIDE, 4, r"Cannot feed a value of shape \(8, 3\) for placeholder 'x:0', which needs \(\?, 2\)$"),
        ((4, 2), (6, 2), DIVIDE, 4, r"needs \(16, 2\) \(4 times the placeholder's 4 rows, for 4 replicas x micro-batches\)"),
        ((None,), (), SAME, 4, r"shape \(\) for placeholder 'x:0', which needs \(\?\)"),
        ((), (2,), SAME, 1, r"shape \(2,\) for placeholder 'x:0', which needs \(\)"),
    ],
)
def test_values_that_do_not_fit(shape, value_shape, mode, parts, text):
    with pytest.raises(FeedError, match=text):
        check(spec(shape), np.zeros(value_shape), mode, parts)


@given(
    shape=st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=3).map(tuple)),
    rows=st.integers(0, 12),
    rank=st.integers(0, 3),
    parts=st.integers(1, 6),
)
@settings(max_examples=200, deadline=None)
def test_what_passes_the_check_can_be_divided(shape, rows, rank, parts):
    array = np.zeros(((rows,) + (2,) * (rank - 1))[:rank])
    (mode,) = modes_of([spec(shape)], [array], parts)
    try:
        check(spec(shape), array, mode, parts)
    except FeedError:
        return
    pieces = np.split(array, parts) if mode == DIVIDE and parts > 1 else [array]
    for piece in pieces:
        if shape is not None:
            assert piece.ndim == len(shape) and all(w is None or w == d for w, d in zip(shape, piece.shape))
        assert mode != DIVIDE or parts == 1 or len(piece)


def test_unequal_shares_leave_no_replica_without_rows_and_need_an_open_batch():
    for rows in (8, 9, 12):
        check(spec((None, 2)), np.zeros([rows, 2], np.float32), DIVIDE, 8, (3, 1))
    text = "The 3 rows fed to 'x:0' are too few to be divided in the ratio 3:1 over .* with 2 micro-batches each: some would get none"
    with pytest.raises(FeedError, match=text):
        check(spec((None, 2)), np.zeros([3, 2], np.float32), DIVIDE, 8, (3, 1))
    with pytest.raises(FeedError, match="ratio 3:1 .*, but the placeholder has a fixed batch of 4 rows. Leave the number of rows .* open"):
        check(spec((4, 2)), np.zeros([16, 2], np.float32), DIVIDE, 4, (3, 1))
