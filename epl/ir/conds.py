"""What must stay in one place: state with what uses it, and v1 loops and conditionals, each as a whole.

A branch that is not taken is dead: nothing in it runs, and a send there would leave its
receiver waiting. An edge that may be dead must never be cut between ranks, and neither
must one that carries a handle or a reference.
"""

from collections import deque
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.endings import Endings
from epl.ir.frames import outer_frames
from epl.ir.program import LOOP_BACK, Node, Program, Ref

FRAME, COND = "frame", "cond"

_SWITCHES = frozenset(("Switch", "RefSwitch"))
_STACKS = frozenset(("Stack", "StackV2"))


class Unit(NamedTuple):
    """A loop (FRAME, by the name of its frame) or a conditional (COND, by its first node); `kind` is "" for a node alone."""

    kind: str
    name: str

    def __str__(self) -> str:
        return ("the while loop '%s'" if self.kind == FRAME else "the conditional of '%s'") % self.name


class Units:
    """The outermost loops and conditionals of a program.

    Attributes:
      of: node -> its loop or conditional; nodes alone are left out. A loop inside a
        conditional belongs to it, and a conditional inside a loop to that one.
      members: loop or conditional -> its nodes, in order of creation.
    """

    def __init__(self, program: Program, order: List[Node]):
        """`order` is topological."""
        self._program = program
        self._endings: Optional[Endings] = None
        if any(_chooses(program, node) for node in order):
            self._endings = Endings(program, order)
        frames = outer_frames(program, order)
        inside = {frames[n.name] for n in order if n.op in op_table.ENTERS and n.name in frames and self.in_branch(n.name)}
        found = {name: Unit(FRAME, frame) for name, frame in frames.items() if frame not in inside}
        if self._endings is not None:
            found.update(self._conditionals(order, frames, found))
        found.update(_stacks(program, found))
        self.of: Dict[str, Unit] = {}
        self.members: Dict[Unit, List[str]] = {}
        for name in program.nodes:
            if name in found:
                self.of[name] = found[name]
                self.members.setdefault(found[name], []).append(name)

    def in_branch(self, name: str) -> bool:
        """True for a node that may not run because it is in a conditional."""
        return self._endings is not None and self._endings.in_branch(name)

    def may_be_dead(self, ref: Ref) -> bool:
        """True for a tensor, or with index -1 for the end of a node, that may not come because it is in a branch."""
        node = self._program.nodes[ref[0]]
        return self.in_branch(node.name) or (ref[1] >= 0 and self._endings is not None and _chooses(self._program, node))

    def in_order(self, before: Callable[[Node], List[str]]) -> List[List[str]]:
        """Nodes alone, and loops and conditionals as a whole; what `before` names comes first."""
        nodes = self._program.nodes
        keys = {name: self.of.get(name) or Unit("", name) for name in nodes}
        after: Dict[Unit, List[Unit]] = {}
        waiting: Dict[Unit, int] = dict.fromkeys(keys.values(), 0)
        for name, node in nodes.items():
            for source in before(node):
                if keys[source] != keys[name] and nodes[source].op not in LOOP_BACK:
                    after.setdefault(keys[source], []).append(keys[name])
                    waiting[keys[name]] += 1
        left = {key: self.members[key] if key.kind else [key.name] for key in waiting}
        ready = deque(key for key, count in waiting.items() if not count)
        units: List[List[str]] = []
        while ready:
            key = ready.popleft()
            units.append(left.pop(key))
            for other in after.get(key, ()):
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)
        # A forward op may wait for a gradient that is part of its loss: then the edges alone would decide.
        units.extend(left.values())
        return units

    def edges(self, node: Node) -> Iterator[Ref]:
        """The edges to a node that may be dead; control edges have index -1."""
        for ref in list(node.inputs) + [(name, -1) for name in node.controls]:
            if self.may_be_dead(ref):
                yield ref

    def _conditionals(self, order: List[Node], frames: Dict[str, str], loops: Dict[str, Unit]) -> Dict[str, Unit]:
        """The nodes that edges which may be dead join, and the Switch nodes of one `tf.cond`."""
        program = self._program
        ours = [n for n in order if n.name not in loops]
        names = {n.name for n in ours}
        edges = [(ref[0], n.name) for n in ours for ref in self.edges(n) if ref[0] in names]
        calls = _calls(ours, edges, frames)
        groups = _Groups()
        for source, name in edges:
            # The backward conditional is one of its own, although it reads values inside the forward branches.
            if calls[source] == calls[name]:
                groups.join(source, name)
        pivots = _pivots(program)
        first: Dict[Tuple[str, int], str] = {}
        for node in ours:
            if _chooses(program, node):
                groups.join(node.name, node.name)
                predicate = node.inputs[1][0]
                if predicate in pivots:
                    groups.join(node.name, first.setdefault((predicate, calls[node.name]), node.name))
                    if calls[node.name] == calls.get(pivots[predicate]):
                        groups.join(node.name, pivots[predicate])
        found: Dict[str, Unit] = {}
        units: Dict[str, Unit] = {}
        for name, node in program.nodes.items():
            # Variables are no part of a branch, whatever they wait for.
            if name in groups and node.op not in op_table.VARIABLES:
                found[name] = units.setdefault(groups.root(name), Unit(COND, name))
        return found


def _chooses(program: Program, node: Node) -> bool:
    """True for the Switch of a conditional; those of loops follow a LoopCond."""
    return node.op in _SWITCHES and program.nodes[node.inputs[1][0]].op != "LoopCond"


def _calls(nodes: List[Node], edges: List[Tuple[str, str]], frames: Dict[str, str]) -> Dict[str, int]:
    """Node -> the gradient call it is part of, 0 for forward code.

    What a gradient call adds to the forward branches (counters and stacks of a loop) is
    forward code.
    """
    calls = {n.name: n.int_attr(A.BACKWARD) or 0 for n in nodes}
    first: Dict[str, int] = {}
    for name, call in calls.items():
        if name in frames:
            first[frames[name]] = min(call, first.get(frames[name], call))
    for name in calls:
        if name in frames:
            calls[name] = first[frames[name]]
    # The edges are in topological order of their ends.
    for source, name in reversed(edges):
        if source not in frames:
            calls[source] = min(calls[source], calls[name])
    return calls


def _pivots(program: Program) -> Dict[str, str]:
    """The predicate of each `tf.cond` -> the Switch by which it begins.

    `tf.cond` makes Switch(p, p), an Identity of each of its outputs, and an Identity of
    p, which is the predicate of this conditional and no other.
    """
    found: Dict[str, str] = {}
    begun: Dict[Ref, str] = {}
    for node in program.nodes.values():
        if node.op in _SWITCHES and node.inputs[0] == node.inputs[1]:
            begun[node.inputs[0]] = node.name
        elif node.op == "Identity" and node.inputs[0] in begun:
            found[node.name] = begun.pop(node.inputs[0])
    return found


def _stacks(program: Program, found: Dict[str, Unit]) -> Dict[str, Unit]:
    """What a gradient call makes outside a forward loop, to keep values of it, belongs to that loop."""
    stacks: Dict[str, Unit] = {}
    for node in program.nodes.values():
        if node.op in _STACKS and node.attr(A.BACKWARD) is not None and node.name not in found:
            users = [found[c] for c, _ in program.consumers.get(node.name, ()) if c in found]
            if users:
                stacks[node.name] = users[0]
    return stacks


def handle_source(program: Program, node: Node) -> Optional[str]:
    """The input node through which a node is given the handle or reference of a variable, or None.

    Host resources (iterators, queues, tables) don't count: they exist once per process.
    """
    for source, index in node.inputs:
        other = program.nodes[source]
        if op_table.is_handle(other, index, program) and not _on_host(program, other):
            return source
    return None


def state_of(program: Program, name: str) -> Optional[str]:
    """The node that owns the handle or reference a node is given: a variable, or a resource of one run; else None."""
    found: Optional[str] = None
    for _ in range(64):
        source = handle_source(program, program.nodes[name])
        if source is None:
            break
        found = name = source
    return found


def states_of(program: Program, node: Node) -> List[str]:
    """All state whose handles or references a node is given; the value that a reference stands for counts for nothing."""
    found: Dict[str, None] = {}
    by_reference = op_table.takes_references(node.op)
    for source, index in node.inputs:
        other = program.nodes[source]
        if other.op in op_table.REF_VARIABLES and not by_reference:
            continue
        if op_table.is_handle(other, index, program) and not _on_host(program, other):
            found[state_of(program, source) or source] = None
    return list(found)


def user_of(program: Program, node: Node) -> str:
    """The node that uses a handle which others, such as a Switch, only hand on."""
    name = node.name
    while program.nodes[name].op in op_table.PASS_THROUGH and op_table.is_handle(program.nodes[name], 0, program):
        users = [consumer for consumer, index in program.consumers.get(name, ()) if index >= 0]
        if not users:
            return node.name
        name = users[0]
    return name


def _on_host(program: Program, node: Node) -> bool:
    for _ in range(64):
        if node.op in op_table.SHARED_HANDLES:
            return True
        if node.op not in op_table.PASS_THROUGH or not node.inputs:
            return False
        node = program.nodes[node.inputs[0][0]]
    return False


class _Groups:
    """Sets of names that grow together."""

    def __init__(self) -> None:
        self._above: Dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._above

    def root(self, name: str) -> str:
        path = []
        while self._above.setdefault(name, name) != name:
            path.append(name)
            name = self._above[name]
        for other in path:
            self._above[other] = name
        return name

    def join(self, one: str, other: str) -> None:
        self._above[self.root(one)] = self.root(other)
