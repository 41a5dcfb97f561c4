"""Checkpoint: the chief alone writes checkpoints and event files."""

from epl.ir.program import Program
from epl.passes.base import Pass
from epl.passes.communicate import COLLECTIVES
from epl.planner.plan import Task

WRITES = frozenset(
    (
        "SaveV2",
        "Save",
        "SaveSlices",
        "MergeV2Checkpoints",
        "CreateSummaryFileWriter",
        "CloseSummaryWriter",
        "FlushSummaryWriter",
        "ImportEvent",
        "WriteSummary",
        "WriteScalarSummary",
        "WriteHistogramSummary",
        "WriteImageSummary",
        "WriteAudioSummary",
        "WriteGraphSummary",
        "WriteRawProtoSummary",
    )
)


class Checkpoint(Pass):
    """Take what writes checkpoints and events out of the programs of all ranks but the chief."""

    name = "checkpoint"

    def run(self, program: Program, task: Task) -> Program:
        if task.chief or not any(n.op in WRITES for n in program.nodes.values()):
            return program
        nodes = {}
        for name, node in program.nodes.items():
            if node.op in WRITES:
                node = node.replace(op="NoOp", proto=None, inputs=(), attrs={})
            nodes[name] = node
        # The chief takes part in collectives whose results only it writes; so must all.
        collectives = tuple(n.name for n in nodes.values() if n.op in COLLECTIVES)
        return program.replace(nodes=nodes, targets=program.targets + collectives).pruned()
