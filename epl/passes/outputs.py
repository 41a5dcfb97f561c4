"""Outputs: merge the values of several instances into one (lower `EplMerge`)."""

from typing import Dict, List, Optional, Sequence

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import DT_FLOAT, Builder
from epl.ir.program import FORWARD, Node, Program, Ref, ref_text
from epl.passes.base import Pass
from epl.passes.clone import MERGE
from epl.passes.rewire import rewire
from epl.planner.plan import Task


class Outputs(Pass):
    """Lower `EplMerge`: local instances first, then the ranks."""

    name = "outputs"

    def run(self, program: Program, task: Task) -> Program:
        merges = [n for n in program.nodes.values() if n.op == MERGE]
        if not merges:
            return program
        nodes = dict(program.nodes)
        mapping: Dict[Ref, Ref] = {}
        for node in merges:
            strings = op_table.dtype_of(program, *node.inputs[0]) in op_table.OPAQUE
            build = Builder(nodes, task.host if strings else task.home(node.taskgraph), FORWARD)
            del nodes[node.name]
            mapping[node.name, 0] = _lower(program, task, build, node)
        return rewire(program, nodes, mapping)


def _lower(program: Program, task: Task, build: Builder, node: Node) -> Ref:
    rule, across = node.info["rule"], node.info["across"] and len(task.group(node.taskgraph)) > 1
    dtype = op_table.dtype_of(program, *node.inputs[0])
    gate = [program.agreement.gate] if program.agreement and program.agreement.gate else []
    if dtype in op_table.OPAQUE:
        if len(node.inputs) == 1 and not across:
            return node.inputs[0]
        if rule != "concat" or across or dtype != 7:
            raise ProgramError(
                "Tensor '%s' of type %s can't be merged over replicas; take it out of the collection"
                % (ref_text(node.info["ref"]), _dtype_name(dtype))
            )
    if rule == "first":
        if not across:
            return node.inputs[0]
        info = {"dtype": dtype, "root": task.first_holder(node.taskgraph), "taskgraph": node.taskgraph}
        return build.op("EplBroadcast", node.name + "/first", node.inputs, gate, info=info)
    if rule == "concat":
        local = _concat(program, build, node, dtype)
        if node.info["nothing"]:
            local = build.rows(node.name + "/nothing", local, 0, dtype)
        if not across:
            return local
        return build.op("EplAllGather", node.name + "/gather", [local], gate, info={"dtype": dtype, "taskgraph": node.taskgraph})
    if rule == "sum":
        local = build.add_n(node.name + "/sum", _counting(build, node, dtype), dtype)
        return _over_ranks(build, node, local, dtype, 1.0, gate) if across else local
    if dtype not in op_table.FLOATS:
        raise ProgramError(
            "Tensor '%s' of type %s can't be averaged; put it in a sum or concat collection, or cast it to float"
            % (ref_text(node.info["ref"]), _dtype_name(dtype))
        )
    return _mean(program, task, build, node, dtype, gate if across else [], across)


def _mean(program: Program, task: Task, build: Builder, node: Node, dtype: int, gate: List[str], across: bool) -> Ref:
    sizes = program.agreement.sizes if program.agreement else {}
    if not sizes:
        local = build.add_n(node.name + "/sum", _counting(build, node, dtype), dtype)
        factor = 1.0 / (task.plan.streams * task.micro_batches if across else len(node.inputs))
        return _over_ranks(build, node, local, dtype, factor, gate) if across else build.scale(node.name + "/mean", local, factor, dtype)
    weights = [sizes[instance] for instance in node.info["instances"]]
    parts = []
    for i, (part, weight) in enumerate(zip(_counting(build, node, dtype), weights)):
        cast = build.cast("%s/weight_%d" % (node.name, i), weight, DT_FLOAT, dtype)
        parts.append(build.mul("%s/part_%d" % (node.name, i), part, cast, dtype))
    local = build.add_n(node.name + "/sum", parts, dtype)
    total = program.agreement.total if across else build.add_n(node.name + "/samples", weights, DT_FLOAT)
    summed = _over_ranks(build, node, local, dtype, 1.0, gate) if across else local
    divisor = build.cast(node.name + "/total", total, DT_FLOAT, dtype)
    return build.op("RealDiv", node.name + "/mean", [summed, divisor], T=A.of_type(dtype))


def _counting(build: Builder, node: Node, dtype: int) -> Sequence[Ref]:
    """The terms of this process."""
    if not node.info["nothing"]:
        return node.inputs
    return [build.op("ZerosLike", node.name + "/nothing", node.inputs, T=A.of_type(dtype))]


def _over_ranks(build: Builder, node: Node, local: Ref, dtype: int, factor: float, gate: List[str]) -> Ref:
    return build.op("EplAllReduce", node.name + "/reduce", [local], gate, info={"dtype": dtype, "scale": factor, "taskgraph": node.taskgraph})


def _concat(program: Program, build: Builder, node: Node, dtype: int) -> Ref:
    shape = program.shape_of(node.info["ref"])
    parts = list(node.inputs)
    if shape is not None and not shape:
        # A scalar of each instance becomes a vector with one element each.
        return build.pack(node.name + "/pack", parts, dtype)
    return build.concat(node.name + "/concat", parts, dtype)


def _dtype_name(dtype: int) -> Optional[str]:
    import tensorflow.compat.v1 as tf

    return tf.as_dtype(dtype).name
