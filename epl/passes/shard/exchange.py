"""Exchange: lower what brings tensors from one form into another, and what differs between lanes.

A tensor is cut along a dimension, or each lane has a term of it, or all of it. So there
are four ways: gather what is cut; take one's piece of what is whole; exchange pieces for
pieces along another dimension; add terms, of all of it or of one's piece. Lanes of one
process do it by plain edges; processes by an all-gather, an all-to-all or an all-reduce of what
their lanes have together. Exchanged pieces travel flat, so that unequal ones need no padding.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import DT_INT32, Builder
from epl.ir.program import Node, Program, Ref
from epl.passes.base import Pass
from epl.passes.communicate import COLLECTIVES
from epl.passes.cut import SHARE
from epl.passes.rewire import rewire
from epl.passes.shard.build import LANE, LANE_SHAPES, RESHARD
from epl.planner.plan import Task
from epl.planner.sharding.spec import F, Spec
from epl.planner.sharding.strategy import BATCH, VARYING, Lane


class Exchange(Pass):
    """Lower `EplReshard` and `EplLane`."""

    name = "exchange"

    def run(self, program: Program, task: Task) -> Program:
        if task.plan.lanes == 1:
            return program
        nodes = dict(program.nodes)
        mapping: Dict[Ref, Ref] = {}
        groups: Dict[Tuple[str, Optional[int], int], List[Node]] = {}
        for node in program.nodes.values():
            if node.op == LANE:
                value = node.info["values"][task.lane(node.replica)]
                attrs = {"dtype": A.of_type(node.info["dtype"]), "value": A.of_tensor(value, node.info["dtype"])}
                nodes[node.name] = node.replace(op="Const", attrs=attrs, info={})
            elif LANE_SHAPES in node.info:
                shape = A.of_shape(node.info[LANE_SHAPES][task.lane(node.replica)])
                nodes[node.name] = node.replace(attrs=dict(node.attrs, shape=shape))
            elif node.op == RESHARD:
                groups.setdefault((node.origin, node.micro_batch, task.group_of(node.replica)), []).append(node)
        gate = [program.agreement.gate] if program.agreement and program.agreement.gate else []
        for members in groups.values():
            for node in members:
                del nodes[node.name]
            mapping.update(_Exchange(nodes, task, members, gate).run())
        for ref, value in mapping.items():
            while value in mapping:  # what the first lane is given of something brought into another form before
                value = mapping[value]
            mapping[ref] = value
        if task.spread or task.plan.lanes % task.plan.devices_per_rank and task.plan.devices_per_rank % task.plan.lanes:
            # A process that fetches from one of its groups takes part in what its other group does.
            talking = [n.name for n in nodes.values() if n.name not in program.nodes and n.op in (*COLLECTIVES, SHARE)]
            program = program.replace(targets=program.targets + tuple(talking))
        return rewire(program, nodes, mapping)


class Cut(NamedTuple):
    """How the whole of a tensor is cut: the dimension, and for each lane where its piece begins and how long it is.

    begins, lengths: known numbers, or int32 scalars by lane.
    """

    dim: int
    begins: Sequence[Any]
    lengths: Sequence[Any]
    static: bool


class _Exchange:
    """One tensor of one group and micro-batch: an instance for each lane of this process."""

    def __init__(self, nodes: Dict[str, Node], task: Task, members: List[Node], gate: List[str]):
        self.members = sorted(members, key=lambda n: task.replica_id(n.replica))
        first = self.members[0]
        self.task = task
        self.info = first.info
        self.group = task.plan.group
        self.lane: Lane = first.info["lane"]
        self.dtype: int = first.info["dtype"]
        self.shape: Tuple[Optional[int], ...] = first.info["shape"]
        self.rank = len(self.shape or ())
        self.gate = gate + [control for node in members for control in node.controls if control not in gate]
        self.base = first.name
        self.build = Builder(nodes, first.device, first.phase)
        self.lanes = [task.lane(n.replica) for n in self.members]
        self._processes: Optional[List[int]] = None

    @property
    def processes(self) -> List[int]:
        """The process of each lane of the group."""
        if self._processes is None:
            first = self.members[0]
            if self.task.spread and first.taskgraph is None:
                raise ProgramError(
                    "Tensor '%s' of form %s is wanted as %s, but belongs to no taskgraph, and so is in all processes of a replica: they can't "
                    "exchange it. Compute it in the scope of a stage" % (first.origin, self.info["source"], self.info["target"])
                )
            self._processes = self.task.plan.lane_processes(self.task.group_of(first.replica), first.taskgraph)
        return self._processes

    @property
    def ranks(self) -> Tuple[int, ...]:
        return tuple(sorted(set(self.processes)))

    def run(self) -> Dict[Ref, Ref]:
        source, target = self.info["source"], self.info["target"]
        if source == F:
            return {(node.name, 0): self._shared() for node in self.members}
        values = [node.inputs[0] for node in self.members]
        if target == F:
            return {(node.name, 0): value for node, value in zip(self.members, values)}
        terms = source.kind == "P" or source.kind == "L" and self.lane.kind == VARYING
        if source.kind == "R":
            found = self._pieces(values, self._cut(target))
        elif target.kind == "R":
            whole = self._sum(values) if terms else self._gather(values, source.dim if source.kind == "S" else self.lane.dim)
            found = [whole] * len(values)
        elif terms:
            found = self._sum_pieces(values, self._cut(target))
        else:
            found = self._exchange(values, self._cut(source), self._cut(target))
        return {(node.name, 0): value for node, value in zip(self.members, found)}

    def _shared(self) -> Ref:
        """What the first lane of the group has, on all of them."""
        own = [node.inputs[0] for node in self.members if node.inputs]
        if len(self.ranks) == 1:
            return own[0]
        if self.dtype in op_table.OPAQUE:
            raise ProgramError(
                "'%s' gives a tensor of type %s in the process of the first device of a group, and the others need it to compute one batch "
                "together: it can't travel. Convert it to numbers there, or give each device batches of its own (epl.replicate(%d) as the "
                "default)" % (self.members[0].origin, tf.as_dtype(self.dtype).name, self.group.size)
            )
        name = self.base + "/shared"
        return (name, 0) if name in self.build.nodes else self._collective(SHARE, name, own, shape=self.info["shape"])

    # Cuts.

    def _cut(self, form: Spec) -> Cut:
        if form.kind == "S":
            bounds = self.group.bounds(self._length(form.dim), form.unit)
            return Cut(form.dim, bounds[:-1], [e - b for b, e in zip(bounds, bounds[1:])], True)
        assert self.lane.kind == BATCH
        sizes = next((node.inputs[1] for node in self.members if len(node.inputs) > 1), None)
        if sizes is None:  # only what goes back to the lanes needs to know where
            return Cut(self.lane.dim, [], [], False)
        return self._cut_by(sizes)

    def _length(self, dim: int) -> int:
        length = self.shape[dim]
        assert length is not None
        return length

    def _cut_by(self, sizes: Ref) -> Cut:
        """Cut where each lane's samples are."""
        build, unit = self.build, self.lane.unit
        lengths, begins = [], []
        total: Optional[Ref] = None
        for lane in range(self.group.size):
            length = build.element("%s/size_%d" % (self.base, lane), sizes, lane, DT_INT32)
            if unit != 1:
                factor = build.const(self.base + "/unit", unit, DT_INT32)
                length = build.mul("%s/rows_%d" % (self.base, lane), length, factor, DT_INT32)
            begins.append(total if total is not None else build.const(self.base + "/begin_0", 0, DT_INT32))
            lengths.append(length)
            total = length if total is None else build.add("%s/begin_%d" % (self.base, lane + 1), total, length, DT_INT32)
        return Cut(self.lane.dim, begins, lengths, False)

    def _own(self, cut: Cut) -> Tuple[List[Any], List[Any]]:
        """Where the pieces of this process's lanes begin within what the process gets, and how long they are."""
        lengths = [cut.lengths[lane] for lane in self.lanes]
        begins: List[Any] = []
        total: Any = 0 if cut.static else self.build.const(self.base + "/begin_0", 0, DT_INT32)
        for number, length in enumerate(lengths):
            begins.append(total)
            if number + 1 < len(lengths):
                total = total + length if cut.static else self.build.add("%s/own_begin_%d" % (self.base, number + 1), total, length, DT_INT32)
        return begins, lengths

    def _slice(self, name: str, value: Ref, dim: int, begin: Any, length: Any) -> Ref:
        """Part of a tensor along one dimension; `begin` and `length` are numbers or scalars."""
        build = self.build
        if isinstance(begin, tuple):
            zero, every = build.const(self.base + "/begin_0", 0, DT_INT32), build.const(self.base + "/every", -1, DT_INT32)
            at = build.pack(name + "/begin", [begin if d == dim else zero for d in range(self.rank)], DT_INT32)
            size = build.pack(name + "/size", [length if d == dim else every for d in range(self.rank)], DT_INT32)
        else:
            at = build.const(name + "/begin", np.array([begin if d == dim else 0 for d in range(self.rank)], np.int32), DT_INT32)
            size = build.const(name + "/size", np.array([length if d == dim else -1 for d in range(self.rank)], np.int32), DT_INT32)
        return build.op("Slice", name, [value, at, size], T=A.of_type(self.dtype), Index=A.of_type(DT_INT32))

    def _joined(self, name: str, values: Sequence[Ref], dim: int) -> Ref:
        if len(values) == 1:
            return values[0]
        axis = self.build.const(name + "/axis", dim, DT_INT32)
        return self.build.op("ConcatV2", name, list(values) + [axis], T=A.of_type(self.dtype), Tidx=A.of_type(DT_INT32), N=A.of_int(len(values)))

    def _combined(self, name: str, values: Sequence[Ref]) -> Ref:
        if self.info["reduce"] == "sum":
            return self.build.add_n(name, values, self.dtype)
        total = values[0]
        for number, value in enumerate(values[1:], 1):
            total = self.build.op("Maximum", "%s/%d" % (name, number), [total, value], T=A.of_type(self.dtype))
        return total

    # The four ways.

    def _pieces(self, wholes: Sequence[Ref], cut: Cut) -> List[Ref]:
        names = ["%s/piece_%d" % (self.base, lane) for lane in self.lanes]
        return [
            self._slice(name, whole, cut.dim, cut.begins[lane], cut.lengths[lane]) for name, lane, whole in zip(names, self.lanes, wholes)
        ]

    def _gather(self, values: Sequence[Ref], dim: int) -> Ref:
        whole = self._joined(self.base + "/joined", values, dim)
        if len(self.ranks) == 1:
            return whole
        front = self._moved(self.base + "/front", whole, self._first(dim))
        gathered = self._collective("EplAllGather", self.base + "/gathered", [front])
        return self._moved(self.base + "/back", gathered, self._back(self._first(dim)))

    def _sum(self, values: Sequence[Ref]) -> Ref:
        total = self._combined(self.base + "/sum", values)
        if len(self.ranks) == 1:
            return total
        return self._collective("EplAllReduce", self.base + "/summed", [total], scale=1.0, op=self.info["reduce"])

    def _sum_pieces(self, values: Sequence[Ref], cut: Cut) -> List[Ref]:
        if len(self.ranks) == 1:
            found = []
            for lane in self.lanes:
                name = "%s/piece_%d" % (self.base, lane)
                pieces = [self._slice("%s/of_%d" % (name, i), v, cut.dim, cut.begins[lane], cut.lengths[lane]) for i, v in enumerate(values)]
                found.append(self._combined(name, pieces))
            return found
        total = self._moved(self.base + "/front", self._combined(self.base + "/sum", values), self._first(cut.dim))
        flat = self._sent(total, cut, 0)
        count = self.build.const(self.base + "/processes", len(self.ranks), DT_INT32)
        dims = [count] + self._dims(total, self._first(cut.dim), {cut.dim: self._process_length(cut)})
        stacked = self._reshaped(self.base + "/stacked", flat, dims)
        axis = self.build.const(self.base + "/stack_axis", [0], DT_INT32)
        attrs = {"T": A.of_type(self.dtype), "Tidx": A.of_type(DT_INT32), "keep_dims": A.of_bool(False)}
        summed = self.build.op("Sum" if self.info["reduce"] == "sum" else "Max", self.base + "/total", [stacked, axis], **attrs)
        return self._divided(self._moved(self.base + "/back", summed, self._back(self._first(cut.dim))), cut)

    def _shifted(self, values: Sequence[Ref], have: Cut, want: Cut) -> List[Ref]:
        """Other parts of the same dimension, as another unit makes them."""
        mine = self._joined(self.base + "/joined", values, have.dim)
        if len(self.ranks) == 1:
            return self._pieces([mine] * len(values), want)
        first = have.begins[self.lanes[0]]
        last = have.begins[self.lanes[-1]] + have.lengths[self.lanes[-1]]
        begins = [min(max(begin, first), last) - first for begin in want.begins]
        ends = [min(max(begin + length, first), last) - first for begin, length in zip(want.begins, want.lengths)]
        order = self._first(have.dim)
        front = self._moved(self.base + "/front", mine, order)
        flat = self._sent(front, Cut(have.dim, begins, [end - begin for begin, end in zip(begins, ends)], True), 0)
        shaped = self._reshaped(self.base + "/stacked", flat, self._dims(front, order, {have.dim: self._process_length(want)}))
        return self._divided(self._moved(self.base + "/back", shaped, self._back(order)), want)

    def _exchange(self, values: Sequence[Ref], have: Cut, want: Cut) -> List[Ref]:
        if have.dim == want.dim:
            return self._shifted(values, have, want)
        if len(self.ranks) == 1:
            found = []
            for lane in self.lanes:
                name = "%s/piece_%d" % (self.base, lane)
                pieces = [self._slice("%s/of_%d" % (name, i), v, want.dim, want.begins[lane], want.lengths[lane]) for i, v in enumerate(values)]
                found.append(self._joined(name, pieces, have.dim))
            return found
        # In front the dimension along which pieces are received, then the one along which they are sent.
        order = self._first(have.dim)
        mine = self._moved(self.base + "/front", self._joined(self.base + "/joined", values, have.dim), order)
        flat = self._sent(mine, want, order.index(want.dim))
        every = self.build.const(self.base + "/all_rows", -1, DT_INT32)
        dims = self._dims(mine, order, {have.dim: every, want.dim: self._process_length(want)})
        shaped = self._reshaped(self.base + "/stacked", flat, dims)
        return self._divided(self._moved(self.base + "/back", shaped, self._back(order)), want)

    def _divided(self, value: Ref, cut: Cut) -> List[Ref]:
        """What this process got, among its lanes."""
        if len(self.lanes) == 1:
            return [value]
        begins, lengths = self._own(cut)
        return [self._slice("%s/piece_%d" % (self.base, lane), value, cut.dim, b, n) for lane, b, n in zip(self.lanes, begins, lengths)]

    # Between processes.

    def _collective(self, kind: str, name: str, inputs: Sequence[Ref], **info: Any) -> Ref:
        """The only one of this tensor: all lanes know it by the tensor's number."""
        first = self.members[0]
        label = "x%d.g%d" % (self.info["number"], self.task.group_of(first.replica))
        if first.micro_batch is not None:
            label += ".m%d" % first.micro_batch
        return self.build.op(kind, name, inputs, self.gate, info=dict(info, dtype=self.dtype, ranks=self.ranks, name=label))

    def _sent(self, value: Ref, cut: Cut, dim: int) -> Ref:
        """Pieces of a tensor along one dimension to their processes; those that come from them, flat and after each other."""
        build = self.build
        flat_shape = build.const(self.base + "/flat", [-1], DT_INT32)
        parts, sizes = [], []
        for process in self.ranks:
            name = "%s/to_%d" % (self.base, process)
            lanes = [lane for lane, holder in enumerate(self.processes) if holder == process]
            piece = self._slice(name, value, dim, cut.begins[lanes[0]], self._length_of(cut, lanes, name + "/length"))
            parts.append(build.op("Reshape", name + "/flat", [piece, flat_shape], T=A.of_type(self.dtype), Tshape=A.of_type(DT_INT32)))
            sizes.append(build.op("Size", name + "/elements", [piece], T=A.of_type(self.dtype), out_type=A.of_type(DT_INT32)))
        flat = build.concat(self.base + "/sent", parts, self.dtype)
        splits = build.pack(self.base + "/splits", sizes, DT_INT32)
        return self._collective("EplAllToAll", self.base + "/received", [flat, splits])

    def _length_of(self, cut: Cut, lanes: Sequence[int], name: str) -> Any:
        if cut.static:
            return sum(cut.lengths[lane] for lane in lanes)
        return self.build.add_n(name, [cut.lengths[lane] for lane in lanes], DT_INT32)

    def _process_length(self, cut: Cut) -> Ref:
        lanes = [lane for lane, holder in enumerate(self.processes) if holder == self.task.rank]
        length = self._length_of(cut, lanes, self.base + "/own_length")
        return length if isinstance(length, tuple) else self.build.const(self.base + "/own_length", length, DT_INT32)

    def _dims(self, value: Ref, order: Sequence[int], known: Dict[int, Ref]) -> List[Ref]:
        """The lengths of a transposed tensor's dimensions, those that are `known` replaced."""
        build = self.build
        dims: List[Ref] = []
        actual: Optional[Ref] = None
        for position, dim in enumerate(order):
            length = self.shape[dim]
            if dim in known:
                dims.append(known[dim])
            elif length is not None and not (self.lane.kind == BATCH and dim == self.lane.dim):
                dims.append(build.const("%s/dim_%d" % (self.base, dim), length, DT_INT32))
            else:
                actual = actual or build.op("Shape", self.base + "/dims", [value], T=A.of_type(self.dtype), out_type=A.of_type(DT_INT32))
                dims.append(build.element("%s/dim_%d" % (self.base, dim), actual, position, DT_INT32))
        return dims

    def _reshaped(self, name: str, flat: Ref, dims: Sequence[Ref]) -> Ref:
        shape = self.build.pack(name + "/shape", dims, DT_INT32)
        return self.build.op("Reshape", name, [flat, shape], T=A.of_type(self.dtype), Tshape=A.of_type(DT_INT32))

    def _first(self, dim: int) -> List[int]:
        """The order of dimensions that puts one in front."""
        return [dim] + [d for d in range(self.rank) if d != dim]

    @staticmethod
    def _back(order: Sequence[int]) -> List[int]:
        return [order.index(d) for d in range(len(order))]

    def _moved(self, name: str, value: Ref, order: Sequence[int]) -> Ref:
        if list(order) == sorted(order):
            return value
        permutation = self.build.const(name + "/order", np.array(order, np.int32), DT_INT32)
        return self.build.op("Transpose", name, [value, permutation], T=A.of_type(self.dtype), Tperm=A.of_type(DT_INT32))
