"""Names that scripts written for the original import."""

import importlib

import pytest

NAMES = """
    epl.parallel.graph_editor: Custom get_global_gcd_from_dict fetch_slice_objects_proportion_to_local_num_replicas
    epl.parallel.partitioner: partition_buckets partition_stages
    epl.parallel.planner: AutoStageGenerator
    epl.communicators.collective_communicator: estimate_split_num_for_comm
    epl.ops.distributed_dense: DistributedDense distributed_dense
    epl.ops.distributed_losses: distributed_sparse_softmax_cross_entropy_with_logits
    epl.ops.distributed_ops: distributed_argmax distributed_equal
    epl.ops.initializers: get
    epl.runtime.gc.gradient_checkpoint: capture_ops
    epl.runtime.saver: ShardingLoader MemoryEfficientBuilder
    epl.runtime.zero: zero_v0 zero_v1
    epl.profiler.flops: FlopsProfilerHook profile_flops
    epl.profiler.profiler: profile_flops profile_memory
    epl.profiler.memory_profiler_hook: MemoryProfilerHook profile_memory
    epl.utils.shape_inference: infer_shape get_tf_tensor_shape
    epl.ir.shape: Dimension ValueDimension ValueReduceType Shape
    """


@pytest.mark.parametrize("line", [line.strip() for line in NAMES.strip().splitlines()])
def test_names_are_there(line):
    module, _, names = line.partition(":")
    for name in names.split():
        assert callable(getattr(importlib.import_module(module), name))


def test_files_of_a_worker():
    from epl.parallel.graph_editor import fetch_slice_objects_proportion_to_local_num_replicas as files_of
    from epl.parallel.graph_editor import get_global_gcd_from_dict

    devices = ["/job:worker/replica:0/task:%d/device:GPU:%d" % (worker, index) for worker, index in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1))]
    assert files_of(0, ["a", "b", "c"], 6, devices) == ["a", "b"]
    assert files_of(1, ["a", "b", "c"], 6, devices) == ["c"]
    assert files_of(1, ["a", "b", "c", "d"], 6, devices, True) == ["c"]
    assert get_global_gcd_from_dict({"a": 4, "b": 6}) == 2


def test_captured_ops():
    import tensorflow.compat.v1 as tf

    from epl.runtime.gc.gradient_checkpoint import capture_ops

    with tf.Graph().as_default():
        tf.constant(1, name="before")
        with capture_ops() as ops:
            tf.constant(2, name="within")
        tf.constant(3, name="behind")
    assert [op.name for op in ops] == ["within"]
