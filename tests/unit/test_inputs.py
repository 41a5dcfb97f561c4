"""Which inputs make batches whose last one may be smaller."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.unit.machine import user_graph

DATA = np.zeros([10, 3], np.float32)


def ragged(make, iterator=tf.data.make_initializable_iterator):
    """The ragged components of a graph that draws from the dataset that `make` builds."""
    with user_graph() as index:
        drawn = iterator(make()).get_next()
        flat = drawn if isinstance(drawn, (tuple, list)) else [drawn]
        for i, item in enumerate(flat):
            tf.identity(item, name="out_%d" % i)
        return list(index().ragged)


@pytest.mark.parametrize("iterator", [tf.data.make_initializable_iterator, tf.data.make_one_shot_iterator])
def test_a_batched_dataset_is_ragged(iterator):
    assert ragged(lambda: tf.data.Dataset.from_tensor_slices(DATA).batch(4), iterator) == [("IteratorGetNext", 0)]


@pytest.mark.parametrize("iterator", [tf.data.make_initializable_iterator, tf.data.make_one_shot_iterator])
def test_a_dropped_remainder_makes_equal_batches(iterator):
    assert ragged(lambda: tf.data.Dataset.from_tensor_slices(DATA).batch(4, drop_remainder=True), iterator) == []


def test_later_stages_do_not_hide_the_batching():
    assert ragged(lambda: tf.data.Dataset.from_tensor_slices(DATA).batch(4).map(lambda v: v * 2).prefetch(1).repeat(2)) == [("IteratorGetNext", 0)]


def test_batches_made_in_a_nested_dataset():
    def make():
        return tf.data.Dataset.range(2).flat_map(lambda i: tf.data.Dataset.from_tensor_slices(DATA).batch(4))

    assert ragged(make) == [("IteratorGetNext", 0)]


def test_padded_batches():
    def make():
        return tf.data.Dataset.range(9).map(lambda i: tf.fill([i], i)).padded_batch(2, [None])

    assert ragged(make) == [("IteratorGetNext", 0)]


def test_samples_of_varying_size_are_no_batches():
    assert ragged(lambda: tf.data.Dataset.range(9).map(lambda i: tf.fill([i], i))) == []


def test_the_first_component_with_a_batch_dimension_counts():
    def make():
        return tf.data.Dataset.from_tensor_slices((DATA, DATA)).batch(4).map(lambda a, b: (tf.reduce_sum(a), b))

    assert ragged(make) == [("IteratorGetNext", 1)]


@pytest.mark.parametrize("op, found", [("dequeue_up_to", True), ("dequeue_many", False)])
def test_queues(op, found):
    with user_graph() as index:
        queue = tf.FIFOQueue(10, tf.float32, shapes=[[3]])
        tf.identity(getattr(queue, op)(4))
        names = [name for name, _ in index().ragged]
    assert bool(names) == found


def test_an_iterator_that_is_fed_by_a_handle_makes_no_promise():
    with user_graph() as index:
        iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(DATA).batch(4))
        handle = tf.placeholder(tf.string, [])
        feedable = tf.data.Iterator.from_string_handle(handle, tf.float32, tf.TensorShape([None, 3]))
        tf.identity(feedable.get_next())
        iterator.string_handle()
        assert index().ragged == ()
