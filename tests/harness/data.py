"""Deterministic training data: the global batch of a step, and each rank's part of it."""

from typing import Dict, Iterable, List, NamedTuple, Sequence, Tuple

import numpy as np

from tests.harness.layouts import Layout

Arrays = Dict[str, np.ndarray]


class Field(NamedTuple):
    """One input of a model: shape of one sample, and integers below `high` or, if None, normal floats."""

    shape: Tuple[int, ...] = ()
    high: int = 0
    low: int = 0

    @property
    def dtype(self) -> type:
        return np.int32 if self.high else np.float32


def global_batch(fields: Dict[str, Field], number: int, rows: int, seed: int = 0) -> Arrays:
    """The `number`-th global batch of `rows` samples."""
    random = np.random.RandomState(1000 * (seed + 1) + number)
    batch = {}
    for name in sorted(fields):
        field = fields[name]
        shape = (rows,) + tuple(field.shape)
        batch[name] = (random.randint(field.low, field.high, shape) if field.high else random.randn(*shape)).astype(field.dtype)
    return batch


def pick(array: np.ndarray, batches: Iterable[int], count: int) -> np.ndarray:
    """The rows of the user batches `batches` of an array that holds `count` user batches of equal size."""
    if len(array) % count:
        raise ValueError("%d rows can't be divided into %d batches" % (len(array), count))
    size = len(array) // count
    return np.concatenate([array[number * size : (number + 1) * size] for number in batches])


def local_part(array: np.ndarray, layout: Layout, rank: int, run: int = 0) -> np.ndarray:
    """What `rank` feeds for a global array in the `run`-th run of a step; scalars go to all.

    A rank without a first stage feeds what its replica's first stage gets.
    """
    if np.ndim(array) == 0:
        return array
    return pick(array, layout.batches_of(rank, run) or layout.seen_by(rank, run), layout.batches)


def rubbish_like(array: np.ndarray) -> np.ndarray:
    """An array of the same kind that spoils whatever it is used in."""
    return np.full_like(array, np.nan if array.dtype.kind == "f" else -7)


def local_stream(steps: Sequence[Arrays], layout: Layout, rank: int) -> Tuple[Arrays, int]:
    """The samples `rank` reads over all steps, and the size of the user's batch.

    Cut into batches of that size they come in the order in which the rank draws them:
    step, run of the step, local replica, micro-batch of the run.
    """
    parts: Dict[str, List[np.ndarray]] = {name: [] for name in steps[0]}
    for step in steps:
        for run in range(layout.runs):
            for name, array in step.items():
                parts[name].append(local_part(array, layout, rank, run))
    rows = len(next(iter(steps[0].values())))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}, rows // layout.batches
