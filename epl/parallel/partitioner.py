"""Cuts of sequences under the original's name; see `epl.planner.partition`."""

from epl.planner.partition import partition_buckets, partition_stages

__all__ = ["partition_buckets", "partition_stages"]
