"""Operation: one operation of an annotated graph, or of its training program, as a user sees it."""

from typing import TYPE_CHECKING, Any, List, Optional

from epl.ir.program import Node

if TYPE_CHECKING:
    from epl.ir.views import Views


class TensorView:
    """One output of an operation."""

    __slots__ = ("op", "value_index")

    def __init__(self, op: "Operation", value_index: int = 0):
        self.op = op
        self.value_index = value_index

    @property
    def name(self) -> str:
        return "%s:%d" % (self.op.name, self.value_index)

    @property
    def device(self) -> str:
        return self.op.device

    def __repr__(self) -> str:
        return "TensorView(%r)" % self.name


class ControlFlowContext:
    """The v1 while or cond context of a clone: that of the user's op under the clone's prefix."""

    def __init__(self, original: Any, prefix: str):
        self.original = original
        self.name = prefix + original.name
        self._prefix = prefix

    def to_proto(self) -> Any:
        """The definition of the user's context with the name of this one."""
        proto = self.original.to_proto()
        proto.context_name = self.name
        return proto


class Operation:
    """An operation of the user's graph, a clone of one, or one that EPL added for training.

    Attributes:
      name: with the prefix of the clone (`epl.utils.common`).
      origin: name of the user's operation; "" for one that EPL added.
      phase: FORWARD, BACKWARD or APPLY (`epl.ir.phase.ModelPhase`); None for what keeps a
        job going and is no part of the model: saving, restoring, checking.
      taskgraph: the taskgraph it belongs to; the first one for what belongs nowhere.
      replica_index, micro_batch_index: of which replica of this process, and micro-batch.
      device: where it runs, by the device names of the cluster.
    """

    __slots__ = ("_views", "_node", "name", "origin", "phase", "taskgraph", "replica_index", "micro_batch_index", "device")

    def __init__(self, views: "Views", node: Node, origin: str, phase: Optional[str], taskgraph: Any, replica: int, micro_batch: int, device: str):
        self._views = views
        self._node = node
        self.name = node.name
        self.origin = origin
        self.phase = phase
        self.taskgraph = taskgraph
        self.replica_index = replica
        self.micro_batch_index = micro_batch
        self.device = device

    @property
    def type(self) -> str:
        """The TensorFlow op type."""
        return self._node.op

    @property
    def inputs(self) -> List[TensorView]:
        """The data inputs in order."""
        operations = self._views.operations
        return [TensorView(operations[name], index) for name, index in self._node.inputs]

    @property
    def control_inputs(self) -> List["Operation"]:
        """The operations that must run before."""
        operations = self._views.operations
        return [operations[name] for name in self._node.controls]

    @property
    def outputs(self) -> List[TensorView]:
        return [TensorView(self, index) for index in range(self._views.num_outputs(self._node))]

    def get_control_flow_context(self) -> Any:
        """The v1 while or cond context, or None."""
        return self._views.control_flow_context(self)

    def __repr__(self) -> str:
        return "Operation(%r, type=%r, device=%r)" % (self.name, self.type, self.device)
