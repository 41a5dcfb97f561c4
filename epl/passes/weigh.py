"""Weigh: unequal batches count by their samples, from the first backward node on.

The loss of an instance with b of the step's B samples weighs b / B. The gradient call
starts from a scalar one; scaling that scalar costs nothing, and every gradient of the
instance carries the weight. When a step spans several runs, B is known in the last run
only, so the weight is b and the sum is divided by B there.
"""

from typing import Dict, Set

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import DT_FLOAT, Builder
from epl.ir.program import BACKWARD, Node, Program, Ref
from epl.passes.base import Pass
from epl.passes.rewire import rewire
from epl.planner.plan import WHOLE, Task


def weighted(program: Program, task: Task) -> bool:
    """True when batches of this program may be unequal and gradients are averaged."""
    return bool(program.agreement and program.agreement.sizes) and task.plan.reduce_method == "mean"


def divided_early(program: Program, task: Task) -> bool:
    """True when the weights have the step's samples in them; else the sum is divided at the end.

    A step that spans several runs does not know them before. With feeds, the ranks would
    wait for each other's count in the middle of the step, where nothing else makes them.
    """
    return task.part == WHOLE and program.agreement.gate is not None


def instance_weight(program: Program, task: Task, nodes: Dict[str, Node], replica: int, micro_batch: int, device: str) -> Ref:
    """The float32 weight of one instance's gradients."""
    build = Builder(nodes, device, BACKWARD)
    size = program.agreement.sizes[replica, micro_batch]
    if not divided_early(program, task):
        return size
    name = "epl_batch/weight_%d_%d" % (replica, micro_batch)
    if name in nodes:
        return name, 0
    return build.op("RealDiv", name, [size, program.agreement.total], T=A.of_type(DT_FLOAT))


class Weigh(Pass):
    """Scale the seeds of gradient calls."""

    name = "weigh"

    def run(self, program: Program, task: Task) -> Program:
        if not weighted(program, task):
            return program
        nodes = dict(program.nodes)
        mapping: Dict[Ref, Ref] = {}
        records = seeded_records(program)
        for node in program.nodes.values():
            if node.int_attr(A.SEED) not in records or node.micro_batch is None:
                continue
            weight = instance_weight(program, task, nodes, node.replica, node.micro_batch, node.device)
            dtype = op_table.dtype_of(program, node.name, 0)
            build = Builder(nodes, node.device, BACKWARD)
            cast = build.cast(node.name + "/epl_weight", weight, DT_FLOAT, dtype)
            mapping[node.name, 0] = build.mul(node.name + "/epl_weighted", (node.name, 0), cast, dtype)
        lowered = {ref[0] for ref in mapping.values()}
        return rewire(program, nodes, mapping, keep=lambda n: n.name in lowered)


def seeded_records(program: Program) -> Set[int]:
    """Gradient calls whose results are aggregated, and whose instances start from a seed of their own.

    The seed of a gradient call inside the loss (a gradient penalty) is part of the forward
    computation, and what optimizers are given is weighted where it is aggregated.
    """
    aggregated = {tag.record for tag in program.facts.gradients.values()}
    return {record for record in program.facts.seeds if record in aggregated}
