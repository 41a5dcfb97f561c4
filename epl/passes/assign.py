"""Assign: the taskgraph of every node of a graph.

Scopes stamp the nodes built inside them, and backward nodes follow their forward op.
For the rest the taskgraph is inferred from what a node works on. It is decided on the
whole graph of the user, never on the nodes of one run, so that every program of a
session finds a variable in the same place.

The rules, in order; the first that decides wins:

* own: the node was built in a scope, or in the forward part outside scopes while a
  default strategy was set (default); a backward node takes what its forward op has
  (backward).
* frame: a v1 while loop is atomic. All its nodes go where the first of them that has a
  taskgraph of its own goes, else where the state that they are given is, else where the
  loop's inputs say. A backward loop goes with the loop whose values it takes up.
* cond: a v1 conditional is atomic in the same way. A branch that is not taken is dead; an
  edge inside it can't be cut.
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

from typing import Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.conds import COND, FRAME, Units, handle_source, state_of, states_of, user_of
from epl.ir.housekeeping import housekeeping
from epl.ir.program import Node, Program, Ref

__all__ = ["COND", "FRAME", "Assigned", "after_gradients", "assign", "check_cuttable", "explain", "handle_source", "state_of"]

OWN, DEFAULT, BACKWARD, STATE = "own", "default", "backward", "state"
INPUTS, SUMMED, COLOCATED, LARGEST, NONE = "inputs", "summed", "colocated", "largest", "none"
CONSUMER, UPDATE, WRITTEN = "consumer", "update", "written"

_STATE = op_table.VARIABLES | op_table.STEP_STATE

_UNKNOWN_DIMENSION = 32
"""Stands for a dimension that is not known when sizes are compared: usually a batch."""


class _Decision(NamedTuple):
    taskgraph: Optional[int]
    rule: str


class Assigned(_Decision):
    """The taskgraph of a node, None for a node that belongs nowhere, and the rule that decided.

    `by` is the node that decided, where the rule looks at others. It is no part of the
    value: equal decisions are equal whatever they came from.
    """

    by: Optional[str] = None

    def __new__(cls, taskgraph: Optional[int], rule: str, by: Optional[str] = None) -> "Assigned":
        self = super().__new__(cls, taskgraph, rule)
        if by is not None:
            self.by = by
        return self


def assign(program: Program, placed: Optional[Mapping[str, Assigned]] = None) -> Dict[str, Assigned]:
    """Decide the taskgraph of every node of a user's graph.

    Reads the attributes of `epl.ir.attrs` on the nodes, the raw gradients and the static
    shapes of the program. The result depends on nothing else.

    Args:
      program: the whole graph, in order of creation.
      placed: what was decided for variables before the graph grew; they don't move.
    """
    return _Assigner(program, placed or {}).run()


def check_cuttable(program: Program, assignment: Mapping[str, Assigned]) -> None:
    """Refuse a program that can't be cut between its taskgraphs.

    Args:
      program: the nodes of the user that will be cut.
      assignment: what `assign` decided.

    Raises:
      ProgramError: a loop, a conditional or a call of functions uses state of another
        taskgraph, or a value inside a branch is used in another taskgraph.
    """
    where = {name: known.taskgraph for name, known in assignment.items() if known.taskgraph is not None}
    units = Units(program, program.topological())
    for name, node in program.nodes.items():
        unit, here = units.of.get(name), where.get(name)
        states = [state for state in states_of(program, node) if state in where]
        other = next((state for state in states if where[state] != (here if unit else where[states[0]])), None)
        if other is not None and unit is None:
            first = states[0]
            raise ProgramError(_STATE_OF_BOTH % (name, node.op, _named(program, first), where[first], _named(program, other), where[other]))
        if other is not None and unit is not None and here is not None:
            what, user = "tf.while_loop" if unit.kind == FRAME else "tf.cond", user_of(program, node)
            advice = (_WRITE if op_table.writes(program, program.nodes[user]) else _READ) if program.nodes[other].op in op_table.VARIABLES else _BUILD
            inside = {where[s] for name in units.members[unit] for s in states_of(program, program.nodes[name]) if s in where}
            known = (user, _named(program, other), where[other], unit, here, advice % what)
            raise ProgramError(_STATE_INSIDE % known + (_MOVE % (what, where[other]) if len(inside) == 1 else ""))
        dead = next((source for source, _ in units.edges(node) if source in units.of and where.get(source, here) != here), None)
        if dead is not None and here is not None:
            raise ProgramError(_VALUE_INSIDE % (name, here, dead, units.of[dead], where[dead]))


_STATE_INSIDE = "Node '%s' uses %s of taskgraph %d inside %s, which is in taskgraph %d and can't be cut between ranks. %s"
_READ = "Read the variable outside of %s, and use the value inside"
_WRITE = "Compute the new value inside %s, and assign it outside"
_BUILD = "Make the state in the same scope as %s"
_MOVE = "; or build %s in the scope of taskgraph %d"
_STATE_OF_BOTH = (
    "Node '%s' (%s) uses %s of taskgraph %d and %s of taskgraph %d, and can't be cut between ranks. "
    "Read one of them outside, and give the node its value; or create both in the scope of one taskgraph"
)
_VALUE_INSIDE = (
    "Node '%s' of taskgraph %d uses '%s' inside %s, which is in taskgraph %d. A branch that is not taken computes nothing that could be sent. "
    "Return the value from tf.cond, and use what tf.cond returns"
)


def _named(program: Program, state: str) -> str:
    op = program.nodes[state].op
    return "%s '%s'" % ("variable" if op in op_table.VARIABLES else op, state)


def explain(program: Program, assignment: Mapping[str, Assigned], name: str) -> str:
    """Why a node is where it is, in one or two sentences.

    Args:
      program: the whole graph. assignment: what `assign` decided for it.
      name: a node of it.
    """
    node, (taskgraph, rule), by = program.nodes[name], assignment[name], assignment[name].by or ""
    there = "'%s', which is in taskgraph %s" % (by, taskgraph)
    inputs = _by_taskgraph(program, assignment, [name])
    texts = {
        OWN: "it is part of the gradient of an op that was built in its scope" if node.attr(A.BACKWARD) is not None else "it was built in its scope",
        DEFAULT: "it was built outside scopes while its strategy was the default one",
        BACKWARD: "it is part of the gradient of " + there,
        STATE: "it is given the state of " + there,
        INPUTS: "all its inputs that have a taskgraph agree (%s)" % inputs,
        SUMMED: "its inputs disagree (%s); it is the sum of gradients of %s" % (inputs, there),
        COLOCATED: "its inputs disagree (%s); TensorFlow was told to put it with %s" % (inputs, there),
        LARGEST: "its inputs disagree (%s); the largest of them is '%s'" % (inputs, by),
        CONSUMER: "it was created outside scopes; the first that uses it is " + there,
        UPDATE: "it was created outside scopes and helps to update " + there,
        WRITTEN: "it was created outside scopes; what is written to it comes from " + there,
        NONE: "saving, restoring and checking variables is no part of the model"
        if inputs
        else "none of its inputs does, and it is computed wherever it is used",
    }
    text = texts[rule] if rule in texts else _explain_unit(program, assignment, name)
    stamped = node.int_attr(A.TASKGRAPH)
    if stamped is not None and stamped != taskgraph:
        text += ", although it was built in the scope of taskgraph %d" % stamped
    head = "belongs to no taskgraph" if taskgraph is None else "belongs to taskgraph %d" % taskgraph
    return "Node '%s' %s: %s (rule: %s)" % (name, head, text, rule)


def _explain_unit(program: Program, assignment: Mapping[str, Assigned], name: str) -> str:
    units = Units(program, program.topological())
    unit, by = units.of[name], assignment[name].by
    text = "it is part of %s, which stays together" % str(unit)
    if by is None:
        return text + ", and nothing that it is given has a taskgraph"
    if units.of.get(by) == unit:
        return text + "; its first node with a taskgraph of its own is '%s'" % by
    if by in units.of:
        return text + "; it takes up '%s' inside %s, which can't be sent" % (by, units.of[by])
    if any(handle_source(program, program.nodes[member]) == by for member in units.members[unit]):
        return text + "; it is given the state of '%s'" % by
    return text + "; it is given '%s' (of its inputs, %s)" % (by, _by_taskgraph(program, assignment, units.members[unit]))


def _by_taskgraph(program: Program, assignment: Mapping[str, Assigned], names: List[str]) -> str:
    """The inputs of nodes from others, by taskgraph, as text."""
    found: Dict[int, Dict[str, None]] = {}
    inside = set(names)
    for name in names:
        for source, _ in program.nodes[name].inputs:
            taskgraph = assignment[source].taskgraph
            if taskgraph is not None and source not in inside:
                found.setdefault(taskgraph, {})[source] = None
    shown = {key: list(value) for key, value in sorted(found.items())}
    return ", ".join("%d: %s" % (key, ", ".join("'%s'" % n for n in value[:3]) + (", ..." if value[3:] else "")) for key, value in shown.items())


class _Assigner:
    def __init__(self, program: Program, placed: Mapping[str, Assigned]):
        self.program = program
        self.nodes = program.nodes
        self.position = {name: i for i, name in enumerate(program.nodes)}
        order = program.topological()
        self.units = Units(program, order)
        # A conditional that asks whether a variable is initialised makes another one's initial value.
        self.apart = housekeeping(program, order) - self.units.of.keys()
        self.late = after_gradients(program)
        self.states = {name: handle_source(program, node) for name, node in self.nodes.items()}
        self.order = self.units.in_order(self._before)
        self.found: Dict[str, Assigned] = {}
        self.variables = dict(placed)

    def run(self) -> Dict[str, Assigned]:
        # First without the variables that nobody annotated: what uses them says where they belong.
        # One that was placed may tell where what is computed from it, and so another one, belongs.
        placed = -1
        while placed < len(self.variables):
            placed = len(self.variables)
            self._flow()
            self._place_variables()
        return {name: self.found[name] for name in self.nodes}

    # The flow from inputs to outputs.

    def _before(self, node: Node) -> List[str]:
        sources = [s for s, _ in node.inputs] + list(node.controls)
        forward = node.str_attr(A.FORWARD_OP)
        if forward in self.nodes:
            sources.append(forward)
        return sources

    def _flow(self) -> None:
        self.found = dict(self.variables)
        for unit in self.order:
            if unit[0] in self.units.of:
                self._atomic(unit)
            elif unit[0] not in self.found:
                self.found[unit[0]] = self._node(self.nodes[unit[0]])

    def _atomic(self, members: List[str]) -> None:
        """A loop or a conditional."""
        rule = self.units.of[members[0]].kind
        own = [self._own(self.nodes[name]) for name in members]
        chosen = self._tied(members)
        if chosen is None:
            chosen = next((Assigned(item.taskgraph, rule, name) for name, item in zip(members, own) if item is not None), None)
        if chosen is None:
            chosen = self._given(members) or self._from_inputs(members)
        rest = Assigned(chosen.taskgraph, rule, chosen.by)
        for name, mine in zip(members, own):
            self.found[name] = mine if mine is not None and mine.taskgraph == chosen.taskgraph else rest

    def _tied(self, members: List[str]) -> Optional[Assigned]:
        """Where another loop or conditional is from which these nodes are given what can't be sent."""
        for name in members:
            state = self.states[name]
            dead = [source for source, _ in self.units.edges(self.nodes[name])]
            for source in dead + ([state] if state is not None else []):
                other = self.units.of.get(source)
                if other is not None and other != self.units.of[name] and self._taskgraph(source) is not None:
                    return Assigned(self._taskgraph(source), "", source)
        return None

    def _given(self, members: List[str]) -> Optional[Assigned]:
        """Where the state is that these nodes are given from outside."""
        for name in members:
            source = self.states[name]
            if source is not None and self.units.of.get(source) != self.units.of[name] and self._taskgraph(source) is not None:
                return Assigned(self._taskgraph(source), "", source)
        return None

    def _node(self, node: Node) -> Assigned:
        source = self.states[node.name]
        if source is not None and self._taskgraph(source) is not None:
            return Assigned(self._taskgraph(source), STATE, source)
        return self._own(node) or self._from_inputs([node.name])

    def _own(self, node: Node) -> Optional[Assigned]:
        if node.name in self.apart:
            return Assigned(None, NONE)
        stamped = node.int_attr(A.TASKGRAPH)
        if stamped is not None:
            return Assigned(stamped, OWN)
        forward = node.str_attr(A.FORWARD_OP)
        if forward in self.found and self._taskgraph(forward) is not None:
            return Assigned(self._taskgraph(forward), BACKWARD, forward)
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
            return Assigned(staged[0][1], INPUTS, staged[0][0][0])
        for name in unit:
            for rule, other in ((SUMMED, self.nodes[name].str_attr(A.SUMMED)), (COLOCATED, _colocated(self.nodes[name]))):
                if other not in inside and self._taskgraph(other) is not None:
                    return Assigned(self._taskgraph(other), rule, other)
        largest, taskgraph = max(staged, key=lambda item: _size(self.program, item[0]))
        return Assigned(taskgraph, LARGEST, largest[0])

    def _taskgraph(self, name: str) -> Optional[int]:
        known = self.found.get(name)
        return None if known is None else known.taskgraph

    # Variables outside scopes.

    def _place_variables(self) -> None:
        free = [n.name for n in self.nodes.values() if n.op in _STATE and self._own(n) is None and n.name not in self.variables]
        uses = {name: self._uses(name) for name in free}
        for rule, decide in ((CONSUMER, self._by_consumer), (UPDATE, self._by_update), (WRITTEN, self._by_values)):
            for name in free:
                if name not in self.variables:
                    by = decide(name, uses[name])
                    if by is not None:
                        self.variables[name] = Assigned(self._taskgraph(by), rule, by)
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

    def _by_consumer(self, variable: str, uses: List[Node]) -> Optional[str]:
        for node in uses:
            if self._is_forward(node) and not op_table.writes_state(node.op) and self._taskgraph(node.name) is not None:
                return node.name
        return None

    def _by_update(self, variable: str, uses: List[Node]) -> Optional[str]:
        for node in uses:
            if not op_table.writes_state(node.op):
                continue
            updated = op_table.variable_of(self.program, *node.inputs[0])
            if updated is not None and updated != variable and self._taskgraph(updated) is not None:
                return updated
        return None

    def _by_values(self, variable: str, uses: List[Node]) -> Optional[str]:
        for node in uses:
            if op_table.writes_state(node.op) and op_table.variable_of(self.program, *node.inputs[0]) == variable:
                for source, _ in node.inputs[1:]:
                    if self._taskgraph(source) is not None:
                        return source
        return None


def _colocated(node: Node) -> str:
    """The node with which TensorFlow was told to put another one, or ""."""
    for text in node.strs_attr("_class"):
        if text.startswith("loc:@"):
            return text[len("loc:@") :]
    return ""


def _size(program: Program, ref: Ref) -> int:
    """The number of elements of a tensor, for comparing."""
    size = 1
    for dim in program.shape_of(ref) or ():
        size *= _UNKNOWN_DIMENSION if dim is None else dim
    return size


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
