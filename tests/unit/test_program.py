"""The intermediate representation: references, nodes, programs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from epl.errors import PassError, ProgramError
from epl.ir import attrs as A
from epl.ir.program import APPLY, FORWARD, Feed, Node, Program, node_from_def, parse_ref, program_from_graph_def, ref_text
from epl.passes.base import check_program
from tests.unit.graph_text import expect, fingerprint, parse, show

DIAMOND = """
    a = Const() {value: 1.0}
    left = Neg(a)
    right = Exp(a)
    out = Add(left, right, ^lonely)
    lonely = Const() {value: 2.0}
    unused = Abs(out)
    fetches: out:0
"""

LOOP = """
    zero = Const() {value: 0}
    enter = Enter(zero) {frame_name: frame}
    merge = Merge(enter, next)
    limit = Const(^merge) {value: 3}
    less = Less(merge, limit)
    cond = LoopCond(less)
    switch = Switch(merge, cond)
    leave = Exit(switch)
    body = Identity(switch:1)
    one = Const(^body) {value: 1}
    add = Add(body, one)
    next = NextIteration(add)
    fetches: leave:0
"""


@pytest.mark.parametrize("text, ref", [("x", ("x", 0)), ("x:0", ("x", 0)), ("a/b:12", ("a/b", 12)), ("^c/d", ("c/d", -1))])
def test_parse_ref(text, ref):
    assert parse_ref(text) == ref


@given(st.from_regex(r"[A-Za-z0-9.][A-Za-z0-9_.\-/]{0,20}", fullmatch=True), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_the_text_of_a_reference_reads_back(name, index):
    text = ref_text((name, index))
    assert parse_ref(text) == (name, index)
    assert (":" in text) == (index > 0)


def test_a_node_can_be_changed_only_by_a_copy():
    node = Node("a", "Add", [("x", 0), ("y", 1)], ["c"], device="/device:CPU:1", replica=2, micro_batch=1, phase=APPLY, taskgraph=3)
    copy = node.replace(name="b", controls=())
    assert (copy.name, copy.controls, node.name, node.controls) == ("b", (), "a", ("c",))
    for field in ("op", "inputs", "device", "replica", "micro_batch", "phase", "taskgraph", "info", "attrs", "origin", "proto"):
        assert getattr(copy, field) == getattr(node, field), field
    assert repr(node) == "a = Add(x, y:1, ^c) @/device:CPU:1"
    with pytest.raises(AttributeError):
        node.unknown = 1


def test_own_attributes_of_a_node_hide_those_of_its_proto():
    proto = node_def_pb2.NodeDef(name="x", op="VarHandleOp")
    proto.attr["shared_name"].s = b"old"
    proto.attr["container"].s = b"box"
    proto.attr[A.TASKGRAPH].i = 2
    node = node_from_def(proto)
    assert (node.taskgraph, node.origin, node.phase) == (2, "x", FORWARD)
    changed = node.replace(attrs={"shared_name": A.of_str("new"), "container": None})
    assert (node.str_attr("shared_name"), changed.str_attr("shared_name")) == ("old", "new")
    assert changed.attr("container") is None and changed.str_attr("container") == "" and changed.attr("nothing") is None
    written = Program({"x": changed}).to_graph_def().node[0]
    assert dict(written.attr) == {"shared_name": A.of_str("new")}, "private and removed attributes are left out"
    assert proto.attr["shared_name"].s == b"old"


def test_typed_attributes():
    proto = node_def_pb2.NodeDef(name="x", op="Op")
    proto.attr["n"].i = 3
    proto.attr["names"].list.s.extend([b"a", b"b"])
    node = node_from_def(proto)
    assert (node.int_attr("n"), node.int_attr("m"), node.strs_attr("names"), node.strs_attr("none")) == (3, None, ["a", "b"], [])


def test_consumers_name_each_edge():
    program = parse(DIAMOND)
    assert program.consumers["a"] == [("left", 0), ("right", 0)]
    assert program.consumers["lonely"] == [("out", -1)]
    assert parse("a = Const() {value: 1.0}\nb = Add(a, a)").consumers["a"] == [("b", 0), ("b", 0)]


def test_topological_order_of_a_diamond():
    program = parse(DIAMOND)
    order = [n.name for n in program.topological()]
    assert sorted(order) == sorted(program.nodes)
    assert order.index("out") > max(order.index(n) for n in ("left", "right", "lonely"))


def test_the_back_edge_of_a_loop_does_not_count():
    order = [n.name for n in parse(LOOP).topological()]
    assert order.index("merge") < order.index("add") < order.index("next")


def test_a_cycle_outside_a_loop_is_an_error_that_names_its_nodes():
    nodes = {"a": Node("a", "Identity", [("b", 0)]), "b": Node("b", "Identity", [("a", 0)]), "c": Node("c", "NoOp")}
    with pytest.raises(ProgramError, match="has a cycle outside a while loop, through: a, b$"):
        Program(nodes).topological()


def test_ancestors_follow_data_and_control_edges():
    program = parse(DIAMOND)
    assert set(program.ancestors(["out"])) == {"out", "left", "right", "a", "lonely"}
    assert set(program.ancestors(["missing"])) == set()
    assert set(parse(LOOP).ancestors(["leave"])) == set(parse(LOOP).nodes), "also through back edges"


def test_pruning_keeps_the_order_and_what_is_needed():
    program = parse(DIAMOND)
    before = fingerprint(program)
    pruned = program.pruned()
    assert list(pruned.nodes) == ["a", "left", "right", "out", "lonely"]
    assert fingerprint(program) == before
    assert pruned.pruned() is pruned
    assert "unused" in program.replace(targets=["unused"]).pruned().nodes
    assert "unused" in program.replace(feeds=[Feed(("unused", 0), "unused")]).pruned().nodes


def test_a_program_can_be_changed_only_by_a_copy():
    program = parse(DIAMOND)
    copy = program.replace(fetches=[("left", 0)], collections={("a", 0): "global_mean_objects"})
    assert (program.fetches, program.collections) == ((("out", 0),), {})
    assert (copy.fetches, copy.nodes, copy.shape_of) == ((("left", 0),), program.nodes, program.shape_of)
    with pytest.raises(TypeError):
        program.replace(unknown=1)


def test_a_graph_def_survives_the_round_trip():
    graph = graph_pb2.GraphDef()
    graph.versions.producer = 99
    graph.library.function.add().signature.name = "f"
    node = graph.node.add(name="y", op="Add", device="/device:CPU:0", input=["x", "x:1", "^c"])
    node.attr["T"].type = 1
    graph.node.add(name="x", op="Split")
    graph.node.add(name="c", op="NoOp")
    program = program_from_graph_def(graph, ["y:0"], ["c"])
    assert program.to_graph_def() == graph
    assert (program.fetches, program.targets) == ((("y", 0),), ("c",))


def test_functions_are_found_by_name():
    library = function_pb2.FunctionDefLibrary()
    library.function.add().signature.name = "f"
    program = Program({}, library=library)
    assert program.function("f").signature.name == "f" and program.function("g") is None


@pytest.mark.parametrize(
    "change, text",
    [
        ({"fetches": [("gone", 0)]}, "a fetch needs 'gone'"),
        ({"targets": ["gone"]}, "a target needs 'gone'"),
        ({"feeds": [Feed(("x", 0), "gone")]}, "a feed needs 'gone'"),
        ({"nodes": {"b": Node("b", "Neg", [("gone", 0)]), "out": Node("out", "NoOp", (), ["away"])}}, "b needs 'gone', out needs 'away'"),
    ],
)
def test_check_program_names_what_dangles(change, text):
    check_program(parse(DIAMOND))
    with pytest.raises(PassError, match="Dangling edges: .*" + text):
        check_program(parse(DIAMOND).replace(**change))


def test_the_text_form_reads_back():
    text = """
        x = Placeholder() {shape: [?, 2]}
        w = VarHandleOp() {shape: [2]}
        w/read = ReadVariableOp(w)
        y = Mul(x, w/read, ^w) @/device:CPU:1
        fetches: y:0
        targets: w
        feeds: x (divide)
    """
    program = parse(text)
    expect(
        program,
        """
        x = Placeholder() {shape: (None, 2)}
        w = VarHandleOp() {shape: (2,)}
        w/read = ReadVariableOp(w)
        y = Mul(x, w/read, ^w) @/device:CPU:1
        fetches: y:0
        targets: w
        feeds: x:0 -> x (divide)
        """,
        "shape",
        devices=True,
    )
    assert program.shape_of(("y", 0)) == (None, 2) and program.shape_of(("gone", 0)) is None
    assert show(parse(text)) == show(program)
