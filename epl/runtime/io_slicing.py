"""Dealing input files to workers in proportion to their replicas."""

import functools
import math
from typing import List, Sequence

from absl import logging

from epl.errors import ConfigError


def slice_files(
    files: Sequence[str], worker_replicas: Sequence[int], worker_index: int, drop_last: bool = False, unbalanced: bool = False
) -> List[str]:
    """The files one worker reads.

    Files are dealt in rounds. A worker's share of a round is its number of replicas
    divided by the greatest common divisor of all workers' numbers: with 4 and 2
    replicas, two files to the first worker and one to the second. If the files do not
    fill whole rounds, every worker reads all of them, each as often as its share says,
    so that the ratio of data to replicas stays equal; the two switches choose otherwise.

    Args:
      files: the job's files, in the same order on every worker.
      worker_replicas: replicas (first-stage devices) of each worker; a worker without any gets no file.
      worker_index: the worker to answer for.
      drop_last: leave out the files of the last, incomplete round (`io.drop_last_files`).
      unbalanced: deal the last, incomplete round too (`io.unbalanced_io_slicing`), so that
        some workers have more data per replica than others.

    Raises:
      ConfigError: there are no files, or too few for the chosen way; no replicas; or no such worker.
    """
    if not files:
        raise ConfigError("io.slicing: there are no input files to deal to the %d workers; check the path or pattern" % len(worker_replicas))
    if not 0 <= worker_index < len(worker_replicas):
        raise ConfigError("io.slicing: worker_index=%d, expected 0 to %d" % (worker_index, len(worker_replicas) - 1))
    if any(n < 0 for n in worker_replicas) or not any(worker_replicas):
        raise ConfigError("io.slicing: worker_replicas=%s, expected numbers of replicas, not all 0" % list(worker_replicas))
    divisor = functools.reduce(math.gcd, worker_replicas)
    shares = [n // divisor for n in worker_replicas]
    round_size = sum(shares)
    left_over = len(files) % round_size
    if left_over and drop_last:
        if len(files) < round_size:
            raise ConfigError(
                "io.drop_last_files: %d files are fewer than one round of %d (shares %s of %s replicas), so that all would be dropped; "
                "give more files or switch it off" % (len(files), round_size, shares, list(worker_replicas))
            )
        files = files[: len(files) - left_over]
    elif left_over and not unbalanced:
        logging.warning(
            "io.slicing: %d files do not fill rounds of %d (shares %s), so every worker reads all of them, each as often as its share says, and the "
            "data is not divided. Give more files, or set io.unbalanced_io_slicing to deal them all out, or io.drop_last_files to leave out the rest",
            len(files), round_size, shares,
        )  # fmt: skip
        return [f for f in files for _ in range(shares[worker_index])]
    dealt = [_dealt(files, shares, w) for w in range(len(shares))]
    empty = [w for w, share in enumerate(shares) if share and not dealt[w]]
    if empty:
        raise ConfigError(
            "io.unbalanced_io_slicing: %d files leave worker %s without any (shares %s); give more files or switch it off, "
            "then every worker reads all files" % (len(files), ", ".join(map(str, empty)), shares)
        )
    return dealt[worker_index]


fetch_slice_objects_proportion_to_local_num_replicas = slice_files
"""The original's name."""


def _dealt(files: Sequence[str], shares: Sequence[int], worker: int) -> List[str]:
    begin = sum(shares[:worker])
    return [f for i, f in enumerate(files) if begin <= i % sum(shares) < begin + shares[worker]]
