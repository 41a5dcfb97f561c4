"""Tensor parallelism."""

from typing import Optional

from epl.strategies.base import ParallelStrategy


class Split(ParallelStrategy):
    """The devices of a replica hold one taskgraph together, each a shard of its tensors."""

    kind = "split"
    is_split = True


def split(device_count: Optional[int] = None, name: Optional[str] = None) -> Split:
    """A scope (or default) whose ops are sharded: `with epl.split(device_count=8):`.

    Args:
      device_count: the shards; None means all devices of the cluster.
      name: shown in messages and reports.

    Raises AnnotationError for a count that is no whole number from 1.
    """
    return Split(device_count, name)
