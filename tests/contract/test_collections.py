"""Merged values of fetches: 2 local replicas with 2 micro-batches each, or 2 stages."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import epl

# What replica r draws as micro-batch m: replica 0 has 1, 2 and replica 1 has 3, 4.
BATCHES = np.array([[1.0, 1.5], [2.0, 2.5], [3.0, 3.5], [4.0, 4.5]], np.float32)

KEYS = ["GLOBAL_CONCAT_OBJECTS", "GLOBAL_MEAN_OBJECTS", "GLOBAL_SUM_OBJECTS", "LOCAL_CONCAT_OBJECTS", "LOCAL_MEAN_OBJECTS", "LOCAL_SUM_OBJECTS"]

MERGED = {
    "GLOBAL_CONCAT_OBJECTS": BATCHES.reshape(-1),
    "GLOBAL_MEAN_OBJECTS": BATCHES.mean(axis=0),
    "GLOBAL_SUM_OBJECTS": BATCHES.sum(axis=0),
    "LOCAL_CONCAT_OBJECTS": BATCHES[:2].reshape(-1),
    "LOCAL_MEAN_OBJECTS": BATCHES[:2].mean(axis=0),
    "LOCAL_SUM_OBJECTS": BATCHES[:2].sum(axis=0),
}


def test_keys():
    assert [key for key in vars(epl.GraphKeys) if key.endswith("_OBJECTS")] == KEYS
    assert [getattr(epl.GraphKeys, key) for key in KEYS] == epl.GraphKeys.ALL_COLLECTION_KEYS
    assert epl.GraphKeys.GLOBAL_CONCAT_OBJECTS == "global_concat_objects"
    assert epl.GraphKeys.LOCAL_SUM_OBJECTS == "local_sum_objects"


def test_get_collection(gpus):
    gpus(1)
    epl.init()
    x, y = tf.constant(1.0), tf.constant(2.0)
    epl.add_to_collection(x, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
    epl.add_to_collection(y, epl.GraphKeys.LOCAL_SUM_OBJECTS)
    assert epl.get_collection(epl.GraphKeys.GLOBAL_MEAN_OBJECTS) == [x]
    everything = epl.get_all_collections()
    assert list(everything) == epl.GraphKeys.ALL_COLLECTION_KEYS
    assert everything[epl.GraphKeys.LOCAL_SUM_OBJECTS] == [y]
    with pytest.raises(RuntimeError, match="can't be merged"):
        epl.add_to_collection(x, epl.GraphKeys.GLOBAL_SUM_OBJECTS)


def build(gpus, devices, options=(), stages=1):
    """x: the batch of an instance; the loss and its training op."""
    gpus(devices)
    epl.init(epl.Config(dict({"pipeline.num_micro_batch": 2, "pipeline.accumulate_in_run": True}, **dict(options))))
    with epl.replicate(1):
        iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(BATCHES).repeat())
        tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        x = tf.identity(iterator.get_next(), name="batch")
        w = tf.get_variable("w", [], initializer=tf.ones_initializer())
        loss = tf.reduce_mean(x * w) if stages == 1 else x * w
    if stages > 1:
        with epl.replicate(1):
            x = tf.identity(loss)
            loss = tf.reduce_mean(loss)
    return x, loss, tf.train.GradientDescentOptimizer(0.0).minimize(loss)


def evaluated(fetches):
    with tf.train.MonitoredTrainingSession() as session:
        return session.run(fetches)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("stages, devices", [(1, 2), (2, 4)], ids=["one stage", "two stages"])
def test_merged_values(gpus, key, stages, devices):
    x, _, train = build(gpus, devices, stages=stages)
    epl.add_to_collection(x, getattr(epl.GraphKeys, key))
    np.testing.assert_allclose(evaluated([x, train])[0], MERGED[key])


def test_without_collection(gpus):
    """The mean of a float scalar over the micro-batches of the first replica."""
    _, loss, train = build(gpus, 2)
    assert evaluated([loss, train])[0] == pytest.approx(BATCHES[:2].mean())


def test_global_mean_of_the_loss(gpus):
    _, loss, train = build(gpus, 2)
    epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
    summary = tf.summary.scalar("loss", loss)
    value, text, _ = evaluated([loss, summary, train])
    assert value == pytest.approx(BATCHES.mean())
    read = tf.Summary.FromString(text).value
    assert [(one.tag, pytest.approx(one.simple_value)) for one in read] == [("loss", BATCHES.mean())]


Pair = collections.namedtuple("Pair", "x op")


def test_structures(gpus):
    x, _, train = build(gpus, 2)
    epl.add_to_collection(x, epl.GraphKeys.GLOBAL_SUM_OBJECTS)
    expected = MERGED["GLOBAL_SUM_OBJECTS"]
    for fetches, of in [
        (x, lambda v: v),
        ([x, train], lambda v: v[0]),
        ((x, train), lambda v: v[0]),
        (Pair(x, train), lambda v: v.x),
        ({"a": x, "b": train}, lambda v: v["a"]),
        (collections.OrderedDict([("a", train), ("b", x)]), lambda v: v["b"]),
        ({"a": [x, (train, {"c": x})]}, lambda v: v["a"][1][1]["c"]),
    ]:
        with tf.train.MonitoredTrainingSession() as session:
            found = session.run(fetches)
        assert type(found) is (np.ndarray if fetches is x else type(fetches))
        if fetches is not x:  # alone it is evaluated, not a training step
            np.testing.assert_allclose(of(found), expected)
    assert evaluated(train) is None


@pytest.mark.parametrize("resource", [False, True], ids=["reference", "resource"])
def test_fetched_arrays_are_copies(gpus, resource):
    """Neither does a later step change a fetched array, nor a change of the array the variable."""
    gpus(2)
    (tf.enable_resource_variables if resource else tf.disable_resource_variables)()
    try:
        epl.init()
        with epl.replicate(1):
            w = tf.get_variable("w", [3], initializer=tf.ones_initializer())
            shifted = tf.reshape(w, [3, 1])
            constant = tf.constant([1.0, 2.0])
            loss = tf.reduce_sum(w)
        train = tf.train.GradientDescentOptimizer(1.0).minimize(loss)
    finally:
        tf.disable_resource_variables()
    with tf.train.MonitoredTrainingSession() as session:
        before, shape_changed, _ = session.run([w, shifted, train])
        alone = session.run(w)
        session.run(train)
        np.testing.assert_array_equal(before, [1, 1, 1])
        np.testing.assert_array_equal(shape_changed, [[1], [1], [1]])
        np.testing.assert_array_equal(alone, [0, 0, 0])
        for fetch, value in ((w, [-1, -1, -1]), (constant, [1, 2])):
            session.run(fetch)[:] = 7
            np.testing.assert_array_equal(session.run(fetch), value)
