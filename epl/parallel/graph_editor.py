"""Cloning and the slicing of files under the original's names; see `epl.passes.clone` and `epl.runtime.io_slicing`."""

import functools
import math
from typing import Any, List, Mapping, Sequence

from epl.cluster.devices import worker_of
from epl.passes.clone import Cloner as Custom
from epl.runtime.io_slicing import slice_files

__all__ = ["Custom", "fetch_slice_objects_proportion_to_local_num_replicas", "get_global_gcd_from_dict"]


def get_global_gcd_from_dict(numbers: Mapping[Any, int]) -> int:
    """The greatest common divisor of a dictionary's values."""
    return functools.reduce(math.gcd, numbers.values(), 0)


def fetch_slice_objects_proportion_to_local_num_replicas(
    worker_index: int,
    objects: Sequence[str],
    num_replicas: int,
    all_devices: Sequence[str],
    drop_last_files: bool = False,
    unbalanced_io_slicing: bool = False,
    name: str = "",
) -> List[str]:
    """The objects that one worker reads, in proportion to its replicas (`slice_files`).

    Args:
      num_replicas: of the taskgraph in the whole job; its devices, equally many a replica, are `all_devices`.
    """
    workers = [worker_of(device) for device in all_devices]
    per_replica = max(1, len(workers) // max(1, num_replicas))
    counts = [workers.count(worker) // per_replica for worker in range(max(workers) + 1)]
    return slice_files(objects, counts, worker_index, drop_last_files, unbalanced_io_slicing)
