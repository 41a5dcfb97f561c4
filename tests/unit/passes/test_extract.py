"""Extract: the closure of a run, with fed tensors cut off."""

import pytest

from epl.errors import FeedError, FetchError
from epl.passes.base import check_program
from epl.passes.extract import extract
from tests.unit.graph_text import expect, fingerprint, parse

NET = """
    x = Placeholder() {shape: [4, 2]}
    axis = Const() {value: 1}
    s = Split(axis, x) {num_split: 2}
    h = Neg(s)  # taskgraph=1
    other = Abs(x)
    y = Add(h, s:1, ^other)
    run = NoOp(^y)
    apart = Const() {value: 0.0}
"""


def cut(fetches, feeds=(), mode="same"):
    whole = parse(NET)
    before = fingerprint(whole)
    program = extract(whole, fetches, feeds, [mode] * len(feeds))
    assert fingerprint(whole) == before
    check_program(program)
    return program


def test_only_what_is_needed_in_the_old_order():
    expect(
        cut(["y:0", "run"]),
        """
        x = Placeholder()
        axis = Const()
        s = Split(axis, x)
        h = Neg(s)
        other = Abs(x)
        y = Add(h, s:1, ^other)
        run = NoOp(^y)
        fetches: y:0
        targets: run
        """,
    )
    assert list(cut(["apart:0"]).nodes) == ["apart"]


def test_the_whole_graph_is_its_own_closure():
    whole = parse(NET)
    assert list(extract(whole, list(whole.nodes), [], []).nodes) == list(whole.nodes)


def test_a_fed_placeholder_takes_the_shape_of_the_value():
    text = "x = Placeholder() {shape: %s}\nother = Abs(x)\nfetches: other:0\nfeeds: x:0 -> x (%s)"
    expect(cut(["other:0"], ["x:0"], "divide"), text % ("(None, 2)", "divide"), "shape")
    expect(cut(["other:0"], ["x:0"], "each"), text % ("(4, 2)", "each"), "shape")


def test_a_fed_intermediate_tensor_cuts_off_what_makes_it():
    program = cut(["y:0"], ["h:0"], "divide")
    expect(
        program,
        """
        x = Placeholder() {shape: (4, 2)}
        axis = Const()
        s = Split(axis, x)
        h = Placeholder() {shape: (None, 1)}
        other = Abs(x)
        y = Add(h, s:1, ^other)
        fetches: y:0
        feeds: h:0 -> h (divide)
        """,
        "shape",
    )
    assert (program.nodes["h"].taskgraph, program.nodes["h"].origin) == (1, "h")


def test_one_fed_output_of_several_leaves_the_others():
    expect(
        cut(["y:0"], ["s:1"]),
        """
        x = Placeholder()
        axis = Const()
        s = Split(axis, x)
        h = Neg(s)
        other = Abs(x)
        y = Add(h, s/epl_output_1, ^other)
        s/epl_output_1 = Placeholder()
        fetches: y:0
        feeds: s:1 -> s/epl_output_1 (same)
        """,
    )


def test_both_fed_outputs_cut_the_op_off():
    program = cut(["y:0"], ["s:0", "s:1"])
    assert sorted(program.nodes) == ["h", "other", "s/epl_output_0", "s/epl_output_1", "x", "y"]
    assert program.nodes["h"].inputs == (("s/epl_output_0", 0),)


def test_the_name_of_a_fed_output_hides_no_node():
    whole = parse(NET.replace("apart", "s_fed_1").replace("^other", "^s_fed_1"))
    program = extract(whole, ["y:0"], ["s:1"], ["same"])
    assert program.nodes["s_fed_1"].op == "Const" and program.nodes["y"].controls == ("s_fed_1",)


def test_a_fetch_of_a_fed_tensor_is_the_fed_value():
    program = cut(["x:0", "s:1", "h"], ["x:0", "s:1", "h:0"])
    assert program.fetches == (("x", 0), ("s/epl_output_1", 0)) and program.targets == ("h",)
    assert {n.op for n in program.nodes.values()} == {"Placeholder"}


def test_control_edges_of_a_fed_node_stay():
    assert cut(["y:0"], ["other:0"]).nodes["y"].controls == ("other",)


def test_a_feed_that_nothing_needs_is_still_fed():
    program = cut(["apart:0"], ["x:0"])
    assert list(program.nodes) == ["x", "apart"] and [f.node for f in program.feeds] == ["x"]


@pytest.mark.parametrize("name", ["gone:0", "gone"])
def test_a_fetch_must_exist(name):
    with pytest.raises(FetchError, match="Fetch '%s' is not in the graph" % name):
        cut([name])


def test_a_feed_must_exist():
    with pytest.raises(FeedError, match="Fed tensor 'gone:0' is not in the graph"):
        cut(["y:0"], ["gone:0"])
