"""Views: a user's graph together with the training program that is made of it.

They are for looking: nothing runs, and no session is needed. The user's operations are
replica 0 and micro-batch 0 of the model. Where the training program has them they are
shown as they stand there, with its clones and with what EPL added; the rest is shown
as the user built it.
"""

from typing import Any, Dict, List, Optional, Set, Tuple

from epl import compat
from epl.env import Env
from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.housekeeping import housekeeping
from epl.ir.operation import ControlFlowContext, Operation, TensorView
from epl.ir.phase import ModelPhase
from epl.ir.program import DIVIDE, SAME, Node, Program
from epl.ir.scope_text import scope_lines
from epl.utils import common

_Key = Tuple[int, Optional[str], int, int]
"""(taskgraph, phase, replica, micro-batch)"""


class OperationGroups:
    """The operations of one taskgraph by phase, replica and micro-batch, in order of creation."""

    def __init__(self, groups: Dict[_Key, List[Operation]], index: int):
        self._groups = groups
        self._index = index

    def _of(self, phase: str, replica: int, micro_batch: int) -> List[Operation]:
        return list(self._groups.get((self._index, phase, replica, micro_batch), ()))

    def forward_operations(self, replica: int, micro_batch: int) -> List[Operation]:
        return self._of(ModelPhase.FORWARD, replica, micro_batch)

    def backward_operations(self, replica: int, micro_batch: int) -> List[Operation]:
        return self._of(ModelPhase.BACKWARD, replica, micro_batch)

    def apply_operations(self, replica: int) -> List[Operation]:
        return self._of(ModelPhase.APPLY, replica, 0)


class Views:
    """The operations of an annotated graph (`epl.ir.graph.Graph`) at one version of it.

    The user's part is read when it is first asked for; the training program is compiled
    when a clone, or all operations, are.
    """

    def __init__(self, graph: Any):
        self.graph = graph
        self.version = self.version_of(graph)
        self._cache: Dict[str, Any] = {}

    @staticmethod
    def version_of(graph: Any) -> Tuple[int, int]:
        """What changes when an annotated graph grows."""
        return graph.tf_graph.version, graph.num_stages

    # The two programs.

    @property
    def whole(self) -> Program:
        """The user's graph."""
        if "whole" not in self._cache:
            from epl.runtime.graph_index import GraphIndex

            self._cache["whole"] = GraphIndex(self.graph.tf_graph).whole()
        return self._cache["whole"]

    @property
    def training(self) -> Optional[Program]:
        """The training program of this process, None as long as there are no gradients."""
        if "training" not in self._cache:
            targets = self._targets()
            self._cache["training"] = self._compile(targets) if targets and Env.get().cluster is not None else None
        return self._cache["training"]

    def _targets(self) -> List[str]:
        """What a training step is asked for.

        The updates behind the gradients, or the gradients while there are none, the losses,
        and the tensors that the script says how to merge.
        """
        whole = self.whole
        if not whole.raw_gradients:
            return []
        updates = [n for n in whole.nodes if n in self._late and n not in self._apart and op_table.writes(whole, whole.nodes[n])]
        targets = dict.fromkeys(updates or [name for name, _ in whole.raw_gradients])
        targets.update((name, None) for name in list(self.graph.losses) + [name for name, _ in whole.collections] if name in whole.nodes)
        return list(targets)

    @property
    def _late(self) -> Set[str]:
        """What depends on the gradients."""
        if "late" not in self._cache:
            from epl.passes.assign import after_gradients

            self._cache["late"] = after_gradients(self.whole)
        return self._cache["late"]

    def _compile(self, targets: List[str]) -> Program:
        from epl.planner.plan import LAST, WHOLE
        from epl.runtime.compiler import Signature, Traits, compile_program
        from epl.runtime.planning import make_plan, make_task

        plan = make_plan(self.graph)
        # Of a step that spans several runs the last one is shown: it does all that the others do, and updates.
        part = LAST if plan.runs_per_step > 1 else WHOLE
        task = make_task(self.graph, plan, part)
        fed = self._placeholders(targets)
        signature = Signature(tuple(targets), tuple("%s:0" % name for name in fed), tuple(fed.values()))
        return compile_program(self.whole, signature, Traits(True, True, ()), plan, task).program

    def _placeholders(self, targets: List[str]) -> Dict[str, str]:
        """The placeholders that a step would be fed, and how their values would be used."""
        modes: Dict[str, str] = {}
        for name in self.whole.ancestors(targets):
            node = self.whole.nodes[name]
            if node.op == "Placeholder":
                whole_value = self.whole.shape_of((name, 0)) == () or op_table.output_types(node)[0] in op_table.OPAQUE
                modes[name] = SAME if whole_value else DIVIDE
        return modes

    # Phases and places of the user's operations.

    @property
    def _apart(self) -> Set[str]:
        if "apart" not in self._cache:
            self._cache["apart"] = housekeeping(self.whole, self.whole.topological())
        return self._cache["apart"]

    @property
    def _phases(self) -> Dict[str, Optional[str]]:
        if "phases" not in self._cache:
            self._cache["phases"] = self._find_phases()
        return self._cache["phases"]

    def _find_phases(self) -> Dict[str, Optional[str]]:
        from epl.passes.classify import Classify
        from epl.passes.extract import extract
        from epl.planner.plan import Plan, Task

        whole = self.whole
        step = Classify()(extract(whole, self._targets(), (), ()), Task(Plan(), parallel=False)).nodes
        # Other gradient calls are part of a loss (gradient penalties).
        calls = {tag.record for tag in whole.raw_gradients.values()}
        phases: Dict[str, Optional[str]] = {}
        for name, node in whole.nodes.items():
            call = node.int_attr(A.BACKWARD)
            if node.attr(A.UPDATE) is not None or name in self._late or (name in step and step[name].phase == ModelPhase.APPLY):
                phases[name] = ModelPhase.APPLY
            elif call in calls:
                phases[name] = ModelPhase.BACKWARD
            elif name in step:
                phases[name] = step[name].phase
            else:
                phases[name] = ModelPhase.FORWARD
            if name in self._apart:
                phases[name] = None
        return phases

    def taskgraph_index(self, name: str) -> int:
        """The taskgraph of a user's operation; 0 for one that belongs nowhere."""
        assignment = self.whole.assignment
        found = assignment[name].taskgraph if assignment is not None else None
        return 0 if found is None else found

    def _taskgraph(self, index: int) -> Any:
        if not self.graph.taskgraphs:
            self.graph.lay_out()
        return self.graph.taskgraphs[index] if self.graph.taskgraphs else None

    def _device(self, node: Node, index: int, replica: int) -> str:
        cluster = Env.get().cluster
        if cluster is None:
            return node.device
        if node.name in self._on_host or Env.get().config.offload.level and node.op in op_table.VARIABLES:
            return common.get_device_string(task=cluster.worker_index, device_type="CPU")
        virtual = self._taskgraph(index).virtual_device
        # A process may hold no stage of any replica's first device.
        local = self._taskgraph(0).virtual_device.local_replicas or virtual.local_replicas or [0]
        return virtual.get_device(local[min(replica, len(local) - 1)])

    @property
    def _on_host(self) -> Set[str]:
        """User's operations that hold or use inputs and tables, which exist once per process."""
        if "host" not in self._cache:
            nodes = self.whole.nodes
            shared = {n for n, node in nodes.items() if node.op in op_table.SHARED_HANDLES or node.op in op_table.SHARED_WRITES}
            users = {n for n, node in nodes.items() if node.op in op_table.PYTHON or any(s in shared for s, _ in node.inputs)}
            self._cache["host"] = shared | users
        return self._cache["host"]

    # Operations.

    @property
    def operations(self) -> Dict[str, Operation]:
        """Name -> operation: the user's in order of creation, then clones and what EPL added."""
        if "operations" not in self._cache:
            made = {name: self._original(name) for name in self.whole.nodes}
            for node in self.training.nodes.values() if self.training is not None else ():
                if node.name not in made:
                    made[node.name] = self._clone(node) if self._is_clone(node) else self._added(node)
            self._cache["operations"] = made
        return self._cache["operations"]

    def _original(self, name: str) -> Operation:
        """A user's operation, as the training program has it where it does."""
        index = self.taskgraph_index(name)
        node = self.whole.nodes[name]
        device = self._device(node, index, 0)
        if self.training is not None:
            node = self.training.nodes.get(name, node)
        return Operation(self, node, name, self._phases[name], self._taskgraph(index), 0, 0, device)

    def _clone(self, node: Node) -> Operation:
        index = self.taskgraph_index(node.origin)
        original = self.whole.nodes[node.origin]
        device = self._device(original, index, node.replica)
        return Operation(
            self, node, node.origin, self._phases[node.origin], self._taskgraph(index), node.replica, node.micro_batch or 0, device
        )

    def _added(self, node: Node) -> Operation:
        index = self.taskgraph_index(node.origin) if node.origin in self.whole.nodes else node.taskgraph or 0
        names = {d.runtime_name: d.name for d in Env.get().cluster.local_devices()}
        device = names.get(node.device) or common.get_device_string(task=Env.get().cluster.worker_index, device_type="CPU")
        return Operation(self, node, "", node.phase, self._taskgraph(index), node.replica, node.micro_batch or 0, device)

    def _is_clone(self, node: Node) -> bool:
        return node.origin in self.whole.nodes and node.name == _clone_name(node.origin, node.replica, node.micro_batch or 0)

    @property
    def tensors(self) -> Dict[str, Operation]:
        """Name -> operation of every tensor."""
        if "tensors" not in self._cache:
            self._cache["tensors"] = {t.name: t.op for op in self.operations.values() for t in op.outputs}
        return self._cache["tensors"]

    def num_outputs(self, node: Node) -> int:
        """The number of outputs of a node; one for an op type that is not loaded."""
        try:
            return len(op_table.output_types(node, self.whole))
        except ProgramError:
            return 1

    def control_flow_context(self, operation: Operation) -> Any:
        """The v1 context of an operation, or None."""
        if not operation.origin:
            return None
        context = compat.control_flow_context(self.graph.tf_graph.get_operation_by_name(operation.origin))
        prefix = operation.name[: len(operation.name) - len(operation.origin)]
        return ControlFlowContext(context, prefix) if context is not None and prefix else context

    @property
    def _groups(self) -> Dict[_Key, List[Operation]]:
        if "groups" not in self._cache:
            groups: Dict[_Key, List[Operation]] = {}
            for op in self.operations.values():
                if op.origin and op.taskgraph is not None:
                    groups.setdefault((op.taskgraph.index, op.phase, op.replica_index, op.micro_batch_index), []).append(op)
            self._cache["groups"] = groups
        return self._cache["groups"]

    # What taskgraphs show.

    def operations_of(self, index: int) -> OperationGroups:
        """The operations of a taskgraph."""
        return OperationGroups(self._groups, index)

    def gradients_of(self, index: int) -> List[Any]:
        """What the optimizers are given that a taskgraph computes, in the order in which they are given it."""
        pairs = self.graph.gradients_with_variables()
        return [g for g, _ in pairs if self.taskgraph_index(_gradient_op(g).name) == index]

    def variables_of(self, index: int, replica: int) -> List[TensorView]:
        """The variables of a replica of a taskgraph, in order of creation."""
        found = [n.name for n in self.whole.nodes.values() if n.op in op_table.VARIABLES and self.taskgraph_index(n.name) == index]
        if replica == 0:
            return [TensorView(self._variable(name)) for name in found]
        names = [_clone_name(name, replica, 0) for name in found]
        return [TensorView(self.operations[name]) for name in names if name in self.operations]

    def _variable(self, name: str) -> Operation:
        index = self.taskgraph_index(name)
        node = self.whole.nodes[name]
        return Operation(self, node, name, ModelPhase.FORWARD, self._taskgraph(index), 0, 0, self._device(node, index, 0))

    def exits_of(self, index: int, replica: int, micro_batch: int) -> List[Operation]:
        """The operations whose outputs the original would aggregate, in order of creation.

        They make what `apply_gradients` is given, or the raw gradients with
        `communication.clip_after_allreduce`. What a script computes of the gradients runs
        once per step and replica; for the other micro-batches the raw gradients are listed.
        """
        raw = [name for (name, _), tag in self.whole.raw_gradients.items() if tag.component in ("dense", "values")]
        given = [_gradient_op(g).name for g, _ in self.graph.gradients_with_variables()]
        if Env.get().config.communication.clip_after_allreduce or not given:
            given = raw
        if any(_clone_name(name, replica, micro_batch) not in self.operations for name in given):
            given = raw
        chosen = set(given)
        names = [n for n in self.whole.nodes if n in chosen and self.taskgraph_index(n) == index]
        clones = [_clone_name(name, replica, micro_batch) for name in names]
        return [self.operations[name] for name in clones if name in self.operations]

    def format(self, max_depth: Optional[int] = None, prefix_list: Any = None) -> str:
        """The scopes of the forward operations with inputs, of micro-batch 0, by taskgraph and replica.

        Args:
          max_depth: the levels of scopes that are shown; None shows all.
          prefix_list: only names that contain one of these are shown.
        """
        if not self.graph.taskgraphs:
            self.graph.lay_out()
        blocks: List[str] = []
        for taskgraph in self.graph.taskgraphs:
            for replica, number in enumerate(taskgraph.virtual_device.local_replicas):
                where = "Taskgraph %d replica %d [Device: %s]" % (taskgraph.index, replica, taskgraph.virtual_device.get_device(number))
                shown = self.operations_of(taskgraph.index).forward_operations(replica, 0)
                names = [op.name for op in shown if op.inputs and (not prefix_list or any(p in op.name for p in prefix_list))]
                depth = None if max_depth is None else max_depth + (replica > 0)
                blocks.append("\n".join(["======= Begin %s =======" % where] + scope_lines(names, depth) + ["======= End %s =======" % where]))
        return "\n\n".join(blocks)


def _clone_name(origin: str, replica: int, micro_batch: int) -> str:
    return common.get_replica_prefix(replica) + common.get_micro_batch_prefix(micro_batch) + origin


def _gradient_op(gradient: Any) -> Any:
    from epl.ir.graph import gradient_tensor

    return gradient_tensor(gradient).op
