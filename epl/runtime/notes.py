"""What a session that trains writes to the log, once: how big a step is, who divides the data, whose input has ended."""

from typing import Optional, Sequence, Set

import numpy as np
from absl import logging

from epl.env import Env
from epl.ir.program import DIVIDE, Program
from epl.passes.amp import half_of, summary
from epl.planner.plan import Plan


def global_batch(plan: Plan, rows: Optional[int] = None) -> str:
    """How many samples a step takes.

    Args:
      rows: of a micro-batch that is fed; None when a dataset gives them.
    """
    count = plan.streams * plan.micro_batches
    size = "the batches of %d x the script's batch size" % count if rows is None else "%d samples" % (count * rows)
    each = "" if rows is None else " x %d rows" % rows
    text = "The global batch of a training step is %s: %d replicas x %d micro-batches%s" % (size, plan.streams, plan.micro_batches, each)
    alike = ", if all processes are fed alike" if rows is not None and plan.ranks > 1 else ""
    return text + alike + ". The script's learning rate and number of steps are not scaled"


def data_policy(plan: Plan) -> str:
    """Where the batches of a program with datasets or queues come from, and who divides the data."""
    options, dealt = Env.get().config.io, Env.get().deals_files
    text = "Each of %d replicas draws its own batches from the input of its process. " % plan.streams
    if plan.ranks == 1:
        return text + "There is one process, so the data needs no division"
    if dealt:
        return text + "io.slicing has dealt the input files to the %d processes: the script must not divide these files again" % plan.ranks
    why = "io.slicing is on, but has met no input files" if options.slicing else "io.slicing is off"
    return text + (
        "%s: the %d processes read the same data unless the script divides it, as "
        "dataset.shard(cluster.worker_num, cluster.worker_index) does with cluster = epl.Env.get().cluster%s"
        % (why, plan.ranks, "; in this pipeline only the processes of first stages read" if plan.places else _readers(plan))
    )


def _readers(plan: Plan) -> str:
    return "; only the process of the first device of each group reads" if plan.copies > plan.devices_per_rank else ""


def mixed_precision(program: Program, plan: Plan) -> str:
    """Which operations compute in half precision, and which of the same types do not."""
    counts = summary(program, half_of(plan.amp))
    lines = ["%s: %d in %s, %d in float32" % (op, half, plan.amp, whole) for op, (half, whole) in sorted(counts.items())]
    scale = "fixed, %g" % plan.loss_scale if plan.loss_scale else "dynamic"
    return "Mixed precision, loss scale %s. Operations of this process:\n%s" % (scale, "\n".join(lines))


def end_of_input(rank: int, ranks: int, own: bool) -> str:
    """Whose input has ended, as far as this rank knows: it learns that some other rank had no data, not which."""
    if own:
        others = ", and with it the epoch of all %d ranks" % ranks if ranks > 1 else ""
        return "The input of rank %d has ended%s; nothing of this step is applied" % (rank, others)
    return (
        "Not rank %d, but another rank has come to the end of its input, as its own log says, or of its training, and with it all %d ranks; "
        "nothing of this step is applied" % (rank, ranks)
    )


class Notes:
    """The notes of one session: each kind once."""

    def __init__(self) -> None:
        self._written: Set[str] = set()

    def training(self, plan: Plan, draws: bool, arrays: Sequence[np.ndarray], modes: Sequence[str], parts: int) -> None:
        """A training program was compiled; what all ranks would say alike is left to rank 0.

        Args:
          draws: it draws from datasets or queues.
          arrays, modes, parts: what it is fed, how, and over how many micro-batches of this process that is divided.
        """
        if Env.get().cluster.worker_index > 0:
            return
        fed = {array.shape[0] for array, mode in zip(arrays, modes) if mode == DIVIDE}
        used = not draws and len(fed) == 1 and (not plan.places or any(row[0] == 0 for row in plan.places))
        # With unequal shares no number of rows is that of every micro-batch.
        self._write("global batch", global_batch(plan, fed.pop() // parts if used and not plan.batch_shares else None))
        if draws and plan.streams > 1:
            self._write("data policy", data_policy(plan))

    def precision(self, program: Program, plan: Plan) -> None:
        """A training program with mixed precision was compiled (`amp.debug_log`)."""
        if plan.amp and Env.get().config.amp.debug_log and Env.get().cluster.worker_index == 0:
            self._write("precision", mixed_precision(program, plan))

    def ended(self, own: bool) -> None:
        """A step found no data, here or on another rank."""
        cluster = Env.get().cluster
        self._write("end", end_of_input(cluster.worker_index, cluster.worker_num, own))

    def _write(self, kind: str, text: str) -> None:
        if kind not in self._written:
            self._written.add(kind)
            logging.info("%s", text)
