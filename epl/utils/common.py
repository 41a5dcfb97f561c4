"""Names of devices, and of the clones of operations, tensors and variables.

A clone's name is `EPL_REPLICA_<r>/EPL_MICRO_BATCH_<m>/<original name>`. A prefix with
index 0 is left out, so the original is its own clone (0, 0). No other module builds
or takes apart such names.
"""

import re
from typing import Tuple

from epl.utils.constant import MICRO_BATCH_PREFIX, REPLICA_PREFIX

_TASK = re.compile(r"/task:(\d+)(?:/|\Z)")
_CLONE = re.compile(rf"(?:{REPLICA_PREFIX}([1-9]\d*)/)?(?:{MICRO_BATCH_PREFIX}([1-9]\d*)/)?")


def get_device_string(job: str = "worker", replica: int = 0, task: int = 0, device_type: str = "GPU", device_index: int = 0) -> str:
    """The full name of a device.

    >>> get_device_string(task=1, device_index=2)
    '/job:worker/replica:0/task:1/device:GPU:2'
    """
    return f"/job:{job}/replica:{replica}/task:{task}/device:{device_type}:{device_index}"


def get_task_index_from_device_str(device_str: str) -> int:
    """The task (worker) number in the name of a device.

    >>> get_task_index_from_device_str("/job:worker/replica:0/task:1/device:GPU:2")
    1
    """
    found = _TASK.search(device_str)
    if not found:
        raise ValueError(f"the device name {device_str!r} has no task; expected one such as {get_device_string()!r}")
    return int(found.group(1))


def get_replica_prefix(replica_index: int) -> str:
    """The name prefix of the clones in a replica; empty for replica 0."""
    return _prefix(REPLICA_PREFIX, replica_index)


def get_micro_batch_prefix(micro_batch_index: int) -> str:
    """The name prefix of the clones for a micro-batch; empty for micro-batch 0."""
    return _prefix(MICRO_BATCH_PREFIX, micro_batch_index)


def get_replica_index_from_node_name(name: str) -> int:
    """The replica that a clone belongs to.

    >>> get_replica_index_from_node_name("EPL_REPLICA_3/EPL_MICRO_BATCH_1/dense/MatMul")
    3
    """
    return _split(name)[0]


def get_micro_batch_index_from_node_name(name: str) -> int:
    """The micro-batch that a clone belongs to.

    >>> get_micro_batch_index_from_node_name("EPL_REPLICA_3/EPL_MICRO_BATCH_1/dense/MatMul")
    1
    """
    return _split(name)[1]


def get_replica_prefix_from_node_name(name: str) -> str:
    """The replica's part of a clone's name; empty for replica 0."""
    return get_replica_prefix(_split(name)[0])


def get_micro_batch_prefix_from_node_name(name: str) -> str:
    """The micro-batch's part of a clone's name; empty for micro-batch 0."""
    return get_micro_batch_prefix(_split(name)[1])


def get_original_name_from_cloned_object(name: str) -> str:
    """The name in the script of what was cloned.

    >>> get_original_name_from_cloned_object("EPL_REPLICA_11/EPL_MICRO_BATCH_123/dense/MatMul")
    'dense/MatMul'
    """
    return _split(name)[2]


def _prefix(text: str, index: int) -> str:
    if index < 0:
        raise ValueError(f"an index must be at least 0, not {index}")
    return f"{text}{index}/" if index else ""


def _split(name: str) -> Tuple[int, int, str]:
    """Replica, micro-batch and original name of a clone."""
    found = _CLONE.match(name)
    assert found is not None  # both prefixes are optional, so the pattern matches any name
    replica, micro_batch = found.groups(default="0")
    return int(replica), int(micro_batch), name[found.end() :]
