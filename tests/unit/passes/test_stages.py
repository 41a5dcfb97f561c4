"""Stages: where what no scope claims goes, when a replica has several stages."""

import tensorflow.compat.v1 as tf

from epl.passes.clone import Clone
from epl.passes.communicate import Communicate
from epl.runtime.compiler import Signature, compile_program, traits_of
from tests.unit.machine import user_graph
from tests.unit.passes.steps import upto
from tests.unit.passes.test_cut import both_sides, cloned, on_ranks, transfers
from tests.unit.random_programs import Block, Layout, Spec, compare, graph_of, taskgraph


def compiled(whole, fetches, feeds=(), modes=(), rows=((0, 1),), **plan):
    signature = Signature(tuple(fetches), tuple(feeds), tuple(modes))
    traits = traits_of(whole, signature)
    return [compile_program(whole, signature, traits, task.plan, task).program for task in on_ranks(rows, **plan)]


def holders(programs, name):
    """The ranks that have instances of a node."""
    return [rank for rank, p in enumerate(programs) if any(n.origin == name and not n.op.startswith("Epl") for n in p.nodes.values())]


def test_a_fed_batch_is_the_one_fed_to_the_first_stage():
    text = """
        x = Placeholder() {shape: [?, 2]}  # taskgraph=1
        y = Placeholder() {shape: [?, 2]}
        h = Neg(x)  # taskgraph=1
        out = Add(h, y)  # taskgraph=1
        feeds: x (divide), y (divide)
        targets: out
    """
    programs = cloned(text, m=2)
    assert len(both_sides(programs)) == 4 and holders(programs, "out") == [1]
    assert {n.op for n in transfers(programs[0]).values()} == {"EplSend"}


def test_a_value_that_is_the_same_for_all_does_not_travel():
    text = "x = Placeholder() {shape: []}\nh = Neg(x)  # taskgraph=0\ny = Neg(x)  # taskgraph=1\nfeeds: x\ntargets: h, y"
    assert not any(transfers(p) for p in cloned(text))


def test_only_the_first_stage_draws():
    text = """
        i = IteratorV2() {output_types: [float], output_shapes: [[4, 2]]}
        n = IteratorGetNext(i) {output_types: [float], output_shapes: [[4, 2]]}
        late = Neg(n)  # taskgraph=1
        out = Neg(late)  # taskgraph=1
        targets: out
    """
    programs = cloned(text, m=2)
    assert holders(programs, "n") == [0] and holders(programs, "late") == [1]
    assert len(both_sides(programs)) == 2


RANDOM = """
    shape = Const() {value: [2]}
    r = RandomUniform(shape) {dtype: float, seed: 1, seed2: 2}
    x = Placeholder() {shape: [?, 2]}
    h = Mul(x, x)  # taskgraph=0
    y = Mul(h, r)  # taskgraph=1
    feeds: x (divide)
"""


def test_random_numbers_are_drawn_where_they_are_used():
    programs = cloned(RANDOM + "targets: y", m=2)
    assert holders(programs, "r") == [1] and len(both_sides(programs)) == 2


def test_random_numbers_of_several_stages_are_drawn_once():
    programs = cloned(RANDOM + "z = Mul(h, r)  # taskgraph=0\ntargets: y, z", m=2)
    assert holders(programs, "r") == [0] and len(both_sides(programs)) == 4


def test_a_fetched_random_number_is_drawn_once_per_replica():
    text = RANDOM[: RANDOM.index("x =")] + "c = Const() {value: 1.0}\na = Neg(c)  # taskgraph=0\nb = Neg(c)  # taskgraph=1\nfetches: r"
    programs = cloned(text)
    assert holders(programs, "r") == [0] and len(both_sides(programs)) == 1


def test_a_step_counter_is_kept_by_every_rank():
    whole, _ = graph_of(Spec(2, (Block("dense", 0), Block("dense", 1)), rate=True), 2)
    for program in compiled(whole, ["train"], ["x:0", "y:0"], ["divide"] * 2):
        found = {n.origin for n in program.nodes.values()}
        assert {"global_step", "GradientDescent"} <= found
        assert sum(n.op.startswith("Horovod") for n in program.nodes.values()) == 3  # an activation, its gradient and the labels
    for fetched in compiled(whole, ["value/global_step:0"]):
        assert not any(n.op.startswith("Horovod") for n in fetched.nodes.values())


def test_asking_which_variables_are_initialised_needs_no_other_rank():
    with user_graph() as index:
        for stage in range(2):
            with taskgraph(stage):
                tf.get_variable("v%d" % stage, [2], initializer=tf.ones_initializer())
        tf.report_uninitialized_variables(name="report")
        name = tf.get_default_graph().get_operations()[-1].name + ":0"
        whole = index()
    for program in compiled(whole, [name]):
        assert not any(n.op.startswith("Horovod") for n in program.nodes.values()) and not program.groups


SPARSE = """
    ids = Placeholder() {dtype: int32, shape: [?]}  # taskgraph=0
    same = Abs(ids)  # taskgraph=0
    w = VarHandleOp() {shape: [5], shared_name: w}  # taskgraph=1
    rows = ResourceGather(w, same) {dtype: float}  # taskgraph=1
    axis = Const() {value: 0}
    loss = Mean(rows, axis)  # taskgraph=1
    all = Const() {value: [-1]}
    values = OnesLike(rows)  # backward=1 seed=1 raw=1/w/values taskgraph=1
    indices = Reshape(same, all)  # backward=1 raw=1/w/indices taskgraph=0
    rate = Const() {value: 0.1}
    scaled = Mul(values, rate)
    train = ResourceScatterSub(w, indices, scaled) {dtype: float}
    feeds: ids (divide)
    targets: train
"""


def test_the_indices_of_a_sparse_gradient_come_to_its_values():
    programs = [upto(Clone, SPARSE, task) for task in on_ranks([(0, 1), (2, 3)], m=2)]
    both_sides(programs)
    assert holders(programs, "epl_indices/indices_0") == [1, 3] and holders(programs, "train") == [1, 3]
    names = [n for n in programs[1].nodes.values() if n.op == "EplAggregate"]
    assert {n.taskgraph for n in names} == {1} and len(names) == 2
    for program in (upto(Communicate, SPARSE, task) for task in on_ranks([(0, 1), (2, 3)], m=2)):
        gathers = [n for n in program.nodes.values() if n.op == "HorovodAllgather"]
        assert len(gathers) in (0, 2)


def test_a_table_of_one_stage_that_another_one_looks_up():
    blocks = (Block("lookup", 0), Block("dense", 1), Block("lookup_again", 1), Block("attend", 1))
    compare(Spec(2, blocks, "adagrad", clip=True), Layout(4, 1, 2))
