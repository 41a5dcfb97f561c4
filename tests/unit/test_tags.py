"""Gradient tags: what is a raw gradient, and which gradient calls are part of a later loss."""

import json

from epl.ir import attrs as A
from epl.ir.tags import GradientTag, data_ancestors, inner_records, outer_tags, partners, tags_of
from tests.unit.graph_text import parse


def test_the_text_of_a_tag():
    assert json.loads(GradientTag(3, "w", "values").text(1)) == [1, 3, "w", "values"]


def test_tags_are_found_by_tensor():
    program = parse("""
        x = Const() {value: [1.0, 2.0]}
        axis = Const() {value: 0}
        g = Split(axis, x) {num_split: 2}  # raw=1/w raw:1=1/v raw:1=2/v
    """)
    assert tags_of(program, A.RAW_GRADIENT) == {
        ("g", 0): [GradientTag(1, "w", "dense")],
        ("g", 1): [GradientTag(1, "v", "dense"), GradientTag(2, "v", "dense")],
    }
    assert tags_of(program, A.APPLY_GRADIENT) == {}
    assert outer_tags(program)[("g", 1)] == GradientTag(1, "v", "dense"), "the first call counts"


PENALTY = """
    w = VarHandleOp() {shape: []}
    w/read = ReadVariableOp(w)
    g1 = Neg(w/read)  # raw=1/w backward=1
    norm = Square(g1)
    g2 = Neg(norm)  # raw=2/w backward=2
"""


def test_the_gradient_inside_a_later_loss_is_no_raw_gradient():
    program = parse(PENALTY)
    assert inner_records(program, tags_of(program, A.RAW_GRADIENT)) == {1}
    assert outer_tags(program) == {("g2", 0): GradientTag(2, "w", "dense")}


def test_three_calls_one_inside_the_other():
    program = parse(PENALTY + "    g3 = Neg(g2)  # raw=3/w\n")
    assert set(outer_tags(program)) == {("g3", 0)}


def test_a_later_loss_that_only_waits_is_another_step():
    program = parse(PENALTY.replace("Square(g1)", "Square(w/read, ^g1)"))
    assert set(outer_tags(program)) == {("g1", 0), ("g2", 0)}


def test_a_gradient_that_two_calls_return_is_of_both():
    program = parse("""
        x = Const() {value: 1.0}
        g = Neg(x)  # raw=1/w raw=2/w
        h = Neg(x)  # raw=2/v
    """)
    assert set(outer_tags(program)) == {("g", 0), ("h", 0)}


def test_what_is_given_to_an_optimizer_is_never_inner():
    program = parse(PENALTY.replace("raw=", "apply="))
    assert set(outer_tags(program, A.APPLY_GRADIENT)) == {("g1", 0), ("g2", 0)}


def test_data_ancestors_leave_out_control_edges():
    program = parse("""
        a = Const() {value: 1.0}
        b = Const() {value: 1.0}
        c = Neg(a, ^b)
    """)
    assert data_ancestors(program, {"c"}) == {"a", "c"}


def test_the_components_of_sparse_gradients_are_paired():
    tags = {
        ("v", 0): GradientTag(1, "w", "values"),
        ("i", 0): GradientTag(1, "w", "indices"),
        ("s", 0): GradientTag(1, "w", "shape"),
        ("d", 0): GradientTag(1, "u", "dense"),
        ("x", 0): GradientTag(2, "w", "values"),
    }
    assert partners(tags) == {("v", 0): {"values": ("v", 0), "indices": ("i", 0), "shape": ("s", 0)}}
