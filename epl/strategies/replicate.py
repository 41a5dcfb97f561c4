"""Data parallelism."""

from typing import Optional

from epl.strategies.base import ParallelStrategy


class Replicate(ParallelStrategy):
    """Every device holds the whole taskgraph and consumes its own batches."""

    kind = "replicate"


def replicate(device_count: Optional[int] = None, name: Optional[str] = None) -> Replicate:
    """A scope (or default) whose ops are replicated: `with epl.replicate(device_count=1):`.

    Args:
      device_count: the devices of the taskgraph in one replica of the model; None means 1.
      name: shown in messages and reports.

    Raises AnnotationError for a count that is no whole number from 1.
    """
    return Replicate(device_count, name)
