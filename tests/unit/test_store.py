"""The store: programs in one graph share what is the same in them."""

import textwrap

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.errors import PassError
from epl.ir import attrs as A
from epl.ir.program import Node
from epl.passes.extract import extract
from epl.runtime.store import Store
from tests.unit.graph_text import parse
from tests.unit.machine import user_graph

BASE = """
    x = Placeholder() {shape: []}
    two = Const() {value: 2.0}
    y = Mul(x, two)
    feeds: x
"""


@pytest.fixture
def store():
    made = Store()
    yield made
    made.close()


def load(store, text, key="k"):
    return store.load(parse(text), key)


def call(store, loaded, *values):
    return store.callable_of(loaded)(*[np.float32(v) for v in values])


def operations(store):
    return sorted(node.name for node in store.graph.as_graph_def().node)


def test_a_program_runs(store):
    loaded = load(store, BASE + "fetches: y:0")
    assert loaded == (("x:0",), ("y:0",), ())
    assert call(store, loaded, 3) == [6.0]
    assert len(store) == 3


def test_a_second_program_adds_only_what_is_new(store):
    first = load(store, BASE + "fetches: y:0")
    second = load(store, BASE + "z = Neg(y)\nfetches: z:0, y:0", "other")
    assert operations(store) == ["two", "x", "y", "z"] and len(store) == 4
    assert second.fetches == ("z:0", "y:0")
    assert call(store, second, 3) == [-6.0, 6.0] and call(store, first, 4) == [8.0]
    assert load(store, BASE + "fetches: y:0", "third") == first and len(store) == 4


@pytest.mark.parametrize(
    "old, new, value",
    [
        ("value: 2.0", "value: 5.0", 15.0),
        ("Mul(x, two)", "AddV2(x, two)", 5.0),
        ("Mul(x, two)", "Sub(two, x)", -1.0),
        ("Mul(x, two)", "Mul(x, two, ^two)", 6.0),
        ("Mul(x, two)", "Mul(x, two) @/device:CPU:0", 6.0),
    ],
)
def test_a_node_that_differs_gets_the_key_in_its_name(store, old, new, value):
    first = load(store, BASE + "fetches: y:0")
    second = load(store, BASE.replace(old, new) + "fetches: y:0", "new")
    assert second.fetches == ("y/epl_new:0",)
    assert call(store, second, 3) == [value] and call(store, first, 3) == [6.0]
    assert ("two/epl_new" in operations(store)) == ("value" in old)


def test_private_attributes_make_no_difference(store):
    load(store, BASE + "fetches: y:0")
    program = parse(BASE.replace("two = Const() {value: 2.0}", "two = Const() {value: 2.0}  # taskgraph=1 backward=2") + "fetches: y:0")
    program = program.replace(nodes=dict(program.nodes, x=program.nodes["x"].replace(attrs={"container": None})))
    store.load(program, "new")
    assert operations(store) == ["two", "x", "y"]


def test_what_depends_on_a_moved_node_moves_too(store):
    load(store, BASE + "z = Neg(y)\nw = NoOp(^z)\nfetches: z:0\ntargets: w")
    moved = load(store, BASE.replace("Mul", "AddV2") + "z = Neg(y)\nw = NoOp(^z)\nfetches: z:0\ntargets: w", "m")
    assert moved.fetches == ("z/epl_m:0",) and moved.targets == ("w/epl_m",)
    assert call(store, moved, 1) == [-3.0]


def test_a_key_that_is_used_twice_gets_a_number_and_finds_its_own_nodes(store):
    texts = [BASE.replace("2.0", str(float(v))) + "fetches: y:0" for v in (2, 3, 4, 3)]
    loaded = [load(store, text) for text in texts]
    assert [item.fetches[0] for item in loaded] == ["y:0", "y/epl_k:0", "y/epl_k_1:0", "y/epl_k:0"]
    assert [call(store, item, 1)[0] for item in loaded] == [2.0, 3.0, 4.0, 3.0]


COUNTER = """
    w = VarHandleOp() {shape: [], shared_name: w}
    zero = Const() {value: 0.0}
    init = AssignVariableOp(w, zero)
    one = Const() {value: 1.0}
    add = AssignAddVariableOp(w, one)
    read = ReadVariableOp(w, ^add)
"""


def test_programs_share_variables(store):
    init, add = load(store, COUNTER + "targets: init"), load(store, COUNTER + "fetches: read:0\ntargets: add", "b")
    call(store, init)
    assert [call(store, add)[0] for _ in range(3)] == [1.0, 2.0, 3.0]


def test_programs_share_generators(store):
    """A program that fetches more goes on with the same random numbers."""
    text = "shape = Const() {value: [1]}\nr = RandomUniform(shape) {seed: 1, seed2: 2, dtype: float}\n"
    one, two = load(store, text + "fetches: r:0"), load(store, text + "n = Neg(r)\nfetches: n:0", "b")
    drawn = [call(store, item)[0][0] for item in (one, two, one)]
    fresh = Store()
    alone = load(fresh, text + "fetches: r:0")
    assert [abs(v) for v in drawn] == [call(fresh, alone)[0][0] for _ in range(3)]
    fresh.close()


LOOP = """
    n = Placeholder() {dtype: int32, shape: []}
    start = Const() {value: 1.0}
    zero = Const() {value: 0}
    i = Enter(zero) {frame_name: frame}
    v = Enter(start) {frame_name: frame}
    limit = Enter(n) {frame_name: frame, is_constant: true}
    i/merge = Merge(i, i/next)
    v/merge = Merge(v, v/next)
    less = Less(i/merge, limit)
    cond = LoopCond(less)
    i/switch = Switch(i/merge, cond)
    v/switch = Switch(v/merge, cond)
    i/body = Identity(i/switch:1)
    v/body = Identity(v/switch:1)
    one = Const(^i/body) {value: 1}
    i/add = AddV2(i/body, one)
    step = Const(^v/body) {value: 2.0}
    v/new = Mul(v/body, step)
    i/next = NextIteration(i/add)
    v/next = NextIteration(v/new)
    out = Exit(v/switch)
    feeds: n
    fetches: out:0
"""


def loop(store, loaded, n):
    return store.callable_of(loaded)(np.int32(n))[0]


def test_a_loop_is_shared(store):
    first = load(store, LOOP)
    assert load(store, LOOP, "b") == first
    assert [loop(store, first, n) for n in (0, 1, 5)] == [1.0, 2.0, 32.0]


def test_a_loop_with_another_body_moves_as_a_whole(store):
    first = load(store, LOOP)
    second = load(store, LOOP.replace("v/new = Mul", "v/new = AddV2"), "b")
    assert second.fetches == ("out/epl_b:0",)
    assert {"v/merge/epl_b", "v/next/epl_b", "v/new/epl_b"} <= set(operations(store))
    for _ in range(2):
        assert [loop(store, first, n) for n in (0, 1, 5)] == [1.0, 2.0, 32.0]
        assert [loop(store, second, n) for n in (0, 1, 5)] == [1.0, 3.0, 11.0]
    third = load(store, LOOP.replace("v/new = Mul", "v/new = Sub"), "c")
    assert [loop(store, third, n) for n in (0, 1, 5)] == [1.0, -1.0, -9.0]


def test_a_loop_that_counts_differently_moves_as_a_whole(store):
    first = load(store, LOOP)
    second = load(store, LOOP.replace("one = Const(^i/body) {value: 1}", "one = Const(^i/body) {value: 2}"), "b")
    assert [loop(store, second, n) for n in (0, 1, 5)] == [1.0, 2.0, 8.0]
    assert [loop(store, first, n) for n in (0, 1, 5)] == [1.0, 2.0, 32.0]


def test_functions_are_added_once(store):
    with user_graph(v2=True) as index:
        p = tf.placeholder(tf.bool, [], "p")
        y = tf.cond(p, lambda: tf.constant(1.0), lambda: tf.constant(2.0))
        tf.negative(y, name="negative")
        whole = index()
    for fetch in (y.name, "negative:0"):
        loaded = store.load(extract(whole, [fetch], ["p:0"], ["same"]), fetch.replace(":", "_"))
        sign = -1 if fetch == "negative:0" else 1
        assert [store.callable_of(loaded)(np.bool_(v))[0] * sign for v in (True, False)] == [1.0, 2.0]


def test_a_collective_has_one_name():
    store = Store()
    nodes = {"x": Node("x", "Placeholder", attrs={"dtype": A.of_type(1)}), "c": Node("c", "HorovodAllreduce", [("x", 0)])}
    program = parse("").replace(nodes=nodes)
    store._written.update({"x": None, "c": None})
    with pytest.raises(PassError, match="Collective 'c' exists with other inputs; ranks could not agree on a second name"):
        store._suffixed(nodes["c"], "k", {})
    assert program.nodes is nodes
    store.close()


def test_a_program_that_does_not_load_leaves_no_trace(store):
    broken = textwrap.dedent(BASE) + "z = Neg(y)\nfetches: z:0"
    program = parse(broken)
    program = program.replace(nodes=dict(program.nodes, z=program.nodes["z"].replace(op="NoSuchOp", proto=None)))
    with pytest.raises(Exception, match="NoSuchOp"):
        store.load(program, "a")
    assert len(store) == 0
    assert call(store, load(store, broken, "b"), 3) == [-6.0]
