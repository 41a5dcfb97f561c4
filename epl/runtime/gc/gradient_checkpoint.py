"""Which ops a block of Python has made."""

import contextlib
from typing import Iterator, List

import tensorflow.compat.v1 as tf

from epl import compat


@contextlib.contextmanager
def capture_ops() -> Iterator[List[tf.Operation]]:
    """A list that holds, at the end of the block, the ops that were added to the default graph in it."""
    graph, ops = tf.get_default_graph(), []  # type: ignore[var-annotated]
    before = compat.op_count(graph)
    try:
        yield ops
    finally:
        ops.extend(compat.new_ops(graph, before))
