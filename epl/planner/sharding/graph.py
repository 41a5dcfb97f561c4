"""From a program to what the search needs, and what it found."""

import dataclasses
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Tuple

import tensorflow.compat.v1 as tf

from epl.errors import ProgramError
from epl.ir import op_table
from epl.ir.program import APPLY, FORWARD, LOOP_BACK, Node, Program, Ref
from epl.planner.op_costs import TensorSpec, op_flops, plain_attrs
from epl.planner.plan import Plan
from epl.planner.sharding import rules as _rules
from epl.planner.sharding.constants import FOLDED, Constants
from epl.planner.sharding.op import Op, Sayings, Tensor, sayings
from epl.planner.sharding.prescribed import ASSIGNS, prescribed
from epl.planner.sharding.reuse import as_before
from epl.planner.sharding.solve import Item, Machine, size_of, solve, used_whole
from epl.planner.sharding.spec import F, Group, R, S, Spec
from epl.planner.sharding.strategy import BATCH, INVARIANT, OWN, SAME, Analysis, L, Lane, Strategy, analyse, moved_bytes

assert _rules

OWN_PREFIX = "epl_own/"
"""Of items that stand for a tensor that is the same on all lanes, seen as one that each lane has of its own."""
SUM = "EplSum"
"""Type of what stands for the sum of a gradient over all lanes; its node is the gradient's, by this name and output."""
_DEARER = 1.02
"""What a program may cost in terms of the one whose choice it keeps."""


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How the devices of a group compute a program together.

    Attributes:
      items: the ops as the search saw them, by name; sums of gradients as `sum_name` calls them.
      strategies: what was chosen for each.
      lanes: how each tensor differs between the lanes.
      forms: tensor -> the forms in which it is needed, each with the form that it is made of, in that order.
      seconds: predicted time of a step, as far as the choice decides it. bytes: sent by each device.
    """

    items: Mapping[str, Item]
    strategies: Mapping[str, Strategy]
    lanes: Mapping[Ref, Lane]
    forms: Mapping[Ref, Mapping[Spec, Spec]]
    seconds: float
    bytes: float

    def sent(self, ref: Ref, source: Spec, target: Spec, group: Group) -> float:
        """Bytes that each device sends to bring a tensor from one form into another."""
        tensor, lane = self.items[ref[0]].op.outputs[ref[1]], self.lanes[ref]
        return moved_bytes(lane, size_of(tensor, lane, Machine().unknown), source, target, group) or 0.0

    def held(self) -> Dict[str, Spec]:
        """The variables that are divided, and those that the first device has alone."""
        forms = {name: self.strategies[name].outputs[0] for name, item in self.items.items() if item.is_variable}
        return {name: form for name, form in forms.items() if form.is_sharded or form == F}


def sum_name(ref: Ref) -> str:
    """The name of the item that stands for the sum of a gradient over the lanes."""
    return "epl_sum/%s_%d" % ref


def plan_sharding(
    program: Program,
    plan: Plan,
    parallel: bool,
    held: Optional[Mapping[str, Spec]] = None,
    machine: Optional[Machine] = None,
    decided: Optional[Mapping[str, Spec]] = None,
    known: Optional[Sharding] = None,
) -> Sharding:
    """Choose how a classified program is computed by a group of devices.

    Args:
      parallel: random numbers differ between lanes that have inputs of their own.
      held: how the variables are divided, once that is decided; those that are not named are whole.
      decided: forms of some variables, while others are still to be decided.
      known: what was chosen for another program of the graph. Where this one has the same ops, it stays so, unless that is dear.
    """
    machine = machine or Machine()
    group = plan.group
    items = Items(program, plan, group, parallel, held, machine, decided or {}).items
    if plan.zero and held is None:
        whole = used_whole(items, group)
        items = [item._replace(fixed=R) if item.name in whole and item.name not in (decided or {}) and item.fixed != L else item for item in items]
    again = None if known is None else as_before(items, known.items, known.strategies)
    if again is None or known is None:
        return chosen(items, group, machine)
    try:
        found = chosen(again, group, machine)
    except ProgramError:
        return chosen(items, group, machine)  # What is new here does not go with it.
    if found.seconds <= _DEARER * known.seconds:
        return found
    return min(found, chosen(items, group, machine), key=lambda one: one.seconds)


def chosen(items: List[Item], group: Group, machine: Machine) -> Sharding:
    """The cheapest way to compute what the items describe."""
    choice = solve(items, group, machine)
    forms: Dict[Ref, Dict[Spec, Spec]] = {}
    for move in choice.moves:
        forms.setdefault(move.ref, {})[move.target] = move.source
    lanes = {(item.name, index): lane for item in items for index, lane in enumerate(item.analysis.lanes)}
    return Sharding({i.name: i for i in items}, choice.strategies, lanes, forms, choice.seconds, sum(m.bytes for m in choice.moves))


class Items:
    """The ops of a classified program, each after those that it reads. Arguments: see `plan_sharding`."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        group: Group,
        parallel: bool,
        held: Optional[Mapping[str, Spec]],
        machine: Machine,
        decided: Mapping[str, Spec],
    ):
        self._decided = decided
        self._program = program
        self._group = group
        self._plan = plan
        self._split = frozenset(plan.split)
        self._copies = plan.copies > 1
        self._parallel = parallel
        self._held = held
        self._unknown = machine.unknown
        self._lanes: Dict[Ref, Lane] = {}
        self._constants = Constants(program, self._lanes)
        self._assigned: Dict[Ref, Tensor] = {}
        self._loose: Dict[Ref, Tensor] = {}
        self._fed = {f.node for f in program.feeds if f.is_batch}
        self._apart = self._apart_frames()
        self._own_state = self._written_by_lanes()
        self._updated = self._written_after_gradients()
        self._assigned = self._assigned_shapes()
        self._prepared = self._preparing()
        self.items: List[Item] = []
        for node in program.topological():
            self._add(node)
        for number, ref in enumerate(program.fetches):
            self._add_fetch(number, ref)

    def _assigned_shapes(self) -> Dict[Ref, Tensor]:
        """What is assigned to variables, restored values for instance, has their shapes."""
        found: Dict[Ref, Tensor] = {}
        for node in self._program.nodes.values():
            if node.op in ASSIGNS:
                ref = node.inputs[1]
                while self._program.shape_of(ref) is None and ref not in found:
                    found[ref] = self._tensor(node.inputs[0])
                    if self._program.nodes[ref[0]].op != "Identity":
                        break
                    ref = self._program.nodes[ref[0]].inputs[0]
        return found

    def _preparing(self) -> FrozenSet[str]:
        """What computes the initial or restored values of variables that may be divided, wherever it is."""
        if self._parallel:
            return frozenset()
        nodes = [n for n in self._program.nodes.values() if n.op in ASSIGNS and self._of_divided(n)]
        return frozenset(self._program.ancestors([n.inputs[1][0] for n in nodes]))

    def _written_by_lanes(self) -> FrozenSet[str]:
        """Variables that each lane changes from its own batches, moving statistics for instance: lanes differ until the step is over."""
        facts = self._program.facts
        if not self._parallel or self._copies:
            return frozenset()
        return frozenset(v for name, variables in facts.writes.items() if name in facts.batch for v in variables)

    def _written_after_gradients(self) -> FrozenSet[str]:
        """The variables of the optimizer and those that it updates."""
        facts, nodes = self._program.facts, self._program.nodes
        return frozenset(v for name, variables in facts.writes.items() if nodes[name].phase == APPLY for v in variables)

    def _apart_frames(self) -> FrozenSet[str]:
        """The while loops in which something differs between lanes."""
        program, frames = self._program, self._program.facts.frames
        found: Dict[str, None] = {}
        varying = dict.fromkeys(n.name for n in program.nodes.values() if self._source(n))
        stack = list(varying)
        members: Dict[str, List[str]] = {}
        for name, frame in frames.items():
            members.setdefault(frame, []).append(name)
        while stack:
            name = stack.pop()
            frame = frames.get(name)
            if frame is not None and frame not in found:
                found[frame] = None
                stack.extend(m for m in members[frame] if m not in varying)
                varying.update(dict.fromkeys(members[frame]))
            for consumer, index in program.consumers.get(name, ()):
                if index >= 0 and consumer not in varying and program.nodes[consumer].phase != APPLY:
                    varying[consumer] = None
                    stack.append(consumer)
        return frozenset(found)

    def _source(self, node: Node) -> str:
        """Its name, if each lane has its own of what a node gives."""
        return "" if self._copies or not self._is_input(node) else node.name

    def _is_input(self, node: Node) -> bool:
        if node.name in self._fed or self._parallel and node.op == "Placeholder" and not self._program.feeds:
            return True
        if self._parallel:
            return op_table.is_source(self._program, node)
        return self._plan.is_shared and op_table.draws(self._program, node)

    def _first_alone(self, node: Node) -> bool:
        """Whether the first lane draws for all: what they would not find alike by themselves."""
        if not self._copies or not self._is_input(node) or node.op in op_table.STEP_STATE or node.op in op_table.GENERATORS:
            return False
        if node.op in op_table.RANDOM and (node.int_attr("seed") or node.int_attr("seed2")):
            return False
        if node.name in self._program.facts.frames or self._program.facts.endings.in_branch(node.name):
            raise ProgramError(
                "Node '%s' (%s) of taskgraph %s draws in a loop or conditional, where the devices that compute one batch together can't be "
                "given what one of them has drawn. Draw before it, or give a random op a seed" % (node.name, node.op, node.taskgraph)
            )
        return True

    def _add(self, node: Node) -> None:
        facts = self._program.facts
        op = self._op(node)
        frame = facts.frames.get(node.name)
        refs = tuple(ref for ref in node.inputs if self._program.nodes[ref[0]].op not in LOOP_BACK)
        inputs = tuple(self._read(node, ref) for ref in refs)
        if len(inputs) < len(op.inputs):
            op = op._replace(inputs=op.inputs[: len(inputs)])
        lanes = tuple(self._lanes[ref] for ref in inputs)
        if frame is None and self._is_free(node):
            inputs = self._with_samples(op, inputs, lanes)
            lanes = tuple(self._lanes[ref] for ref in inputs)
        if frame is None:
            analysis = analyse(op, lanes, self._source(node))
        else:
            analysis = Analysis(Sayings(), tuple(_in_loop(t) if frame in self._apart else SAME for t in op.outputs), None)
        if node.name in self._own_state:
            analysis = analysis._replace(lanes=(OWN,))
        if node.op == FOLDED and self._constants.of((node.name, 0)) is not None:
            analysis = analysis._replace(lanes=(SAME, SAME))
        if node.op in op_table.RANDOM and node.name not in self._prepared:
            # A step draws other numbers than the step before.
            analysis = analysis._replace(said=Sayings())
        for index, lane in enumerate(analysis.lanes):
            self._lanes[node.name, index] = lane
        flops = op_flops(node.op, op.attrs, self._known(op.inputs, lanes), self._known(op.outputs, analysis.lanes)) or 0
        work = flops + sum(size_of(t, lane, self._unknown) for t, lane in zip(op.outputs, analysis.lanes)) / 4
        item = Item(node.name, op, inputs, analysis, lanes, self._is_free(node), work, prepares=node.name in self._prepared)
        way = prescribed(self._program, node, op, self._held)
        if self._is_narrow(node):
            # The handle of an iterator is everywhere, and can't be sent.
            forms = [R if t.is_handle and not self._is_narrow(self._program.nodes[ref[0]]) else F for t, ref in zip(op.inputs, inputs)]
            item = item._replace(ways=(Strategy(tuple(forms), (F,) * len(op.outputs)),))
        elif way is not None:
            item = item._replace(ways=(way,))
        elif self._first_alone(node):
            item = item._replace(ways=(Strategy((R,) * len(op.inputs), (F,) * len(op.outputs)),))
        if node.op in op_table.VARIABLES:
            # What is in a scope is divided because the user says so; a bias goes with what is cheaper.
            item = item._replace(is_variable=True, fixed=self._fixed(node), divide=node.taskgraph in self._split and op.outputs[0].rank > 1)
        self.items.append(item)

    def _with_samples(self, op: Op, inputs: Tuple[Ref, ...], lanes: Tuple[Lane, ...]) -> Tuple[Ref, ...]:
        """What is the same on all lanes but meets their samples one by one (a mean's gradient, of static shape) is each lane's own."""
        batches = [(i, lane) for i, lane in enumerate(lanes) if lane.kind == BATCH]
        if not batches or all(lane.kind != INVARIANT for lane in lanes):
            return inputs
        for axis in sayings(op).axes:
            if any(axis.inputs[i] != lane.dim for i, lane in batches):
                continue
            first, lane = batches[0]
            found = list(inputs)
            for position, dim in enumerate(axis.inputs):
                if dim is not None and lanes[position].kind == INVARIANT and not op.inputs[position].is_handle:
                    own = Lane(BATCH, dim, lane.unit // axis.unit(first) * axis.unit(position), lane.origin)
                    found[position] = self._own(inputs[position], own, op.inputs[position])
            return tuple(found)
        return inputs

    def _own(self, ref: Ref, lane: Lane, tensor: Tensor) -> Ref:
        name = "%s%s_%d/%d_%d" % ((OWN_PREFIX,) + ref + (lane.dim, lane.unit))
        if (name, 0) not in self._lanes:
            ways = (Strategy((R,), (L,), "", 0.0),)
            self.items.append(Item(name, Op("EplOwn", (tensor,), (tensor,)), (ref,), Analysis(Sayings(), (lane,), None), (SAME,), ways=ways))
            self._lanes[name, 0] = lane
        return name, 0

    def _is_free(self, node: Node) -> bool:
        facts = self._program.facts
        if node.name in facts.frames or facts.endings.in_branch(node.name) or node.name in facts.outputs:
            return False
        if node.phase != FORWARD or node.taskgraph in self._split or node.op in op_table.VARIABLES:
            return True
        # Where all is split, what belongs to no taskgraph may be, too; and what is restored is passed on to variables.
        unclaimed = node.taskgraph is None and (self._copies or not self._parallel and node.op == "Identity")
        return unclaimed or node.name in self._prepared or self._of_divided(node)

    def _of_divided(self, node: Node) -> bool:
        """Wherever it is done, what initialises, reads or saves a variable takes it as it is held."""
        variables = [op_table.variable_of(self._program, *ref) for ref in node.inputs if self._tensor(ref).is_handle]
        return any(name is not None and self._fixed(self._program.nodes[name]) != R for name in variables)

    def _is_narrow(self, node: Node) -> bool:
        """Whether the first lane alone computes a node."""
        return node.taskgraph is not None and node.taskgraph in self._plan.narrow

    def _fixed(self, node: Node) -> Optional[Spec]:
        if self._is_narrow(node):
            return F
        known = self._decided.get(node.name) if self._held is None else self._held.get(node.name, R)
        if node.name in self._own_state and (known is None or known == R):
            return L
        if known is not None:
            return known
        if self._plan.zero:
            return zero_form(self._tensor((node.name, 0)), self._group) if node.name in self._updated else R
        return None if node.taskgraph is None or node.taskgraph in self._split else R

    def _read(self, node: Node, ref: Ref) -> Ref:
        return self._summed(ref) if node.phase == APPLY else ref

    def _summed(self, ref: Ref) -> Ref:
        """What an update or a fetch sees of a gradient is the sum over all lanes."""
        if ref not in self._program.facts.gradients or not self._parallel:
            return ref
        name = sum_name(ref)
        if (name, 0) not in self._lanes:
            tensor, lane = self._tensor(ref), self._lanes[ref]
            analysis, ways = Analysis(Sayings(), (SAME,), None), self._sums(ref, tensor, lane)
            self.items.append(Item(name, Op(SUM, (tensor,), (tensor,)), (ref,), analysis, (lane,), ways=ways))
            self._lanes[name, 0] = SAME
        return name, 0

    def _sums(self, ref: Ref, tensor: Tensor, lane: Lane) -> Tuple[Strategy, ...]:
        """The sum of a gradient over all lanes and micro-batches: with those of all groups, or in this group beforehand."""
        alone = Strategy((R if lane.kind == INVARIANT else L,), (R,), "", 0.0, (2.0,) if lane.kind != INVARIANT else ())
        tag = self._program.facts.gradients[ref]
        if self._plan.zero and tag.component == "dense":
            # v0 adds up the gradients once, after the last micro-batch; with v1 a device never holds the sum of more than its part.
            form = zero_form(tensor, self._group)
            early = lane == OWN and (tag.record in self._program.facts.seeds or self._even())
            return (Strategy((form,), (form,), "", 0.0) if self._plan.zero != "v0" and form != R and early else alone,)
        if self._copies and tag.component == "dense":
            return tuple(Strategy((form,), (form,), "", 0.0) for form in self._parts(tensor))
        if lane != OWN or tag.component != "dense" or tag.record not in self._program.facts.seeds and not self._even():
            return (alone,)
        return (alone,) + tuple(Strategy((form,), (form,), "", 0.0) for form in self._parts(tensor))

    def _parts(self, tensor: Tensor) -> List[Spec]:
        return [R] + ([F] if self._plan.narrow else []) + [S(d) for d in range(tensor.rank) if (tensor.dim(d) or 0) >= self._group.size]

    def _even(self) -> bool:
        """Whether all lanes' gradients weigh the same."""
        return not self._program.ragged and not any(f.is_batch for f in self._program.feeds)

    def _add_fetch(self, number: int, ref: Ref) -> None:
        """What a fetch returns is each lane's own, and the whole of what is the same."""
        tensor, ref = self._tensor(ref), self._summed(ref)
        lane = self._lanes[ref]
        way = Strategy((R if lane.kind == INVARIANT else L,), (), "", 0.0)
        self.items.append(Item("epl_fetch/%d" % number, Op("EplFetch", (tensor,), ()), (ref,), Analysis(Sayings(), (), None), (lane,), ways=(way,)))

    def _known(self, tensors: Tuple[Tensor, ...], lanes: Tuple[Lane, ...]) -> List[TensorSpec]:
        """The tensors with a guess for what is not known, as `size_of` has it."""
        found = []
        for tensor, lane in zip(tensors, lanes):
            shape = None if tensor.shape is None else list(tensor.shape)
            for dim, length in enumerate(shape or ()):
                if length is None and shape is not None:
                    shape[dim] = self._unknown * max(1, lane.unit if lane.kind == BATCH and dim == lane.dim else 1)
            found.append(TensorSpec(None if shape is None else tuple(shape), tensor.dtype))
        return found

    def _op(self, node: Node) -> Op:
        inputs = tuple(self._tensor(ref) for ref in node.inputs)
        types = op_table.output_types(node, self._program)
        outputs = tuple(self._tensor((node.name, i)) for i in range(len(types)))
        constants = {i: value for i, ref in enumerate(node.inputs) for value in [self._constants.of(ref)] if value is not None}
        attrs: Mapping[str, Any] = dict(plain_attrs(dict(node.proto.attr) if node.proto is not None else {}), **plain_attrs(node.attrs))
        op = Op(node.op, inputs, outputs, attrs, constants)
        return self._loosened(node, op) if node.phase == APPLY else op

    def _loosened(self, node: Node, op: Op) -> Op:
        """What an update sees of a sparse gradient has the rows of all lanes, not as many as the plain graph says."""
        inputs = list(op.inputs)
        rows: Dict[int, Tuple[int, ...]] = {}
        for position, ref in enumerate(node.inputs):
            tag = self._program.facts.gradients.get(ref) if self._parallel else None
            if tag is not None and tag.component in ("values", "indices"):
                inputs[position], rows[position] = _without_lengths(op.inputs[position], (0,)), (0,)
            elif ref in self._loose:
                inputs[position] = self._loose[ref]
                rows[position] = tuple(d for d, length in enumerate(self._loose[ref].shape or ()) if length is None)
        if not rows:
            return op
        said = sayings(op)
        outputs = list(op.outputs)
        for index, tensor in enumerate(op.outputs if not said.described else ()):
            if tensor.is_handle:
                continue
            found = [axis.outputs[index] for axis in said.axes for p, dims in rows.items() if axis.inputs[p] in dims]
            known = all(any(axis.inputs[p] == dim for axis in said.axes) for p, dims in rows.items() for dim in dims)
            outputs[index] = self._loose[node.name, index] = _without_lengths(tensor, found if known else range(tensor.rank))
        return op._replace(inputs=tuple(inputs), outputs=tuple(outputs))

    def _tensor(self, ref: Ref) -> Tensor:
        node = self._program.nodes[ref[0]]
        variable = op_table.variable_of(self._program, *ref)
        types = op_table.output_types(node, self._program)
        dtype = tf.as_dtype(types[ref[1]])
        if variable is not None and op_table.is_handle(node, ref[1], self._program):
            shape = self._program.nodes[variable].attr("shape")
            kind = "resource" if dtype == tf.resource else dtype.name + "_ref"
            if shape is None or shape.shape.unknown_rank:
                return Tensor(None, kind)
            return Tensor(tuple(d.size if d.size >= 0 else None for d in shape.shape.dim), kind)
        if ref in self._assigned:
            return Tensor(self._assigned[ref].shape, dtype.name)
        shape = self._program.shape_of(ref)
        return Tensor(shape if node.op != "Sum" or None not in (shape or (None,)) else self._summed_shape(node) or shape, dtype.name)

    def _summed_shape(self, node: Node) -> Optional[Tuple[Optional[int], ...]]:
        """Of a sum over axes that follow from shapes: the graph does not know which these are."""
        axes, whole, keep = self._constants.of(node.inputs[1]), self._tensor(node.inputs[0]).shape, node.attr("keep_dims")
        if axes is None or whole is None:
            return None
        gone = {int(axis) % max(1, len(whole)) for axis in axes.ravel()}
        if keep is not None and keep.b:
            return tuple(1 if dim in gone else length for dim, length in enumerate(whole))
        return tuple(length for dim, length in enumerate(whole) if dim not in gone)


def zero_form(tensor: Tensor, group: Group) -> Spec:
    """How ZeRO divides a variable of the optimizer: along the first dimension that has an index for each lane, if there is any."""
    return next((S(dim) for dim in range(tensor.rank) if (tensor.dim(dim) or 0) >= group.size), R)


def _without_lengths(tensor: Tensor, dims: Iterable[Optional[int]]) -> Tensor:
    gone = set(dims)
    return tensor._replace(shape=None if tensor.shape is None else tuple(None if d in gone else n for d, n in enumerate(tensor.shape)))


def _in_loop(tensor: Tensor) -> Lane:
    return OWN if tensor.rank == 0 else Lane(BATCH, 0, 0)
