"""Synchronise: identities marked `_epl_sync` give the mean or sum over the replicas."""

from typing import Dict, List, Tuple

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import Builder
from epl.ir.program import Node, Program, Ref
from epl.passes.base import Pass
from epl.passes.rewire import rewire
from epl.planner.plan import Task


class Synchronise(Pass):
    """Put an all-reduce over local replicas and ranks behind each marked identity.

    Replicas meet micro-batch by micro-batch. A program on one replica is left as it is.
    """

    name = "synchronise"

    def run(self, program: Program, task: Task) -> Program:
        marked = [n for n in program.nodes.values() if n.origin and n.attr(A.SYNC) is not None]
        if not marked or not task.parallel or task.plan.replicas == 1:
            return program
        groups: Dict[Tuple[str, object], List[Node]] = {}
        for node in marked:
            if node.origin in program.facts.frames:
                raise ProgramError("'%s' synchronises replicas inside a while loop; take the normalisation out of the loop" % node.origin)
            groups.setdefault((node.origin, node.micro_batch), []).append(node)
        nodes = dict(program.nodes)
        mapping: Dict[Ref, Ref] = {}
        gate = [program.agreement.gate] if program.agreement and program.agreement.gate else []
        for (_, micro_batch), members in groups.items():
            if micro_batch is None and members[0].origin not in program.facts.batch:
                continue  # the same value on all replicas
            value = _combine(program, task, nodes, members, gate)
            mapping.update(((m.name, 0), value) for m in members)
        if not mapping:
            return program
        own = {m.name for m in marked} | {n for n in nodes if n not in program.nodes}
        return rewire(program, nodes, mapping, keep=lambda n: n.name in own and n.name not in program.nodes)


def _combine(program: Program, task: Task, nodes: Dict[str, Node], members: List[Node], gate: List[str]) -> Ref:
    first = members[0]
    kind = first.str_attr(A.SYNC)
    dtype = op_table.dtype_of(program, first.name, 0)
    build = Builder(nodes, task.home(first.taskgraph), first.phase)
    base = first.name + "/epl_all"
    total = build.add_n(base + "/sum", [(m.name, 0) for m in members], dtype)
    # Lanes that compute one batch have the same value of it.
    factor = (task.plan.streams if kind == "sum" else 1.0) / task.plan.replicas
    if len(task.group(first.taskgraph)) == 1:
        return build.scale(base + "/scaled", total, factor, dtype)
    return build.op("EplAllReduce", base, [total], gate, info={"dtype": dtype, "scale": factor, "taskgraph": first.taskgraph})
