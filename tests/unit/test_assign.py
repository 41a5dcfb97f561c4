import pytest

from epl.ir import attrs as A
from epl.ir.housekeeping import housekeeping
from epl.passes.assign import Assigned, assign, explain, handle_source, state_of
from epl.passes.classify import Classify
from epl.planner.plan import Plan, Task
from epl.runtime.graph_index import with_defaults
from tests.unit.graph_text import fingerprint, parse


def program(text, **marks):
    """A program from text; marks: node -> attributes, with `/` in names written as `__`."""
    made = parse(text)
    nodes = dict(made.nodes)
    for name, attrs in marks.items():
        name = name.replace("__", "/")
        nodes[name] = nodes[name].replace(attrs=dict(nodes[name].attrs, **attrs))
    return made.replace(nodes=nodes)


def forward_of(name):
    return {A.FORWARD_OP: A.of_str(name), A.BACKWARD: A.of_int(1)}


def colocated(name):
    return {"_class": A.of_strs(["loc:@" + name])}


UPDATE = {A.UPDATE: A.of_int(2)}


def assigned(made, *names):
    before = fingerprint(made)
    found = assign(made)
    assert fingerprint(made) == before
    assert list(found) == list(made.nodes)
    return {name: tuple(found[name]) for name in names or found}


def test_own_attribute_wins():
    made = program(
        """
        x = Placeholder() {shape: [?, 2]}  # taskgraph=0
        y = Relu(x)  # taskgraph=1
        z = Relu(y)
        """
    )
    assert assigned(made) == {"x": (0, "own"), "y": (1, "own"), "z": (1, "inputs")}


def test_nothing_is_known():
    made = program(
        """
        c = Const() {value: 1.0}
        d = Neg(c)
        x = Placeholder() {shape: [2]}  # taskgraph=1
        y = Mul(x, d)
        """
    )
    assert assigned(made, "c", "d", "y") == {"c": (None, "none"), "d": (None, "none"), "y": (1, "inputs")}


def test_control_edges_decide_nothing():
    made = program(
        """
        x = Placeholder() {shape: [2]}  # taskgraph=1
        c = Const(^x) {value: 1.0}
        n = NoOp(^x, ^c)
        """
    )
    assert assigned(made, "c", "n") == {"c": (None, "none"), "n": (None, "none")}


STATE = """
    w = VarHandleOp() {shape: [2], shared_name: w}  # taskgraph=0
    x = Placeholder() {shape: [2]}  # taskgraph=1
    read = ReadVariableOp(w)  # taskgraph=1
    y = Mul(x, read)  # taskgraph=1
    assign = AssignVariableOp(w, y)
    """


def test_state_keeps_what_is_given_its_handle():
    assert assigned(program(STATE), "read", "y", "assign") == {"read": (0, "state"), "y": (1, "own"), "assign": (0, "state")}


def test_state_keeps_what_is_given_its_reference():
    made = program(
        """
        w = VariableV2() {shape: [2]}  # taskgraph=0
        read = Identity(w)  # taskgraph=1
        y = Neg(read)  # taskgraph=1
        assign = Assign(w, y)
        again = Identity(assign)
        """
    )
    found = assigned(made, "read", "y", "assign", "again")
    assert found == {"read": (0, "state"), "y": (1, "own"), "assign": (0, "state"), "again": (0, "state")}
    assert state_of(made, "again") == "w" and state_of(made, "y") is None
    assert handle_source(made, made.nodes["again"]) == "assign"


def test_inputs_and_tables_are_no_state():
    made = program(
        """
        i = IteratorV2() {shared_name: i, output_types: [float], output_shapes: [[2]]}  # taskgraph=0
        x = IteratorGetNext(i) {output_types: [float], output_shapes: [[2]]}  # taskgraph=1
        """
    )
    assert assigned(made, "x") == {"x": (1, "own")}
    assert state_of(made, "x") is None


def test_disagreeing_inputs_follow_the_largest():
    made = program(
        """
        a = Placeholder() {shape: [3]}  # taskgraph=0
        b = Placeholder() {shape: [3, 5]}  # taskgraph=1
        c = AddV2(a, b)
        batch = Placeholder() {shape: [?, 3]}  # taskgraph=0
        d = AddV2(batch, a)
        e = Pack(a, a, b) {N: 3}
        """
    )
    made = made.replace(shape_of=lambda ref: {"a": (3,), "b": (3, 5), "batch": (None, 3)}.get(ref[0]))
    assert assigned(made, "c", "d") == {"c": (1, "largest"), "d": (0, "inputs")}
    assert assigned(made.replace(shape_of=lambda ref: None), "c") == {"c": (0, "largest")}


def test_colocation_decides_only_when_inputs_disagree():
    text = """
        a = Placeholder() {shape: [3]}  # taskgraph=0
        b = Placeholder() {shape: [3]}  # taskgraph=1
        both = AddV2(a, b)
        one = Neg(a)
        none = Const() {value: 1.0}
        """
    made = program(text, both=colocated("b"), one=colocated("b"), none=colocated("b"))
    assert assigned(made, "both", "one", "none") == {"both": (1, "colocated"), "one": (0, "inputs"), "none": (None, "none")}


def test_sum_of_partial_gradients_follows_its_forward_op():
    text = """
        h = Placeholder() {shape: [3]}  # taskgraph=0
        a = Placeholder() {shape: [3]}  # taskgraph=1
        b = Placeholder() {shape: [3]}  # taskgraph=2
        sum = AddN(a, b) {N: 2}
        same = AddN(b, b) {N: 2}
        """
    made = program(text, sum={A.SUMMED: A.of_str("h")}, same={A.SUMMED: A.of_str("h")})
    assert assigned(made, "sum", "same") == {"sum": (0, "summed"), "same": (2, "inputs")}


def test_backward_follows_its_forward_op():
    text = """
        x = Placeholder() {shape: [3]}  # taskgraph=0
        y = Relu(x)
        z = Neg(y)  # taskgraph=1
        dz = Const() {value: [1.0, 1.0, 1.0]}
        dy = Neg(dz)  # taskgraph=1
        dx = ReluGrad(dy, y)
        """
    made = program(text, dx=forward_of("y"), dz=forward_of("missing"))
    assert assigned(made, "dx", "dz", "dy") == {"dx": (0, "backward"), "dz": (None, "none"), "dy": (1, "own")}


DEFAULTS = """
    early = Const() {value: 1.0}
    x = Placeholder() {shape: [2]}  # taskgraph=1
    w = VarHandleOp() {shape: [2], shared_name: w}
    read = ReadVariableOp(w)
    y = Mul(x, read)
    dw = Mul(y, x)  # backward=1 raw=1/w
    clipped = Neg(dw)
    rate = Const() {value: 1.0}
    power = VarHandleOp() {shape: [], shared_name: power}
    update = ResourceApplyGradientDescent(w, rate, clipped)
    """


def test_default_taskgraph_takes_the_forward_part():
    made = with_defaults(program(DEFAULTS, power=UPDATE, update=UPDATE, dw=forward_of("y")), [(1, 0), (5, 2)])
    assert assigned(made) == {
        "early": (None, "none"),
        "x": (1, "own"),
        "w": (0, "default"),
        "read": (0, "state"),
        "y": (0, "default"),
        "dw": (0, "backward"),
        "clipped": (0, "inputs"),
        "rate": (2, "default"),
        "power": (None, "none"),
        "update": (0, "state"),
    }
    assert with_defaults(made, []) is made


LOOP = """
    zero = Const() {value: 0.0}
    x = Placeholder() {shape: []}  # taskgraph=1
    enter = Enter(zero) {frame_name: f}MARK
    input = Enter(x) {frame_name: f, is_constant: true}
    merge = Merge(enter, next) {N: 2}
    one = Const(^merge) {value: 1.0}
    test = Less(merge, input)
    cond = LoopCond(test)
    switch = Switch(merge, cond)
    add = AddV2(switch:1, one)OTHER
    next = NextIteration(add)
    exit = Exit(switch)
    after = Neg(exit)
    """
MEMBERS = ["enter", "input", "merge", "one", "test", "cond", "switch", "add", "next", "exit"]


def test_loop_is_atomic():
    made = program(LOOP.replace("MARK", "").replace("OTHER", ""))
    assert assigned(made, "after", *MEMBERS) == dict({name: (1, "frame") for name in MEMBERS}, after=(1, "inputs"))


def test_first_annotation_in_a_loop_counts():
    found = assigned(program(LOOP.replace("MARK", "  # taskgraph=0").replace("OTHER", "  # taskgraph=2")))
    assert found["enter"] == (0, "own")
    assert {found[name] for name in MEMBERS[1:]} == {(0, "frame")}
    assert found["after"] == (0, "inputs")


def test_variable_outside_scopes_belongs_to_its_first_forward_consumer():
    made = program(
        """
        w = VarHandleOp() {shape: [2], shared_name: w}
        init = Const() {value: [1.0, 1.0]}
        start = AssignVariableOp(w, init)
        read = ReadVariableOp(w)
        a = Placeholder() {shape: [2]}  # taskgraph=1
        y = Mul(a, read)
        b = Placeholder() {shape: [2]}  # taskgraph=0
        z = Mul(b, read)  # taskgraph=0
        """
    )
    found = assigned(made, "w", "start", "read", "y", "init")
    assert found == {"w": (1, "consumer"), "start": (1, "state"), "read": (1, "state"), "y": (1, "inputs"), "init": (None, "none")}


ADAM = """
    b = VariableV2() {shape: [2]}  # taskgraph=1
    a = VariableV2() {shape: [2]}  # taskgraph=0
    db = Placeholder() {shape: [2]}  # taskgraph=2
    da = Placeholder() {shape: [2]}  # taskgraph=0
    power = VariableV2() {shape: []}
    power/read = Identity(power)
    m = VariableV2() {shape: [2]}
    v = VariableV2() {shape: [2]}
    rate = Const() {value: 0.1}
    update_b = ApplyAdam(b, m, v, power/read, power/read, rate, rate, rate, rate, db)
    n = VariableV2() {shape: [2]}
    u = VariableV2() {shape: [2]}
    update_a = ApplyAdam(a, n, u, power/read, power/read, rate, rate, rate, rate, da)
    decayed = Mul(power/read, rate)
    next = Assign(power, decayed, ^update_a, ^update_b)
    """


def test_slots_follow_what_they_update():
    """The power goes to the first update, whatever variable TensorFlow puts it with."""
    marks = {name: dict(UPDATE, **colocated("a")) for name in ("power", "m", "v", "n", "u", "update_b", "update_a", "decayed", "next")}
    found = assigned(program(ADAM, **marks))
    assert {name: found[name] for name in ("m", "v", "n", "u", "power")} == {
        "m": (1, "update"),
        "v": (1, "update"),
        "n": (0, "update"),
        "u": (0, "update"),
        "power": (1, "update"),
    }
    assert [found[name] for name in ("update_b", "update_a", "next", "power/read")] == [(1, "state"), (0, "state"), (1, "state"), (1, "state")]
    assert found["rate"] == (None, "none")


def test_average_follows_what_is_written_to_it():
    made = program(
        """
        w = VariableV2() {shape: [2]}  # taskgraph=1
        average = VariableV2() {shape: [2]}
        zero = Const() {value: [0.0, 0.0]}
        start = Assign(average, zero)
        diff = Sub(average, w)
        new = AssignSub(average, diff)
        """,
        diff=UPDATE,
        new=UPDATE,
    )
    assert assigned(made, "average", "start", "new") == {"average": (1, "written"), "start": (1, "state"), "new": (1, "state")}


SAVED = """
    w = VariableV2() {shape: [2]}  # taskgraph=1
    s = VariableV2() {shape: []}
    file = Const() {value: "file"}
    names = Const() {value: ["w"]}
    save = SaveV2(file, names, names, w) {dtypes: [float]}
    done = NoOp(^save)
    ready = IsVariableInitialized(s)
    all = Pack(ready, ready) {N: 2}
    restored = RestoreV2(file, names, names) {dtypes: [float]}
    again = Assign(w, restored)
    count = AssignAdd(s, one)
    one = Const() {value: 1.0}
    """


def test_housekeeping_decides_nothing():
    made = program(SAVED)
    assert housekeeping(made, made.topological()) == {"save", "names", "file", "done", "ready", "all", "restored", "again"}
    found = assigned(made)
    assert found["s"] == (None, "none") and found["again"] == (1, "state")
    assert {found[name] for name in ("done", "all", "restored", "file", "ready")} == {(None, "none")}


def test_placed_variables_stay():
    made = program(STATE.replace("  # taskgraph=0", ""))
    assert assign(made)["w"] == Assigned(1, "consumer")
    found = assign(made, {"w": Assigned(None, "none")})
    assert found["w"] == Assigned(None, "none")
    assert found["read"] == Assigned(1, "own")


@pytest.mark.parametrize("whole", [True, False], ids=["whole graph", "part"])
def test_classify_sets_the_taskgraphs(whole):
    made = program(STATE)
    stages = (("/device:CPU:0", "/device:CPU:1"),)
    if whole:
        made = made.replace(assignment={name: Assigned(3, "own") for name in made.nodes})
    result = Classify()(made, Task(Plan(), stages=stages))
    assert result.taskgraph_of("read") == (3 if whole else 0)
    assert Classify()(program(STATE), Task(Plan())).taskgraph_of("read") == 1


def test_many_nodes():
    lines = ["x = Placeholder() {shape: [2]}  # taskgraph=1"]
    lines += ["n%d = Neg(%s)" % (k, "n%d" % (k - 1) if k else "x") for k in range(3000)]
    found = assign(parse("\n".join(lines)))
    assert found["n2999"] == Assigned(1, "inputs")


EXPLAINED = """
    a = Placeholder() {shape: [3]}  # taskgraph=0
    b = Placeholder() {shape: [3, 5]}  # taskgraph=1
    w = VarHandleOp() {shape: [3], shared_name: w}
    read = ReadVariableOp(w)  # taskgraph=0
    use = Mul(b, read)  # taskgraph=1
    one = Neg(a)
    sum = AddN(a, b) {N: 2}
    large = AddV2(a, b)
    near = AddV2(a, b)
    none = Const() {value: 1.0}
    back = Neg(none)
    file = Const() {value: "file"}
    save = SaveV2(file, file, file, a) {dtypes: [float]}
    m = VarHandleOp() {shape: [3], shared_name: m}
    update = ResourceApplyMomentum(w, m, none, one, none)
    early = Neg(b)
    """


@pytest.mark.parametrize(
    "name, text",
    [
        ("a", "belongs to taskgraph 0: it was built in its scope (rule: own)"),
        ("early", "belongs to taskgraph 1: all its inputs that have a taskgraph agree (1: 'b') (rule: inputs)"),
        ("w", "belongs to taskgraph 1: it was created outside scopes; the first that uses it is 'use', which is in taskgraph 1 (rule: consumer)"),
        (
            "read",
            "belongs to taskgraph 1: it is given the state of 'w', which is in taskgraph 1, although it was built in the scope of taskgraph 0 "
            "(rule: state)",
        ),
        (
            "sum",
            "belongs to taskgraph 0: its inputs disagree (0: 'a', 1: 'b'); it is the sum of gradients of 'a', which is in taskgraph 0 (rule: summed)",
        ),
        ("large", "belongs to taskgraph 1: its inputs disagree (0: 'a', 1: 'b'); the largest of them is 'b' (rule: largest)"),
        (
            "near",
            "belongs to taskgraph 0: its inputs disagree (0: 'a', 1: 'b'); TensorFlow was told to put it with 'a', which is in taskgraph 0 "
            "(rule: colocated)",
        ),
        ("none", "belongs to no taskgraph: none of its inputs does, and it is computed wherever it is used (rule: none)"),
        ("back", "belongs to taskgraph 0: it is part of the gradient of 'a', which is in taskgraph 0 (rule: backward)"),
        ("save", "belongs to no taskgraph: saving, restoring and checking variables is no part of the model (rule: none)"),
        ("m", "belongs to taskgraph 1: it was created outside scopes and helps to update 'w', which is in taskgraph 1 (rule: update)"),
    ],
)
def test_explain(name, text):
    # Without the scope of `read`, `use` is the first user of `w`.
    made = program(EXPLAINED, sum={A.SUMMED: A.of_str("a")}, near=colocated("a"), back=dict(forward_of("a")), update=UPDATE, m=UPDATE, read=UPDATE)
    made = made.replace(shape_of=lambda ref: {"a": (3,), "b": (3, 5)}.get(ref[0]))
    assert explain(made, assign(made), name) == "Node '%s' %s" % (name, text)
