"""Shapes of sharded tensors."""

import dataclasses

import numpy as np
import pytest

from epl.ir.shape import Dimension, Shape, ValueDimension, ValueReduceType


def test_dimension():
    dim = Dimension(4, 2, 1)
    assert (dim.value, dim.sharding_num, dim.sharding_index) == (4, 2, 1)
    assert dim == Dimension(4, sharding_num=2, sharding_index=1)
    assert hash(dim) == hash(Dimension(4, 2, 1))
    assert Dimension(4) == Dimension(4, 0, 0)
    assert Dimension(np.int64(4), 4, 3).value == 4


@pytest.mark.parametrize("other", [Dimension(5, 2, 1), Dimension(4, 3, 1), Dimension(4, 2, 0), Dimension(4), 4])
def test_dimensions_differ(other):
    assert Dimension(4, 2, 1) != other


@pytest.mark.parametrize(
    "args, expected",
    [
        ((4, 1, 2), "sharding_index 2 is out of range: 1 shards are numbered from 0"),
        ((4, 2, 2), "sharding_index 2 is out of range: 2 shards are numbered from 0"),
        ((4, 0, 1), "sharding_index 1 is out of range: 0 shards are numbered from 0"),
        ((4, 5, 1), "a dimension of 4 can't have 5 shards: each needs at least one element"),
        ((4, "8", "6"), "sharding_num must be an integer of at least 0, not '8'"),
        ((4, 8, "6"), "sharding_index must be an integer of at least 0, not '6'"),
        ((None,), "value must be an integer of at least 0, not None"),
        ((-1,), "value must be an integer of at least 0, not -1"),
        ((True,), "value must be an integer of at least 0, not True"),
    ],
)
def test_bad_dimension(args, expected):
    with pytest.raises(ValueError) as caught:
        Dimension(*args)
    assert str(caught.value) == expected


def test_value_dimension():
    dim = ValueDimension()
    assert (dim.value, dim.sharding_num, dim.sharding_index, dim.reduce_op) == (0, 0, 0, ValueReduceType.SUM)
    assert dim == ValueDimension(reduce_op=ValueReduceType.SUM)
    mean = ValueDimension(sharding_num=8, sharding_index=7, reduce_op=ValueReduceType.MEAN)
    assert (mean.value, mean.sharding_num, mean.sharding_index, mean.reduce_op) == (0, 8, 7, ValueReduceType.MEAN)
    assert mean != ValueDimension(8, 7)
    assert mean != ValueDimension(8, 6, ValueReduceType.MEAN)
    assert ValueDimension() != Dimension(0)


@pytest.mark.parametrize(
    "keywords, expected",
    [
        ({"reduce_op": 4}, "reduce_op must be one of ValueReduceType.SUM, ValueReduceType.MEAN, not 4"),
        ({"reduce_op": None}, "reduce_op must be one of ValueReduceType.SUM, ValueReduceType.MEAN, not None"),
        ({"sharding_num": 2, "sharding_index": 2}, "sharding_index 2 is out of range: 2 shards are numbered from 0"),
        ({"sharding_num": 2.0}, "sharding_num must be an integer of at least 0, not 2.0"),
    ],
)
def test_bad_value_dimension(keywords, expected):
    with pytest.raises(ValueError) as caught:
        ValueDimension(**keywords)
    assert str(caught.value) == expected


def test_shape():
    dims = [Dimension(4, 2, 1), Dimension(5, 2, 1), Dimension(4, 2, 0)]
    partial = ValueDimension(5, 3, ValueReduceType.MEAN)
    shape = Shape(dims, partial)
    assert shape.rank == 3
    assert shape.as_list() == [4, 5, 4]
    assert list(shape.dims) == dims
    assert shape.value_dim == partial
    assert shape == Shape(tuple(dims), partial)
    assert hash(shape) == hash(Shape(dims, partial))
    assert shape != Shape(dims)
    assert shape != Shape(dims[1:], partial)
    assert Shape(dims).value_dim is None
    assert (Shape([]).rank, Shape([]).as_list()) == (0, [])


@pytest.mark.parametrize(
    "args, expected",
    [
        (([4, 5],), "a shape consists of Dimension objects, not 4"),
        (([ValueDimension()],), "a shape consists of Dimension objects, not ValueDimension("),
        (([], Dimension(4)), "value_dim must be a ValueDimension or None, not Dimension(value=4"),
    ],
)
def test_bad_shape(args, expected):
    with pytest.raises(ValueError) as caught:
        Shape(*args)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("thing, name", [(Dimension(4), "value"), (ValueDimension(), "value"), (Shape([]), "dims")])
def test_nothing_can_be_changed(thing, name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(thing, name, 1)
