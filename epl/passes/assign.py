"""Assign: the taskgraph of every node of a graph.

Scopes stamp the nodes built inside them, and backward nodes follow their forward op.
For the rest the taskgraph is inferred from what a node works on. It is decided on the
whole graph of the user, never on the nodes of one run, so that every program of a
session finds a variable in the same place.

The rules, in order; the first that decides wins:

* own: the node was built in a scope, or in the forward part outside scopes while a
  default strategy was set (default); a backward node takes what its forward op has
  (backward).
* frame: a while loop is atomic. All its nodes go where the first of them that has a
  taskgraph of its own goes, else where the loop's inputs say.
* state: a node that is given the handle or reference of a variable goes with it,
  even out of its scope: neither can leave its device.
* inputs: all inputs with a taskgraph agree.
* summed: the sum of partial gradients goes to the op whose output they are of.
* colocated: the inputs disagree, and TensorFlow was told to put the node with another one.
* largest: the inputs disagree; the largest one decides.
* none: no input has a taskgraph. The node belongs nowhere, and is computed where it is used.

A variable built outside scopes has no inputs to go by. It belongs to its first forward
consumer (consumer), else to the variable it helps to update, as the slots of optimizers
do (update), else to what is written to it (written). Colocation alone never decides:
the powers that Adam keeps are colocated with the variable of the first name.
Control edges decide nothing, and saving, restoring and checking variables nothing either.
"""

from collections import deque
from typing import Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.frames import outer_frames
from epl.ir.housekeeping import housekeeping
from epl.ir.program import LOOP_BACK, Node, Program, Ref

OWN, DEFAULT, BACKWARD, FRAME, STATE = "own", "default", "backward", "frame", "state"
INPUTS, SUMMED, COLOCATED, LARGEST, NONE = "inputs", "summed", "colocated", "largest", "none"
CONSUMER, UPDATE, WRITTEN = "consumer", "update", "written"

_STATE = op_table.VARIABLES | op_table.STEP_STATE

_UNKNOWN_DIMENSION = 32
"""Stands for a dimension that is not known when sizes are compared: usually a batch."""


class Assigned(NamedTuple):
    """The taskgraph of a node, None for a node that belongs nowhere, and the rule that decided."""

    taskgraph: Optional[int]
    rule: str


def assign(program: Program, placed: Optional[Mapping[str, Assigned]] = None) -> Dict[str, Assigned]:
    """Decide the taskgraph of every node of a user's graph.

    Reads the attributes of `epl.ir.attrs` on the nodes, the raw gradients and the static
    shapes of the program. The result depends on nothing else.

    Args:
      program: the whole graph, in order of creation.
      placed: what was decided for variables before the graph grew; they don't move.
    """
    return _Assigner(program, placed or {}).run()


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


def _on_host(program: Program, node: Node) -> bool:
    for _ in range(64):
        if node.op in op_table.SHARED_HANDLES:
            return True
        if node.op not in op_table.PASS_THROUGH or not node.inputs:
            return False
        node = program.nodes[node.inputs[0][0]]
    return False


class _Assigner:
    def __init__(self, program: Program, placed: Mapping[str, Assigned]):
        self.program = program
        self.nodes = program.nodes
        self.position = {name: i for i, name in enumerate(program.nodes)}
        order = program.topological()
        self.frames = outer_frames(program, order)
        self.apart = housekeeping(program, order)
        self.members: Dict[str, List[str]] = {}
        for name in self.nodes:
            if name in self.frames:
                self.members.setdefault(self.frames[name], []).append(name)
        self.late = after_gradients(program)
        self.states = {name: handle_source(program, node) for name, node in self.nodes.items()}
        self.units = self._order()
        self.found: Dict[str, Assigned] = {}
        self.variables = dict(placed)

    def run(self) -> Dict[str, Assigned]:
        # First without the variables that nobody annotated: what uses them says where they belong.
        self._flow()
        self._place_variables()
        self._flow()
        return {name: self.found[name] for name in self.nodes}

    # The flow from inputs to outputs.

    def _order(self) -> List[List[str]]:
        """Nodes alone and loops as a whole, sources first; forward ops before their gradients."""
        unit_of = {name: self.frames.get(name, "") or name for name in self.nodes}
        # A frame may have the name of a node.
        keys = {name: (unit_of[name], name in self.frames) for name in self.nodes}
        after: Dict[Tuple[str, bool], List[Tuple[str, bool]]] = {}
        waiting: Dict[Tuple[str, bool], int] = dict.fromkeys(keys.values(), 0)
        for name, node in self.nodes.items():
            for source in self._before(node):
                if keys[source] != keys[name] and self.nodes[source].op not in LOOP_BACK:
                    after.setdefault(keys[source], []).append(keys[name])
                    waiting[keys[name]] += 1
        members = {key: self.members[key[0]] if key[1] else [key[0]] for key in waiting}
        ready = deque(key for key, count in waiting.items() if not count)
        units: List[List[str]] = []
        while ready:
            key = ready.popleft()
            units.append(members.pop(key))
            for other in after.get(key, ()):
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)
        # A forward op may wait for a gradient that is part of its loss: then the edges alone would decide.
        units.extend(members.values())
        return units

    def _before(self, node: Node) -> List[str]:
        sources = [s for s, _ in node.inputs] + list(node.controls)
        forward = node.str_attr(A.FORWARD_OP)
        if forward in self.nodes:
            sources.append(forward)
        return sources

    def _flow(self) -> None:
        self.found = dict(self.variables)
        for unit in self.units:
            if unit[0] in self.frames:
                self._frame(unit)
            elif unit[0] not in self.found:
                self.found[unit[0]] = self._node(self.nodes[unit[0]])

    def _frame(self, members: List[str]) -> None:
        own = [self._own(self.nodes[name]) for name in members]
        chosen = next((item for item in own if item is not None), None) or self._from_inputs(members)
        for name, mine in zip(members, own):
            self.found[name] = mine if mine is not None and mine.taskgraph == chosen.taskgraph else Assigned(chosen.taskgraph, FRAME)

    def _node(self, node: Node) -> Assigned:
        source = self.states[node.name]
        if source is not None and self._taskgraph(source) is not None:
            return Assigned(self._taskgraph(source), STATE)
        return self._own(node) or self._from_inputs([node.name])

    def _own(self, node: Node) -> Optional[Assigned]:
        if node.name in self.apart:
            return Assigned(None, NONE)
        stamped = node.int_attr(A.TASKGRAPH)
        if stamped is not None:
            return Assigned(stamped, OWN)
        forward = node.str_attr(A.FORWARD_OP)
        if forward in self.found and self._taskgraph(forward) is not None:
            return Assigned(self._taskgraph(forward), BACKWARD)
        default = node.int_attr(A.DEFAULT)
        if default is not None and self._is_forward(node):
            return Assigned(default, DEFAULT)
        return None

    def _is_forward(self, node: Node) -> bool:
        return node.attr(A.BACKWARD) is None and node.attr(A.UPDATE) is None and node.name not in self.late and node.name not in self.apart

    def _from_inputs(self, unit: List[str]) -> Assigned:
        """What the inputs from outside say about a node, or about the nodes of a loop."""
        inside = set(unit)
        staged: List[Tuple[Ref, int]] = []
        for name in unit:
            for ref in self.nodes[name].inputs:
                taskgraph = self._taskgraph(ref[0]) if ref[0] not in inside else None
                if taskgraph is not None:
                    staged.append((ref, taskgraph))
        if not staged:
            return Assigned(None, NONE)
        if len({taskgraph for _, taskgraph in staged}) == 1:
            return Assigned(staged[0][1], INPUTS)
        for name in unit:
            for rule, other in ((SUMMED, self.nodes[name].str_attr(A.SUMMED)), (COLOCATED, _colocated(self.nodes[name]))):
                if other not in inside and self._taskgraph(other) is not None:
                    return Assigned(self._taskgraph(other), rule)
        return Assigned(max(staged, key=lambda item: self._size(item[0]))[1], LARGEST)

    def _taskgraph(self, name: str) -> Optional[int]:
        known = self.found.get(name)
        return None if known is None else known.taskgraph

    def _size(self, ref: Ref) -> int:
        size = 1
        for dim in self.program.shape_of(ref) or ():
            size *= _UNKNOWN_DIMENSION if dim is None else dim
        return size

    # Variables outside scopes.

    def _place_variables(self) -> None:
        free = [n.name for n in self.nodes.values() if n.op in _STATE and self._own(n) is None and n.name not in self.variables]
        uses = {name: self._uses(name) for name in free}
        for rule, decide in ((CONSUMER, self._by_consumer), (UPDATE, self._by_update), (WRITTEN, self._by_values)):
            for name in free:
                if name not in self.variables:
                    taskgraph = decide(name, uses[name])
                    if taskgraph is not None:
                        self.variables[name] = Assigned(taskgraph, rule)
            self.found.update(self.variables)

    def _uses(self, variable: str) -> List[Node]:
        """What is given the variable or its value, in order of creation."""
        seen: Set[str] = set()
        used: Dict[str, None] = {}
        stack = [variable]
        while stack:
            for consumer, index in self.program.consumers.get(stack.pop(), ()):
                node = self.nodes[consumer]
                if index < 0 or consumer in seen:
                    continue
                seen.add(consumer)
                if node.op in op_table.PASS_THROUGH or node.op == "ReadVariableOp":
                    stack.append(consumer)
                used[consumer] = None
        return [self.nodes[name] for name in sorted(used, key=self.position.__getitem__)]

    def _by_consumer(self, variable: str, uses: List[Node]) -> Optional[int]:
        for node in uses:
            if self._is_forward(node) and not op_table.writes_state(node.op) and self._taskgraph(node.name) is not None:
                return self._taskgraph(node.name)
        return None

    def _by_update(self, variable: str, uses: List[Node]) -> Optional[int]:
        for node in uses:
            if not op_table.writes_state(node.op):
                continue
            updated = op_table.variable_of(self.program, *node.inputs[0])
            if updated is not None and updated != variable and self._taskgraph(updated) is not None:
                return self._taskgraph(updated)
        return None

    def _by_values(self, variable: str, uses: List[Node]) -> Optional[int]:
        for node in uses:
            if op_table.writes_state(node.op) and op_table.variable_of(self.program, *node.inputs[0]) == variable:
                for source, _ in node.inputs[1:]:
                    if self._taskgraph(source) is not None:
                        return self._taskgraph(source)
        return None


def _colocated(node: Node) -> str:
    """The node with which TensorFlow was told to put another one, or ""."""
    for text in node.strs_attr("_class"):
        if text.startswith("loc:@"):
            return text[len("loc:@") :]
    return ""


def after_gradients(program: Program) -> Set[str]:
    """What depends on raw gradients and is not needed for them."""
    gradients = {ref[0] for ref in program.raw_gradients if ref[0] in program.nodes}
    above = program.ancestors(gradients)
    seen: Set[str] = set()
    stack = list(gradients)
    while stack:
        for consumer, _ in program.consumers.get(stack.pop(), ()):
            if consumer not in seen and consumer not in above:
                seen.add(consumer)
                stack.append(consumer)
    return seen
