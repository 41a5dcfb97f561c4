"""Loading parts of checkpoints, and saving piece by piece."""

import os
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.errors import CheckpointError
from epl.runtime.saver import MemoryEfficientBuilder, ShardingLoader


@pytest.fixture(autouse=True, params=[False, True], ids=["reference", "resource"])
def _variables(request):
    before = tf.resource_variables_enabled()
    (tf.enable_resource_variables if request.param else tf.disable_resource_variables)()
    yield
    (tf.enable_resource_variables if before else tf.disable_resource_variables)()


def saveables():
    return tf.global_variables() + tf.get_collection(tf.GraphKeys.SAVEABLE_OBJECTS)


def model(optimizer, copies, width):
    """Two dense layers, `copies` equal ones, one of the given width and a last one; learning rate 0."""
    x = np.random.randint(0, 10, (500, 10)).astype(np.float32)
    iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(x).batch(10).repeat(1))
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    x = tf.layers.dense(iterator.get_next(), 16)
    for i in range(copies):
        x = tf.layers.dense(x, 16, name="layer_%d" % i)
    x = tf.layers.dense(x, width, name="split1")
    loss = tf.reduce_mean(tf.layers.dense(x, 10, name="split0"))
    step = tf.train.get_or_create_global_step()
    with tf.name_scope(optimizer):
        chosen = tf.train.AdamOptimizer(0.0) if optimizer == "adam" else tf.train.MomentumOptimizer(0.0, 0.09)
        return step, chosen.minimize(loss, global_step=step)


def run(folder, load=None, optimizer="momentum", copies=1, width=16):
    """Five steps; returns the steps seen and the variables before the first, by op name."""
    with tf.Graph().as_default():
        step, train = model(optimizer, copies, width)
        if load is not None:
            load(tf.train.latest_checkpoint(folder)).restore()
            folder = None
        steps = []
        with tf.train.MonitoredTrainingSession(checkpoint_dir=folder) as sess:
            values = sess.run({v.op.name: v for v in tf.global_variables()})
            for _ in range(5):
                steps.append(sess.run(step))  # apart: in plain TensorFlow the read races with the update
                sess.run(train)
    return steps, values


@pytest.fixture()
def folder(tmp_path):
    """A folder with the checkpoint of a first run."""
    steps, _ = run(str(tmp_path))
    assert steps == [0, 1, 2, 3, 4]
    return str(tmp_path)


def checkpoint(folder):
    reader = tf.train.load_checkpoint(folder)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def test_everything(folder):
    steps, values = run(folder, ShardingLoader)
    assert steps == [5, 6, 7, 8, 9]
    stored = checkpoint(folder)
    assert set(stored) == set(values)
    for name in set(values) - {"global_step"}:
        np.testing.assert_array_equal(values[name], stored[name])


def test_a_folder_stands_for_its_latest_checkpoint(folder):
    assert run(folder, lambda prefix: ShardingLoader(folder))[0] == [5, 6, 7, 8, 9]


def test_no_checkpoint_is_no_work():
    with tf.Graph().as_default():
        v = tf.get_variable("v", [2])
        before = v.initializer
        ShardingLoader(None).restore()
        assert v.initializer is before


def test_list_of_variables_and_another_optimizer(folder):
    def load(prefix):
        return ShardingLoader(prefix, [v for v in saveables() if "adam" not in v.name.lower()])

    steps, values = run(folder, load, optimizer="adam")
    assert steps == [5, 6, 7, 8, 9]
    np.testing.assert_array_equal(values["split1/kernel"], checkpoint(folder)["split1/kernel"])
    moments = [value for name, value in values.items() if "Adam" in name]
    assert len(moments) == 2 * 8
    assert not any(value.any() for value in moments)


def test_variables_that_the_checkpoint_lacks_keep_their_initializers(folder):
    steps, values = run(folder, ShardingLoader, optimizer="adam")
    assert steps == [5, 6, 7, 8, 9]
    assert [v for name, v in values.items() if "beta1_power" in name] == [pytest.approx(0.9)]


def first_layer(name):
    return re.sub(r"layer_\d+/", "layer_0/", name)


def test_five_copies_of_one_layer(folder):
    def load(prefix):
        variables = [v for v in saveables() if "global_step" not in v.name]
        return ShardingLoader(prefix, var_list=variables, assign_map={v.op.name: first_layer(v.op.name) for v in variables})

    steps, values = run(folder, load, copies=5)
    assert steps == [0, 1, 2, 3, 4]
    stored = checkpoint(folder)
    assert "layer_4/kernel" in values
    for name in set(values) - {"global_step"}:
        np.testing.assert_array_equal(values[name], stored[first_layer(name)])


@pytest.mark.parametrize("begin", [0, 8])
def test_layers_of_half_the_width(folder, begin):
    def load(prefix):
        variables = [v for v in saveables() if "global_step" not in v.name]
        slices = {}
        for v in variables:
            if v.op.name.startswith("split"):
                size = v.shape.as_list()
                stored = tf.train.load_checkpoint(prefix).get_variable_to_shape_map()[v.op.name]
                slices[v.op.name] = {"begin": [begin if s != d else 0 for s, d in zip(size, stored)], "size": size}
        names = {v.op.name: first_layer(v.op.name) for v in variables}
        return ShardingLoader(prefix, var_list=variables, assign_map=names, sharding_info=slices)

    steps, values = run(folder, load, copies=5, width=8)
    assert steps == [0, 1, 2, 3, 4]
    stored = checkpoint(folder)
    half = slice(begin, begin + 8)
    assert values["split1/kernel"].shape == (16, 8)
    np.testing.assert_array_equal(values["split1/kernel"], stored["split1/kernel"][:, half])
    np.testing.assert_array_equal(values["split1/bias"], stored["split1/bias"][half])
    np.testing.assert_array_equal(values["split0/kernel"], stored["split0/kernel"][half])
    np.testing.assert_array_equal(values["layer_3/kernel"], stored["layer_0/kernel"])


# --- One variable at a time ----------------------------------------------------------------


@pytest.fixture()
def small(tmp_path):
    """A checkpoint with 'a' [4, 6] = 0..23 and 'n' = 7, an int64."""
    prefix = str(tmp_path / "small")
    with tf.Graph().as_default(), tf.Session() as sess:
        tf.get_variable("a", initializer=np.arange(24, dtype=np.float32).reshape(4, 6))
        tf.get_variable("n", initializer=np.int64(7))
        sess.run(tf.global_variables_initializer())
        tf.train.Saver().save(sess, prefix, write_meta_graph=False)
    return prefix


A = np.arange(24, dtype=np.float32).reshape(4, 6)


def initial_values(build, *arguments, **keywords):
    """The variables that `build` makes, as a ShardingLoader initialises them."""
    with tf.Graph().as_default(), tf.Session() as sess:
        made = build()
        ShardingLoader(*arguments, **keywords).restore()
        sess.run(tf.global_variables_initializer())
        return sess.run(tf.convert_to_tensor(made))


@pytest.mark.parametrize("partitions", [[2, 1], [3, 1], [1, 4]])
def test_partitioned_variable_reads_its_parts(small, partitions):
    def build():
        return tf.get_variable("a", [4, 6], partitioner=lambda shape, dtype: partitions)

    np.testing.assert_array_equal(initial_values(build, small), A)


def test_partitioned_variable_given_whole_renamed_and_sliced(small):
    def build():
        return tf.get_variable("b", [4, 3], partitioner=tf.fixed_size_partitioner(2))

    with tf.Graph().as_default(), tf.Session() as sess:
        whole = build()
        info = {"a": {"begin": [0, 2], "size": [4, 3]}}
        ShardingLoader(small, var_list=[whole], assign_map={"b": "a"}, sharding_info=info).restore()
        sess.run(tf.global_variables_initializer())
        np.testing.assert_array_equal(sess.run(tf.convert_to_tensor(whole)), A[:, 2:5])


def test_initial_value_is_the_checkpoints(small):
    with tf.Graph().as_default(), tf.Session() as sess:
        v = tf.get_variable("a", [4, 6])
        ShardingLoader(small).restore()
        assert v.initial_value.shape.as_list() == [4, 6]
        np.testing.assert_array_equal(sess.run(v.initial_value), A)


def test_reading_stays_off_the_variables_device(small):
    with tf.Graph().as_default() as graph:
        with tf.device("/job:worker/task:1/device:GPU:3"):
            v = tf.get_variable("a", [4, 6])
        ShardingLoader(small).restore()
        (read,) = (op for op in graph.get_operations() if op.type == "RestoreV2")
        assert read.device == "/job:worker/task:1/device:CPU:0"
        assert v.initializer.device == "/job:worker/task:1/device:GPU:3"


def test_integers_and_scalars(small):
    assert initial_values(lambda: tf.get_variable("n", [], tf.int64), small) == 7


@pytest.mark.parametrize(
    "shape, dtype, keywords, message",
    [
        ([4, 5], tf.float32, {}, r"'v' has the shape \[4, 5\], but 'a' in the checkpoint gives \[4, 6\]"),
        ([4, 6], tf.float64, {}, "is float64, but 'a' .* is float32"),
        ([4, 3], tf.float32, {"sharding_info": {"a": {"begin": [0, 4], "size": [4, 3]}}}, "do not lie in its shape"),
        ([4, 3], tf.float32, {"sharding_info": {"a": {"begin": [0], "size": [4]}}}, "do not lie in its shape"),
        ([4, 2], tf.float32, {"sharding_info": {"a": {"begin": [0, 0], "size": [4, 3]}}}, r"gives \[4, 3\] \(a slice of \[4, 6\]\)"),
        ([4, 6], tf.float32, {"sharding_info": {"z": {"begin": [0], "size": [1]}}}, "has no 'z'"),
        ([4, 6], tf.float32, {"assign_map": {"v": "nothing"}}, "has no 'nothing'.*It has: a, n"),
    ],
)
def test_what_does_not_fit_is_an_error(small, shape, dtype, keywords, message):
    arguments = dict({"assign_map": {"v": "a"}}, **keywords)
    with pytest.raises(CheckpointError, match=message):
        initial_values(lambda: tf.get_variable("v", shape, dtype), small, **arguments)


def test_missing_checkpoint_is_an_error(tmp_path):
    for place in (str(tmp_path), str(tmp_path / "none")):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            ShardingLoader(place).restore()


# --- MemoryEfficientBuilder ----------------------------------------------------------------


def innermost(session):
    while not isinstance(session, tf.Session):
        session = session._sess
    return session


def memory_saver_run(folder):
    """Train and save when there is no checkpoint, else load it; returns all variables."""
    with tf.Graph().as_default():
        step, train = model("momentum", 1, 16)
        saver = tf.train.Saver(sharded=True, restore_sequentially=True, builder=MemoryEfficientBuilder())
        found = tf.train.latest_checkpoint(folder)
        ShardingLoader(found).restore()
        with tf.train.MonitoredTrainingSession() as sess:
            if found is None:
                for _ in range(5):
                    _, number = sess.run([train, step])
                saver.save(innermost(sess), os.path.join(folder, "model.ckpt"), number)
            return sess.run({v.name: v for v in saveables()}), found


def test_saver_and_loader(tmp_path):
    first, found = memory_saver_run(str(tmp_path))
    assert found is None
    second, found = memory_saver_run(str(tmp_path))
    assert found is not None
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])


def waits_itself(op):
    """True if an op, or the op it reads a value through, waits for another file."""
    return any(c.type in ("Identity", "NoOp") and c.name.startswith("save/") for c in op.control_inputs)


@pytest.mark.parametrize("size, groups", [(10**9, [5]), (400, [2, 2, 1]), (1, [1, 1, 1, 1, 1])])
def test_files_of_limited_size_one_after_the_other(tmp_path, size, groups):
    prefix = str(tmp_path / "model")
    with tf.Graph().as_default() as graph, tf.Session() as sess:
        with tf.device("/device:CPU:0"):
            for i in range(4):
                tf.get_variable("v%d" % i, [10, 5])  # 200 bytes
            tf.get_variable("w", [300])  # more than 400
        saver = tf.train.Saver(sharded=True, restore_sequentially=True, builder=MemoryEfficientBuilder(size))
        sess.run(tf.global_variables_initializer())
        before = sess.run({v.name: v for v in tf.global_variables()})
        saver.save(sess, prefix, write_meta_graph=False)
        assert len([f for f in os.listdir(str(tmp_path)) if ".data-" in f]) == len(groups)
        saves = [op for op in graph.get_operations() if op.type == "SaveV2"]
        assert [len(op.inputs) - 3 for op in saves] == groups
        # Each tensor is taken from its variable only when the file before is written.
        assert [all(waits_itself(t.op) for t in op.inputs[3:]) for op in saves] == [False] + [True] * (len(groups) - 1)
        reads = [op for op in graph.get_operations() if op.type == "RestoreV2"]
        assert [any(waits_itself(t.op) for t in op.inputs) for op in reads] == [False] * groups[0] + [True] * sum(groups[1:])
        sess.run([v.assign(tf.zeros_like(v)) for v in tf.global_variables()])
        saver.restore(sess, prefix)
        after = sess.run({v.name: v for v in tf.global_variables()})
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])
    with tf.Graph().as_default(), tf.Session() as sess:
        v = tf.get_variable("v2", [10, 5])
        tf.train.Saver().restore(sess, prefix)  # a plain saver reads it
        np.testing.assert_array_equal(sess.run(v), before["v2:0"])


def test_partitioned_variables_are_saved_as_one(tmp_path):
    prefix = str(tmp_path / "model")
    with tf.Graph().as_default(), tf.Session() as sess:
        v = tf.get_variable("v", [6, 2], partitioner=tf.fixed_size_partitioner(3))
        saver = tf.train.Saver(sharded=True, restore_sequentially=True, builder=MemoryEfficientBuilder(20))
        sess.run(tf.global_variables_initializer())
        saver.save(sess, prefix, write_meta_graph=False)
        np.testing.assert_array_equal(checkpoint(prefix)["v"], sess.run(tf.convert_to_tensor(v)))


def test_size_below_one_byte_is_refused():
    with pytest.raises(ValueError, match="1 or more"):
        MemoryEfficientBuilder(0)
