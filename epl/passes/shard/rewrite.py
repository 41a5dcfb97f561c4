"""Shard: compute what is in `split` scopes on the devices of a group together.

The devices of a group are lanes: each has inputs of its own, as replicas have. The
planner chooses a form for each tensor (`epl.planner.sharding`); this pass puts the nodes
that bring tensors from one form into another, and replaces ops whose part is not simply
the op itself. The program stays one for all lanes: what differs between them is in
`EplLane` constants and in `EplReshard` nodes, which are lowered when instances exist.
"""

import dataclasses
from typing import Dict, List, Mapping, Optional, Set, Tuple

from epl.ir.program import APPLY, LOOP_BACK, Node, Program, Ref
from epl.passes.base import Pass
from epl.passes.instances import tensor_label
from epl.passes.shard.build import LANE_SHAPES, RESHARD, LaneBuilder, reshard
from epl.passes.shard.lower import lower
from epl.planner.plan import Task
from epl.planner.sharding.graph import OWN_PREFIX, Sharding, plan_sharding, sum_name
from epl.planner.sharding.spec import Group, R, Spec
from epl.planner.sharding.strategy import INVARIANT, SAME, L, Lane


class Shard(Pass):
    """Divide the taskgraphs of `split` scopes."""

    name = "shard"

    def run(self, program: Program, task: Task) -> Program:
        if task.plan.lanes == 1:
            return program
        group = Group.of(task.plan.lanes)
        sharding = plan_sharding(program, task.plan.split, group, task.parallel, program.held or {})
        return _Rewriter(program, task, group, sharding).run()


class _Rewriter:
    def __init__(self, program: Program, task: Task, group: Group, sharding: Sharding):
        self._program = program
        self._task = task
        self._group = group
        self._sharding = sharding
        self._facts = program.facts
        self._nodes: Dict[str, Node] = {}
        self._batch: Set[str] = set(self._facts.batch)
        self._made: Dict[Ref, Ref] = {}
        """Tensor -> what has it in the form that its strategy gives, where that is another tensor."""
        self._formed: Dict[Tuple[Ref, Spec], Ref] = {}
        self._gradients: Dict[Ref, Ref] = {}
        """Gradient -> the tensor that is aggregated in its place."""
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
        order = {name: position for position, name in enumerate(program.nodes)}
        nodes = dict(sorted(self._nodes.items(), key=lambda item: order.get(item[0], len(order))))
        gradients = {self._gradients.get(ref, ref): tag for ref, tag in self._facts.gradients.items()}
        facts = dataclasses.replace(
            self._facts, gradients=gradients, batch=frozenset(self._batch), summed=frozenset(self._summed), once=self._once()
        )
        names = {new: ref for ref, new in self._gradients.items()}
        names.update(zip(fetches, program.fetches))
        collections = dict(program.collections)
        collections.update((new, collections[ref]) for new, ref in names.items() if ref in collections)
        shape_of = program.shape_of
        return program.replace(
            nodes=nodes,
            fetches=fetches,
            facts=facts,
            groups=self._groups(),
            collections=collections,
            shape_of=lambda ref: shape_of(names.get(ref, ref)),
        )

    def _groups(self) -> List[Tuple[int, ...]]:
        """The groups of processes that this program makes talk: the lanes of each group, and the same lanes of all groups."""
        plan = self._task.plan
        found: Dict[Tuple[int, ...], None] = {}
        if any(node.op == RESHARD and node.info["source"] != R for node in self._nodes.values()):
            for first in range(0, plan.replicas, plan.lanes):
                found[tuple(sorted({(first + lane) // plan.devices_per_rank for lane in range(plan.lanes)}))] = None
        if self._summed:
            found.update(dict.fromkeys(self._task.peers(lane) for lane in range(plan.lanes)))
        return [group for group in found if len(group) > 1]

    def _once(self) -> frozenset:
        """What a program that is not parallel computes once in a process: no lane has another value of it."""
        if self._task.parallel:
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
        node = node.replace(inputs=inputs)
        self._nodes[node.name] = node
        if item.is_variable and way.outputs[0].is_sharded:
            self._nodes[node.name] = node.replace(info=dict(node.info, **{LANE_SHAPES: self._lane_shapes(item.op.outputs[0].shape, way.outputs[0])}))
        if way.how:
            build = LaneBuilder(self._program, self._nodes, self._batch, self._group, node)
            for index, ref in enumerate(lower(build, node, item, way)):
                if ref != (node.name, index):
                    self._made[node.name, index] = ref

    def _lane_shapes(self, shape: Optional[Tuple[Optional[int], ...]], form: Spec) -> List[List[int]]:
        assert shape is not None
        dims = [d or 0 for d in shape]
        return [dims[: form.dim] + [length] + dims[form.dim + 1 :] for length in self._group.lengths(dims[form.dim], form.unit)]

    # Tensors.

    def _in_form(self, reader: Node, ref: Ref, key: Ref, form: Spec) -> Ref:
        """A tensor as a node wants it; `key` is what the search has called it."""
        if key[0].startswith(OWN_PREFIX):
            whole = self._form(ref, ref, R)
            return self._converted(key, whole, self._sharding.forms.get(key, {}), L, form, self._lane(key), self._program.nodes[ref[0]].phase)
        if reader.phase == APPLY and ref in self._facts.gradients and self._task.parallel:
            return self._sum(ref, form)
        return self._form(ref, ref, form)

    def _sum(self, ref: Ref, form: Spec) -> Ref:
        """The sum of a gradient over all replicas and micro-batches, in a form."""
        name = sum_name(ref)
        way = self._sharding.strategies[name]
        have = way.outputs[0]
        if ref not in self._gradients:
            current = self._gradients[ref] = self._form(ref, ref, way.inputs[0])
            if way.inputs[0] == have and self._lane(ref).kind != INVARIANT:
                self._summed[current] = None
        current = self._gradients[ref]
        if form == have:
            return current
        return self._converted((name, 0), current, self._sharding.forms.get((name, 0), {}), have, form, SAME, APPLY)

    def _form(self, key: Ref, ref: Ref, form: Spec) -> Ref:
        have = self._sharding.strategies[ref[0]].outputs[ref[1]]
        current = self._made.get(ref, ref)
        if form == have:
            return current
        return self._converted(key, current, self._sharding.forms.get(key, {}), have, form, self._lane(ref), self._program.nodes[ref[0]].phase)

    def _converted(self, key: Ref, made: Ref, sources: Mapping[Spec, Spec], have: Spec, form: Spec, lane: Lane, phase: str) -> Ref:
        if form == have:
            return made
        known = self._formed.get((key, form))
        if known is not None:
            return known
        source = sources[form]
        value = self._converted(key, made, sources, have, source, lane, phase)
        item = self._sharding.items[key[0]]
        producer = self._program.nodes.get(key[0]) or self._nodes[made[0]]
        build = LaneBuilder(self._program, self._nodes, self._batch, self._group, producer.replace(phase=phase))
        name = "epl_form/%s/%s" % (tensor_label(key), _text(form))
        made_ref = reshard(build, name, value, source, form, lane, item.op.outputs[key[1]])
        self._formed[key, form] = made_ref
        return made_ref

    def _fetched(self, number: int, ref: Ref) -> Ref:
        form = self._sharding.strategies["epl_fetch/%d" % number].inputs[0]
        if self._task.parallel and ref in self._facts.gradients and (sum_name(ref), 0) in self._sharding.lanes:
            return self._sum(ref, form)
        return self._form(ref, ref, form)


def _text(form: Spec) -> str:
    return form.kind if not form.is_sharded else "S%d" % form.dim if form.unit == 1 else "S%d_by_%d" % (form.dim, form.unit)


