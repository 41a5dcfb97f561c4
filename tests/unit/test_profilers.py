"""FLOPs and memory of graphs and runs."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.profiler import flops as flops_lib
from epl.profiler import profiler
from epl.profiler.flops import FlopsProfilerHook, count_flops, format_report, profile_flops
from epl.profiler.memory_profiler_hook import Allocation, MemoryProfilerHook, format_bytes, profile_memory


@pytest.fixture(autouse=True, params=[False, True], ids=["reference", "resource"])
def _version_1_graph(request):
    before = tf.control_flow_v2_enabled(), tf.resource_variables_enabled()
    tf.disable_control_flow_v2()
    (tf.enable_resource_variables if request.param else tf.disable_resource_variables)()
    with tf.Graph().as_default():
        yield
    (tf.enable_control_flow_v2 if before[0] else tf.disable_control_flow_v2)()
    (tf.enable_resource_variables if before[1] else tf.disable_resource_variables)()


def inputs():
    x = np.random.RandomState(0).randint(0, 10, (500, 10)).astype(np.float32)
    y = np.zeros(500, np.int32)
    iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices((x, y)).batch(10).repeat(1))
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()[0]


def train(loss):
    step = tf.train.get_or_create_global_step()
    return tf.train.MomentumOptimizer(0.001, 0.9).minimize(loss, global_step=step)


# --- FLOPs ---------------------------------------------------------------------------------


def test_hook_and_total_of_a_traced_session():
    out = tf.layers.dense(inputs(), 16, name="dense1")
    tf.train.get_or_create_global_step()
    hook = FlopsProfilerHook(cmds=["scope"])
    metadata = tf.RunMetadata()
    with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
        sess.run(out, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
        # MatMul 2 * 10 * 10 * 16, BiasAdd 160, initializer 160 * (1 product, 1 sum) and one difference of scalars
        assert profile_flops(sess, metadata, ["op"]) == 2 * 10 * 10 * 16 + 160 + 321 == 3681
        assert profile_flops(sess, metadata, "graph") == 3681
        assert profile_flops(sess) == 3681
    assert hook.total_flops == 3681


def test_hook_profiles_once(monkeypatch):
    calls = []
    monkeypatch.setattr(flops_lib, "profile_flops", lambda *a: calls.append(a) or 7)
    out = tf.layers.dense(inputs(), 4)
    tf.train.get_or_create_global_step()
    hook = FlopsProfilerHook()
    assert hook.total_flops is None
    with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
        sess.run(out)
        sess.run(out)
    assert len(calls) == 1
    assert hook.total_flops == 7


@pytest.mark.parametrize("cmds", ["code", ["op", "name"], None, 3])
def test_unknown_view_is_refused(cmds):
    with pytest.raises(ValueError, match="scope, op, graph"):
        FlopsProfilerHook(cmds=cmds)


def test_flops_and_memory_of_the_default_graph():
    x = tf.layers.dense(inputs(), 16, name="dense1")
    x = tf.layers.dense(x, 16, name="dense2")
    assert x.shape.as_list() == [None, 16]
    flops = profiler.profile_flops()
    assert flops["dense1/MatMul"] == 3200
    assert flops["dense2/MatMul"] == 5120
    assert flops["dense1/BiasAdd"] == flops["dense2/BiasAdd"] == 160
    memory = profiler.profile_memory()
    assert memory["dense1/MatMul:0"] == memory["dense2/MatMul:0"] == 640
    assert x.shape.as_list() == [None, 16]  # the user's graph stays as it is


def test_gradients_of_a_dense_layer_cost_twice_the_forward():
    x = tf.layers.dense(inputs(), 16, name="dense1")
    x = tf.layers.dense(x, 8, name="dense2", use_bias=False)
    train(tf.reduce_mean(x))
    flops = profiler.profile_flops()
    forward = 2 * 10 * 16 * 8
    assert flops["dense2/MatMul"] == forward
    assert flops["gradients/dense2/MatMul_grad/MatMul"] == forward
    assert flops["gradients/dense2/MatMul_grad/MatMul_1"] == forward
    assert flops["gradients/dense1/BiasAdd_grad/BiasAddGrad"] == 10 * 16 - 16
    update = [n for name, n in flops.items() if name.startswith("Momentum/update_dense1/kernel")]
    assert sum(update) == 4 * 10 * 16


def test_shapes_behind_a_placeholder_come_from_the_trace():
    x = tf.placeholder(tf.float32, [None, 10])
    out = tf.layers.dense(x, 16, name="d", kernel_initializer=tf.zeros_initializer())
    assert profiler.profile_flops() == {}
    metadata = tf.RunMetadata()
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        trace = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        sess.run(tf.tanh(out), {x: np.ones((3, 10))}, options=trace, run_metadata=metadata)
        counted = count_flops(sess.graph, metadata)
    assert counted["Tanh"] == 3 * 16
    assert counted["d/BiasAdd"] == 3 * 16


def test_calls_branches_and_loops_count_their_functions():
    tf.enable_control_flow_v2()
    x = tf.ones([4, 5])
    w = tf.ones([5, 5])
    tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.matmul(v, w)), [tf.constant(0), x])
    tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.matmul(x, w), lambda: tf.tanh(x))
    by_type = {tf.get_default_graph().get_operation_by_name(n).type: f for n, f in profiler.profile_flops().items()}
    matmul = 2 * 4 * 5 * 5
    assert by_type["StatelessWhile"] == matmul  # one turn; the counter is an integer
    assert by_type["StatelessIf"] == matmul  # the more expensive side
    assert by_type["Sum"] == 19
    assert by_type["Greater"] == 1


def test_reports():
    with tf.name_scope("a"):
        x = tf.tanh(tf.ones([4, 5]), name="t")
        with tf.name_scope("b"):
            tf.matmul(x, tf.ones([5, 2]), name="m")
    graph = tf.get_default_graph()
    flops = count_flops(graph)
    assert flops == {"a/t": 20, "a/b/m": 80}
    assert format_report(graph, flops, "scope").splitlines() == ["100 100.0%  a", " 20  20.0%    t", " 80  80.0%    b", " 80  80.0%      m"]
    assert format_report(graph, flops, "op").splitlines() == ["80  80.0%  MatMul (1)", "20  20.0%  Tanh (1)"]
    assert format_report(graph, flops, "graph").splitlines() == ["20  20.0%  a/t = Tanh", "80  80.0%  a/b/m = MatMul"]
    assert format_report(graph, {}, "scope") == ""


# --- Memory --------------------------------------------------------------------------------


def run_with(hook, steps=10):
    x = tf.layers.dense(inputs(), 16)
    loss = tf.reduce_mean(tf.layers.dense(x, 10))
    op = train(loss)
    with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
        for _ in range(steps):
            sess.run([op, loss])


def test_memory_hook_writes_the_metadata_of_the_chosen_steps(tmp_path):
    hook = MemoryProfilerHook(save_steps=2, max_steps=4, output_dir=str(tmp_path), dump_metadata=True, visualize=False)
    run_with(hook)
    assert sorted(os.listdir(str(tmp_path))) == ["run_metadata_2.bin", "run_metadata_4.bin"]
    metadata = tf.RunMetadata.FromString((tmp_path / "run_metadata_4.bin").read_bytes())
    devices = profile_memory(metadata)
    assert sorted(hook.peaks) == [2, 4]
    assert hook.peaks[4] == {name: memory.peak for name, memory in devices.items()}


def test_memory_hook_draws_live_memory(tmp_path):
    folder = tmp_path / "new"
    run_with(MemoryProfilerHook(save_steps=3, max_steps=3, output_dir=str(folder), visualize=True), steps=4)
    assert os.listdir(str(folder)) == ["memory_3.png"]
    picture = (folder / "memory_3.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) > 5000


@pytest.mark.parametrize("steps", [{"save_steps": 0}, {"max_steps": 0}])
def test_memory_hook_refuses_steps_below_one(steps):
    with pytest.raises(ValueError, match="1 or more"):
        MemoryProfilerHook(**steps)


def test_live_memory_of_a_real_run():
    big = tf.tanh(tf.ones([256, 1024]) * tf.random_uniform([]))  # 1 MiB
    small = tf.reduce_sum(big)
    metadata = tf.RunMetadata()
    with tf.Session() as sess:
        sess.run(small, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    (memory,) = profile_memory(metadata).values()
    assert 2**20 <= memory.peak < 4 * 2**20
    assert memory.live[-1] < 2**20  # only the result outlives the step
    assert memory.at_peak(1)[0].bytes >= 2**20


def record(stats, name, records, start=100):
    node = stats.node_stats.add(node_name=name, all_start_micros=start, timeline_label="%s = Tanh()" % name)
    memory = node.memory.add(allocator_name="cpu")
    for time, size in records:
        memory.allocation_records.add(alloc_micros=time, alloc_bytes=size)
    return node


def test_live_memory_is_the_sum_of_what_is_alive():
    metadata = tf.RunMetadata()
    stats = metadata.step_stats.dev_stats.add(device="/device:GPU:0")
    record(stats, "a", [(110, 100), (140, -100)])
    record(stats, "b", [(120, 40), (130, 7), (150, -40)])
    variable = stats.node_stats.add(node_name="v", all_start_micros=100)
    variable.memory_stats.persistent_memory_size = 1000
    memory = profile_memory(metadata)["/device:GPU:0"]
    assert memory.times == [10, 20, 30, 40, 50]
    assert memory.live == [100, 140, 147, 47, 7]
    assert memory.persistent == 1000
    assert memory.peak == 1147
    assert memory.peak_time == 30
    assert memory.at_peak() == [Allocation("a", 10, 40, 100), Allocation("b", 20, 50, 40), Allocation("b", 30, None, 7)]


def test_variables_are_counted_once_by_their_address():
    tf.layers.dense(tf.ones([2, 300]), 100, use_bias=False, name="d")
    kernel = tf.global_variables()[0]
    out = [tf.matmul(tf.ones([2, 300]), kernel), tf.reduce_sum(kernel)]
    metadata = tf.RunMetadata()
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        sess.run(out, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    (memory,) = profile_memory(metadata).values()
    assert 300 * 100 * 4 <= memory.persistent < 2 * 300 * 100 * 4


def test_format_bytes():
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * 2**20, 2**42)] == ["0 B", "1023 B", "1.5 KiB", "3 MiB", "4 TiB"]
