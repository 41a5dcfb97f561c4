"""Adapter of file inputs: with `io.slicing` each worker reads its share of the files."""

import functools
from typing import Any, Callable, List, Optional

import tensorflow.compat.v1 as tf
from absl import logging

from epl import compat
from epl.env import Env
from epl.runtime.adapters import Patches
from epl.runtime.io_slicing import slice_files


def install(patches: Patches) -> None:
    for cls in compat.file_dataset_classes():
        patches.replace(cls, "__init__", _reader)
    for owner in compat.list_files_owners():
        patches.replace(owner, "list_files", lambda original: staticmethod(_list_files(original)))
    patches.replace(tf.train, "string_input_producer", _producer)


def share_of(files: List[str]) -> List[str]:
    """This worker's share of a list of files, the same list on all workers; logged once per list."""
    env = Env.get()
    cluster, options = env.cluster, env.config.io
    env.deals_files = True
    weights = _weights(cluster, env.config.cluster.batch_shares)
    mine = slice_files(files, weights, cluster.worker_index, options.drop_last_files, options.unbalanced_io_slicing)
    logging.info("io.slicing: worker %d of %d reads %d of %d files: %s", cluster.worker_index, cluster.worker_num, len(mine), len(files), mine[:5])
    return mine


def _weights(cluster: Any, batch_shares: str) -> List[int]:
    """How much each worker reads: by its devices, or by the shares of its replicas (`cluster.batch_shares`)."""
    shares = [int(share) for share in batch_shares.split(",") if share]
    if not shares or len(shares) % cluster.worker_num:
        return [cluster.gpu_num_per_worker] * cluster.worker_num
    each = len(shares) // cluster.worker_num
    return [sum(shares[worker * each : (worker + 1) * each]) for worker in range(cluster.worker_num)]


def _active() -> bool:
    env = Env.get()
    return bool(env.initialized and env.config.io.slicing and env.cluster is not None and env.cluster.worker_num > 1)


def _names(value: Any) -> Optional[List[str]]:
    """The file names in a Python or constant value; None for a dataset or a computed tensor."""
    if isinstance(value, tf.Tensor):
        value = tf.get_static_value(value)
    if isinstance(value, bytes):
        return [value.decode()]
    if isinstance(value, str):
        return [value]
    if value is None or not hasattr(value, "__len__"):
        return None
    try:
        return [v.decode() if isinstance(v, bytes) else str(v) for v in value]
    except TypeError:
        return None


def _reader(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, filenames: Any, *args: Any, **kwargs: Any) -> None:
        names = _names(filenames) if _active() else None
        original(self, filenames if names is None else share_of(names), *args, **kwargs)

    return init


def _list_files(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def list_files(file_pattern: Any, shuffle: Optional[bool] = None, *args: Any, **kwargs: Any) -> Any:
        names = _names(file_pattern) if _active() else None
        if names is None:
            return original(file_pattern, shuffle, *args, **kwargs)
        # The share is taken from the sorted list, so that it is the same division on all workers.
        found = sorted({path for pattern in names for path in tf.gfile.Glob(pattern)})
        return original(share_of(found), shuffle, *args, **kwargs)

    return list_files


def _producer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def string_input_producer(string_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        names = _names(string_tensor) if _active() else None
        return original(string_tensor if names is None else share_of(names), *args, **kwargs)

    return string_input_producer
