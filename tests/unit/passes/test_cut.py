"""Cut: what crosses between the processes that hold the stages of one replica."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.errors import ProgramError
from epl.passes.agree import GATE
from epl.passes.clone import Clone
from epl.passes.communicate import Communicate
from epl.passes.cut import RECEIVE, SEND, SHARE, TRANSFERS
from epl.passes.effects import Guard
from epl.passes.outputs import Outputs
from epl.planner.plan import WHOLE, Plan, Task
from tests.unit.machine import user_graph
from tests.unit.passes.steps import DRAWN, TRAIN, upto
from tests.unit.random_programs import Layout, Ranks, taskgraph


def on_ranks(rows, m=1, parallel=True, key="key", **plan):
    """The task of each rank; `rows` are the ranks of the stages of each replica."""
    ranks = max(rank for row in rows for rank in row) + 1
    layout = Plan(ranks=ranks, devices_per_rank=0, micro_batches=m, accumulate_in_run=True, places=tuple(rows), **plan)
    tasks = []
    for rank in range(ranks):
        own, names, stages = layout.held(rank), iter("/device:CPU:%d" % d for d in range(99)), []
        for g in own:
            stages.append(tuple(next(names) if holder == rank else "" for holder in rows[g]))
        devices = tuple(next(name for name in row if name) for row in stages)
        task = Task(plan=layout, rank=rank, devices=devices, stages=tuple(stages), replicas=own, part=WHOLE, key=key)
        tasks.append(task if parallel else task.alone())
    return tasks


def cloned(text, rows=((0, 1),), last=Clone, **options):
    """The programs of all ranks after a pass."""
    return [upto(last, text, task) for task in on_ranks(rows, **options)]


def transfers(program, op=None):
    """Label -> transfer."""
    return {n.name.partition("/")[2]: n for n in program.nodes.values() if (n.op == op if op else n.op in TRANSFERS)}


def both_sides(programs):
    """Check that all ranks of each transfer have it and describe it alike; returns the labels."""
    found = {}
    for rank, program in enumerate(programs):
        assert program.groups == programs[0].groups
        for label, node in transfers(program).items():
            assert rank in node.info["ranks"]
            found.setdefault(label, {})[rank] = node
    for label, sides in found.items():
        facts = {(n.info["ranks"], n.info["dtype"], n.info["shape"], n.info["root"]) for n in sides.values()}
        assert len(facts) == 1 and tuple(sides) == facts.copy().pop()[0], label
        ranks, _, _, root = facts.pop()
        assert len(ranks) == len(programs) or ranks in programs[0].groups
        kinds = {rank: node.op for rank, node in sides.items()}
        assert set(kinds.values()) == {SHARE} or kinds == {root: SEND, sum(ranks) - root: RECEIVE}, label
        for rank, node in sides.items():
            assert len(node.inputs) == (rank == root)
    return sorted(found)


TWO = """
    x = Placeholder() {shape: [?, 2]}  # taskgraph=0
    w = VarHandleOp() {shape: [2], shared_name: w}  # taskgraph=0
    read = ReadVariableOp(w)  # taskgraph=0
    h = Mul(x, read)  # taskgraph=0
    unused = Neg(h)  # taskgraph=0
    y = Mul(h, read)  # taskgraph=1
    z = AddV2(h, y)  # taskgraph=1
    out = Mul(z, read)  # taskgraph=1
    feeds: x (divide)
    targets: unused, out
"""
H, READ = "n3_0", "n2_0"
"""Labels are positions in the program."""


def test_a_tensor_crosses_once_however_many_use_it():
    programs = cloned(TWO, m=2)
    assert both_sides(programs) == [READ + ".r0.to1", H + ".r0.m0.to1", H + ".r0.m1.to1"]
    assert {n.op for n in transfers(programs[0]).values()} == {SEND}
    receive = "epl_receive/%s.r0.m1.to1" % H
    assert programs[1].nodes["EPL_MICRO_BATCH_1/y"].inputs[0] == programs[1].nodes["EPL_MICRO_BATCH_1/z"].inputs[0] == (receive, 0)
    assert "unused" in programs[0].nodes and not [n for n in programs[1].nodes.values() if n.origin in ("unused", "h") and n.op not in TRANSFERS]


def test_transfers_stay_though_nobody_here_uses_them():
    for program in cloned(TWO):
        assert {n.name for n in transfers(program).values()} <= set(program.targets)


@pytest.mark.parametrize(
    "rows, m, count",
    [
        ([(0, 1), (2, 3)], 2, 6),
        ([(0, 1), (0, 1)], 1, 4),
        ([(0, 0), (0, 1), (1, 1)], 2, 3),  # two ranks with three devices each
        ([(0, 1), (1, 0)], 1, 4),
        ([(0, 0), (1, 1), (0, 1)], 1, 2),
    ],
)
def test_whole_and_partial_replicas(rows, m, count):
    assert len(both_sides(cloned(TWO, rows, m=m))) == count


@pytest.mark.parametrize("rows", [[(0, 1)], [(0, 1), (1, 0)], [(0, 0), (0, 1), (1, 1)]], ids=str)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_fetch_is_a_value_of_every_rank(rows, parallel):
    text = TWO.replace("targets: unused, out", "fetches: h, out, read")
    programs = cloned(text, rows, parallel=parallel)
    both_sides(programs)
    assert all(len(p.fetches) == 3 and all(s in p.nodes for s, _ in p.fetches) for p in programs)
    if rows == [(0, 1)]:
        assert len(transfers(programs[0], SHARE)) == 3


def test_the_replica_that_a_rank_holds_as_a_whole_needs_no_share():
    programs = cloned(TWO.replace("targets: unused, out", "fetches: out"), [(0, 0), (0, 1), (1, 1)])
    assert not any(transfers(p, SHARE) for p in programs)


UNSEEN = [(0, 1), (0, 2), (1, 2)]
"""No process shows the values of the last replica."""

MEAN = TWO.replace("targets: unused, out", "axes = Const() {value: [0, 1]}\n    mean = Mean(%s, axes)  # taskgraph=%d%s\n    fetches: mean\n")


def all_reduces(programs):
    return [[n.name for n in p.nodes.values() if n.op == "EplAllReduce"] for p in programs]


def test_what_only_leads_to_a_fetch_travels_only_where_it_is_shown():
    text = MEAN % ("h", 1, "") + "targets: unused"
    labels = both_sides(cloned(text, UNSEEN))
    assert {H + ".r0.m0.to1", H + ".r1.m0.to2"} < set(labels) and not [label for label in labels if ".r2." in label]
    # A mean of all replicas is everybody's.
    text = text.replace("taskgraph=1\n    fetches", "taskgraph=1 collection=global_mean_objects\n    fetches")
    assert {H + ".r0.m0.to1", H + ".r1.m0.to2", H + ".r2.m0.to2"} < set(both_sides(cloned(text, UNSEEN)))


def test_all_that_hold_a_stage_take_part_in_a_mean_over_replicas():
    programs = cloned(MEAN % ("h", 0, " collection=global_mean_objects"), UNSEEN, last=Outputs)
    both_sides(programs)
    found = all_reduces(programs)
    assert found[0] == found[1] and len(found[0]) == 1 and not found[2], "rank 1 has the stage in the last replica only"
    text = MEAN % ("h", 0, "") + 'tag = Const() {value: "name"}\nsummary = ScalarSummary(tag, mean)'
    programs = cloned(text.replace("fetches: mean", "fetches: summary"), UNSEEN, last=Outputs)
    both_sides(programs)
    found = all_reduces(programs)
    assert found[0] == found[1] and len(found[0]) == 1 and not found[2]


def test_labels_do_not_depend_on_names():
    renamed = TWO.replace("read", "scope/r").replace(" h = ", " scope/other = ").replace("(h", "(scope/other")
    assert both_sides(cloned(TWO)) == both_sides(cloned(renamed))


def hvd(program):
    return {n.name: n.op for n in program.nodes.values() if n.op.startswith("Horovod")}


@pytest.mark.parametrize(
    "shape, told", [("[3, 2]", False), ("[?, 2]", False), ("[2, ?]", False), ("[?, ?]", True), ("?", True), ("[]", False), ("[?, 0]", True)]
)
def test_a_shape_travels_when_more_than_one_dimension_is_unknown(shape, told):
    text = "x = Placeholder() {shape: %s}  # taskgraph=0\nh = Neg(x)  # taskgraph=0\ny = Neg(h)  # taskgraph=1\nfeeds: x\ntargets: y" % shape
    for program in cloned(text, last=Communicate):
        assert len(hvd(program)) == 1 + told and set(hvd(program).values()) == {"HorovodAlltoall"}
        assert any(name.endswith(".shape") for name in hvd(program)) == told


DTYPES = "float16 float32 float64 bfloat16 int8 uint8 int16 uint16 int32 int64 bool".split()


SHAPES = ((3, 2), (None, 2), (None, None), None)
# Types and shapes are independent: one shape is enough for most types.
SENT = [(dtype, (None, 2)) for dtype in DTYPES if dtype not in ("float32", "bfloat16", "bool")]
SENT += [(dtype, shape) for dtype in ("float32", "bfloat16", "bool") for shape in SHAPES]
SENT += [(dtype, (None, 2)) for dtype in ("uint32", "uint64", "complex64")] + [("complex128", shape) for shape in SHAPES]


@pytest.mark.parametrize("dtype, shape", SENT, ids=str)
def test_values_of_all_types_and_shapes_arrive(dtype, shape):
    with user_graph() as index:
        x = tf.placeholder(tf.float32, shape, "x")
        with taskgraph(0):
            h = tf.identity(tf.cast(x * 3, dtype), name="h")
        with taskgraph(1):
            tf.identity(tf.cast(tf.identity(h), tf.float32), name="y")
        whole = index()
    machine = Ranks(whole, Layout(2, 1), 2)
    value = np.array([[0, 1], [2, 3], [4, 5]], np.float32)
    wanted = value * 3 if dtype != "bool" else value != 0
    for fetched in machine.run(("y:0", "h:0"), {"x:0": value}):
        np.testing.assert_array_equal(fetched[0], wanted)
        assert fetched[1].dtype.name == dtype
        np.testing.assert_array_equal(fetched[1].astype(np.complex128), wanted)


FULL = {
    "uint32": [0, 2**31, 2**32 - 1],
    "uint64": [2**63, 2**64 - 1, 1],
    "complex64": [1 + 2j, -3e30j, 1e-30],
    "complex128": [1 + 2j, -3e300j, 1e-300],
}


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("scalar", [False, True])
def test_all_bits_of_what_travels_as_another_type_arrive(dtype, scalar):
    value = np.array(FULL[dtype], dtype)[0 if scalar else slice(None)]
    with user_graph() as index:
        x = tf.placeholder(dtype, value.shape, "x")
        with taskgraph(0):
            h = tf.identity(x, name="h")
        with taskgraph(1):
            tf.stack([h, tf.constant(value)], name="y")
        whole = index()
    for made, twice in Ranks(whole, Layout(2, 1), 2).run(("h:0", "y:0"), {"x:0": value}):
        assert made.dtype == twice.dtype == value.dtype and made.shape == value.shape
        assert made.tolist() == value.tolist() and twice.tolist() == [value.tolist()] * 2


QUANTISED = {"qint8": tf.int8, "quint8": tf.uint8, "qint16": tf.int16, "quint16": tf.uint16, "qint32": tf.int32}


@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised_values_arrive(dtype):
    plain = QUANTISED[dtype]
    with user_graph() as index:
        x = tf.placeholder(plain, [None], "x")
        with taskgraph(0):
            h = tf.bitcast(x, tf.as_dtype(dtype), name="h")
            fixed = tf.bitcast(tf.constant([5, 7], plain), tf.as_dtype(dtype), name="fixed")
        with taskgraph(1):
            tf.concat([tf.bitcast(h, plain), tf.bitcast(fixed, plain)], 0, name="y")
        whole = index()
    value = np.array([plain.min, 0, plain.max], plain.as_numpy_dtype)
    for (fetched,) in Ranks(whole, Layout(2, 1), 2).run(("y:0",), {"x:0": value}):
        assert fetched.tolist() == value.tolist() + [5, 7]


def test_what_does_not_travel_is_refused():
    text = "x = Placeholder() {dtype: string, shape: [?]}  # taskgraph=0\nh = Identity(x)  # taskgraph=0\ny = Identity(h)  # taskgraph=1\nfeeds: x\n"
    with pytest.raises(ProgramError, match="'h' of type string is made in taskgraph 0 and used by node 'y' in taskgraph 1.*strings do not travel"):
        cloned(text + "targets: y")
    with pytest.raises(ProgramError, match="'h' of type string is made in .* and fetched, which gives it to every process .*: strings do not"):
        cloned(text + "fetches: h")
    text = text.replace("string", "float8_e5m2")
    with pytest.raises(ProgramError, match="'h' of type float8_e5m2 is made .* and used by node 'y' in taskgraph 1.*Cast it to another type"):
        cloned(text + "targets: y")
    text = """
        s = StackV2(size) {elem_type: float}  # taskgraph=0
        size = Const() {value: 3}
        h = Identity(s)  # taskgraph=0
        f = Const() {value: 1.0}
        y = StackPushV2(h, f)  # taskgraph=1
        targets: y
    """
    try:
        programs = cloned(text)
    except ProgramError as error:
        assert "resource can't leave its process" in str(error)
    else:
        assert not any(transfers(p) for p in programs)  # it went where its state is


CONTROLS = """
    a = VarHandleOp() {shape: [], shared_name: a}  # taskgraph=0
    b = VarHandleOp() {shape: [], shared_name: b}  # taskgraph=1
    one = Const() {value: 1.0}
    first = AssignVariableOp(a, one)  # taskgraph=0
    second = AssignVariableOp(b, one, ^first)  # taskgraph=1
    third = AssignAddVariableOp(a, one, ^second)  # taskgraph=0
    targets: third
"""


def test_control_edges_keep_the_order_within_a_rank():
    first, second = cloned(CONTROLS, parallel=False)
    assert "first" in first.nodes["third"].controls and "second" not in first.nodes
    assert not {"first", "third"} & set(second.nodes["second"].controls) and not {"first", "third"} & set(second.nodes)
    # `second` must run though `third`, which asked for it, is elsewhere.
    assert "second" in second.targets and not any(transfers(p) for p in (first, second))


def test_summaries_show_the_value_of_every_rank():
    text = TWO.replace("targets: unused, out", 'tag = Const() {value: "name"}\n    axes = Const() {value: [0, 1]}\n    mean = Mean(out, axes)')
    programs = cloned(text + "\nsummary = ScalarSummary(tag, mean)\nfetches: summary")
    both_sides(programs)
    for program in programs:
        assert "summary" in program.nodes and len(transfers(program, SHARE)) == 1


def test_what_belongs_to_no_stage_is_on_every_rank():
    text = TWO.replace("targets: unused, out", "c = Const() {value: 2.0}\nd = Neg(c)\n")
    text += "u = Mul(h, d)  # taskgraph=0\nv = Mul(out, d)  # taskgraph=1\n"
    for program in cloned(text + "targets: u, v"):
        assert {"c", "d"} <= set(program.nodes)
        assert not [label for label in transfers(program) if label.startswith(("n8", "n9"))]


def in_two_stages(text):
    """The training programs of `steps`, with the weights in a second stage."""
    text = text.replace("shared_name: w}", "shared_name: w}  # taskgraph=1").replace("Mean(x, zero)", "Mean(h, zero)")
    return text.replace("y = Mul(x, read)", "h = Neg(x)  # taskgraph=0\n    y = Mul(h, read)  # taskgraph=1")


def test_nothing_travels_before_all_have_data():
    text = in_two_stages(DRAWN)
    programs = cloned(text + "targets: train", last=Guard, m=2)
    both_sides(programs)
    for program in programs:
        assert len(transfers(program)) == 3 and GATE in program.nodes  # two activations and the sum of the gradients
        assert all(GATE in n.controls for n in transfers(program).values())


def test_groups_are_the_same_list_on_all_ranks():
    text = in_two_stages(TRAIN)
    programs = cloned(text + "feeds: x (divide)\nfetches: loss\ntargets: train", [(0, 1), (2, 3)])
    both_sides(programs)
    assert programs[0].groups == ((0, 2), (1, 3), (0, 1), (2, 3))
