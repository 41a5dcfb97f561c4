"""Clone: the local instances of all nodes and the edges between them."""

import pytest
from hypothesis import given as given_values
from hypothesis import settings
from hypothesis import strategies as st

from epl.errors import ProgramError
from epl.passes.clone import Clone
from epl.passes.instances import derived_seed, instance_name
from tests.unit.graph_text import expect, subset
from tests.unit.passes.steps import TRAIN, task, training, upto

DRAW = """
    i = %s {output_types: [float], output_shapes: [[?]]}
    n = IteratorGetNext(i) {output_types: [float], output_shapes: [[?]]}
"""


def clone(program, job=None):
    return upto(Clone, program, job or task(devices=2, m=2))


def part(program, *words):
    return subset(program, [n for n in program.nodes if any(w in n for w in words)])


def test_two_replicas_of_two_micro_batches():
    expect(
        clone(training(fetches="loss:0, y:0, g:0")),
        """
        x/epl_fed = Placeholder() @/device:CPU:0
        x/epl_axis = Const() @/device:CPU:0
        x/epl_split = Split(x/epl_axis, x/epl_fed) {num_split: 4} @/device:CPU:0
        x = Identity(x/epl_split) @/device:CPU:0
        EPL_MICRO_BATCH_1/x = Identity(x/epl_split:1) @/device:CPU:0
        EPL_REPLICA_1/x = Identity(x/epl_split:2) @/device:CPU:1
        EPL_REPLICA_1/EPL_MICRO_BATCH_1/x = Identity(x/epl_split:3) @/device:CPU:1
        w = VarHandleOp() {shared_name: w} @/device:CPU:0
        EPL_REPLICA_1/w = VarHandleOp() {shared_name: EPL_REPLICA_1/w} @/device:CPU:1
        read = ReadVariableOp(w) @/device:CPU:0
        EPL_REPLICA_1/read = ReadVariableOp(EPL_REPLICA_1/w) @/device:CPU:1
        y = Mul(x, read) @/device:CPU:0
        EPL_MICRO_BATCH_1/y = Mul(EPL_MICRO_BATCH_1/x, read) @/device:CPU:0
        EPL_REPLICA_1/y = Mul(EPL_REPLICA_1/x, EPL_REPLICA_1/read) @/device:CPU:1
        EPL_REPLICA_1/EPL_MICRO_BATCH_1/y = Mul(EPL_REPLICA_1/EPL_MICRO_BATCH_1/x, EPL_REPLICA_1/read) @/device:CPU:1
        axes = Const() @/device:CPU:0
        EPL_REPLICA_1/axes = Const() @/device:CPU:1
        loss = Mean(y, axes) @/device:CPU:0
        EPL_MICRO_BATCH_1/loss = Mean(EPL_MICRO_BATCH_1/y, axes) @/device:CPU:0
        EPL_REPLICA_1/loss = Mean(EPL_REPLICA_1/y, EPL_REPLICA_1/axes) @/device:CPU:1
        EPL_REPLICA_1/EPL_MICRO_BATCH_1/loss = Mean(EPL_REPLICA_1/EPL_MICRO_BATCH_1/y, EPL_REPLICA_1/axes) @/device:CPU:1
        zero = Const() @/device:CPU:0
        EPL_REPLICA_1/zero = Const() @/device:CPU:1
        one = Const() @/device:CPU:0
        EPL_REPLICA_1/one = Const() @/device:CPU:1
        rows = Mean(x, zero) @/device:CPU:0
        EPL_MICRO_BATCH_1/rows = Mean(EPL_MICRO_BATCH_1/x, zero) @/device:CPU:0
        EPL_REPLICA_1/rows = Mean(EPL_REPLICA_1/x, EPL_REPLICA_1/zero) @/device:CPU:1
        EPL_REPLICA_1/EPL_MICRO_BATCH_1/rows = Mean(EPL_REPLICA_1/EPL_MICRO_BATCH_1/x, EPL_REPLICA_1/zero) @/device:CPU:1
        g = Mul(rows, one) @/device:CPU:0
        EPL_MICRO_BATCH_1/g = Mul(EPL_MICRO_BATCH_1/rows, one) @/device:CPU:0
        EPL_REPLICA_1/g = Mul(EPL_REPLICA_1/rows, EPL_REPLICA_1/one) @/device:CPU:1
        EPL_REPLICA_1/EPL_MICRO_BATCH_1/g = Mul(EPL_REPLICA_1/EPL_MICRO_BATCH_1/rows, EPL_REPLICA_1/one) @/device:CPU:1
        rate = Const() @/device:CPU:0
        EPL_REPLICA_1/rate = Const() @/device:CPU:1
        train = ResourceApplyGradientDescent(w, rate, epl_gradient/g) @/device:CPU:0
        EPL_REPLICA_1/train = ResourceApplyGradientDescent(EPL_REPLICA_1/w, EPL_REPLICA_1/rate, epl_gradient/g:1) @/device:CPU:1
        epl_gradient/g = EplAggregate(g, EPL_MICRO_BATCH_1/g, EPL_REPLICA_1/g, EPL_REPLICA_1/EPL_MICRO_BATCH_1/g)
        epl_merge/loss/of_0 = EplMerge(loss, EPL_MICRO_BATCH_1/loss) {rule: mean, across: False} @/device:CPU:0
        epl_merge/y/of_0 = EplMerge(y, EPL_MICRO_BATCH_1/y) {rule: concat, across: False} @/device:CPU:0
        fetches: epl_merge/loss/of_0:0, epl_merge/y/of_0:0, epl_gradient/g:0
        targets: train, EPL_REPLICA_1/train
        feeds: x:0 -> x/epl_fed (divide)
        """,
        "shared_name", "rule", "across", "num_split",
        devices=True,
    )  # fmt: skip


def test_one_replica_of_one_micro_batch_keeps_all_names():
    program = clone(training(), task())
    assert set(program.nodes) == set(training().nodes) | {"epl_gradient/g"}
    assert (program.fetches, program.targets, program.feeds) == (training().fetches, training().targets, training().feeds)


def test_a_program_on_one_replica_is_not_cloned():
    program = clone(training(mode="same", targets="init"), task(devices=3, m=2, parallel=False))
    assert set(program.nodes) == set(training(mode="same", targets="init").nodes)
    assert {n.device for n in program.nodes.values()} == {"/device:CPU:0"}


def test_an_unclassified_program_is_refused():
    with pytest.raises(ProgramError, match="The clone pass needs a classified program"):
        Clone()(training(), task())


def test_a_value_for_each_is_not_split():
    expect(
        part(clone(training(mode="each"), task(m=2)), "x"),
        """
        x/epl_fed = Placeholder()
        x = Identity(x/epl_fed)
        EPL_MICRO_BATCH_1/x = Identity(x/epl_fed)
        axes = Const()
        """,
    )


def test_a_value_that_is_the_same_for_all_exists_once():
    program = clone(training(mode="same"))
    assert [n for n in program.nodes if n.endswith("x")] == ["x"]
    assert program.nodes["EPL_REPLICA_1/y"].inputs[0] == ("x", 0)


@pytest.mark.parametrize("mode, node", [("divide", "x/epl_fed"), ("each", "x/epl_fed"), ("same", "x")])
def test_a_fetch_of_a_fed_tensor_is_the_whole_value(mode, node):
    """Through an identity: TensorFlow's callables refuse to fetch what they feed."""
    for job, source in ((task(devices=2, m=2), node), (task(), "x")):
        program = clone(training(mode=mode, fetches="x:0"), job)
        assert program.fetches == (("epl_fed/x", 0),) and repr(program.nodes["epl_fed/x"]).startswith("epl_fed/x = Identity(%s)" % source)
    local = clone(training(mode="same", fetches="x:0", targets=""), task(parallel=False))
    assert local.nodes[local.fetches[0][0]].op == "Identity"


def test_clones_know_where_they_belong():
    node = clone(training()).nodes["EPL_REPLICA_1/EPL_MICRO_BATCH_1/y"]
    assert (node.origin, node.replica, node.micro_batch) == ("y", 1, 1)
    node = clone(training()).nodes["EPL_REPLICA_1/read"]
    assert (node.origin, node.replica, node.micro_batch) == ("read", 1, None)


def test_stages_have_devices_of_their_own():
    text = TRAIN.replace("w = VarHandleOp() {shape: [2], shared_name: w}", "w = VarHandleOp() {shape: [2]}  # taskgraph=1")
    text = text.replace("y = Mul(x, read)", "y = Mul(x, read)  # taskgraph=1").replace("{shape: [4, 2]}", "{shape: [4, 2]}  # taskgraph=0")
    program = clone(training(text=text), task(m=2, stages=(("/device:CPU:0", "/device:CPU:1"),)))
    devices = {name: program.nodes[name].device[-1] for name in ("x", "w", "read", "y", "EPL_MICRO_BATCH_1/y", "rows", "train", "x/epl_fed")}
    assert devices == {"x": "0", "w": "1", "read": "1", "y": "1", "EPL_MICRO_BATCH_1/y": "1", "rows": "1", "train": "1", "x/epl_fed": "0"}


# Random numbers, loops and resources.


def seeds(program):
    return {n.name: (n.int_attr("seed") or 0, n.int_attr("seed2") or 0) for n in program.nodes.values() if n.op == "RandomUniform"}


RANDOM = "shape = Const() {value: [2]}\nr = RandomUniform(shape) {dtype: float, seed: %d, seed2: %d}\nz = Neg(r)"


def test_clones_of_a_seeded_op_draw_different_numbers():
    found = seeds(clone(training(RANDOM % (7, 9), targets="train, z")))
    assert found["r"] == (7, 9) and len(set(found.values())) == 4 and {s for s, _ in found.values()} == {7}


def test_an_op_without_seed_stays_without():
    assert set(seeds(clone(training(RANDOM % (0, 0), targets="train, z"))).values()) == {(0, 0)}


def test_seeds_do_not_depend_on_how_clones_are_spread():
    whole = list(seeds(clone(training(RANDOM % (1, 0), targets="train, z"), task(devices=2, m=2))).values())
    ranks = [list(seeds(clone(training(RANDOM % (1, 0), targets="train, z"), task(m=2, ranks=2, rank=r))).values()) for r in range(2)]
    assert ranks[0] + ranks[1] == whole


@given_values(st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(0, 10**6), min_size=2, max_size=20, unique=True))
@settings(max_examples=200, deadline=None)
def test_derived_seeds_are_distinct_and_fit(seed, indices):
    derived = [derived_seed(seed, i) for i in indices]
    assert len(set(derived)) == len(indices)
    assert derived_seed(seed, 0) == seed and all(0 <= d < 2**63 for d, i in zip(derived, indices) if i)


WHILE = """
    enter = Enter(%s) {frame_name: frame}
    merge = Merge(enter, next)
    limit = Const(^merge) {value: [9.0, 9.0]}
    less = Less(merge, limit)
    all = Const(^merge) {value: [0]}
    any = All(less, all)
    cond = LoopCond(any)
    switch = Switch(merge, cond)
    leave = Exit(switch)
    double = Add(switch:1, switch:1)
    next = NextIteration(double)
"""


@pytest.mark.parametrize("start", ["rows", "read"])
def test_loops_run_in_frames_of_their_own(start):
    """Also a loop that exists once per replica: in one graph two loops may not share a frame."""
    program = clone(training(WHILE % start, fetches="leave:0"))
    frames = {n.name: n.str_attr("frame_name") for n in program.nodes.values() if n.op == "Enter"}
    assert len(set(frames.values())) == len(frames) == (4 if start == "rows" else 2)
    assert frames["EPL_REPLICA_1/enter"] == "EPL_REPLICA_1/frame"
    for node in program.nodes.values():
        if node.op == "Merge":
            assert [s[: len(node.name) - len("merge")] for s, _ in node.inputs] == [node.name[: -len("merge")]] * 2


def test_temporary_variables_have_names_of_their_own():
    text = "t = TemporaryVariable() {shape: [2], var_name: t}\nset = Assign(t, rows)\nend = DestroyTemporaryVariable(set) {var_name: t}"
    program = clone(training(text, fetches="end:0"))
    for name in ("t", "end"):
        names = {n.str_attr("var_name") for n in program.nodes.values() if n.origin == name and n.op != "EplMerge"}
        assert names == {"t", "EPL_MICRO_BATCH_1/t", "EPL_REPLICA_1/t", "EPL_REPLICA_1/EPL_MICRO_BATCH_1/t"}


def test_draws_of_one_input_come_in_order():
    expect(
        part(clone(DRAW % "IteratorV2()" + "z = Neg(n)\ntargets: z"), "i", "n"),
        """
        i = IteratorV2() {shared_name: i}
        n = IteratorGetNext(i)
        EPL_MICRO_BATCH_1/n = IteratorGetNext(i, ^n)
        EPL_REPLICA_1/n = IteratorGetNext(i, ^EPL_MICRO_BATCH_1/n)
        EPL_REPLICA_1/EPL_MICRO_BATCH_1/n = IteratorGetNext(i, ^EPL_REPLICA_1/n)
        """,
        "shared_name",
    )


def test_users_of_a_host_resource_are_where_it_is():
    program = clone(DRAW % "IteratorV2()" + "z = Neg(n)\ntargets: z")
    devices = {n.name: n.device for n in program.nodes.values()}
    assert devices["EPL_REPLICA_1/n"] == "/device:CPU:0" and devices["EPL_REPLICA_1/z"] == "/device:CPU:1"


def test_a_named_iterator_keeps_its_name_and_one_that_can_not_have_one_has_none():
    named = clone(DRAW.replace("[[?]]", "[[?]], shared_name: mine", 1) % "IteratorV2()" + "targets: n")
    assert named.nodes["i"].str_attr("shared_name") == "mine"
    anonymous = clone(DRAW % "AnonymousIteratorV3()" + "targets: n")
    assert anonymous.nodes["i"].attr("shared_name") is None


def test_writes_of_micro_batches_come_in_order():
    program = clone(training("""
        m = VarHandleOp() {shape: [2]}
        old = ReadVariableOp(m)
        new = Add(old, rows)
        set = AssignVariableOp(m, new)
        look = ReadVariableOp(m)
    """, fetches="", targets="set, look"), task(m=3))  # fmt: skip
    expect(
        part(program, "old", "set", "look"),
        """
        old = ReadVariableOp(m)
        EPL_MICRO_BATCH_1/old = ReadVariableOp(m, ^set)
        EPL_MICRO_BATCH_2/old = ReadVariableOp(m, ^EPL_MICRO_BATCH_1/set)
        set = AssignVariableOp(m, new)
        EPL_MICRO_BATCH_1/set = AssignVariableOp(m, EPL_MICRO_BATCH_1/new, ^set, ^old, ^look)
        EPL_MICRO_BATCH_2/set = AssignVariableOp(m, EPL_MICRO_BATCH_2/new, ^EPL_MICRO_BATCH_1/set, ^EPL_MICRO_BATCH_1/old, ^EPL_MICRO_BATCH_1/look)
        look = ReadVariableOp(m)
        EPL_MICRO_BATCH_1/look = ReadVariableOp(m, ^set)
        EPL_MICRO_BATCH_2/look = ReadVariableOp(m, ^EPL_MICRO_BATCH_1/set)
        """,
    )


COND = """
    p = Placeholder() {dtype: bool, shape: []}
    m = VarHandleOp() {shape: [2]}
    pivot = Switch(p, p)
    handle = Switch(m, p)
    value = Switch(rows, p)
    set = AssignAddVariableOp(handle:1, value:1)
    yes = Identity(value:1, ^set)
    no = Identity(value)
    out = Merge(no, yes)
"""


def test_nothing_waits_inside_a_branch_that_may_not_be_taken():
    program = clone(training(COND, fetches="out:0"), task(m=2))
    inside = {"set", "yes", "no", "value", "handle"}
    for node in program.nodes.values():
        assert not inside & set(node.controls) or node.origin == "yes", node
    assert "out" in program.nodes["EPL_MICRO_BATCH_1/set"].controls


def test_names_of_instances():
    assert [instance_name("a/b", r, m) for r, m in ((0, None), (0, 0), (1, None), (0, 2), (1, 2))] == [
        "a/b", "a/b", "EPL_REPLICA_1/a/b", "EPL_MICRO_BATCH_2/a/b", "EPL_REPLICA_1/EPL_MICRO_BATCH_2/a/b",
    ]  # fmt: skip
