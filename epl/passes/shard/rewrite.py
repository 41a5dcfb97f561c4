"""Shard: compute what is in `split` scopes on the devices of a group together.

The devices of a group are lanes: each has inputs of its own, as replicas have. The
planner chooses a form for each tensor (`epl.planner.sharding`); this pass puts the nodes
that bring tensors from one form into another, and replaces ops whose part is not simply
the op itself. The program stays one for all lanes: what differs between them is in
`EplLane` constants and in `EplReshard` nodes, which are lowered when instances exist.
"""

import dataclasses
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, Tuple

from epl.errors import ProgramError
from epl.ir import op_table
from epl.ir.build import Builder
from epl.ir.program import APPLY, BACKWARD, FORWARD, LOOP_BACK, Node, Program, Ref, Shape
from epl.passes.base import Pass
from epl.passes.instances import tensor_label
from epl.passes.rewire import add_controls
from epl.passes.shard.build import LANE_SHAPES, RESHARD, WHOLE_SHAPE, LaneBuilder, reshard
from epl.passes.shard.lower import lower
from epl.passes.shard.lower.part import dtype_of
from epl.planner.plan import Task
from epl.planner.sharding.constants import FOLDED
from epl.planner.sharding.graph import OWN_PREFIX, Sharding, plan_sharding, sum_name
from epl.planner.sharding.prescribed import held_form
from epl.planner.sharding.spec import F, Group, R, Spec
from epl.planner.sharding.strategy import BATCH, INVARIANT, SAME, L, Lane


class Shard(Pass):
    """Divide the taskgraphs of `split` scopes."""

    name = "shard"

    def run(self, program: Program, task: Task) -> Program:
        if task.plan.lanes == 1:
            return program
        _refuse_hidden_batches(program, task)
        program = _reading(program)
        group = task.plan.group
        sharding = plan_sharding(program, task.plan, task.parallel, program.held or {}, known=program.sharding)
        return _Rewriter(program, task, group, sharding).run()


def _reading(program: Program) -> Program:
    """Fetch the value of a reference variable through a node that reads it: a part of it is not what was asked for."""
    nodes = dict(program.nodes)
    build = Builder(nodes, "", FORWARD)
    fetches = []
    for ref in program.fetches:
        node = program.nodes[ref[0]]
        if node.op in op_table.REF_VARIABLES and node.name in (program.held or {}):
            name = "epl_read/" + node.name
            if name not in nodes:
                build.identity(name, ref, op_table.dtype_of(program, *ref))
                nodes[name] = nodes[name].replace(origin=name, taskgraph=node.taskgraph)
            ref = name, 0
        fetches.append(ref)
    if len(nodes) == len(program.nodes):
        return program
    shape_of, of = program.shape_of, dict(zip(fetches, program.fetches))
    return program.replace(nodes=nodes, fetches=fetches, shape_of=lambda ref: shape_of(of.get(ref, ref)))


def _refuse_hidden_batches(program: Program, task: Task) -> None:
    """Refuse an evaluation in which several lanes of a process draw batches, of whose results it sees one.

    Raises ProgramError.
    """
    plan = task.plan
    if task.parallel or not task.spread or plan.copies > 1 or all(len(set(r)) == len(r) for r in map(plan.lane_processes, range(1), (0,))):
        return
    for node in program.nodes.values():
        if op_table.draws(program, node):
            raise ProgramError(
                "Node '%s' draws batches for an evaluation or prediction. Several devices of one process would draw, and the process sees the "
                "result of one of them. Feed the batches, or give each device of the first stage a process of its own" % node.name
            )


class _Rewriter:
    def __init__(self, program: Program, task: Task, group: Group, sharding: Sharding):
        self._program = program
        self._task = task
        self._plan = task.plan
        self._group = group
        self._sharding = sharding
        self._facts = program.facts
        self._nodes: Dict[str, Node] = {}
        self._batch: Set[str] = set(self._facts.batch)
        self._made: Dict[Ref, Ref] = {}
        """Tensor -> what has it in the form that its strategy gives, where that is another tensor."""
        self._formed: Dict[Tuple[Ref, Spec, bool], Ref] = {}
        self._gathers: Dict[str, str] = {}
        """What gathers a weight -> the first node that reads it, in the order of those."""
        self._gradients: Dict[Ref, Ref] = {}
        """Gradient -> the tensor that is aggregated in its place."""
        self._collections: Dict[Ref, str] = dict(program.collections)
        self._summed: Dict[Ref, None] = {}
        """Those of them that are sums over the lanes of the group."""

    def run(self) -> Program:
        program = self._program
        for node in program.topological():
            if node.op in LOOP_BACK or node.name in self._facts.frames:
                self._nodes[node.name] = self._redirected(node)
            else:
                self._add(node)
        fetches = [self._fetched(number, ref) for number, ref in enumerate(program.fetches)]
        self._gather_in_time()
        order = {name: position for position, name in enumerate(program.nodes)}
        nodes = dict(sorted(self._nodes.items(), key=lambda item: order.get(item[0], len(order))))
        for number, node in enumerate([n for n in nodes.values() if n.op == RESHARD]):
            nodes[node.name] = node.replace(info=dict(node.info, number=number))
        gradients = {self._gradients.get(ref, ref): tag for ref, tag in self._facts.gradients.items()}
        first = {name for name, way in self._sharding.strategies.items() if F in way.outputs or F in way.inputs}
        first.update(node.name for node in program.nodes.values() if node.taskgraph in self._task.plan.narrow)
        facts = dataclasses.replace(
            self._facts, gradients=gradients, batch=frozenset(self._batch), summed=frozenset(self._summed), once=self._once(), first=frozenset(first),
            forms=self._forms(),
        )  # fmt: skip
        # What is merged and how is asked of what a fetch or an update is given.
        names = {new: ref for ref, new in self._gradients.items()}
        names.update(zip(fetches, program.fetches))
        self._collections.update((new, program.collections[ref]) for new, ref in names.items() if ref in program.collections)
        infos = {node.name: node.info for node in nodes.values() if node.op == RESHARD}
        shape_of = _with_forms(lambda ref: program.shape_of(names.get(ref, ref)), infos)
        return program.replace(
            nodes=nodes, fetches=fetches, facts=facts, groups=self._groups(), collections=self._collections, shape_of=shape_of
        )

    def _forms(self) -> Dict[Ref, Spec]:
        """The divided tensors, where they are made and where they are brought into their form."""
        found = {}
        for name, way in self._sharding.strategies.items():
            if name in self._program.nodes:
                found.update({(name, index): form for index, form in enumerate(way.outputs) if form.is_sharded})
        found.update({ref: form for (_, form, _), ref in self._formed.items() if form.is_sharded})
        return found

    def _groups(self) -> List[Tuple[int, ...]]:
        """The groups of processes that this program makes talk: the lanes of each group, and the same lanes of all groups."""
        plan = self._task.plan
        found: Dict[Tuple[int, ...], None] = {}
        sharing = {self._place(n.taskgraph) for n in self._nodes.values() if n.op == RESHARD and n.info["source"] != R}
        for taskgraph in sorted(sharing, key=str):
            found.update(dict.fromkeys(plan.lane_groups(taskgraph)))
        for taskgraph in sorted({self._place(self._nodes[name].taskgraph) for name, _ in self._summed}, key=str):
            found.update(dict.fromkeys(plan.peers(lane, taskgraph) for lane in range(plan.lanes)))
        return [group for group in found if len(group) > 1]

    def _place(self, taskgraph: Optional[int]) -> Optional[int]:
        return taskgraph if self._task.spread else None

    def _once(self) -> frozenset:
        """What a program that is not parallel computes once in a process: no lane has another value of it."""
        if self._task.parallel or self._task.spread:
            return frozenset()
        found = set()
        for name, way in self._sharding.strategies.items():
            if name in self._program.nodes and all(form.kind in "RL" for form in way.inputs + way.outputs):
                found.add(name)
        return frozenset(found)

    def _lane(self, ref: Ref) -> Lane:
        return self._sharding.lanes[ref]

    # Nodes.

    def _redirected(self, node: Node) -> Node:
        """A node of a loop, whose inputs are the lane's own."""
        inputs = []
        position = 0
        forms = self._sharding.strategies[node.name].inputs if node.name in self._sharding.strategies else ()
        for ref in node.inputs:
            if self._program.nodes[ref[0]].op in LOOP_BACK or position >= len(forms):
                inputs.append(ref)
                continue
            inputs.append(self._in_form(node, ref, ref, forms[position]))
            position += 1
        return node.replace(inputs=inputs)

    def _add(self, node: Node) -> None:
        way, item = self._sharding.strategies[node.name], self._sharding.items[node.name]
        inputs = [self._in_form(node, ref, key, form) for ref, key, form in zip(node.inputs, item.inputs, way.inputs)]
        node = node.replace(inputs=[self._folded(node, position, ref) for position, ref in enumerate(inputs)])
        self._nodes[node.name] = node
        if item.is_variable and way.outputs[0].is_sharded:
            shape = [d or 0 for d in item.op.outputs[0].shape or ()]
            parts = {LANE_SHAPES: self._lane_shapes(shape, way.outputs[0]), WHOLE_SHAPE: shape}
            self._nodes[node.name] = node.replace(info=dict(node.info, **parts))
        if way.how:
            build = LaneBuilder(self._program, self._nodes, self._batch, self._group, node)
            for index, ref in enumerate(lower(build, node, item, way)):
                if ref != (node.name, index):
                    self._made[node.name, index] = ref

    def _folded(self, node: Node, position: int, ref: Ref) -> Ref:
        """Axes of a sum as the planner has seen them: those of a lane with one sample would be others."""
        name: Optional[str] = ref[0]
        while name in self._program.nodes and self._program.nodes[name].op == "Identity":
            name = self._program.nodes[name].inputs[0][0]
        if name not in self._program.nodes or self._program.nodes[name].op != FOLDED:
            return ref
        op = self._sharding.items[node.name].op
        axes = op.constants.get(position)
        build = LaneBuilder(self._program, self._nodes, self._batch, self._group, node)
        return ref if axes is None else build.const(build.named("axes_%d" % position), axes, dtype_of(op.inputs[position]))

    def _lane_shapes(self, shape: List[int], form: Spec) -> List[List[int]]:
        return [shape[: form.dim] + [length] + shape[form.dim + 1 :] for length in self._group.lengths(shape[form.dim], form.unit)]

    # Tensors.

    def _in_form(self, reader: Node, ref: Ref, key: Ref, form: Spec) -> Ref:
        """A tensor as a node wants it; `key` is what the search has called it."""
        if key[0].startswith(OWN_PREFIX):
            whole = self._form(ref, ref, R)
            return self._converted(key, whole, self._sharding.forms.get(key, {}), L, form, self._lane(key), self._program.nodes[ref[0]].phase)
        if reader.phase == APPLY and ref in self._facts.gradients and self._task.parallel:
            return self._sum(ref, form)
        gathers = self._plan.zero == "v2" and not form.is_sharded and held_form(self._program, ref, self._program.held) is not None
        found = self._form(ref, ref, form, gathers and reader.phase == BACKWARD)
        if gathers and found[0] in self._nodes and self._nodes[found[0]].op == RESHARD:
            self._gathers.setdefault(found[0], reader.name)
        return found

    def _gather_in_time(self) -> None:
        """Gather a weight when the one before the one before it is used, and not all of them at once.

        Of several micro-batches each needs all weights, and they are gathered but once.
        """
        if self._task.micro_batches > 1:
            return
        rows: Dict[Optional[int], List[str]] = {}
        for gather in self._gathers:
            rows.setdefault(self._place(self._nodes[gather].taskgraph), []).append(gather)
        for row in rows.values():
            for earlier, gather in zip(row, row[2:]):
                reader = self._gathers[earlier]
                if reader not in self._facts.frames and not self._facts.endings.in_branch(reader):
                    add_controls(self._nodes, gather, [reader])

    def _sum(self, ref: Ref, form: Spec) -> Ref:
        """The sum of a gradient over all replicas and micro-batches, in a form."""
        name = sum_name(ref)
        way = self._sharding.strategies[name]
        have = way.outputs[0]
        if ref not in self._gradients:
            current = self._gradients[ref] = self._form(ref, ref, way.inputs[0])
            alike = self._lane(ref).kind == INVARIANT
            if way.inputs[0] == have and (not alike or self._task.plan.copies > 1 and self._facts.gradients[ref].component == "dense"):
                self._summed[current] = None
        current = self._gradients[ref]
        if form == have:
            return current
        return self._converted((name, 0), current, self._sharding.forms.get((name, 0), {}), have, form, SAME, APPLY)

    def _form(self, key: Ref, ref: Ref, form: Spec, again: bool = False) -> Ref:
        """A tensor in a form; `again`: apart from what is in this form already."""
        have = self._sharding.strategies[ref[0]].outputs[ref[1]]
        current = self._made.get(ref, ref)
        if form == have:
            return current
        phase = BACKWARD if again else self._program.nodes[ref[0]].phase
        return self._converted(key, current, self._sharding.forms.get(key, {}), have, form, self._lane(ref), phase, again)

    def _converted(
        self, key: Ref, made: Ref, sources: Mapping[Spec, Spec], have: Spec, form: Spec, lane: Lane, phase: str, again: bool = False
    ) -> Ref:
        if form == have:
            return made
        known = self._formed.get((key, form, again))
        if known is not None:
            return known
        source = sources[form]
        value = self._converted(key, made, sources, have, source, lane, phase, again)
        item = self._sharding.items[key[0]]
        producer = self._program.nodes.get(key[0]) or self._nodes[made[0]]
        build = LaneBuilder(self._program, self._nodes, self._batch, self._group, producer.replace(phase=phase))
        name = "epl_form/%s/%s%s" % (tensor_label(key), _text(form), "/again" if again else "")
        made_ref = reshard(build, name, value, source, form, lane, item.op.outputs[key[1]])
        self._formed[key, form, again] = made_ref
        if key in self._program.collections:
            self._collections[made_ref] = self._program.collections[key]
        return made_ref

    def _fetched(self, number: int, ref: Ref) -> Ref:
        form = self._sharding.strategies["epl_fetch/%d" % number].inputs[0]
        if self._task.parallel and ref in self._facts.gradients:
            return self._sum(ref, form)
        return self._form(ref, ref, form)


def _with_forms(shape_of: Callable[[Ref], Shape], infos: Mapping[str, Mapping[str, Any]]) -> Callable[[Ref], Shape]:
    """The shapes of tensors in other forms: those of the whole, and of batches that are gathered with an unknown length."""

    def found(ref: Ref) -> Shape:
        info = infos.get(ref[0])
        if info is None:
            return shape_of(ref)
        shape: Shape = info["shape"]
        lane = info["lane"]
        if shape is None or lane.kind != BATCH or info["target"] == L:
            return shape
        return tuple(None if dim == lane.dim else length for dim, length in enumerate(shape))

    return found


def _text(form: Spec) -> str:
    return form.kind if not form.is_sharded else "S%d" % form.dim if form.unit == 1 else "S%d_by_%d" % (form.dim, form.unit)


