"""After which nodes a node of a loop or conditional is done."""

import tensorflow.compat.v1 as tf

from epl.ir.endings import Endings, fenced
from epl.ir.frames import frame_paths, outer_frames
from tests.unit.graph_text import parse
from tests.unit.machine import user_graph

COND = """
    p = Placeholder() {dtype: bool, shape: []}
    x = Placeholder() {shape: []}
    switch = Switch(x, p)
    yes = Neg(switch:1)
    no = Abs(switch)
    alone = Exp(switch)
    out = Merge(no, yes)
    after = Neg(out)
    wait = NoOp(^yes)
    pivot = Switch(p, p)
    const = Const(^pivot) {value: 1.0}
"""


def endings(text_or_program, ignored=()):
    program = parse(text_or_program) if isinstance(text_or_program, str) else text_or_program
    return Endings(program, program.topological(), ignored)


def test_a_node_outside_is_done_when_it_has_run():
    found = endings(COND)
    assert all(found.done(name) == (name,) for name in ("p", "x", "switch", "out", "after", "const"))
    assert not any(found.in_branch(name) for name in ("p", "x", "switch", "out", "after", "const"))


def test_a_branch_ends_where_the_sides_join():
    found = endings(COND)
    assert found.done("yes") == found.done("no") == ("out",)
    assert found.in_branch("wait"), "what waits for a branch belongs to it"
    assert found.done("alone") == (), "nothing outside depends on it"


def test_ignored_nodes_end_nothing():
    assert endings(COND, ignored={"out"}).done("yes") == ()


def test_what_is_ignored_ends_with_its_like():
    found = endings(COND, ignored={"yes", "out"})
    assert found.done("yes") == ("out",), "an update in a branch is done where the conditional ends"
    assert found.done("no") == ()


def test_the_value_of_a_branch_outside():
    text = COND.replace("out = Merge(no, yes)", "same = Identity(switch:1)\n    out = Merge(no, same)")
    found = endings(text)
    assert found.value(("switch", 1)) == ("switch", 1), "a switch itself is outside"
    assert found.value(("same", 0)) == ("out", 0) and found.value(("x", 0)) == ("x", 0)
    assert found.value(("yes", 0)) == ("yes", 0), "it is not passed on as it is"


NESTED = """
    p = Placeholder() {dtype: bool, shape: []}
    q = Placeholder() {dtype: bool, shape: []}
    x = Placeholder() {shape: []}
    outer = Switch(x, p)
    inner = Switch(outer:1, q)
    deep = Neg(inner:1)
    join = Merge(inner, deep)
    out = Merge(outer, join)
"""


def test_a_conditional_inside_another():
    found = endings(NESTED)
    assert found.done("deep") == found.done("join") == ("out",)
    assert found.in_branch("join") and not found.in_branch("out")


def test_a_predicate_of_another_name_is_another_predicate():
    """Whether both conditionals agree is not known: the node may not run."""
    text = NESTED.replace("out = Merge(outer, join)", "again = Identity(p)\n    other = Switch(x, again)\n    out = Merge(other, join)")
    assert endings(text).in_branch("join") and not endings(text).in_branch("out") and endings(text).done("join") == ("out",)


def loops():
    with user_graph(v2=False) as index:
        x = tf.placeholder(tf.float32, [], "x")
        p = tf.placeholder(tf.bool, [], "p")

        def body(i, v):
            inner = tf.while_loop(lambda j, u: j < 2, lambda j, u: (j + 1, tf.negative(u, name="deep")), [0, v])[1]
            return i + 1, tf.cond(p, lambda: tf.exp(inner, name="chosen"), lambda: inner)

        tf.identity(tf.while_loop(lambda i, v: i < 3, body, [0, x], name="loop")[1], name="out")
        tf.cond(p, lambda: tf.while_loop(lambda v: v < 3, lambda v: tf.add(v, 1, name="added"), [x]), lambda: x, name="maybe")
        return index()


def named(program, end):
    (found,) = (name for name in program.nodes if name.endswith("/" + end))
    return found


def test_nested_loops_are_done_at_the_exits_of_the_outer_one():
    program = loops()
    found = endings(program)
    exits = {n.name for n in program.nodes.values() if n.op == "Exit" and n.name.startswith("loop/") and n.name.count("/") == 1}
    assert exits and set(found.done(named(program, "deep"))) == set(found.done(named(program, "chosen"))) == exits
    assert all(found.done(name) == (name,) for name in exits)
    paths = frame_paths(program, program.topological())
    assert len(paths[named(program, "deep")]) == 2 and outer_frames(program, program.topological())[named(program, "deep")] == "loop/while_context"


def test_a_loop_inside_a_conditional_is_done_where_the_conditional_ends():
    program = loops()
    assert set(endings(program).done(named(program, "added"))) == {"maybe/Merge"}


def test_a_buffer_is_released_by_the_users_of_its_views():
    found = endings("""
        w = VariableV2() {shape: [2]}
        read = Identity(w)
        shape = Const() {value: [2, 1]}
        view = Reshape(read, shape)
        other = Squeeze(view)
        y = Neg(other)
        z = Exp(read)
        copy = Neg(y)
        wait = NoOp(^read)
    """)
    assert set(found.released("read")) == {"y", "z"} and found.released("y") == ("y",) and found.released("w") == ("w",)


def test_calls_that_are_given_variables_have_fences():
    with user_graph(v2=True) as index:
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        p = tf.placeholder(tf.bool, [], "p")

        def write():
            with tf.control_dependencies([w.assign_add(1.0)]):
                return tf.constant(1.0)

        tf.cond(p, write, lambda: 2.0, name="writes")
        tf.cond(p, lambda: 1.0, lambda: 2.0, name="pure")
        tf.while_loop(lambda i: i < 2.0, lambda i: i + w, [0.0], name="reads")
        whole = index()
    program = fenced(whole)
    assert set(program.nodes) - set(whole.nodes) == set(program.targets) == {"writes/epl_fence", "reads/epl_fence"}
    fence = program.nodes["reads/epl_fence"]
    assert fence.controls == ("reads",) and [s for s, _ in fence.inputs] == ["reads"] * len(fence.attr("T").list.type)
    found = endings(program)
    assert found.done("writes") == ("writes/epl_fence",) and found.done("pure") == ("pure",)
    assert fenced(parse(COND)).nodes.keys() == parse(COND).nodes.keys()
