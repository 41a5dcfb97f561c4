"""Segments of a forward pass that are computed again, and what is kept between them.

Checkpoints divide the forward part of each taskgraph into levels: a node is one level
above the checkpoint that it depends on. What a node of another level needs is kept, as are
the results of ops that must not run twice: random numbers, elements of inputs, state,
loops, conditionals and what processes exchange. The rest is computed again from what is
kept, a connected part of a level (a segment) at a time. So is what the backward part
computes of activations alone, before any gradient is there.
"""

from typing import Dict, FrozenSet, List, NamedTuple, Optional, Set, Tuple

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.framework import types_pb2

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.program import BACKWARD, FORWARD, Node, Program, Ref
from epl.passes.schedule import schedule_of
from epl.planner.checkpoints import Activation, choose_cuts, choose_within
from epl.planner.op_costs import TensorSpec, op_flops, plain_attrs
from epl.planner.plan import Task
from epl.planner.schedules import Schedule, peak_activations

_UNKNOWN = 16
"""Taken for a length that is not known, such as that of a batch."""


class Segment(NamedTuple):
    """A part of the forward pass that is computed again as a whole.

    nodes: in the order in which the user built them. ends: the checkpoints that it leads to.
    readers: the backward nodes that are given its tensors, sources first.
    """

    nodes: Tuple[str, ...]
    ends: Tuple[Ref, ...]
    readers: Tuple[str, ...]


class Segments(NamedTuple):
    """What a program computes again.

    early: backward nodes that no gradient reaches. small: those of them that only tell shapes.
    bytes: stage (None where a replica has one device) -> what its activations take at most, for "auto".
    """

    segments: List[Segment]
    early: FrozenSet[str]
    small: FrozenSet[str]
    bytes: Dict[Optional[int], float]


def find_segments(program: Program, task: Task) -> Segments:
    """The segments of a classified training program, by `Plan.recompute`."""
    return _Finder(program, task).run()


def _in_flight(schedule: Schedule, stage: int) -> int:
    """The micro-batches whose activations of one stage are held at the same time."""
    return max(1, round(max(peak_activations(schedule, [float(s == stage) for s in range(schedule.stages)]))))


def _transient(activations: List[Activation]) -> float:
    """Bytes of the gradients that a backward op is given and makes: taken as two of the largest activations."""
    return 2 * max((item.size for item in activations if item.saved), default=0.0)


def late_nodes(program: Program, order: List[Node]) -> Set[str]:
    """The backward nodes that wait for a gradient; a loop does as a whole. `order` is topological."""
    frames = program.facts.frames
    loops: Set[str] = set()
    while True:
        late: Set[str] = set()
        for node in order:
            if node.phase != BACKWARD:
                continue
            waits = any(s in late for s, _ in node.inputs) or any(s in late for s in node.controls)
            if waits or node.attr(A.SEED) is not None or frames.get(node.name) in loops:
                late.add(node.name)
        found = {frames[name] for name in late if name in frames}
        if found == loops:
            return late
        loops = found


class _Finder:
    def __init__(self, program: Program, task: Task):
        self.program = program
        self.task = task
        self.facts = program.facts
        self.order = program.topological()
        self.late = late_nodes(program, self.order)
        self.moving = {v for name, variables in self.facts.writes.items() if name in self.facts.batch for v in variables}
        """What is written while the forward and the backward part run."""
        self.early = [n for n in self.order if n.phase == BACKWARD and n.name in self.facts.batch and n.name not in self.late]
        self.forward = [n for n in program.nodes.values() if n.phase == FORWARD and n.attr(A.BACKWARD) is None and self._may_repeat(n)]
        self.moved = [n for n in self.early if self._may_repeat(n) and not self._is_small(n)]
        self.known = {n.name for n in self.forward + self.moved}
        self.level: Dict[str, int] = {}
        self.kept: Set[Ref] = set()
        self.bytes: Dict[Optional[int], float] = {}
        self.needed = self._needed()
        self.useful = self._useful()

    def run(self) -> Segments:
        if self.task.plan.recompute == "collection":
            checkpoints = {ref for ref in self.program.checkpoints if ref[0] in self.program.nodes}
            self._level_by_checkpoints(checkpoints)
            self.kept.update(checkpoints, map(self._root, checkpoints))
        else:
            self._level_by_memory()
        self._keep_crossing(self.forward)
        self._level_moved()
        self._keep_crossing(self.moved)
        self.kept.update(self._drawn())
        small = [n.name for n in self.early if self._is_small(n) and n.name not in self.facts.frames and not self.facts.endings.in_branch(n.name)]
        return Segments(self._connected(self._closure()), frozenset(n.name for n in self.early), frozenset(small), self.bytes)

    # Nodes.

    def _place(self, name: str) -> Optional[int]:
        """The stage of a node; all of a replica's nodes are in one place where it has one device."""
        return self.program.nodes[name].taskgraph if self.task.stages else None

    def _may_repeat(self, node: Node) -> bool:
        facts = self.facts
        if node.name not in facts.batch or not node.inputs:
            return False
        if node.name in facts.frames or facts.endings.in_branch(node.name) or node.name in facts.outputs:
            return False
        if not self.moving.isdisjoint(facts.variables_of.get(node.name, ())):
            return False
        if node.op.startswith(op_table.PSEUDO) or node.op.startswith("Placeholder") or op_table.is_source(self.program, node):
            return False
        if self.task.stages and node.taskgraph is None or self._is_past_the_last(node):
            return False
        if op_table.is_stateful(node, self.program) or op_table.is_call(self.program, node):
            return False
        types = op_table.output_types(node, self.program)
        return not any(t in op_table.OPAQUE for t in types) and not any(op_table.is_handle(node, i, self.program) for i in range(len(types)))

    def _is_past_the_last(self, node: Node) -> bool:
        last = self.task.plan.recompute_last
        return self.task.plan.recompute == "auto" and last >= 0 and (node.taskgraph or 0) > last

    def _is_small(self, node: Node) -> bool:
        """Whether a node only tells lengths and places."""
        return all(t in (types_pb2.DT_INT32, types_pb2.DT_INT64) for t in op_table.output_types(node, self.program))

    def _root(self, ref: Ref) -> Ref:
        """The tensor whose buffer a tensor shares."""
        name, index = ref
        while name in self.known and self.program.nodes[name].op in op_table.ALIASES:
            name, index = self.program.nodes[name].inputs[0]
        return name, index

    def _needed(self) -> Dict[Ref, Dict[str, None]]:
        """Forward tensors -> the backward nodes of the same place that are given them."""
        found: Dict[Ref, Dict[str, None]] = {}
        for node in self.order:
            if node.name not in self.late or node.name in self.facts.frames or self.facts.endings.in_branch(node.name):
                continue
            for ref in node.inputs:
                if ref[0] in self.known and self._place(ref[0]) == self._place(node.name):
                    found.setdefault(ref, {})[node.name] = None
        return found

    # Levels.

    def _level_by_checkpoints(self, checkpoints: Set[Ref]) -> None:
        """What leads to no checkpoint is not computed again: its gradients are due at once."""
        before = self.program.ancestors([name for name, _ in checkpoints])
        row = [n for n in self.order if n.name in self.known and n.name in before and n.phase == FORWARD]
        floating: Set[str] = set()
        for node in row:
            above = [ref for ref in node.inputs if ref[0] in self.level and self._place(ref[0]) == self._place(node.name)]
            self.level[node.name] = max((self.level[ref[0]] + (ref in checkpoints) for ref in above), default=0)
            if all(name in floating for name, _ in above):
                floating.add(node.name)
        # What depends on no checkpoint and no input of the segments, such as a mask, is computed where it is used.
        for node in reversed(row):
            users = [self.level[c] - ((node.name, i) in checkpoints) for c, i in self.program.consumers.get(node.name, ()) if c in self.level]
            if node.name in floating and users:
                self.level[node.name] = min(users)

    def _level_by_memory(self) -> None:
        """The levels that need the least memory."""
        schedule = schedule_of(self.task)
        for place in dict.fromkeys(self._place(n.name) for n in self.forward):
            row = [n for n in self.forward if n.name in self.useful and self._place(n.name) == place]
            batches = _in_flight(schedule, place) if schedule is not None and place is not None else 1
            activations, limit = self._activations(row), self.task.plan.recompute_limit
            if limit:
                self._refuse_unknown(row)
                choice = choose_within(activations, [self._work(n) for n in row], limit * 1e6 - _transient(activations), batches)
            else:
                choice = choose_cuts(activations, len(row), batches)
            self.bytes[place] = choice.bytes + _transient(activations)
            level = 0
            for position, node in enumerate(row):
                while level < len(choice.cuts) and choice.cuts[level] <= position:
                    level += 1
                # The gradients of the last piece of the last stage are due at once.
                if level not in choice.whole and (batches > 1 or level < len(choice.cuts)):
                    self.level[node.name] = level

    def _keep_crossing(self, users: List[Node]) -> None:
        """Keep what is used in another level than it is made in."""
        for node in users:
            if node.name not in self.useful:
                continue
            own, place = self.level.get(node.name), self._place(node.name)
            roots = [self._root(ref) for ref in node.inputs]
            self.kept.update(r for r in roots if r[0] in self.level and self._place(r[0]) == place and self.level[r[0]] != own)

    def _level_moved(self) -> None:
        """What is computed of kept tensors is due with what follows them."""
        for node in self.moved:
            above = [ref for ref in node.inputs if ref[0] in self.known and self._place(ref[0]) == self._place(node.name)]
            if above and all(ref[0] in self.level for ref in above):
                self.level[node.name] = max(self.level[ref[0]] + (ref in self.kept or self._root(ref) in self.kept) for ref in above)

    def _useful(self) -> Set[str]:
        """The nodes that lead to what the backward part needs."""
        found = {name for name, _ in self.needed}
        stack = list(found)
        while stack:
            for source, _ in self.program.nodes[stack.pop()].inputs:
                if source in self.known and source not in found:
                    found.add(source)
                    stack.append(source)
        return found

    def _activations(self, row: List[Node]) -> List[Activation]:
        needed = {self._root(ref) for ref in self.needed}
        needed.update(self._root(ref) for node in self.moved for ref in node.inputs)
        position = {n.name: p for p, n in enumerate(row)}
        last: Dict[Ref, int] = {}
        for node in row:
            for index in range(len(op_table.output_types(node, self.program))):
                last.setdefault(self._root((node.name, index)), position[node.name])
            for ref in node.inputs:
                root = self._root(ref)
                if root in last:
                    last[root] = position[node.name]
        return [Activation(position[r[0]], end, self._bytes(r), r in needed) for r, end in last.items() if r[0] in position]

    def _refuse_unknown(self, row: List[Node]) -> None:
        for node in row:
            if any(None in (self.program.shape_of((node.name, i)) or ()) for i in range(len(op_table.output_types(node, self.program)))):
                raise ProgramError(
                    "gradient_checkpoint.memory_limit is set, but the shape of node '%s' is not known before it runs, so that nobody can tell how "
                    "much memory the activations take. Give the placeholders, or `Dataset.batch(n, drop_remainder=True)`, a fixed batch size, or "
                    "leave the limit away: then as little as possible is held" % node.name
                )

    def _work(self, node: Node) -> float:
        """What an op costs: its FLOPs and, for ops that only move memory, the elements that it makes."""
        outputs = [(node.name, i) for i in range(len(op_table.output_types(node, self.program)))]
        given, made = ([self._spec(ref) for ref in refs] for refs in (node.inputs, outputs))
        attrs = plain_attrs(node.proto.attr) if node.proto is not None else {}
        return float(op_flops(node.op, attrs, given, made) or 0) + sum(map(self._bytes, outputs)) / 4

    def _spec(self, ref: Ref) -> TensorSpec:
        return TensorSpec(self.program.shape_of(ref), tf.as_dtype(op_table.dtype_of(self.program, *ref)).name)

    def _bytes(self, ref: Ref) -> float:
        shape = self.program.shape_of(ref) or ()
        size = float(tf.as_dtype(op_table.dtype_of(self.program, *ref)).size)
        return size * float(np.prod([_UNKNOWN if d is None else d for d in shape], dtype=np.float64))

    # Segments.

    def _closure(self) -> Set[str]:
        """The nodes that are computed again to have the needed tensors."""
        found: Set[str] = set()
        stack = [ref[0] for ref in self.needed if self._is_repeated(ref)]
        while stack:
            name = stack.pop()
            if name not in found:
                found.add(name)
                same = [ref for ref in self.program.nodes[name].inputs if self._place(ref[0]) == self._place(name)]
                stack.extend(ref[0] for ref in same if self._is_repeated(ref))
        return found

    def _is_repeated(self, ref: Ref) -> bool:
        """Whether a tensor is computed again; one that shares the buffer of a kept one is there anyway."""
        if ref[0] not in self.level or ref in self.kept:
            return False
        root = self._root(ref)
        return root == ref or root not in self.kept and root[0] in self.level

    def _drawn(self) -> Set[Ref]:
        """What is made of random numbers alone and is no larger, such as the mask of a dropout: it is kept in their place."""
        facts, found = self.facts, set()
        for node in self.order:
            if node.name not in self.level:
                continue
            given = [ref for ref in node.inputs if ref[0] in facts.batch]
            made = [(node.name, i) for i in range(len(op_table.output_types(node, self.program)))]
            drawn = given and all(ref in found or self.program.nodes[ref[0]].op in op_table.RANDOM for ref in given)
            if drawn and sum(map(self._bytes, made)) <= sum(map(self._bytes, given)):
                found.update(made)
        return found

    def _connected(self, repeated: Set[str]) -> List[Segment]:
        parent = {name: name for name in self.level}

        def top(name: str) -> str:
            while parent[name] != name:
                parent[name] = parent[parent[name]]
                name = parent[name]
            return name

        for name, level in self.level.items():
            for source, _ in self.program.nodes[name].inputs:
                if self.level.get(source) == level and self._place(source) == self._place(name):
                    parent[top(name)] = top(source)
        nodes: Dict[str, List[str]] = {}
        for node in self.forward + self.moved:
            if node.name in repeated:
                nodes.setdefault(top(node.name), []).append(node.name)
        ends: Dict[str, List[Ref]] = {}
        for ref in self.program.checkpoints:
            if ref[0] in self.level and self.task.plan.recompute == "collection":
                ends.setdefault(top(ref[0]), []).append(ref)
        readers: Dict[str, Dict[str, None]] = {}
        for ref, names in self.needed.items():
            if ref[0] in repeated and self._is_repeated(ref):
                readers.setdefault(top(ref[0]), {}).update(names)
        number = {node.name: position for position, node in enumerate(self.order)}
        return [
            Segment(tuple(names), tuple(ends.get(key, ())), tuple(sorted(readers.get(key, ()), key=number.__getitem__)))
            for key, names in nodes.items()
        ]
