"""Gradients: one value per aggregation point and local replica.

Local micro-batches are summed one after the other on their device, local replicas on
the first device, ranks by an all-reduce (dense) or all-gather (sparse). The result is
(1 / n) times the sum over the n instances of the step, or over a replica's
micro-batches for the "sum" method. When a step spans several runs the local sums wait
in accumulators, variables that EPL owns and that no checkpoint sees.
"""

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import DT_FLOAT, DT_INT32, Builder
from epl.ir.program import APPLY, Node, Program, Ref
from epl.passes.agree import FLAG
from epl.passes.base import Pass
from epl.passes.clone import AGGREGATE
from epl.passes.fusion import all_reduce
from epl.passes.rewire import add_controls, rewire
from epl.passes.shard.build import WHOLE_SHAPE
from epl.passes.weigh import divided_early, instance_weight, seeded_records, weighted
from epl.planner.plan import FIRST, LAST, MIDDLE, WHOLE, Task

ACCUMULATOR = "epl_accumulator/"


class Dense(NamedTuple):
    """A local dense sum on its way to the other ranks.

    record: the gradient call that it comes from. replicas: the local replicas that get the result.
    lane: the place in their groups of the replicas that meet; None where all do.
    """

    node: str
    value: Ref
    dtype: int
    size: int
    record: int
    replicas: Tuple[int, ...]
    taskgraph: Optional[int] = None
    lane: Optional[int] = None


class Gradients(Pass):
    """Lower `EplAggregate`."""

    name = "gradients"

    def run(self, program: Program, task: Task) -> Program:
        if not any(n.op == AGGREGATE for n in program.nodes.values()):
            return program
        return _Lowering(program, task).run()


class _Lowering:
    def __init__(self, program: Program, task: Task):
        self.program = program
        self.task = task
        self.nodes = dict(program.nodes)
        self.build = Builder(self.nodes, task.devices[0], APPLY)
        self.mapping: Dict[Ref, Ref] = {}
        self.effects: List[str] = []
        self.seeded = seeded_records(program)
        self.weights = weighted(program, task)
        self.gate = [program.agreement.gate] if program.agreement and program.agreement.gate else []
        self.factor = self._factor()
        self.tables: List[Tuple[Node, Node, int]] = []
        """Sparse gradients that travel as tables: values, indices and the indices' type."""
        self.divisor: Optional[Ref] = self._divisor()

    def run(self) -> Program:
        waiting = [n for n in self.program.nodes.values() if n.op == AGGREGATE]
        by_ref = {n.info["ref"]: n for n in waiting}
        # Rows are merged only together with their indices: these must belong to one gradient alone.
        self.may_merge = all(n.info["indices"] in by_ref for n in waiting if n.info["batch"] and n.info["tag"].component == "values")
        dense: List[Dense] = []
        for node in waiting:
            self.build = self._home(node)
            component = node.info["tag"].component
            if not node.info["batch"]:
                self._constant(node)
            elif node.info["indices"] in by_ref:
                dense.extend(self._sparse(node, by_ref[node.info["indices"]]))
            elif node.info["values"] in by_ref:
                continue  # lowered together with its values
            elif node.info["summed"]:
                dense.extend(self._lane_sums(node))
            elif component == "dense":
                dense.append(self._local_dense(node))
            elif component == "shape":
                self._pass_on(node, [node.inputs[0]] * len(self.task.holding(node.taskgraph)))
            else:
                self._half(node)
        for item, value in zip(dense, self._across(dense)):
            for replica in item.replicas:
                self.mapping[item.node, replica] = value
        for values, indices, itype in self.tables:
            self.build = self._home(values)
            self._rows_of_table(values, indices, itype)
        program = self.program.replace(nodes=self.nodes, targets=self.program.targets + tuple(self.effects))
        names = {n.name for n in waiting}
        kept = {name: node for name, node in self.nodes.items() if name not in names}
        return self._with_the_count_along(rewire(program.replace(nodes=kept), kept, self.mapping))

    def _with_the_count_along(self, program: Program) -> Program:
        """Send the samples of fed batches, which divide the sums, together with the last gradients: one round of Horovod less.

        Of several training steps in one run, the gradients of a later one may wait for the
        count, and those of a branch that is not taken never come.
        """
        if self.divisor is None or self.task.spread or program.agreement.gate is not None or FLAG not in program.nodes:
            return program
        if any(program.facts.endings.in_branch(name) or name in program.facts.frames for name, _ in program.facts.gradients):
            return program
        behind = {FLAG}
        stack = [FLAG]
        while stack:
            for consumer, _ in program.consumers.get(stack.pop(), ()):
                if consumer not in behind:
                    behind.add(consumer)
                    stack.append(consumer)
        sums = [n for n in program.nodes.values() if n.op == "EplAllReduce" and n.name not in behind]
        if not sums:
            return program
        nodes = dict(program.nodes)
        add_controls(nodes, FLAG, [name for name, _ in sums[-1].inputs])
        return program.replace(nodes=nodes)

    # Scaling.

    def _factor(self) -> float:
        plan = self.task.plan
        if self.task.part in (FIRST, MIDDLE):
            return 1.0
        if plan.reduce_method == "sum":
            return 1.0 / plan.micro_batches
        if self.weights:
            return 1.0
        return 1.0 / (plan.micro_batches * plan.streams)

    def _divisor(self) -> Optional[Ref]:
        """1 / B, when batches may be unequal and B is not in the weights."""
        if not self.weights or divided_early(self.program, self.task):
            return None
        records = sorted({n.info["tag"].record for n in self.program.nodes.values() if n.op == AGGREGATE})
        name = "samples_" + "_".join(str(r) for r in records)
        total = self._accumulated(name, self.program.agreement.total, DT_FLOAT, [])
        if self.task.part not in (WHOLE, LAST):
            return None
        return self.build.op("Reciprocal", "epl_gradient_scale", [total], T=A.of_type(DT_FLOAT))

    def _scaled(self, name: str, value: Ref, dtype: int, factor: float) -> Ref:
        value = self.build.scale(name + "/scaled", value, factor, dtype)
        if self.divisor is not None:
            value = self.build.mul(name + "/mean", value, self.build.cast(name + "/by", self.divisor, DT_FLOAT, dtype), dtype)
        return value

    # Local sums.

    def _constant(self, node: Node) -> None:
        """A gradient that does not depend on the batch is the same everywhere (weight decay)."""
        factor = float(self.task.plan.streams) if self.task.plan.reduce_method == "sum" else 1.0
        dtype = op_table.dtype_of(self.program, *node.inputs[0])
        refs = []
        for replica, part in zip(self.task.holding(node.taskgraph), node.inputs):
            build = self.build.at(self.task.device_of(replica, node.taskgraph))
            refs.append(build.scale("%s/of_%d" % (node.name, replica), part, factor, dtype) if dtype in op_table.FLOATS else part)
        self._pass_on(node, refs)

    def _weighed(self, node: Node, dtype: int) -> Sequence[Ref]:
        """The parts of a gradient, weighted here when its call had no seed to weigh."""
        if not self.weights or node.info["tag"].record in self.seeded:
            return node.inputs
        parts = []
        for (replica, micro_batch), part in zip(node.info["instances"], node.inputs):
            device = self.task.device_of(replica, node.taskgraph)
            weight = instance_weight(self.program, self.task, self.nodes, replica, micro_batch, device)
            name = "%s/part_%d_%d" % (node.name, replica, micro_batch)
            build = self.build.at(device)
            parts.append(build.mul(name, part, build.cast(name + "/weight", weight, DT_FLOAT, dtype), dtype))
        return parts

    def _local_dense(self, node: Node) -> Dense:
        dtype = op_table.dtype_of(self.program, *node.inputs[0])
        parts = self._weighed(node, dtype)
        batches = self.task.micro_batches
        sums = []
        for place, replica in enumerate(self.task.holding(node.taskgraph)):
            build = self.build.at(self.task.device_of(replica, node.taskgraph))
            sums.append(build.chain("%s/of_%d" % (node.name, replica), parts[place * batches : (place + 1) * batches], dtype))
        value = self.build.add_n(node.name + "/local", sums, dtype)
        value = self._accumulated(node.name, value, dtype, self.program.shape_of(node.info["ref"]))
        return Dense(node.name, value, dtype, self._bytes(node, dtype), node.info["tag"].record, self._everywhere, self._stage(node))

    @property
    def _everywhere(self) -> Tuple[int, ...]:
        return tuple(range(self.task.local_replicas))

    def _lane_sums(self, node: Node) -> List[Dense]:
        """What is summed over the lanes of each group already meets the same lane of the other groups."""
        dtype = op_table.dtype_of(self.program, *node.inputs[0])
        batches, lanes = self.task.micro_batches, self.task.plan.lanes
        sums: Dict[int, List[Tuple[int, Ref]]] = {}
        # What the first lane has alone has no instances on the others.
        holding = list(dict.fromkeys(replica for replica, _ in node.info["instances"]))
        for place, replica in enumerate(holding):
            build = self.build.at(self.task.device_of(replica, node.taskgraph))
            parts = node.inputs[place * batches : (place + 1) * batches]
            total = build.chain("%s/of_%d" % (node.name, replica), parts, dtype)
            sums.setdefault(self.task.lane(replica), []).append((replica, total))
        found = []
        size = self._bytes(node, dtype) // lanes
        for lane, totals in sorted(sums.items()):
            self.build = self.build.at(self.task.device_of(totals[0][0], node.taskgraph))
            name = "%s/lane_%d" % (node.name, lane)
            value = self.build.add_n(name, [total for _, total in totals], dtype)
            value = self._accumulated(name, value, dtype, None)
            found.append(Dense(node.name, value, dtype, size, node.info["tag"].record, tuple(r for r, _ in totals), node.taskgraph, lane))
        return found

    def _home(self, node: Node) -> Builder:
        """Where the local replicas of a gradient meet."""
        return self.build.at(self.task.home(node.taskgraph))

    def _stage(self, node: Node) -> Optional[int]:
        """The taskgraph of a gradient, when it says where the gradient is."""
        return node.taskgraph if self.task.stages else None

    def _travels(self, taskgraph: Optional[int]) -> bool:
        """Whether the gradients of a taskgraph meet those of other processes in this run."""
        return len(self.task.group(taskgraph)) > 1 and self.task.part in (WHOLE, LAST)

    def _bytes(self, node: Node, dtype: int, rows: int = 0) -> int:
        """Size of a gradient as far as its shape is known; of a table of so many rows when they are given."""
        shape = self.program.shape_of(node.info["ref"]) or ()
        size = 1
        for dim in (rows,) + shape[1:] if rows else shape:
            size *= dim or 1
        return size * tf.as_dtype(dtype).size

    def _accumulated(self, name: str, value: Ref, dtype: int, shape: object) -> Ref:
        """Add the sums of the earlier runs of this step, and keep the sum for the later ones."""
        part = self.task.part
        if part == WHOLE:
            return value
        full = ACCUMULATOR + name
        build = self.build
        handle = build.variable(full, dtype, shape)
        if part == FIRST:
            self.effects.append(build.assign(full + "/first", handle, value, dtype, self.gate))
            return value
        if part == MIDDLE:
            self.effects.append(build.assign(full + "/more", handle, value, dtype, self.gate, "Add"))
            return value
        return build.add(full + "/total", build.read(full + "/read", handle, dtype), value, dtype)

    # Over ranks.

    def _across(self, dense: List[Dense]) -> List[Ref]:
        found: Dict[int, Ref] = {}
        for taskgraph, lane in dict.fromkeys((item.taskgraph, item.lane) for item in dense):
            positions = [i for i, item in enumerate(dense) if (item.taskgraph, item.lane) == (taskgraph, lane)]
            items = [dense[i] for i in positions]
            factor = self.factor
            values: Sequence[Ref] = [item.value for item in items]
            ranks = self.task.group(taskgraph) if lane is None else self.task.plan.peers(lane, taskgraph)
            self.build = self.build.at(self.task.home(taskgraph) if lane is None else self.task.device_of(items[0].replicas[0], taskgraph))
            if len(ranks) > 1 and self.task.part in (WHOLE, LAST):
                values, factor = all_reduce(self.build, items, self.task, factor, self.gate, lane), 1.0
            for position, item, value in zip(positions, items, values):
                name = item.node if lane is None else "%s/lane_%d" % (item.node, lane)
                found[position] = self._scaled(name, value, item.dtype, factor)
        return [found[i] for i in range(len(dense))]

    def _finish(self, name: str, value: Ref) -> None:
        for replica in range(self.task.local_replicas):
            self.mapping[name, replica] = value

    def _pass_on(self, node: Node, refs: Sequence[Ref]) -> None:
        for replica, ref in zip(self.task.holding(node.taskgraph), refs):
            self.mapping[node.name, replica] = ref

    # Sparse gradients.

    def _sparse(self, values: Node, indices: Node) -> List[Dense]:
        """Rows and their indices of all instances; what is to travel as a dense table is returned."""
        dtype = op_table.dtype_of(self.program, *values.inputs[0])
        itype = op_table.dtype_of(self.program, *indices.inputs[0])
        name = values.name
        rows = self._kept(name, "rows", self._concatenated(values, name + "/rows", self._weighed(values, dtype), dtype), dtype)
        ids = self._kept(name, "ids", self._concatenated(indices, name + "/ids", indices.inputs, itype), itype)
        # What consumers do with the rows is known in the last run of a step only.
        if self._travels(values.taskgraph) and self._mergeable(values, indices):
            vocabulary = self._vocabulary(values)
            if vocabulary and (self.task.plan.sparse_as_dense or self._static_rows(values) >= vocabulary):
                self.tables.append((values, indices, itype))
                return self._as_dense(values, rows, ids, dtype, itype, vocabulary)
            rows, ids = self._merge_rows(name, rows, ids, dtype, itype)
        self._finish(values.name, self._scaled(name, self._gathered(values, "rows", rows, dtype), dtype, self.factor))
        self._finish(indices.name, self._gathered(values, "ids", ids, itype))
        return []

    def _concatenated(self, node: Node, name: str, parts: Sequence[Ref], dtype: int) -> Ref:
        """The rows of the local instances; none where no batch is this process's own."""
        rows = self.build.concat(name, parts, dtype)
        return self.build.rows(name + "/nothing", rows, 0, dtype) if node.info["nothing"] else rows

    def _half(self, node: Node) -> None:
        """Only the values of a sparse gradient are used (their norm, say), or only the indices."""
        dtype = op_table.dtype_of(self.program, *node.inputs[0])
        values = node.info["tag"].component == "values"
        rows = self._concatenated(node, node.name + "/rows", self._weighed(node, dtype) if values else node.inputs, dtype)
        rows = self._gathered(node, "rows", self._kept(node.name, "rows", rows, dtype), dtype)
        self._finish(node.name, self._scaled(node.name, rows, dtype, self.factor) if values else rows)

    def _mergeable(self, values: Node, indices: Node) -> bool:
        """True when all consumers sum rows of one index anyway, so that summing them early changes nothing."""
        if not self.may_merge:
            return False
        for node in (values, indices):
            for consumer, _ in self.program.consumers.get(node.name, ()):
                op = self.program.nodes[consumer].op
                if op in op_table.LINEAR_IN_ROWS or (node is indices and op in ("Unique", "UniqueV2")):
                    continue
                return False
        return not any(ref[0] in (values.name, indices.name) for ref in self.program.fetches)

    def _merge_rows(self, name: str, rows: Ref, ids: Ref, dtype: int, itype: int) -> Sequence[Ref]:
        build = self.build
        unique = build.op("Unique", name + "/unique", [ids], T=A.of_type(itype), out_idx=A.of_type(DT_INT32))
        count = build.dim0(name + "/count", unique, itype)
        merged = build.op(
            "UnsortedSegmentSum",
            name + "/merged",
            [rows, (unique[0], 1), count],
            T=A.of_type(dtype),
            Tindices=A.of_type(DT_INT32),
            Tnumsegments=A.of_type(DT_INT32),
        )
        return merged, unique

    def _vocabulary(self, values: Node) -> int:
        variable = self.program.nodes.get(values.info["tag"].variable)
        if variable is not None and variable.info.get(WHOLE_SHAPE):
            return int(variable.info[WHOLE_SHAPE][0])
        shape = variable.attr("shape") if variable is not None else None
        if shape is None or shape.shape.unknown_rank or not shape.shape.dim:
            return 0
        return max(0, int(shape.shape.dim[0].size))

    def _static_rows(self, values: Node) -> int:
        """How many rows the local instances of a sparse gradient have at least: a whole table, when a layer shares its weights with a lookup."""
        part = self.program.nodes[values.inputs[0][0]]
        refs = part.inputs[:-1] if part.op == "ConcatV2" else [values.inputs[0]]
        shapes = (self.program.shape_of((self.program.nodes[n].origin or n, i)) for n, i in refs)
        # The same on all ranks, also on one that draws nothing.
        instances = len(values.inputs) if self.task.plan.copies == 1 else self.task.micro_batches
        return instances * sum(shape[0] or 0 for shape in shapes if shape)

    def _as_dense(self, values: Node, rows: Ref, ids: Ref, dtype: int, itype: int, vocabulary: int) -> List[Dense]:
        """The gradient as a table, and which rows were used: optimizers leave the other rows alone."""
        build, name = self.build, values.name
        record, stage, count = values.info["tag"].record, self._stage(values), build.const(name + "/vocabulary", vocabulary, DT_INT32)
        ones = build.cast(name + "/uses", build.op("OnesLike", name + "/ones", [ids], T=A.of_type(itype)), itype, DT_FLOAT)
        table = self._by_row(name + "/dense", rows, ids, count, dtype, itype)
        used = self._by_row(name + "/uses_of_row", ones, ids, count, DT_FLOAT, itype)
        # Not more than one each, for which float16 has room beside any other.
        used = build.op("Minimum", name + "/used", [used, build.const(name + "/once", 1.0, DT_FLOAT)], T=A.of_type(DT_FLOAT))
        return [
            Dense(name, table, dtype, self._bytes(values, dtype, vocabulary), record, self._everywhere, stage),
            Dense(name + "/used", used, DT_FLOAT, 4 * vocabulary, record, self._everywhere, stage),
        ]

    def _by_row(self, name: str, rows: Ref, ids: Ref, count: Ref, dtype: int, itype: int) -> Ref:
        types = {"T": A.of_type(dtype), "Tindices": A.of_type(itype), "Tnumsegments": A.of_type(DT_INT32)}
        return self.build.op("UnsortedSegmentSum", name, [rows, ids, count], **types)

    def _rows_of_table(self, values: Node, indices: Node, itype: int) -> None:
        """The used rows of a table that has travelled."""
        build, name = self.build, values.name
        dtype = op_table.dtype_of(self.program, *values.inputs[0])
        table, used = self.mapping[name, 0], [self.mapping.pop((name + "/used", r)) for r in range(self.task.local_replicas)][0]
        where = build.op("Where", name + "/where", [used], T=A.of_type(DT_FLOAT))
        flat = build.op("Reshape", name + "/flat", [where, build.const(name + "/all", [-1], DT_INT32)], T=A.of_type(9), Tshape=A.of_type(DT_INT32))
        ids = build.cast(name + "/ids_of_table", flat, 9, itype)
        types = {"Tparams": A.of_type(dtype), "Tindices": A.of_type(itype), "Taxis": A.of_type(DT_INT32)}
        self._finish(name, build.op("GatherV2", name + "/rows_of_table", [table, ids, build.const(name + "/axis", 0, DT_INT32)], **types))
        self._finish(indices.name, ids)

    def _kept(self, name: str, label: str, value: Ref, dtype: int) -> Ref:
        """Keep the rows of a run that accumulates; in the last run of a step those of the earlier ones come first."""
        part = self.task.part
        if part == WHOLE:
            return value
        full = "%s%s/%s" % (ACCUMULATOR, name, label)
        build = self.build.at(self.task.host)
        handle = build.variable(full, dtype)
        joined = value
        if part != FIRST:
            joined = build.concat(full + "/joined", [build.read(full + "/read", handle, dtype), value], dtype)
        if part == LAST:
            return joined
        self.effects.append(build.assign(full + "/keep", handle, joined, dtype, self.gate))
        return value

    def _gathered(self, node: Node, label: str, value: Ref, dtype: int) -> Ref:
        """The rows of all ranks."""
        if not self._travels(node.taskgraph):
            return value
        info = {"dtype": dtype, "taskgraph": node.taskgraph}
        return self.build.op("EplAllGather", "%s/all_%s" % (node.name, label), [value], self.gate, info=info)
