"""Checkpoint: the chief alone writes checkpoints and event files, but for the parts of stages and lanes."""

from epl.ir.program import Node, Program
from epl.passes.base import Pass
from epl.passes.communicate import COLLECTIVES
from epl.passes.parts import trimmed
from epl.planner.plan import Task
from epl.planner.sharding.prescribed import LANE

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
        if task.spread:
            program = trimmed(program)
        if not any(n.op in WRITES and not self._writes(task, n) for n in program.nodes.values()):
            return program
        nodes = {}
        for name, node in program.nodes.items():
            if node.op in WRITES and not self._writes(task, node):
                node = node.replace(op="NoOp", proto=None, inputs=(), attrs={})
            nodes[name] = node
        # The chief takes part in collectives whose results only it writes; so must all.
        collectives = tuple(n.name for n in nodes.values() if n.op in COLLECTIVES)
        return program.replace(nodes=nodes, targets=program.targets + collectives).pruned()

    @staticmethod
    def _writes(task: Task, node: Node) -> bool:
        """The chief writes; what belongs to a stage of the first replica or a lane of the first group, the process that holds it."""
        if LANE in node.info:
            return task.replica_id(node.replica) == node.info[LANE]
        if task.spread and node.taskgraph is not None:
            return task.replica_id(node.replica) == 0
        return task.chief and (task.plan.lanes == 1 or task.replica_id(node.replica) == 0)
