"""Classify: phases, and how often a node exists."""

import pytest
import tensorflow.compat.v1 as tf

from epl.errors import ProgramError
from epl.ir.tags import GradientTag
from epl.passes.classify import Classify
from epl.planner.plan import FIRST, LAST
from tests.unit.graph_text import expect, fingerprint, parse
from tests.unit.machine import user_graph
from tests.unit.passes.steps import TRAIN, apply, task, training


def classify(program, job=None):
    return apply(Classify(), parse(program) if isinstance(program, str) else program, job or task(devices=2))


def phases(program, phase):
    return {n.name for n in program.nodes.values() if n.phase == phase}


def test_a_training_program():
    program = classify(training())
    expect(
        program,
        """
        x = Placeholder()  # FORWARD
        w = VarHandleOp()  # FORWARD
        read = ReadVariableOp(w)  # FORWARD
        y = Mul(x, read)  # FORWARD
        axes = Const()  # FORWARD
        loss = Mean(y, axes)  # FORWARD
        zero = Const()  # FORWARD
        one = Const()  # BACKWARD
        rows = Mean(x, zero)  # BACKWARD
        g = Mul(rows, one)  # BACKWARD
        rate = Const()  # FORWARD
        train = ResourceApplyGradientDescent(w, rate, g)  # APPLY
        fetches: loss:0
        targets: train
        feeds: x:0 -> x (divide)
        """,
        phases=True,
    )
    facts = program.facts
    assert facts.batch == {"x", "y", "loss", "rows", "g"}
    assert facts.gradients == {("g", 0): GradientTag(1, "w", "dense")}
    assert facts.variables_of == {"read": ("w",), "train": ("w",)} and facts.writes == {"train": ("w",)}
    assert not facts.shared and not facts.outputs and not facts.frames


def test_a_program_without_gradients_is_forward_and_left_as_it_is():
    program = training(fetches="loss:0", targets="")
    result = classify(program, task(parallel=False))
    assert phases(result, "FORWARD") == set(program.nodes) and not result.facts.batch and not result.facts.gradients
    assert fingerprint(result.replace(facts=None)) == fingerprint(program)


def test_variables_that_a_program_writes():
    facts = classify(training(fetches="", targets="init"), task(parallel=False)).facts
    assert facts.written(parse(TRAIN)) == ["w"]
    assert classify(training(targets=""), task(parallel=False)).facts.written(parse(TRAIN)) == []


def test_what_follows_a_gradient_by_a_control_edge_is_apply():
    program = classify(training("n = Const() {value: 1.0}\ncount = NoOp(^g, ^n)\nafter = Identity(loss, ^train)", targets="train, count, after"))
    assert phases(program, "APPLY") == {"train", "count", "after"}
    assert "count" not in program.facts.batch and "n" not in program.facts.batch


def test_only_the_tagged_output_of_a_node_starts_the_apply_phase():
    program = classify("""
        x = Placeholder() {shape: [2]}
        zero = Const() {value: 0}
        g = Split(zero, x) {num_split: 2}  # backward=1 raw:1=1/w
        one = Neg(g)
        two = Neg(g:1)
        feeds: x (divide)
    """)
    assert phases(program, "APPLY") == {"two"} and "one" in program.facts.batch


def test_a_gradient_on_the_way_to_another_one_is_not_apply():
    program = classify("""
        x = Placeholder() {shape: [2]}
        g1 = Neg(x)  # backward=1 raw=1/w
        g2 = Neg(g1)  # backward=1 raw=1/v
        g3 = Neg(x, ^g1)  # backward=1 raw=1/u
        group = NoOp(^g1)  # backward=1
        g4 = Neg(x, ^group)  # backward=1 raw=1/t
        end = AddN(g1, g2, g3, g4)
        feeds: x (divide)
    """)
    assert phases(program, "APPLY") == {"end"}


def test_other_updates_of_the_same_state_belong_to_the_apply_phase():
    """Adam decays its moments before the sparse gradient is added to them."""
    program = classify(training("""
        m = VarHandleOp() {shape: [2]}
        m/read = ReadVariableOp(m)
        decayed = Mul(m/read, rate)
        decay = AssignVariableOp(m, decayed)
        add = AssignAddVariableOp(m, g, ^decay)
        clip = AssignVariableOp(w, start)
    """, targets="train, add, clip"))  # fmt: skip
    assert phases(program, "APPLY") == {"train", "add", "decay", "clip"}


def test_state_that_the_forward_part_needs_stays_forward():
    extra = "tick = VarHandleOp() {shape: [2]}\nbump = AssignAddVariableOp(tick, start)"
    program = classify(training(extra, text=TRAIN.replace("Mul(x, read)", "Mul(x, read, ^bump)")))
    assert program.nodes["bump"].phase == "FORWARD" and "bump" not in program.facts.batch


DRAW = """
    i = IteratorV2() {output_types: [float], output_shapes: [[2]]}
    n = IteratorGetNext(i) {output_types: [float], output_shapes: [[2]]}
    z = Neg(n)
"""


@pytest.mark.parametrize("extra, batch", [
    ("shape = Const() {value: [2]}\nr = RandomUniform(shape) {dtype: float}\nz = Neg(r)", {"r", "z"}),
    (DRAW, {"n", "z"}),
    ("z = Neg(read)", set()),
    ("z = Identity(read, ^y)", set()),
    ("late = Identity(read, ^y)\nz = Mul(late, x)", {"late", "z"}),
    ("v = VarHandleOp() {shape: []}\nold = ReadVariableOp(v, ^y)\nnew = Add(old, rate)\nz = AssignVariableOp(v, new)", set()),
    ("v = VarHandleOp() {shape: []}\nz = AssignAddVariableOp(v, rate, ^y)", set()),
    ("v = VarHandleOp() {shape: []}\nz = AssignAddVariableOp(v, loss)", {"z"}),
    ("f = PlaceholderWithDefault(rate) {shape: []}\nz = Neg(f)", set()),
])  # fmt: skip
def test_multiplicity(extra, batch):
    program = classify(training(extra, targets="train, z"))
    assert program.facts.batch - {"x", "y", "loss", "rows", "g"} == batch


def test_a_value_fed_the_same_for_all_makes_no_batch():
    assert not classify(training(mode="same")).facts.batch
    assert "loss" in classify(training(mode="each")).facts.batch


def test_host_resources_and_what_sets_them_up_are_shared():
    program = classify(training("""
        t = HashTableV2() {key_dtype: string, value_dtype: float}
        k = Const() {value: ["a"]}
        v = Const() {value: [1.0]}
        setup = InitializeTableV2(t, k, v)
    """, targets="train, setup"))  # fmt: skip
    assert program.facts.shared == {"t", "setup"}


def test_summaries_are_outputs():
    program = classify(training("tag = Const() {value: \"loss\"}\ns = ScalarSummary(tag, loss)\nall = MergeSummary(s)", fetches="all:0"))
    assert program.facts.outputs == {"s", "all"} and not program.facts.outputs & program.facts.batch


def test_state_written_per_micro_batch_is_read_anew():
    program = classify(training("""
        m = VarHandleOp() {shape: [2]}
        old = ReadVariableOp(m)
        new = Add(old, rows)
        set = AssignVariableOp(m, new)
        twice = Add(old, old)
        late = ReadVariableOp(m, ^train)
    """, targets="train, set, twice, late"))  # fmt: skip
    assert {"old", "new", "set", "twice"} <= program.facts.batch
    assert "late" not in program.facts.batch and program.nodes["late"].phase == "APPLY"


LOOP = """
    one = Const() {value: 1.0}
    enter = Enter(one) {frame_name: frame}
    merge = Merge(enter, next)
    limit = Const(^merge) {value: 3.0}
    less = Less(merge, limit)
    cond = LoopCond(less)
    switch = Switch(merge, cond)
    leave = Exit(switch)
    add = Add(switch:1, %s)
    next = NextIteration(add)
    after = Neg(leave)
    x = Placeholder() {shape: []}
    xin = Enter(x) {frame_name: frame, is_constant: true}
    feeds: x (divide)
"""


def test_a_loop_is_cloned_as_a_whole_or_not_at_all():
    batch = classify(LOOP % "xin").facts.batch
    assert {"enter", "merge", "limit", "less", "cond", "switch", "leave", "add", "next", "after"} <= batch and "one" not in batch
    alone = classify((LOOP % "limit").replace(", is_constant: true", "").replace("xin = Enter(x) {frame_name: frame}", "xin = Neg(x)"))
    assert alone.facts.batch == {"x", "xin"}
    assert alone.facts.frames["limit"] == alone.facts.frames["leave"] == "frame" and "after" not in alone.facts.frames


def test_seeds_of_unequal_batches_are_made_per_instance():
    text = training().replace(ragged=[("x", 0)])
    assert "one" in classify(text).facts.batch
    assert "one" not in classify(training()).facts.batch


def test_gradients_are_aggregated_where_the_plan_says():
    extra = "clipped = Neg(g)  # apply=2/w"
    text = TRAIN.replace("rate, g)", "rate, clipped)")
    assert set(classify(training(extra, text=text)).facts.gradients) == {("g", 0)}
    at_apply = classify(training(extra, text=text), task(devices=2, aggregate_at="apply"))
    assert set(at_apply.facts.gradients) == {("clipped", 0)} and at_apply.nodes["clipped"].phase == "FORWARD"
    assert set(classify(training(), task(devices=2, aggregate_at="apply")).facts.gradients) == {("g", 0)}, "nothing was given to an optimizer"


def test_updates_whose_gradients_were_not_seen_are_refused():
    text = TRAIN.replace(" raw=1/w", "")
    error = "Node 'train' updates a variable, but EPL did not see the gradients it applies being built. Call epl.init\\(\\) before"
    with pytest.raises(ProgramError, match=error):
        classify(training(text=text))
    classify(training(text=text), task())  # one replica, one micro-batch: nothing to aggregate


SECOND = """
    v = VarHandleOp() {shape: [2]}
    again = ReadVariableOp(w, ^train)
    v/read = ReadVariableOp(v)
    h = Mul(again, v/read)
    g2 = Mul(rows, h, ^train)  # backward=2 raw=2/v
    train2 = ResourceApplyGradientDescent(v, rate, g2)
"""


def test_a_gradient_that_waits_for_an_update_does_not_contain_it():
    program = classify(training(SECOND, targets="train2"))
    assert phases(program, "APPLY") == {"train", "train2"}
    assert phases(program, "BACKWARD") == {"one", "rows", "g", "g2"}
    assert set(program.facts.gradients) == {("g", 0), ("g2", 0)}


@pytest.mark.parametrize("part", [FIRST, LAST])
def test_no_update_is_in_the_middle_of_a_step_of_several_runs(part):
    job = task(m=2, in_run=False, part=part)
    with pytest.raises(ProgramError, match="Node 'again' reads a variable after its update, and a later gradient of the same program depends on it"):
        classify(training(SECOND, targets="train2"), job)
    classify(training(SECOND.replace("(w, ^train)", "(w)"), targets="train2"), job)  # only waits


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_are_given_variables_get_a_fence(parallel):
    with user_graph(v2=True) as index:
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        p = tf.placeholder(tf.bool, [], "p")
        tf.cond(p, lambda: w + 1.0, lambda: 2.0, name="cond")
        tf.cond(p, lambda: 1.0, lambda: 2.0, name="pure")
        whole = index()
    program = classify(whole.replace(fetches=[("cond", 0), ("pure", 0)]), task(parallel=parallel))
    fences = [n for n in program.nodes.values() if n.name.endswith("/epl_fence")]
    assert [repr(n) for n in fences] == (["cond/epl_fence = IdentityN(cond, ^cond)"] if parallel else [])
    assert program.targets == tuple(n.name for n in fences)


@pytest.mark.parametrize("parallel", [True, False])
def test_updates_inside_functions_are_refused_with_several_ranks(parallel):
    with user_graph(v2=True) as index:
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())

        def train():
            with tf.control_dependencies([tf.train.AdamOptimizer().minimize(tf.square(w))]):
                return tf.constant(1.0)

        tf.cond(tf.placeholder(tf.bool, [], "p"), train, lambda: 0.0, name="cond")
        whole = index().replace(fetches=[("cond", 0)])
    with pytest.raises(ProgramError, match="Node 'cond' updates variables inside a function, where EPL does not see the gradients: every process"):
        classify(whole, task(ranks=2, parallel=parallel))
    classify(whole, task(devices=2, parallel=False))
