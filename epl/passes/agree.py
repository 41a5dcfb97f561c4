"""Agree: all draws of a step first, then everything that the step changes.

An input may end on one rank, or on one local replica, while others still have data.
Then nothing of that step may be applied anywhere. A gate waits for all local draws
and, with several ranks, for a small all-reduce in which every rank says that it has
drawn; all later passes hang collectives and state changes behind the gate. The same
all-reduce carries the number of samples, with which unequal batches are weighted.
"""

import dataclasses
from typing import Dict, List, Optional, Tuple

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import DT_FLOAT, DT_INT32, Builder
from epl.ir.program import DIVIDE, FORWARD, Feed, Program, Ref
from epl.passes.base import Pass
from epl.passes.instances import instance_name, instances_at
from epl.planner.plan import Task

GATE = "epl_gate"
FLAG = "epl_agree"


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Names that later passes need.

    gate: node that everything with an effect waits for, or None.
    sizes: (replica, micro-batch) -> samples in that batch (float32 scalar); empty when
      all batches of the program have the same static size.
    length, label: elements and label of the all-reduce in which the ranks agree.
    local_total: samples of this rank in this run; total: samples of all ranks.
    """

    gate: Optional[str] = None
    sizes: Dict[Tuple[int, int], Ref] = dataclasses.field(default_factory=dict)
    local_total: Optional[Ref] = None
    total: Optional[Ref] = None
    length: int = 2
    label: str = FLAG

    def nodes(self) -> List[str]:
        """The nodes of the program that are named here."""
        refs = list(self.sizes.values()) + [r for r in (self.local_total, self.total) if r is not None]
        return [r[0] for r in refs] + ([self.gate] if self.gate else [])


class Agree(Pass):
    """Add the gate and the batch sizes."""

    name = "agree"

    def run(self, program: Program, task: Task) -> Program:
        facts = program.facts
        ranks = task.ranks
        if not task.parallel:
            if not (facts.draws and program.groups):
                return program.replace(agreement=Agreement())
            # The other stages of an evaluation wait for what this one draws; all ranks run it.
            ranks = task.plan.ranks
        draws = [n for n in program.nodes.values() if n.origin and n.phase == FORWARD and op_table.draws(program, n)]
        draws = [n for n in draws if n.origin in facts.batch or not task.parallel]
        elsewhere = task.spread or task.plan.copies > 1
        ends = facts.draws if elsewhere else bool(draws)
        found = ragged_component(program)
        if found is None and task.parallel:
            feed = uneven_feed(program, task)
            # Each instance has its part of the fed rows.
            found = (feed.ref[0], 0) if feed is not None else None
        if not ends and found is None:
            return program.replace(agreement=Agreement())
        nodes = dict(program.nodes)
        build = Builder(nodes, task.host, FORWARD)
        drawn = list(dict.fromkeys(e for n in draws for e in instances_at(program, task, n, facts.endings.done(n.origin))))
        sizes = _sizes(program, task, build, found) if found is not None else {}
        local = build.add_n("epl_batch/local", [sizes[k] for k in sorted(sizes)], DT_FLOAT) if sizes else None
        if ranks == 1:
            build.no_op(GATE, drawn)
            sizes = {key: sizes[_first_lane(task, key[0]), key[1]] for key in _keys(task)} if sizes else {}
            return program.replace(nodes=nodes, agreement=Agreement(GATE, sizes, local, local))
        one = build.const(FLAG + "/one", 1.0, DT_FLOAT)
        count = local or build.const(FLAG + "/none", 0.0, DT_FLOAT)
        said = build.op("Pack", FLAG + "/said", [one, count], drawn, N=A.of_int(2), T=A.of_type(DT_FLOAT), axis=A.of_int(0))
        length = 2
        if elsewhere and found is not None:
            said = _with_all_sizes(task, build, said, sizes)
            length += task.plan.streams * task.micro_batches
        summed = build.op("EplAllReduce", FLAG, [said], info={"dtype": DT_FLOAT, "scale": 1.0, "name": FLAG, "ranks": range(ranks)})
        total = build.element(FLAG + "/total", summed, 1, DT_FLOAT) if found is not None else None
        if elsewhere and found is not None:
            sizes = _all_sizes(task, build, summed)
        if not ends:  # what is fed does not end
            # A stage without variables or weights has no use for it, but the others wait for each process.
            targets = program.targets + ((total[0],) if total is not None else ())
            return program.replace(nodes=nodes, targets=targets, agreement=Agreement(None, sizes, local, total, length))
        present = build.element(FLAG + "/present", summed, 0, DT_FLOAT)
        everybody = build.const(FLAG + "/everybody", float(ranks), DT_FLOAT)
        complete = build.op("GreaterEqual", FLAG + "/complete", [present, everybody], T=A.of_type(DT_FLOAT))
        build.op("Assert", GATE, [complete, present], T=A.AttrValue(list=A.AttrValue.ListValue(type=[DT_FLOAT])), summarize=A.of_int(1))
        return program.replace(nodes=nodes, targets=program.targets + (GATE,), agreement=Agreement(GATE, sizes, local, total, length))


def _sizes(program: Program, task: Task, build: Builder, found: Ref) -> Dict[Tuple[int, int], Ref]:
    """The rows of the batches that this process draws or is fed."""
    origin, index = found
    sizes: Dict[Tuple[int, int], Ref] = {}
    for replica in task.holding(0 if task.spread else None):
        for micro_batch in range(task.micro_batches if task.draws(replica) else 0):
            name = "epl_batch/size_%d_%d" % (replica, micro_batch)
            drawn = (instance_name(origin, replica, micro_batch), index)
            dtype = op_table.dtype_of(program, *drawn)
            sizes[replica, micro_batch] = build.cast(name, build.dim0(name + "/rows", drawn, dtype), DT_INT32, DT_FLOAT)
    return sizes


def _with_all_sizes(task: Task, build: Builder, said: Ref, sizes: Dict[Tuple[int, int], Ref]) -> Ref:
    """Tell the sizes to the processes that draw nothing, of later stages for instance: one element for each batch of the step."""
    count = task.plan.streams * task.micro_batches
    if sizes:
        keys = sorted(sizes)
        at = build.const(FLAG + "/positions", [[task.global_index(*key)] for key in keys], DT_INT32)
        packed = build.pack(FLAG + "/sizes", [sizes[key] for key in keys], DT_FLOAT)
        length = build.const(FLAG + "/length", [count], DT_INT32)
        own = build.op("ScatterNd", FLAG + "/own", [at, packed, length], T=A.of_type(DT_FLOAT), Tindices=A.of_type(DT_INT32))
    else:
        own = build.const(FLAG + "/own", [0.0] * count, DT_FLOAT)
    return build.concat(FLAG + "/all", [said, own], DT_FLOAT)


def _all_sizes(task: Task, build: Builder, summed: Ref) -> Dict[Tuple[int, int], Ref]:
    """The sizes of all batches of the local replicas."""
    return {key: build.element("%s/size_%d_%d" % ((FLAG,) + key), summed, 2 + task.global_index(*key), DT_FLOAT) for key in _keys(task)}


def _keys(task: Task) -> List[Tuple[int, int]]:
    return [(replica, micro_batch) for replica in range(task.local_replicas) for micro_batch in range(task.micro_batches)]


def _first_lane(task: Task, replica: int) -> int:
    """The local replica that draws what a local replica computes, in a job of one process."""
    return replica - replica % task.plan.copies


def uneven_feed(program: Program, task: Task) -> Optional[Feed]:
    """The fed batch whose number of rows may differ between replicas, or None."""
    alone = task.ranks == 1 and not task.plan.batch_shares
    if alone or task.plan.streams == 1 or task.plan.reduce_method != "mean" or not program.facts.gradients:
        return None
    for feed in program.feeds:
        if feed.mode == DIVIDE and feed.ref[1] == 0:
            shape = program.shape_of(feed.ref)
            if shape is None or (shape and shape[0] is None):
                return feed
    return None


def ragged_component(program: Program) -> Optional[Ref]:
    """The input component whose dimension 0 is a batch that may be smaller at the end."""
    facts = program.facts
    for ref in program.ragged:
        if ref[0] not in facts.batch:
            continue
        # Drawn in a conditional: its size is known where the branches join.
        value = facts.endings.value(ref)
        if not facts.endings.in_branch(value[0]):
            return value
    return None
