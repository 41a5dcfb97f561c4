"""Cut: values that cross between the processes that hold the stages of one replica.

Three pseudo-ops, which the communicate pass lowers:

* `EplSend`: one tensor to another process. `EplReceive`: that tensor there.
* `EplShare`: one tensor of one process, in all that hold a part of the replica. The
  owner gives it, the others give nothing.

Both sides find the same transfers from the same program, and call them by the position
of the tensor in it: names of nodes may differ between processes.
"""

from typing import Dict, List, Optional, Sequence, Set, Tuple

import tensorflow.compat.v1 as tf

from epl.errors import ProgramError
from epl.ir import op_table
from epl.ir.program import Node, Program, Ref, Shape, ref_text
from epl.passes.merge_rules import merge_rule
from epl.passes.wires import moved
from epl.planner.plan import Plan, Task

SEND, RECEIVE, SHARE = "EplSend", "EplReceive", "EplShare"
INSPECTIONS = frozenset(("IsVariableInitialized", "VarIsInitializedOp"))
"""What asks whether a variable is initialised: each process answers for its own."""
TRANSFERS = (SEND, RECEIVE, SHARE)
PREFIXES = ("epl_receive/", "epl_send/", "epl_share/")
"""Of the names of transfers between stages; the rest of the name is common to both sides."""
FETCHED = "fetched"
"""Form of what a fetch returns."""


class Value:
    """What crosses: a tensor of the user's program in one form.

    Attributes:
      ref: the tensor. form: "" as it is, "gradient" aggregated, "merged" over micro-batches and
        replicas (followed by a point and its collection, if any), `FETCHED` as a fetch returns it.
      replica: local index. micro_batch: None for what exists once per step.
    """

    __slots__ = ("ref", "form", "replica", "micro_batch")

    def __init__(self, ref: Ref, form: str, replica: int, micro_batch: Optional[int]):
        self.ref = ref
        self.form = form
        self.replica = replica
        self.micro_batch = micro_batch


class Crossings:
    """Collects the transfers of a program that is being cloned.

    Args:
      program: the user's program, classified.
      task: this process's task. nodes: where the transfers are added.
    """

    def __init__(self, program: Program, task: Task, nodes: Dict[str, Node]):
        self._program = program
        self._task = task
        self._nodes = nodes
        self._position = {name: i for i, name in enumerate(program.nodes)}
        self.targets: List[str] = []

    def receive(self, value: Value, device: str, consumer: str) -> Ref:
        """The value of another process, here."""
        stage = self._stage(value.ref)
        owner = self._task.owner(value.replica, stage)
        label = self._label(value, self._task.rank)
        info = self._info(value, consumer, (owner, self._task.rank))
        return self._add(RECEIVE, "epl_receive/" + label, [], device, value, dict(info, root=owner))

    def send(self, value: Value, local: Ref, to: int, consumer: str) -> None:
        """Give a value of this process to another one."""
        label = self._label(value, to)
        info = self._info(value, consumer, (self._task.rank, to))
        device = self._task.device_of(value.replica, self._stage(value.ref))
        self._add(SEND, "epl_send/" + label, [local], device, value, dict(info, root=self._task.rank))

    def share(self, value: Value, local: Optional[Ref], consumer: str) -> Ref:
        """The value in all processes of its replica; `local` on the one that has it."""
        label = self._label(value, None)
        owner = self._task.owner(value.replica, self._stage(value.ref))
        info = self._info(value, consumer, self._task.members(value.replica))
        inputs, device = [local] if local else [], self._task.devices[value.replica]
        name, index = self._add(SHARE, "epl_share/" + label, inputs, device, value, dict(info, root=owner))
        return local or (name, index)

    def _stage(self, ref: Ref) -> int:
        stage = self._program.taskgraph_of(ref[0])
        assert stage is not None
        return stage

    def _add(self, op: str, name: str, inputs: Sequence[Ref], device: str, value: Value, info: Dict[str, object]) -> Ref:
        if name not in self._nodes:
            source = self._program.nodes[value.ref[0]]
            self._nodes[name] = Node(
                name, op, inputs, device=device, replica=value.replica, micro_batch=value.micro_batch, phase=source.phase, info=info,
                taskgraph=source.taskgraph,
            )  # fmt: skip
            # A receive that nobody uses must not vanish while the other side waits with its send.
            self.targets.append(name)
        return name, 0

    def _label(self, value: Value, to: Optional[int]) -> str:
        parts = ["n%d_%d" % (self._position[value.ref[0]], value.ref[1])]
        if value.form:
            parts.append(value.form)
        parts.append("r%d" % self._task.replica_id(value.replica))
        if value.micro_batch is not None:
            parts.append("m%d" % value.micro_batch)
        if to is not None:
            parts.append("to%d" % to)
        return ".".join(parts)

    def _info(self, value: Value, consumer: str, ranks: Sequence[int]) -> Dict[str, object]:
        dtype = op_table.dtype_of(self._program, *value.ref)
        if moved(dtype) is None:
            raise ProgramError(self._opaque(value.ref, consumer, dtype))
        return {"dtype": dtype, "shape": self._shape(value), "ranks": tuple(sorted(ranks)), "ref": value.ref}

    def _opaque(self, ref: Ref, consumer: str, dtype: int) -> str:
        advice = {
            tf.string.as_datatype_enum: "strings do not travel. Convert them to numbers before the stage ends, for example by tf.strings.to_number, "
            "a table lookup or tf.strings.to_hash_bucket_fast, or use them in the stage that has them, as in tf.print",
            tf.resource.as_datatype_enum: "a resource can't leave its process. Use it in the stage that created it, and pass on what is read from it",
            tf.variant.as_datatype_enum: "a value of this type can't leave its process. Convert it to a tensor of numbers in the stage that has it",
        }.get(dtype, "TensorFlow has no way to send its bits. Cast it to another type, such as float16 or int8, in the stage that has it")
        if consumer in self._program.nodes:
            use = "used by node '%s' in taskgraph %s, in another process" % (consumer, self._program.taskgraph_of(consumer))
        else:
            use = "fetched, which gives it to every process of the replica"
        return "Tensor '%s' of type %s is made in taskgraph %s and %s: %s" % (
            ref_text(ref),
            tf.as_dtype(dtype).name,
            self._program.taskgraph_of(ref[0]),
            use,
            advice,
        )

    def _shape(self, value: Value) -> Shape:
        """The static shape of what crosses."""
        shape = self._program.shape_of(value.ref)
        if shape is None:
            return None
        form = self._program.facts.forms.get(value.ref)
        if form is not None:
            length = self._task.plan.group.lengths(shape[form.dim] or 0, form.unit)[self._task.lane(value.replica)]
            shape = shape[: form.dim] + (length,) + shape[form.dim + 1 :]
        if value.form == "gradient":
            # Rows of a sparse gradient are concatenated.
            rows = self._program.facts.gradients[value.ref].component in ("values", "indices")
        else:
            collection = self._program.collections.get(value.ref, "") if value.form == FETCHED else value.form.partition(".")[2]
            rows = bool(value.form) and merge_rule(self._program, value.ref, collection) == "concat"
        return (None,) + tuple(shape[1:]) if rows else shape


def process_groups(program: Program, plan: Plan, parallel: bool) -> Tuple[Tuple[int, ...], ...]:
    """All groups of processes that talk among themselves in a classified program, the same list on every rank.

    Those that hold one stage, those that hold one replica, and the pairs of processes between
    which a tensor crosses.
    """
    stages = {name: node.taskgraph for name, node in program.nodes.items()}
    pairs: Set[Tuple[int, int]] = set()
    shared = any(stages[ref[0]] is not None for ref in program.fetches)
    for node in program.nodes.values():
        for source, _ in node.inputs:
            giver, taker = stages[source], stages[node.name]
            if giver is None or giver == taker or (taker is None and program.nodes[source].op in INSPECTIONS):
                continue
            if taker is None:
                shared = True
            else:
                pairs.add((giver, taker))
    found: Dict[Tuple[int, ...], None] = {}
    if parallel:
        for taskgraph in range(len(plan.places[0])):
            found[plan.holders(taskgraph)] = None
    for replica, row in enumerate(plan.places):
        if shared:
            found[plan.members(replica)] = None
        for made, used in sorted(pairs):
            found[tuple(sorted({row[made], row[used]}))] = None
    return tuple(ranks for ranks in found if len(ranks) > 1)
