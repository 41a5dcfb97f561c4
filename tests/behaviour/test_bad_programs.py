"""What a user gets wrong in a script, and what EPL says: one row per mistake, none hangs.

Wrong configuration values are in tests/unit/test_config_errors.py, wrong clusters in
tests/unit/test_cluster.py and test_tf_config.py.
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import epl
from epl import errors


def start(**config):
    epl.init(epl.Config({k.replace("__", "."): v for k, v in config.items()}))


def linear(rows=None):
    """x, loss, train of a linear model with `rows` static rows."""
    x = tf.placeholder(tf.float32, [rows, 2], "x")
    w = tf.get_variable("w", [2, 1], initializer=tf.ones_initializer(), use_resource=True)
    loss = tf.reduce_mean(tf.matmul(x, w), name="loss")
    return x, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")


def session():
    made = tf.Session()
    made.run(tf.global_variables_initializer())
    return made


def not_divisible():
    start(cluster__devices_per_worker=2, pipeline__num_micro_batch=2, pipeline__accumulate_in_run=True)
    x, loss, train = linear()
    session().run([loss, train], {x: np.ones((6, 2))})


def static_batch_wrong():
    start(cluster__devices_per_worker=2)
    x, loss, train = linear(rows=4)
    session().run([loss, train], {x: np.ones((6, 2))})


def empty_batch():
    start(cluster__devices_per_worker=2)
    x, loss, train = linear()
    session().run([loss, train], {x: np.ones((0, 2))})


def wrong_columns():
    start(cluster__devices_per_worker=2)
    x, loss, train = linear()
    session().run([loss, train], {x: np.ones((4, 3))})


def wrong_rank():
    start(cluster__devices_per_worker=2)
    x, loss, train = linear()
    session().run([loss, train], {x: np.ones(4)})


def wrong_type():
    start(cluster__devices_per_worker=2)
    x, loss, train = linear()
    session().run([loss, train], {x: [["a", "b"]] * 4})


def ragged_value():
    start(cluster__devices_per_worker=2)
    x, loss, train = linear()
    session().run([loss, train], {x: [[1.0, 2.0], [3.0]]})


def tensor_value():
    start(cluster__devices_per_worker=2)
    x, loss, train = linear()
    session().run([loss, train], {x: tf.ones([4, 2])})


def no_gradient():
    start(cluster__devices_per_worker=2)
    tf.get_variable("unused", [2], use_resource=True)
    tf.train.GradientDescentOptimizer(0.1).apply_gradients([(None, v) for v in tf.global_variables()])


def unknown_fetch():
    start(cluster__devices_per_worker=2)
    linear()
    session().run("los:0")


def fetch_of_other_graph():
    start(cluster__devices_per_worker=2)
    linear()
    with tf.Graph().as_default():
        other = tf.constant(1.0)
    session().run(other)


def fetch_of_nothing():
    start(cluster__devices_per_worker=2)
    linear()
    session().run(None)


def feed_of_operation():
    start(cluster__devices_per_worker=2)
    _, loss, train = linear()
    session().run(loss, {train: 1.0})


def gradients_before_init():
    epl.shutdown()
    graph = tf.Graph()
    with graph.as_default():
        x, loss, train = linear()
        start(cluster__devices_per_worker=2)
        session().run([loss, train], {x: np.ones((4, 2))})


def partial_run():
    start(cluster__devices_per_worker=2)
    x, loss, _ = linear()
    session().partial_run_setup([loss], [x])


def nested_scopes():
    start()
    with epl.replicate(1):
        with epl.replicate(1):
            pass


def split_in_replicate():
    start()
    with epl.replicate(1, name="outer"):
        with epl.split(1):
            pass


def default_inside_scope():
    start()
    with epl.replicate(1):
        epl.set_default_strategy(epl.replicate(1))


def zero_devices():
    epl.replicate(0)


def negative_devices():
    epl.split(-1)


def text_devices():
    epl.replicate("2")


def default_is_a_function():
    epl.set_default_strategy(epl.replicate)


def devices_do_not_divide():
    start(cluster__devices_per_worker=3)
    x = tf.placeholder(tf.float32, [None, 2])
    with epl.replicate(1):
        h = tf.layers.dense(x, 2)
    with epl.replicate(1):
        loss = tf.reduce_mean(tf.layers.dense(h, 1))
    tf.train.GradientDescentOptimizer(0.1).minimize(loss)


def too_few_devices():
    start()
    x = tf.placeholder(tf.float32, [None, 2])
    with epl.replicate(1):
        h = tf.layers.dense(x, 2)
    with epl.replicate(1):
        loss = tf.reduce_mean(tf.layers.dense(h, 1))
    tf.train.GradientDescentOptimizer(0.1).minimize(loss)


def unknown_collection():
    start()
    epl.add_to_collection(tf.constant(1.0), "global_avg_objects")


def two_collections():
    start()
    loss = tf.constant(1.0, name="loss")
    epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
    epl.add_to_collection(loss, epl.GraphKeys.LOCAL_SUM_OBJECTS)


def mean_of_integers():
    start(cluster__devices_per_worker=2)
    x, _, train = linear()
    count = tf.size(x, name="count")
    epl.add_to_collection(count, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
    session().run([count, train], {x: np.ones((4, 2))})


def sum_of_strings():
    start(cluster__devices_per_worker=2)
    x, _, train = linear()
    text = tf.as_string(tf.reduce_sum(x), name="text")
    epl.add_to_collection(text, epl.GraphKeys.GLOBAL_SUM_OBJECTS)
    session().run([text, train], {x: np.ones((4, 2))})


def python_choice_steers_update():
    start(cluster__devices_per_worker=2)
    x, loss, _ = linear()
    lucky = tf.py_func(lambda: np.int32(1), [], tf.int32, name="lucky")
    lucky.set_shape([])
    optimizer = tf.train.GradientDescentOptimizer(tf.cast(lucky, tf.float32) * 0.1)
    train = optimizer.apply_gradients([(g * tf.cast(lucky, tf.float32), v) for g, v in optimizer.compute_gradients(loss)])
    step = tf.get_variable("step", [], tf.int32, initializer=tf.zeros_initializer(), use_resource=True)
    with tf.control_dependencies([train]):
        chosen = step.assign_add(lucky)
    session().run([chosen.op], {x: np.ones((4, 2))})


def init_with_text():
    epl.init("two devices")


def init_with_dict():
    epl.init({"pipeline.num_micro_batch": 2})


def config_of_text():
    epl.Config("pipeline.num_micro_batch=2")


def misspelt_key():
    epl.Config({"pipeline.num_microbatch": 2})


def attribute_misspelt():
    epl.Config().pipeline.num_microbatch = 2


def negative_micro_batches():
    epl.Config({"pipeline.num_micro_batch": 0})


def unknown_zero_level():
    start(cluster__devices_per_worker=2, zero__level="v123")
    x, loss, train = linear()
    session().run([loss, train], {x: np.ones((4, 2))})


def split_model(devices, scope, columns=2, noise=None, **options):
    """A step of a model in one split scope; `noise` is added to its input."""
    start(cluster__devices_per_worker=devices, **options)
    x = tf.placeholder(tf.float32, [None, 2])
    with scope():
        h = tf.layers.dense(x if noise is None else x + noise(), columns)
    loss = tf.reduce_mean(h)
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    session().run([loss, train], {x: np.ones((4, 2))})


def shares_for_other_devices():
    split_model(2, lambda: epl.split(2), cluster__split_shares="2,1,1")


def batch_shares_for_other_replicas():
    start(cluster__devices_per_worker=2, cluster__batch_shares="2,1,1")
    x, loss, train = linear()
    session().run([loss, train], {x: np.ones((4, 2))})


def batch_shares_of_a_split_model():
    split_model(2, lambda: epl.split(2), cluster__batch_shares="2,1", cluster__colocate_split_and_replicate=True)


def too_few_rows_for_the_shares():
    start(cluster__devices_per_worker=2, cluster__batch_shares="1,3")
    x, loss, train = linear()
    session().run([loss, train], {x: np.ones((3, 2))})


def splits_of_different_sizes():
    start(cluster__devices_per_worker=4, cluster__colocate_split_and_replicate=True)
    x = tf.placeholder(tf.float32, [None, 4])
    with epl.split(2):
        h = tf.layers.dense(x, 4)
    with epl.split(4):
        loss = tf.reduce_mean(tf.layers.dense(h, 4))
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    session().run([loss, train], {x: np.ones((4, 4))})


def replicated_over_some_of_the_devices():
    start(cluster__devices_per_worker=4, cluster__colocate_split_and_replicate=True)
    epl.set_default_strategy(epl.replicate(2))
    x = tf.placeholder(tf.float32, [None, 4])
    with epl.split(4):
        loss = tf.reduce_mean(tf.layers.dense(x, 4))
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    session().run([loss, train], {x: np.ones((4, 4))})


def noise_in_a_loop_of_a_split_model():
    def noise():
        return tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v + tf.random_uniform([2])), [0, tf.zeros([2])])[1]

    enabled = tf.control_flow_v2_enabled()
    tf.disable_control_flow_v2()
    try:
        split_model(2, lambda: epl.split(2), noise=noise)
    finally:
        if enabled:
            tf.enable_control_flow_v2()


def stages_of_different_sizes():
    start(cluster__devices_per_worker=3)
    x = tf.placeholder(tf.float32, [None, 2])
    with epl.replicate(1):
        h = tf.layers.dense(x, 2)
    with epl.replicate(2):
        loss = tf.reduce_mean(tf.layers.dense(h, 2))
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    session().run([loss, train], {x: np.ones((4, 2))})


def closed_session():
    start(cluster__devices_per_worker=2)
    _, loss, _ = linear()
    made = session()
    made.close()
    made.run("w:0")


def callable_with_too_few_values():
    start(cluster__devices_per_worker=2)
    x, loss, _ = linear()
    session().make_callable(loss, [x])()


def uninitialised():
    start(cluster__devices_per_worker=2)
    x, loss, train = linear()
    tf.Session().run([loss, train], {x: np.ones((4, 2))})


def started_alone():
    start()
    with epl.Cluster(worker_hosts="127.0.0.1:7801,127.0.0.1:7802", worker_index=1):
        x, loss, train = linear()
        session().run([loss, train], {x: np.ones((4, 2))})


MISTAKES = [
    (
        not_divisible,
        errors.FeedError,
        "The 6 rows fed to 'x:0' can't be divided evenly over 4 replicas x micro-batches of this process; feed a multiple of 4 rows",
    ),
    (
        static_batch_wrong,
        errors.FeedError,
        "Cannot feed a value of shape (6, 2) for placeholder 'x:0', which needs (8, 2) (2 times the placeholder's 4 rows",
    ),
    (empty_batch, errors.FeedError, "An empty batch is fed to 'x:0'"),
    (wrong_columns, errors.FeedError, "Cannot feed a value of shape (4, 3) for placeholder 'x:0', which needs (?, 2)"),
    (wrong_rank, errors.FeedError, "Cannot feed a value of shape (4,) for placeholder 'x:0', which needs (?, 2)"),
    (wrong_type, errors.FeedError, "The value fed to 'x:0' can't be converted to float32"),
    (ragged_value, errors.FeedError, "The value fed to 'x:0' can't be converted to float32"),
    (tensor_value, TypeError, "The value of a feed can't be a tf.Tensor"),
    (no_gradient, errors.AnnotationError, "No variable has a gradient: 'unused:0'. The loss given to GradientDescent does not depend on them"),
    (unknown_fetch, ValueError, "los:0"),
    (fetch_of_other_graph, ValueError, "is not an element of this graph"),
    (fetch_of_nothing, TypeError, "None"),
    (feed_of_operation, errors.FeedError, "'train' can't be fed"),
    (gradients_before_init, errors.ProgramError, "Call epl.init() before the model and its gradients are built"),
    (partial_run, errors.ProgramError, "partial_run has no meaning for a distributed program"),
    (nested_scopes, errors.AnnotationError, "scopes do not nest"),
    (split_in_replicate, errors.AnnotationError, "name='outer'"),
    (default_inside_scope, errors.AnnotationError, "set it before the scope or after it"),
    (zero_devices, errors.AnnotationError, "replicate(device_count=0): expected a whole number of devices, 1 or more, or None"),
    (negative_devices, errors.AnnotationError, "split(device_count=-1): expected a whole number of devices"),
    (text_devices, errors.AnnotationError, "replicate(device_count='2'): expected a whole number of devices"),
    (default_is_a_function, errors.AnnotationError, "expected a strategy, such as epl.replicate(device_count=1)"),
    (devices_do_not_divide, errors.ClusterError, "the cluster's 3 devices are no multiple of it; use 2 or 4 devices"),
    (too_few_devices, errors.ClusterError, "but the cluster has only 1"),
    (unknown_collection, errors.AnnotationError, "unknown key 'global_avg_objects'; expected one of global_concat_objects"),
    (two_collections, errors.AnnotationError, "Tensor 'loss:0' is in the collection 'global_mean_objects' already"),
    (
        mean_of_integers,
        errors.ProgramError,
        "Tensor 'count' of type int32 can't be averaged; put it in a sum or concat collection, or cast it to float",
    ),
    (sum_of_strings, errors.ProgramError, "Tensor 'text' of type string can't be merged over replicas"),
    (python_choice_steers_update, errors.ProgramError, "Node 'lucky' of type 'PyFunc' depends on the batch and steers the update"),
    (init_with_text, errors.ConfigError, "epl.init takes an epl.Config, got 'two devices'"),
    (init_with_dict, errors.ConfigError, "write epl.init(epl.Config({...}))"),
    (config_of_text, errors.ConfigError, "pipeline.num_micro_batch=2"),
    (misspelt_key, errors.ConfigError, "num_micro_batch"),
    (attribute_misspelt, errors.ConfigError, "num_micro_batch"),
    (negative_micro_batches, errors.ConfigError, "pipeline.num_micro_batch"),
    (unknown_zero_level, errors.ConfigError, "v123"),
    (shares_for_other_devices, errors.ConfigError, "cluster.split_shares is '2,1,1', 3 weights, but taskgraphs are split over 2 devices"),
    (batch_shares_for_other_replicas, errors.ConfigError, "cluster.batch_shares is '2,1,1', 3 weights, but 2 replicas take batches in this job"),
    (batch_shares_of_a_split_model, errors.ConfigError, "cluster.batch_shares is '2,1', but there are epl.split scopes"),
    (too_few_rows_for_the_shares, errors.FeedError, "The 3 rows fed to 'x:0' are too few to be divided in the ratio 1:3"),
    (splits_of_different_sizes, errors.ProgramError, "Taskgraphs are split over [2, 4] devices of 4: expected one number for all of them"),
    (
        replicated_over_some_of_the_devices,
        errors.ProgramError,
        "Taskgraphs are split over 4 devices, others replicated over [2]: expected one number for these, either 4",
    ),
    (noise_in_a_loop_of_a_split_model, errors.ProgramError, "draws in a loop or conditional, where the devices that compute one batch together"),
    (stages_of_different_sizes, errors.ProgramError, "The stages of the pipeline have [1, 2] devices"),
    (closed_session, RuntimeError, "closed Session"),
    (callable_with_too_few_values, TypeError, "The callable takes 1 feed values, got 0"),
    (uninitialised, tf.errors.FailedPreconditionError, "w"),
    (
        started_alone,
        errors.ClusterError,
        "The cluster has 2 workers and this process is number 1 of them, but it was started as rank 0 of 1 (no launcher). Start one process for each",
    ),
]


@pytest.fixture(autouse=True)
def fresh():
    with tf.Graph().as_default():
        yield
    epl.shutdown()


@pytest.mark.parametrize("mistake, error, text", MISTAKES, ids=[m[0].__name__ for m in MISTAKES])
def test_mistake(mistake, error, text):
    with pytest.raises(error) as caught:
        mistake()
    assert text in str(caught.value)


def test_the_table_is_long_enough():
    assert len({m[0] for m in MISTAKES}) >= 40
