"""An instrument that writes the program after each pass to a folder."""

import os

from epl.ir.program import Program
from epl.passes.base import Instrument, Pass
from epl.passes.picture import taskgraph_picture
from epl.planner.plan import Task


def program_text(program: Program) -> str:
    """One line per node, then fetches, targets and feeds."""
    lines = []
    for node in program.nodes.values():
        extra = " ".join(
            t
            for t in (
                node.phase if node.origin else "",
                "taskgraph=%d" % node.taskgraph if node.taskgraph is not None else "",
                "replica=%d" % node.replica if node.replica else "",
                "micro_batch=%d" % node.micro_batch if node.micro_batch is not None else "",
            )
            if t
        )
        lines.append("%r%s" % (node, "  # " + extra if extra else ""))
    lines.append("fetches: %s" % ", ".join("%s:%d" % r for r in program.fetches))
    lines.append("targets: %s" % ", ".join(program.targets))
    lines.append("feeds: %s" % ", ".join("%s:%d -> %s (%s)" % (f.ref[0], f.ref[1], f.node, f.mode) for f in program.feeds))
    return "\n".join(lines) + "\n"


def dump_instrument(folder: str, task: Task) -> Instrument:
    """Write `<folder>/rank<r>_<program key>/NN_<pass>.txt` after each pass, and `taskgraphs.svg` of the latest."""
    base = os.path.join(folder, "rank%d_%s" % (task.rank, task.key))

    def write(position: int, item: Pass, before: Program, after: Program, seconds: float) -> None:
        os.makedirs(base, exist_ok=True)
        head = "# %s: %d -> %d nodes, %.3f s\n" % (item.name, len(before.nodes), len(after.nodes), seconds)
        _publish(os.path.join(base, "%02d_%s.txt" % (position, item.name)), head + program_text(after))
        _publish(os.path.join(base, "taskgraphs.svg"), taskgraph_picture(after))

    return write


def _publish(path: str, text: str) -> None:
    with open(path + ".new", "w") as out:
        out.write(text)
    os.replace(path + ".new", path)
