"""Which nodes stay together: the conditionals and loops of TensorFlow 1, where they go, and what is refused."""

import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.errors import ProgramError
from epl.ir.conds import COND, FRAME, Unit, Units, state_of, states_of, user_of
from epl.passes.assign import Assigned, assign, check_cuttable, explain
from tests.unit.graph_text import parse
from tests.unit.machine import user_graph
from tests.unit.test_assign import LOOP as COUNTS
from tests.unit.test_assign import STATE, assigned, program


def units(text_or_program):
    program = parse(text_or_program) if isinstance(text_or_program, str) else text_or_program
    return Units(program, program.topological())


def members(text_or_program):
    """Each loop or conditional and its nodes, as text."""
    return {str(unit): " ".join(names) for unit, names in units(text_or_program).members.items()}


def conditional(scope=""):
    """What `tf.cond(p, lambda: -x, lambda: 1.0)` makes."""
    return """
    ~pivot = Switch(p, p)
    ~on = Identity(~pivot:1)
    ~off = Identity(~pivot)
    ~pred = Identity(p)
    ~switch = Switch(x, ~pred)
    ~yes = Neg(~switch:1)
    ~no = Const(^~off) {value: 1.0}
    ~out = Merge(~no, ~yes)
    ~after = Neg(~out)
    """.replace("~", scope)


INPUTS = """
    p = Placeholder() {dtype: bool, shape: []}
    x = Placeholder() {shape: []}
"""
ONE = INPUTS + conditional()


def test_the_nodes_of_a_conditional():
    assert members(ONE) == {"the conditional of 'pivot'": "pivot on off switch yes no out"}
    found = units(ONE)
    assert found.of["out"] == Unit(COND, "pivot") and not found.in_branch("out") and found.in_branch("yes") and not found.in_branch("switch")
    assert found.may_be_dead(("switch", 0)) and found.may_be_dead(("no", -1)) and not found.may_be_dead(("switch", -1))


def test_outputs_of_one_conditional_stay_together():
    """They share no node, but the predicate of one `tf.cond`."""
    other = """
    y = Placeholder() {shape: []}
    other = Switch(y, pred)
    same = Identity(other)
    exp = Exp(other:1)
    result = Merge(same, exp)
    """
    assert members(ONE + other) == {"the conditional of 'pivot'": "pivot on off switch yes no out other same exp result"}


def test_conditionals_with_one_predicate_are_several():
    text = ONE + conditional("second/")
    assert members(text) == {
        "the conditional of 'pivot'": "pivot on off switch yes no out",
        "the conditional of 'second/pivot'": "second/pivot second/on second/off second/switch second/yes second/no second/out",
    }


def test_a_predicate_that_is_no_conditionals_own_joins_nothing():
    assert members("""
        p = Placeholder() {dtype: bool, shape: []}
        x = Placeholder() {shape: []}
        a = Switch(x, p)
        a/out = Merge(a, a:1)
        b = Switch(a/out, p)
        b/out = Merge(b, b:1)
    """) == {"the conditional of 'a'": "a a/out", "the conditional of 'b'": "b b/out"}


def test_a_conditional_inside_another_belongs_to_it():
    assert members("""
        p = Placeholder() {dtype: bool, shape: []}
        q = Placeholder() {dtype: bool, shape: []}
        x = Placeholder() {shape: []}
        outer = Switch(x, p)
        choice = Switch(q, p)
        inner = Switch(outer:1, choice:1)
        deep = Neg(inner:1)
        join = Merge(inner, deep)
        out = Merge(outer, join)
    """) == {"the conditional of 'outer'": "outer choice inner deep join out"}


LOOP = """
    enter = Enter(START) {frame_name: f}
    merge = Merge(enter, next) {N: 2}
    limit = Const(^merge) {value: 3.0}
    test = Less(merge, limit)
    cond = LoopCond(test)
    switch = Switch(merge, cond)
    BODY
    next = NextIteration(new)
    exit = Exit(switch)
"""


def test_a_loop_inside_a_conditional_belongs_to_it():
    text = """
    p = Placeholder() {dtype: bool, shape: []}
    x = Placeholder() {shape: []}
    branch = Switch(x, p)
    LOOP
    out = Merge(branch, exit)
    """.replace("LOOP", LOOP.replace("START", "branch:1").replace("BODY", "new = Exp(switch:1)"))
    assert members(text) == {"the conditional of 'branch'": "branch enter merge limit test cond switch new next exit out"}


def test_a_conditional_inside_a_loop_belongs_to_it():
    body = "p = Less(switch:1, limit)\n branch = Switch(switch:1, p)\n yes = Exp(branch:1)\n new = Merge(branch, yes)"
    text = "x = Placeholder() {shape: []}\n" + LOOP.replace("START", "x").replace("BODY", body)
    assert members(text) == {"the while loop 'f'": "enter merge limit test cond switch p branch yes new next exit"}
    assert units(text).of["yes"] == Unit(FRAME, "f")


BACKWARD = (
    ONE
    + """
    dout = Placeholder() {shape: []}
    dswitch = Switch(dout, pred)  # backward=1
    dyes = Mul(dswitch:1, yes)  # backward=1
    zero = Const(^off) {value: 0.0}  # backward=1
    dx = Merge(zero, dyes)  # backward=1
    kept = Const(^on) {value: 0.0}  # backward=1
    keeps = Add(kept, yes)
"""
)


def test_the_backward_conditional_is_one_of_its_own():
    """What the gradient call adds to the forward branch is not part of it."""
    assert members(BACKWARD) == {
        "the conditional of 'pivot'": "pivot on off switch yes no out kept keeps",
        "the conditional of 'dswitch'": "dswitch dyes zero dx",
    }
    program = parse(BACKWARD)
    assert list(units(BACKWARD).edges(program.nodes["dyes"])) == [("dswitch", 1), ("yes", 0)]
    assert list(units(BACKWARD).edges(program.nodes["kept"])) == [("on", -1)] and not list(units(BACKWARD).edges(program.nodes["after"]))


def test_variables_are_no_members():
    text = (
        ONE
        + """
    w = VarHandleOp(^on) {shape: [], shared_name: w}
    read = ReadVariableOp(w)
    """
    )
    assert "w" not in units(text).of and units(text).of["read"] == units(text).of["out"]


def test_sources_come_first_and_units_as_a_whole():
    found = units(ONE).in_order(lambda node: [s for s, _ in node.inputs] + list(node.controls))
    assert found == [["p"], ["x"], ["pred"], ["pivot", "on", "off", "switch", "yes", "no", "out"], ["after"]]


def test_a_handle_is_followed_through_branches():
    program = parse("""
        p = Placeholder() {dtype: bool, shape: []}
        w = VarHandleOp() {shape: [2], shared_name: w}
        switch = Switch(w, p)
        inner = Switch(switch:1, p)
        read = ReadVariableOp(inner:1)
        unused = Switch(w, p)
    """)
    assert state_of(program, "read") == "w" and states_of(program, program.nodes["inner"]) == ["w"]
    assert [user_of(program, program.nodes[name]) for name in ("switch", "read", "unused")] == ["read", "read", "unused"]


def branch_of_stages(p, h, w):
    return tf.cond(p, lambda: tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, tf.tanh(tf.matmul(a, w))), [0, h])[1], lambda: h * 2.0)


def loop_with_branches(p, h, w):
    return tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, tf.cond(p, lambda: tf.matmul(a, w), lambda: a)), [0, h])[1]


@pytest.mark.parametrize("build, kind", [(branch_of_stages, COND), (loop_with_branches, FRAME)])
@pytest.mark.parametrize("resource", [True, False])
def test_gradients_as_tensorflow_builds_them(build, kind, resource):
    """One unit of the forward part and one of the backward part; the stacks belong to the forward one."""
    with user_graph(v2=False, resource=resource) as index:
        p, x = tf.placeholder(tf.bool, [], "p"), tf.placeholder(tf.float32, [2, 2], "x")
        w = tf.get_variable("w", [2, 2])
        tf.gradients(build(p, tf.matmul(x, w), w), [w])
        whole = index()
    found = units(whole)
    forward, backward = found.members
    assert forward.kind == backward.kind == kind
    stacks = [n.name for n in whole.nodes.values() if n.op == "StackV2"]
    assert stacks and {found.of[name] for name in stacks} == {forward}
    assert {found.of[n.name] for n in whole.nodes.values() if n.op == "StackPopV2"} == {backward}


def in_two_scopes(x, w):
    with epl.replicate(1, "a"):
        h = tf.tanh(tf.matmul(x, w))
    with epl.replicate(1, "b"):
        return tf.sigmoid(h)


@pytest.mark.parametrize("loop", [True, False])
def test_scopes_inside(loop):
    """The ops of the backward part are of two scopes too; it goes where the forward part is, whose values it takes up."""
    with user_graph(v2=False, **{"cluster.devices_per_worker": 2}) as index:
        p, x = tf.placeholder(tf.bool, [], "p"), tf.placeholder(tf.float32, [2, 2], "x")
        w = tf.get_variable("w", [2, 2])
        h = tf.matmul(x, w)
        if loop:
            y = tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, in_two_scopes(a, w)), [0, h])[1]
        else:
            y = tf.cond(p, lambda: in_two_scopes(h, w), lambda: h)
        tf.gradients(y, [w])
        whole = index()
    found = units(whole)
    assert len(found.members) == 2 and {whole.assignment[name].taskgraph for name in found.of} == {0}
    check_cuttable(whole, whole.assignment)


def test_layers_that_share_a_predicate_stay_apart():
    with user_graph(v2=False) as index:
        p, x = tf.placeholder(tf.bool, [], "p"), tf.placeholder(tf.float32, [2, 2], "x")
        tf.identity(
            tf.cond(p, lambda: tf.exp(tf.cond(p, lambda: x, lambda: x + 1)), lambda: x, name="a") + tf.cond(p, lambda: x, lambda: -x, name="b")
        )
        whole = index()
    assert [unit.name for unit in units(whole).members] == ["a/Switch", "b/Switch"]


READS = """
    p = Placeholder() {dtype: bool, shape: []}
    w = VarHandleOp() {shape: [2], shared_name: w}  # taskgraph=0
    x = Placeholder() {shape: [2, 2]}  # taskgraph=1
    pivot = Switch(p, p)
    on = Identity(pivot:1)
    off = Identity(pivot)
    pred = Identity(p)
    handle = Switch(w, pred)
    read = ReadVariableOp(handle:1)READ
    switch = Switch(x, pred)
    yes = Mul(switch:1, read)YES
    no = Const(^off) {value: 1.0}
    out = Merge(no, yes)
    after = Neg(out)
    dswitch = Switch(after, pred)  # backward=1
    dyes = Mul(dswitch:1, yes)  # backward=1DYES
    dno = Identity(dswitch)  # backward=1
    dx = Merge(dno, dyes)  # backward=1
    """
BRANCHES = ["pivot", "on", "off", "handle", "read", "switch", "yes", "no", "out"]
BACK = ["dswitch", "dyes", "dno", "dx"]


def reads(read="", yes="", dyes=""):
    return program(READS.replace("READ", read).replace("DYES", dyes).replace("YES", yes))


def test_conditional_is_atomic():
    """Nothing in it is in a scope: it goes where the variable is that it reads, although its other input is larger."""
    found = assigned(reads(), "after", "pred", *BRANCHES, *BACK)
    assert found == dict({name: (0, "cond") for name in BRANCHES + BACK}, after=(0, "inputs"), pred=(None, "none"))


def test_conditional_without_a_variable_goes_where_its_inputs_are():
    text = READS.replace("VarHandleOp() {shape: [2], shared_name: w}  # taskgraph=0", "Placeholder() {shape: [2]}").replace(
        "ReadVariableOp", "Identity"
    )
    made = program(text.replace("READ", "").replace("DYES", "").replace("YES", ""))
    assert {name: assigned(made)[name] for name in BRANCHES} == {name: (1, "cond") for name in BRANCHES}


def test_first_annotation_in_a_conditional_counts():
    found = assigned(reads(read="  # taskgraph=2", yes="  # taskgraph=1"))
    assert found["read"] == (2, "own") and {found[name] for name in BRANCHES if name != "read"} == {(2, "cond")}


def test_backward_conditional_goes_with_the_values_of_the_branches():
    """Its own scope does not count: what it reads inside the forward branch can't be sent."""
    found = assigned(reads(read="  # taskgraph=1", dyes=" taskgraph=2"))
    assert {found[name] for name in BACK} == {(1, "cond")}


TWO = """
    w = VarHandleOp() {shape: [2], shared_name: w}  # taskgraph=0
    v = VarHandleOp() {shape: [2], shared_name: v}  # taskgraph=1
    i = VarHandleOp() {shape: [2], shared_name: i}
    p = Placeholder() {dtype: bool, shape: []}
    choice = If(p, w, v) {Tout: [float], then_branch: f, else_branch: g}
    """
ADDS = """
    w = VarHandleOp() {shape: [], shared_name: w}  # taskgraph=0
    x = Placeholder() {shape: []}
    handle = Enter(w) {frame_name: f, is_constant: true}
    """ + LOOP.replace("START", "x").replace("BODY", "add = AssignAddVariableOp(handle, limit)\n new = Exp(switch:1)  # taskgraph=1")


@pytest.mark.parametrize(
    "made, message",
    [
        (
            reads(yes="  # taskgraph=1"),
            "Node 'read' uses variable 'w' of taskgraph 0 inside the conditional of 'pivot', which is in taskgraph 1 and can't be cut between "
            "ranks. Read the variable outside of tf.cond, and use the value inside; or build tf.cond in the scope of taskgraph 0",
        ),
        (
            program(ADDS),
            "Node 'add' uses variable 'w' of taskgraph 0 inside the while loop 'f', which is in taskgraph 1 and can't be cut between ranks. "
            "Compute the new value inside tf.while_loop, and assign it outside; or build tf.while_loop in the scope of taskgraph 0",
        ),
        (
            program(TWO),
            "Node 'choice' (If) uses variable 'w' of taskgraph 0 and variable 'v' of taskgraph 1, and can't be cut between ranks. "
            "Read one of them outside, and give the node its value; or create both in the scope of one taskgraph",
        ),
    ],
    ids=["conditional", "loop", "call"],
)
def test_state_in_two_places_is_refused(made, message):
    with pytest.raises(ProgramError) as error:
        check_cuttable(made, assign(made))
    assert str(error.value) == message


def test_value_inside_a_branch_is_not_used_elsewhere():
    made = reads()
    decided = dict(assign(made), dyes=Assigned(1, "cond"))
    with pytest.raises(ProgramError) as error:
        check_cuttable(made, decided)
    assert str(error.value) == (
        "Node 'dyes' of taskgraph 1 uses 'dswitch' inside the conditional of 'dswitch', which is in taskgraph 0. A branch that is not taken "
        "computes nothing that could be sent. Return the value from tf.cond, and use what tf.cond returns"
    )


@pytest.mark.parametrize("made", [reads(), reads(read="  # taskgraph=0"), program(STATE), program(TWO.replace("w, v", "w, i"))])
def test_what_can_be_cut(made):
    check_cuttable(made, assign(made))


@pytest.mark.parametrize(
    "made, name, text",
    [
        (
            reads(yes="  # taskgraph=1"),
            "no",
            "taskgraph 1: it is part of the conditional of 'pivot', which stays together; its first node with a taskgraph of its own is 'yes'",
        ),
        (reads(), "out", "taskgraph 0: it is part of the conditional of 'pivot', which stays together; it is given the state of 'w'"),
        (
            reads(),
            "dx",
            "taskgraph 0: it is part of the conditional of 'dswitch', which stays together; "
            "it takes up 'yes' inside the conditional of 'pivot', which can't be sent",
        ),
        (
            program(COUNTS.replace("MARK", "").replace("OTHER", "")),
            "add",
            "taskgraph 1: it is part of the while loop 'f', which stays together; it is given 'x' (of its inputs, 1: 'x')",
        ),
        (
            program(COUNTS.replace("MARK", "").replace("OTHER", "").replace("  # taskgraph=1", "")),
            "add",
            "no taskgraph: it is part of the while loop 'f', which stays together, and nothing that it is given has a taskgraph",
        ),
    ],
    ids=["own", "state", "dead", "inputs", "none"],
)
def test_explain_what_stays_together(made, name, text):
    decided = assign(made)
    assert explain(made, decided, name) == "Node '%s' belongs to %s (rule: %s)" % (name, text, decided[name].rule)
