"""After which nodes a node is done, seen from outside loops and conditionals.

A control edge must leave a v1 loop or conditional by its exits. In a branch that is not
taken nothing runs, and neither does anything that waits for it. A call of functions is
inlined by TensorFlow; then a control edge from it waits for nothing inside, as only the
data outputs do. Such a call has a fence, a node that reads all its outputs.
"""

from typing import Collection, Dict, FrozenSet, List, Tuple

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.frames import frame_paths
from epl.ir.program import LOOP_BACK, Node, Program, Ref

_MERGES = frozenset(("Merge", "RefMerge"))
_FORWARDS = _MERGES | {"Identity"}
_SWITCHES = frozenset(("Switch", "RefSwitch"))
_Side = Tuple[Ref, int]
FENCE = "/epl_fence"


def fenced(program: Program) -> Program:
    """Add the fences of the calls that are given variables or draw from inputs."""
    calls = [n for n in program.nodes.values() if op_table.is_call(program, n) and (op_table.draws(program, n) or _given_variables(program, n))]
    if not calls:
        return program
    order = program.topological()
    inside = frame_paths(program, order).keys() | _branches(program, order).keys()
    fences: Dict[str, Node] = {}
    for node in calls:
        outputs = [(node.name, i) for i, _ in enumerate(op_table.output_types(node, program))]
        if outputs and node.name not in inside:
            name = node.name + FENCE
            attrs = {"T": A.of_types(op_table.output_types(node, program))}
            fences[name] = Node(name, "IdentityN", outputs, [node.name], attrs=attrs, origin=name, taskgraph=node.taskgraph)
    # A fence has no consumers yet: as a target it is there until what waits for it is added.
    return program.replace(nodes=dict(program.nodes, **fences), targets=program.targets + tuple(fences))


def _given_variables(program: Program, node: Node) -> bool:
    return any(op_table.variable_of(program, *ref) is not None for ref in node.inputs)


class Endings:
    """Knows the loops and conditionals of a user's program; names are those of its nodes."""

    def __init__(self, program: Program, order: List[Node], ignored: Collection[str] = ()):
        """`order` is topological; `ignored` nodes don't count as users of a buffer."""
        self._program = program
        self._ignored = ignored
        self._paths = frame_paths(program, order)
        self._exits: Dict[str, List[str]] = {}
        for name, path in self._paths.items():
            if len(path) == 1 and program.nodes[name].op in op_table.EXITS:
                self._exits.setdefault(path[0], []).append(name)
        self._sides = _branches(program, order)
        self._done: Dict[str, Tuple[str, ...]] = {}

    def done(self, name: str) -> Tuple[str, ...]:
        """Nodes outside loops and conditionals that run when the node has run, or will not run in this step."""
        key = name
        if key not in self._done:
            found: Dict[str, None] = {}
            if name + FENCE in self._program.nodes:
                name = name + FENCE
            path = self._paths.get(name)
            inside = path is not None and not (len(path) == 1 and self._program.nodes[name].op in op_table.EXITS)
            for item in self._exits.get(path[0], ()) if inside and path else (name,):
                found.update(dict.fromkeys(self._joins(item)))
            self._done[key] = tuple(found)
        return self._done[key]

    def released(self, name: str) -> Tuple[str, ...]:
        """Nodes, as of `done`, after which the buffer that a node is given or returns is not read any more."""
        found: Dict[str, None] = {}
        seen = {name}
        stack = [name]
        while stack:
            current = stack.pop()
            if current in self._paths or self._program.nodes[current].op not in op_table.ALIASES:
                found.update(dict.fromkeys(self.done(current)))
                continue
            for consumer, index in self._program.consumers.get(current, ()):
                if index >= 0 and consumer not in seen and consumer not in self._ignored:
                    seen.add(consumer)
                    stack.append(consumer)
        return tuple(found)

    def value(self, ref: Ref) -> Ref:
        """The tensor outside conditionals that has the value of one inside when its branch is taken; else the tensor itself."""
        current = ref
        while current[0] in self._sides:
            users = [c for c, index in self._program.consumers.get(current[0], ()) if index == current[1]]
            forwards = [c for c in users if self._program.nodes[c].op in _FORWARDS]
            if not forwards:
                return ref
            current = forwards[0], 0
        return current

    def in_branch(self, name: str) -> bool:
        """True for a node that may not run because it is in a conditional."""
        return name in self._sides

    def _joins(self, name: str) -> Tuple[str, ...]:
        """The nodes at which the conditionals around a node end."""
        if name not in self._sides:
            return (name,)
        # What updates state in a branch ends where the updates join.
        ignored = () if name in self._ignored else self._ignored
        found: Dict[str, None] = {}
        seen = {name}
        stack = [name]
        while stack:
            for consumer, _ in self._program.consumers.get(stack.pop(), ()):
                if consumer in seen or consumer in ignored:
                    continue
                seen.add(consumer)
                if consumer in self._sides:
                    stack.append(consumer)
                else:
                    found[consumer] = None
        return tuple(found)


def _branches(program: Program, order: List[Node]) -> Dict[str, FrozenSet[_Side]]:
    """Node -> the outcomes (predicate, side) that must come for it to run; nodes outside conditionals are left out."""
    sides: Dict[str, FrozenSet[_Side]] = {}
    if not any(n.op in _SWITCHES for n in order):
        return sides
    for node in order:
        above = [_through(program, sides, ref) for ref in node.inputs if program.nodes[ref[0]].op not in LOOP_BACK]
        if node.op in _MERGES and len(above) == len(node.inputs):
            found = frozenset.intersection(*above)
        else:
            found = frozenset().union(*above, *(sides.get(c, frozenset()) for c in node.controls))
        if found:
            sides[node.name] = found
    return sides


def _through(program: Program, sides: Dict[str, FrozenSet[_Side]], ref: Ref) -> FrozenSet[_Side]:
    node = program.nodes[ref[0]]
    found = sides.get(node.name, frozenset())
    if node.op in _SWITCHES and program.nodes[node.inputs[1][0]].op != "LoopCond":
        return found | {(node.inputs[1], ref[1])}
    return found
