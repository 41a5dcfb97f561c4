"""Choose a strategy for each op of a graph, so that the whole costs least.

A linear program: one variable for each op and strategy, 0 or 1 in the end; others say in
which forms a tensor is needed, and out of which form each of them is made.
Ops that do the same in the same surroundings (the layers of a transformer) share their
variables, so that the size of the program does not grow with the depth of a model.

Source: the formulation of Alpa (Zheng et al., OSDI 2022, section 4.2), with conversions
counted once for each form of a tensor instead of once for each edge.
"""

import dataclasses
from typing import Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from epl.errors import ProgramError
from epl.ir.program import Ref
from epl.planner.sharding.improve import Block, Problem, improve
from epl.planner.sharding.integer import rounded
from epl.planner.sharding.op import Op, Tensor
from epl.planner.sharding.rules.shapes import blocks
from epl.planner.sharding.spec import F, Group, R, Spec
from epl.planner.sharding.strategy import BATCH, SAME, Analysis, Lane, Strategy, moved_bytes, strategies

_BYTES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "bool": 1}
_COMMUTES = frozenset(("AddN", "Pack", "ConcatV2", "NoOp"))
_ROUNDS = 6


@dataclasses.dataclass(frozen=True)
class Machine:
    """What time things take; only ratios matter.

    Attributes:
      flops: floating-point operations per second. bandwidth: bytes per second that a device
        sends to others of its group. latency: seconds for a collective.
      memory: seconds of step time that a byte held for good is worth: a price.
      unknown: samples in a batch whose size is not known.
    """

    flops: float = 1e13
    bandwidth: float = 1e10
    latency: float = 2e-5
    memory: float = 4e-10
    unknown: int = 64

    def computes(self, item: "Item", way: Strategy, group: Group) -> float:
        """Seconds of one way to compute an op, with what it sends within and the price of what it holds."""
        seconds = way.work * item.flops / self.flops
        for times, tensor, lane in zip(way.moved, item.op.outputs, item.analysis.lanes):
            if times:
                seconds += self.sends(times * size_of(tensor, lane, self.unknown) * (group.size if lane.kind == BATCH else 1))
        kept = 1 if item.is_variable else len(way.outputs) if item.prepares else 0
        for tensor, form in zip(item.op.outputs[:kept], way.outputs):
            seconds += size_of(tensor, SAME, self.unknown) * self.memory * (group.largest if form.is_sharded else 1.0)
        return seconds

    def sends(self, count: float) -> float:
        """Seconds of a collective in which each device sends so many bytes; none is sent where there are none."""
        return self.latency + count / self.bandwidth if count else 0.0


class Item(NamedTuple):
    """One op in its place.

    Attributes:
      name: of the node.
      op, inputs: what it is and what it reads; its outputs are (name, 0), (name, 1), ...
      analysis: of lanes. lanes: those of the inputs.
      free: whether it may be divided; else every lane computes it for itself.
      flops: work for one lane.
      is_variable: it holds memory for good.
      ways: all strategies, when they are not those of the op.
      fixed: the form of its first output, if that was decided before.
      divide: it is to be divided if there is any way, whatever it costs.
      prepares: it makes what becomes a variable's value, as large as that.
    """

    name: str
    op: Op
    inputs: Tuple[Ref, ...]
    analysis: Analysis
    lanes: Tuple[Lane, ...]
    free: bool = True
    flops: float = 0.0
    is_variable: bool = False
    ways: Tuple[Strategy, ...] = ()
    fixed: Optional[Spec] = None
    divide: bool = False
    prepares: bool = False


class Move(NamedTuple):
    """A tensor that is brought into another form. bytes: what each device sends."""

    ref: Ref
    source: Spec
    target: Spec
    bytes: float


class Choice(NamedTuple):
    """What was chosen.

    Attributes:
      strategies: by name of the node. moves: each form of a tensor once, after the form it is made of.
      seconds: the cost.
    """

    strategies: Dict[str, Strategy]
    moves: Tuple[Move, ...]
    seconds: float


def size_of(tensor: Tensor, lane: Lane, unknown: int) -> float:
    """Bytes of a tensor of one lane, with a guess for what is not known: so many samples, or so long."""
    size = float(_BYTES.get(tensor.dtype, 4))
    for dim, length in enumerate(tensor.shape or ()):
        size *= length if length is not None else unknown * max(1, lane.unit if lane.kind == BATCH and dim == lane.dim else 1)
    return size


def solve(items: Sequence[Item], group: Group, machine: Optional[Machine] = None) -> Choice:
    """The cheapest choice.

    Args:
      items: each after those that it reads.

    Raises:
      ProgramError: an op can't be computed in any form of its inputs.
    """
    if not items:
        return Choice({}, (), 0.0)
    machine = machine or Machine()
    undivided = used_whole(items, group)
    for item in items:
        if item.name in undivided and item.fixed is not None and item.fixed.is_sharded:
            raise ProgramError(
                "Variable '%s' is divided over the devices of a split, as training has it, but this program uses it where it would have to be "
                "whole: in a loop or a conditional, or in an op that EPL can't divide. Create it outside of the scope" % item.name
            )
    if any(item.divide for item in items):
        try:
            return _Search([item._replace(divide=item.divide and item.name not in undivided) for item in items], group, machine).run()
        except _Impossible:
            pass
    return _Search([item._replace(divide=False) for item in items], group, machine).run()


def used_whole(items: Sequence[Item], group: Group) -> FrozenSet[str]:
    """The variables that some op needs whole, one in a loop for example, and those that go with them into an update."""
    variables = {item.name for item in items if item.is_variable}
    units = hinted_units(items)
    found: Dict[str, None] = {}
    beside: Dict[str, List[str]] = {}
    for item in items:
        handles = [(position, name) for position, (name, _) in enumerate(item.inputs) if name in variables]
        if not handles:
            continue
        ways = list(item.ways) or strategies(item.op, item.lanes, item.analysis, group, units) if item.free else []
        found.update((name, None) for position, name in handles if not any(way.inputs[position].is_sharded for way in ways))
        for _, name in handles[1:]:
            beside.setdefault(name, []).append(handles[0][1])
            beside.setdefault(handles[0][1], []).append(name)
    stack = list(found)
    while stack:
        for name in beside.get(stack.pop(), ()):
            if name not in found:
                found[name] = None
                stack.append(name)
    return frozenset(found)


class _Impossible(ProgramError):
    """There is no choice that meets all conditions."""


class _Class:
    """Ops that do the same in the same surroundings."""

    def __init__(self, item: Item, ways: List[Tuple[Strategy, float]]):
        self.item = item
        self.ways = ways
        self.count = 0
        self.first = 0
        """Number of the variable of its first strategy."""


class _Search:
    def __init__(self, items: Sequence[Item], group: Group, machine: Machine):
        self._items = items
        self._group = group
        self._machine = machine
        self._units = hinted_units(items)
        self._of: Dict[str, _Class] = {}
        self._classes: List[_Class] = []
        self._costs: List[float] = []
        self._rows: List[Dict[int, float]] = []
        self._limits: List[float] = []
        self._blocks: List[Block] = []
        self._tensors = {(i.name, n): (t, lane) for i in items for n, (t, lane) in enumerate(zip(i.op.outputs, i.analysis.lanes))}

    def run(self) -> Choice:
        self._classify()
        for one in self._classes:
            one.first = len(self._costs)
            self._costs.extend(seconds * one.count for _, seconds in one.ways)
        binaries = len(self._costs)
        self._tensor_rows()
        costs = self._scaled(binaries)
        choices = [range(one.first, one.first + len(one.ways)) for one in self._classes]
        problem = Problem(costs, self._rows, self._limits, choices, self._blocks)
        found_values = rounded(problem, [one.item.is_variable for one in self._classes])
        if found_values is None:
            raise _Impossible("No way was found to divide the taskgraph among %d devices" % self._group.size)
        values = improve(problem, found_values)
        chosen = {c: max(range(len(c.ways)), key=lambda s: values[c.first + s]) for c in self._classes}  # noqa: B023
        found = {item.name: self._of[item.name].ways[chosen[self._of[item.name]]][0] for item in self._items}
        return self._choice(found)

    # Strategies.

    def _ways(self, item: Item) -> List[Tuple[Strategy, float]]:
        ways = ways_of(item, self._group, self._units)
        if not ways:
            raise ProgramError("Node '%s' (%s) can't be held as %s, as its variable was before" % (item.name, item.op.type, item.fixed))
        return [(way, self._machine.computes(item, way, self._group)) for way in ways]

    # Classes.

    def _classify(self) -> None:
        """Refine by type and strategies, then by neighbours, a few steps far."""
        known: Dict[object, int] = {}
        colours: Dict[str, int] = {}
        ways: Dict[object, List[Tuple[Strategy, float]]] = {}
        keys: Dict[str, object] = {}
        consumers: Dict[str, List[Tuple[str, int, int]]] = {}
        for item in self._items:
            key = (item.op.type, item.op.inputs, item.op.outputs, _attrs(item.op)) + tuple(item[3:])
            keys[item.name] = key
            if key not in ways:
                ways[key] = self._ways(item)
            colours[item.name] = known.setdefault(key, len(known))
            for position, (source, index) in enumerate(item.inputs):
                consumers.setdefault(source, []).append((item.name, 0 if item.op.type in _COMMUTES else position, index))
        for _ in range(_ROUNDS):
            interned: Dict[object, int] = {}
            fresh: Dict[str, int] = {}
            for item in self._items:
                before = tuple((colours[s], i) for s, i in item.inputs)
                if item.op.type in _COMMUTES:
                    before = tuple(sorted(set(before)))
                after = tuple(sorted({(colours[c], p, i) for c, p, i in consumers.get(item.name, ())}))
                fresh[item.name] = interned.setdefault((colours[item.name], before, after), len(interned))
            settled = len(interned) == len(set(colours.values()))
            colours = fresh
            if settled:
                break
        by_colour: Dict[int, _Class] = {}
        for item in self._items:
            found = by_colour.get(colours[item.name])
            if found is None:
                found = by_colour[colours[item.name]] = _Class(item, ways[keys[item.name]])
                self._classes.append(found)
            found.count += 1
            self._of[item.name] = found

    # Tensors: in which forms they are needed, and what that costs.

    def _tensor_rows(self) -> None:
        readers: Dict[Tuple[_Class, int], Dict[Tuple[_Class, int], None]] = {}
        for item in self._items:
            for position, (source, index) in enumerate(item.inputs):
                readers.setdefault((self._of[source], index), {})[self._of[item.name], position] = None
        number = {one: i for i, one in enumerate(self._classes)}
        for (producer, index), found in readers.items():
            rows, variables = len(self._rows), len(self._costs)
            self._one_tensor(producer, index, list(found))
            deciding = (number[producer],) + tuple(number[reader] for reader, _ in found)
            self._blocks.append(Block(deciding, range(rows, len(self._rows)), range(variables, len(self._costs))))

    def _variable(self, cost: float = 0.0) -> int:
        self._costs.append(cost)
        return len(self._costs) - 1

    def _at_most(self, row: Dict[int, float], limit: float = 0.0) -> None:
        self._rows.append(row)
        self._limits.append(limit)

    def _one_tensor(self, producer: _Class, index: int, readers: List[Tuple[_Class, int]]) -> None:
        tensor, lane = producer.item.op.outputs[index], producer.item.analysis.lanes[index]
        size = size_of(tensor, lane, self._machine.unknown)
        made: Dict[Spec, List[int]] = {}
        for number, (way, _) in enumerate(producer.ways):
            made.setdefault(way.outputs[index], []).append(producer.first + number)
        wanted = {way.inputs[position] for reader, position in readers for way, _ in reader.ways}
        handle = tensor.is_handle
        if len(made) == 1 and wanted == set(made):
            return
        forms = sorted(wanted | ({R} if not handle and (lane.kind == BATCH or F in made or F in wanted) else set()))
        needed = {form: self._variable() for form in forms}
        for reader, position in readers:
            asks: Dict[Spec, List[int]] = {}
            for number, (way, _) in enumerate(reader.ways):
                asks.setdefault(way.inputs[position], []).append(reader.first + number)
            for form, variables in asks.items():
                self._at_most({**dict.fromkeys(variables, 1.0), needed[form]: -1.0})
        for form in forms:
            supply = {needed[form]: 1.0}
            for variable in made.get(form, ()):
                supply[variable] = -1.0
            for source, variables in made.items():
                sent = None if handle or source == form else moved_bytes(lane, size, source, form, self._group)
                if sent is None:
                    continue
                move = self._variable(self._machine.sends(sent) * producer.count)
                supply[move] = -1.0
                self._at_most({**dict.fromkeys(variables, -1.0), move: 1.0})
            if not handle and form != R and R in needed and moved_bytes(lane, size, R, form, self._group) == 0:
                free = self._variable()
                supply[free] = -1.0
                self._at_most({free: 1.0, needed[R]: -1.0})
            self._at_most(supply)

    # Solving.

    def _scaled(self, binaries: int) -> np.ndarray:
        """Costs in units of a latency: the solver's tolerances are absolute. Of equal strategies the first."""
        costs = np.array(self._costs) / self._machine.latency
        costs[:binaries] += 1e-4 * np.concatenate([np.arange(len(one.ways)) for one in self._classes])
        return costs

    def _choice(self, found: Dict[str, Strategy]) -> Choice:
        """Which form is made of which: of what is there, the one that needs the fewest bytes."""
        wanted: Dict[Ref, Dict[Spec, None]] = {}
        for item in self._items:
            for ref, form in zip(item.inputs, found[item.name].inputs):
                wanted.setdefault(ref, {})[form] = None
        moves: List[Move] = []
        seconds = 0.0
        for item in self._items:
            seconds += self._machine.computes(item, found[item.name], self._group)
        for ref, forms in wanted.items():
            tensor, lane = self._tensors[ref]
            size = size_of(tensor, lane, self._machine.unknown)
            have = [found[ref[0]].outputs[ref[1]]]
            if any(moved_bytes(lane, size, have[0], form, self._group) is None for form in forms):
                forms = {R: None, **forms}  # over the whole, as from and to what the first device has alone
            for form in sorted(forms, key=lambda f: (f != R, f)):
                if form in have:
                    continue
                ways = [(sent, source) for source in have for sent in [moved_bytes(lane, size, source, form, self._group)] if sent is not None]
                if not ways or tensor.is_handle:
                    raise ProgramError("Tensor %s:%d can't be brought from %s to %s" % (ref + (have[0], form)))
                sent, source = min(ways, key=lambda way: way[0])
                moves.append(Move(ref, source, form, sent))
                seconds += self._machine.sends(sent)
                have.append(form)
        return Choice(found, tuple(moves), seconds)


def _attrs(op: Op) -> object:
    """What a rule may look at beside the tensors."""
    attrs = [(k, repr(v)) for k, v in op.attrs.items() if not k.startswith("_") and k not in ("shared_name", "debug_name", "container", "value")]
    return tuple(sorted(attrs)), tuple(sorted((i, np.asarray(v).tobytes()) for i, v in op.constants.items() if np.size(v) < 64))


def ways_of(item: Item, group: Group, units: Mapping[int, Tuple[int, ...]]) -> List[Strategy]:
    """The ways among which one is chosen; none where an earlier decision can't be kept."""
    ways = list(item.ways) or strategies(item.op, item.lanes, item.analysis, group, units)
    if item.fixed is not None:
        return [way for way in ways if way.outputs[0] == item.fixed]
    if not item.free:
        return ways[:1]
    return [way for way in ways if way.outputs[0].is_sharded] or ways if item.divide else ways


def hinted_units(items: Sequence[Item]) -> Mapping[int, Tuple[int, ...]]:
    """Length of a dimension -> the units that reshapes cut it into: heads of so many columns."""
    found: Dict[int, Dict[int, None]] = {}
    for item in items:
        if item.op.type != "Reshape" or not item.free:
            continue
        for sides in blocks(item.op.inputs[0].shape, item.op.outputs[0].shape):
            for (begin, end), tensor in zip(sides, (item.op.inputs[0], item.op.outputs[0])):
                inner = 1
                lengths = (tensor.shape or ())[begin:end]
                if None in lengths or len(lengths) < 2:
                    continue
                for length in lengths[1:]:
                    inner *= length or 1
                found.setdefault(inner * (lengths[0] or 1), {})[inner] = None
    for item in items:
        # A variable keeps its form also in a program without the reshape that it comes from.
        if item.fixed is not None and item.fixed.unit > 1:
            found.setdefault(item.op.outputs[0].dim(item.fixed.dim) or 0, {})[item.fixed.unit] = None
    return {length: tuple(units) for length, units in found.items()}
