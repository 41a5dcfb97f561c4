"""Names of devices and of clones."""

import pytest

from epl.utils import common, constant


def test_device_string():
    assert common.get_device_string() == "/job:worker/replica:0/task:0/device:GPU:0"
    assert common.get_device_string("ps", 2, 1, "CPU", 3) == "/job:ps/replica:2/task:1/device:CPU:3"
    assert common.get_device_string(task=1, device_index=2) == "/job:worker/replica:0/task:1/device:GPU:2"


@pytest.mark.parametrize("task", [0, 1, 12])
@pytest.mark.parametrize("device_type", ["CPU", "GPU"])
def test_task_index_of_a_device(task, device_type):
    assert common.get_task_index_from_device_str(common.get_device_string(task=task, device_type=device_type)) == task


def test_task_index_of_a_short_name():
    assert common.get_task_index_from_device_str("/job:worker/task:3") == 3


@pytest.mark.parametrize("name", ["", "/device:GPU:0", "/job:worker/task:x"])
def test_device_without_a_task(name):
    with pytest.raises(ValueError, match=f"the device name '{name}' has no task"):
        common.get_task_index_from_device_str(name)


def test_prefixes():
    assert [common.get_replica_prefix(i) for i in (0, 1, 12)] == ["", "EPL_REPLICA_1/", "EPL_REPLICA_12/"]
    assert [common.get_micro_batch_prefix(i) for i in (0, 1, 12)] == ["", "EPL_MICRO_BATCH_1/", "EPL_MICRO_BATCH_12/"]


@pytest.mark.parametrize("function", [common.get_replica_prefix, common.get_micro_batch_prefix])
def test_negative_index(function):
    with pytest.raises(ValueError, match="at least 0, not -1"):
        function(-1)


@pytest.mark.parametrize("replica", [0, 1, 11])
@pytest.mark.parametrize("micro_batch", [0, 1, 123])
@pytest.mark.parametrize("original", ["dense/MatMul", "dense/MatMul:0", "x"])
def test_clone_names_round_trip(replica, micro_batch, original):
    prefixes = common.get_replica_prefix(replica), common.get_micro_batch_prefix(micro_batch)
    name = "".join(prefixes) + original
    assert common.get_replica_index_from_node_name(name) == replica
    assert common.get_micro_batch_index_from_node_name(name) == micro_batch
    assert (common.get_replica_prefix_from_node_name(name), common.get_micro_batch_prefix_from_node_name(name)) == prefixes
    assert common.get_original_name_from_cloned_object(name) == original


@pytest.mark.parametrize(
    "name",
    [
        "",
        "EPL_REPLICA_1",  # no separator: an object of that name, not a clone
        "EPL_REPLICA_x/a",
        "EPL_REPLICA_0/a",  # index 0 has no prefix
        "EPL_REPLICA_01/a",
        "MY_EPL_REPLICA_1/a",
        "scope/EPL_REPLICA_1/EPL_MICRO_BATCH_1/a",
    ],
)
def test_names_that_only_look_like_clones(name):
    assert common.get_replica_index_from_node_name(name) == common.get_micro_batch_index_from_node_name(name) == 0
    assert common.get_original_name_from_cloned_object(name) == name


def test_constants():
    assert (constant.REDUCE_METHOD_MEAN, constant.REDUCE_METHOD_SUM) == ("mean", "sum")
    assert (constant.GC_COLLECTION, constant.GC_AUTO, constant.GC_COLLECTION_NAME) == ("collection", "auto", "checkpoints")
