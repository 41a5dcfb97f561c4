"""Gradients: one value per aggregation point, by structure."""

import pytest

from epl.passes.gradients import Gradients
from epl.planner.plan import FIRST, LAST, MIDDLE
from tests.unit.graph_text import expect, fingerprint, parse, subset
from tests.unit.passes.steps import DRAWN, TRAIN, apply, before, task, training


def gradients(program, job):
    program = parse(program) if isinstance(program, str) else program
    known = program.shape_of
    # Batches of a static size need no weights.
    program = program.replace(shape_of=lambda ref: (2,) + known(ref)[1:] if ref in (("x", 0), ("ids", 0)) and not program.ragged else known(ref))
    program = before(Gradients, program, job)
    result = apply(Gradients(), program, job)
    assert not [n for n in result.nodes.values() if n.op == "EplAggregate"]
    return result, subset(result, [n for n in result.nodes if n not in program.nodes])


def test_one_instance_needs_nothing():
    result, added = gradients(training(), task())
    assert not added.nodes and result.nodes["train"].inputs[2] == ("g", 0)


def test_micro_batches_and_local_replicas_are_summed_and_scaled_once():
    result, added = gradients(training(fetches="g:0"), task(devices=2, m=3))
    expect(
        added,
        """
        epl_gradient/g/of_0/add_1 = AddV2(g, EPL_MICRO_BATCH_1/g) @/device:CPU:0
        epl_gradient/g/of_0/add_2 = AddV2(epl_gradient/g/of_0/add_1, EPL_MICRO_BATCH_2/g) @/device:CPU:0
        epl_gradient/g/of_1/add_1 = AddV2(EPL_REPLICA_1/g, EPL_REPLICA_1/EPL_MICRO_BATCH_1/g) @/device:CPU:1
        epl_gradient/g/of_1/add_2 = AddV2(epl_gradient/g/of_1/add_1, EPL_REPLICA_1/EPL_MICRO_BATCH_2/g) @/device:CPU:1
        epl_gradient/g/local = AddN(epl_gradient/g/of_0/add_2, epl_gradient/g/of_1/add_2) @/device:CPU:0
        epl_gradient/g/scaled/factor = Const() {value: 0.1666666716337204} @/device:CPU:0
        epl_gradient/g/scaled = Mul(epl_gradient/g/local, epl_gradient/g/scaled/factor) @/device:CPU:0
        """,
        "value",
        devices=True,
    )
    assert result.fetches == (("epl_gradient/g/scaled", 0),)
    for name in ("train", "EPL_REPLICA_1/train"):
        assert result.nodes[name].inputs[2] == ("epl_gradient/g/scaled", 0)


@pytest.mark.parametrize("method, scale", [("mean", 1 / 12), ("sum", 1 / 2)])
def test_ranks_sum_and_scale_in_one_go(method, scale):
    result, added = gradients(training(), task(devices=2, m=2, ranks=3, reduce_method=method))
    reduce = added.nodes["epl_all_reduce/1_1_0"]
    assert (reduce.op, reduce.inputs) == ("EplAllReduce", (("epl_gradient/g/local", 0),))
    assert reduce.info == {"dtype": 1, "scale": scale, "taskgraph": None}
    assert result.nodes["EPL_REPLICA_1/train"].inputs[2] == ("epl_all_reduce/1_1_0", 0)


def test_the_first_run_of_a_step_starts_the_sum():
    result, added = gradients(training(fetches="g:0"), task(m=3, in_run=False, part=FIRST))
    expect(
        added,
        """
        epl_accumulator/epl_gradient/g = VarHandleOp() {shape: (2,), shared_name: epl_accumulator/epl_gradient/g}
        epl_accumulator/epl_gradient/g/first = AssignVariableOp(epl_accumulator/epl_gradient/g, g)
        """,
        "shape",
        "shared_name",
    )
    assert "epl_accumulator/epl_gradient/g/first" in result.targets and result.fetches == (("g", 0),)


def test_runs_in_the_middle_add_to_the_sum():
    result, added = gradients(training(fetches="g:0"), task(m=3, in_run=False, part=MIDDLE, ranks=2))
    assert [n.op for n in added.nodes.values()] == ["VarHandleOp", "AssignAddVariableOp"]
    assert result.fetches == (("g", 0),), "nothing travels"


def test_the_last_run_uses_the_whole_sum():
    _, added = gradients(training(), task(m=3, in_run=False, part=LAST, ranks=2))
    expect(
        added,
        """
        epl_accumulator/epl_gradient/g = VarHandleOp()
        epl_accumulator/epl_gradient/g/read = ReadVariableOp(epl_accumulator/epl_gradient/g)
        epl_accumulator/epl_gradient/g/total = AddV2(epl_accumulator/epl_gradient/g/read, g)
        epl_all_reduce/1_1_0 = EplAllReduce(epl_accumulator/epl_gradient/g/total) {scale: 0.16666666666666666}
        """,
        "scale",
    )


def test_a_program_without_gradients_is_left_as_it_is():
    program = before(Gradients, training(targets="", mode="same"), task(devices=2))
    assert fingerprint(apply(Gradients(), program, task(devices=2))) == fingerprint(program)


@pytest.mark.parametrize("method, factor", [("mean", 1 / 12), ("sum", 1 / 3)])
def test_over_ranks_a_gradient_of_no_batch_is_reduced(method, factor):
    """Its constants may be samples that each rank read in Python."""
    text = TRAIN.replace("g = Mul(rows, one)", "g = Mul(read, one)")
    result, added = gradients(training(text=text), task(devices=2, m=3, ranks=2, reduce_method=method))
    (reduce,) = (n for n in added.nodes.values() if n.op == "EplAllReduce")
    assert reduce.info["scale"] == pytest.approx(factor)
    assert result.nodes["EPL_REPLICA_1/train"].inputs[2] == (reduce.name, 0)


@pytest.mark.parametrize("method, factor", [("mean", None), ("sum", 2.0)])
def test_a_gradient_of_no_batch_is_the_same_everywhere(method, factor):
    """Weight decay: it is not averaged, and in a sum each replica counts."""
    text = TRAIN.replace("g = Mul(rows, one)", "g = Mul(read, one)")
    result, added = gradients(training(text=text), task(devices=2, m=3, reduce_method=method))
    values = [n.attr("value").tensor.float_val[0] for n in added.nodes.values() if n.op == "Const"]
    assert values == ([] if factor is None else [factor] * 2)
    source = {None: "EPL_REPLICA_1/g", 2.0: "epl_gradient/g/of_1"}[factor]
    assert result.nodes["EPL_REPLICA_1/train"].inputs[2][0] == source


UNSEEDED = DRAWN.replace("seed=1", "")


@pytest.mark.parametrize("part, weight, divided", [(FIRST, "epl_batch/size_0_0", False), (LAST, "epl_batch/size_0_0", True)])
def test_unequal_batches_of_several_runs_are_divided_at_the_end(part, weight, divided):
    program = parse(UNSEEDED + "\ntargets: train").replace(ragged=[("x", 0)]).pruned()
    result, added = gradients(program, task(m=2, in_run=False, part=part))
    assert added.nodes["epl_gradient/g/part_0_0"].inputs[1][0] == weight
    assert ("epl_gradient_scale" in added.nodes) == divided
    handle = added.nodes["epl_accumulator/samples_1"]
    assert handle.attr("shape").shape.dim == [] and ("epl_accumulator/samples_1/first" in result.nodes) != divided


# Sparse gradients.

SPARSE = """
    ids = Placeholder() {shape: [4], dtype: int32}
    t = VarHandleOp() {shape: [5, 2]}
    x = Placeholder() {shape: [4, 2]}
    i = Identity(ids)  # raw=1/t/indices
    v = Neg(x)  # raw=1/t/values
    train = ResourceScatterSub(t, i, v)
    targets: train
    feeds: x (divide), ids (divide)
"""


def fed(job, extra="", targets="train"):
    """Training on a fed batch of any size, after its gradients."""
    text = TRAIN.replace("shape: [4, 2]", "shape: [?, 2]")
    return apply(Gradients(), before(Gradients, training(text=text, extra=extra, targets=targets), job), job)


def test_the_count_of_fed_samples_travels_with_the_last_gradients():
    result = fed(task(ranks=2))
    sums = [n for n in result.nodes.values() if n.op == "EplAllReduce" and n.name != "epl_agree"]
    assert len(sums) == 1 and result.nodes["epl_agree"].controls == tuple(name for name, _ in sums[0].inputs)


@pytest.mark.parametrize("part", [FIRST, MIDDLE])
def test_the_count_of_a_run_that_accumulates_waits_for_nothing(part):
    assert fed(task(ranks=2, m=3, in_run=False, part=part)).nodes["epl_agree"].controls == ()


def test_the_agreement_on_drawn_batches_waits_for_no_gradient():
    program = parse(DRAWN + "\ntargets: train").replace(ragged=[("x", 0)]).pruned()
    result, _ = gradients(program, task(ranks=2))
    assert result.nodes["epl_agree"].controls == before(Gradients, program, task(ranks=2)).nodes["epl_agree"].controls


def test_rows_of_micro_batches_are_joined():
    result, added = gradients(SPARSE, task(m=2))
    expect(
        added,
        """
        epl_gradient/v/rows/axis = Const() {value: 0}
        epl_gradient/v/rows = ConcatV2(v, EPL_MICRO_BATCH_1/v, epl_gradient/v/rows/axis)
        epl_gradient/v/ids/axis = Const() {value: 0}
        epl_gradient/v/ids = ConcatV2(i, EPL_MICRO_BATCH_1/i, epl_gradient/v/ids/axis)
        epl_gradient/v/scaled/factor = Const() {value: 0.5}
        epl_gradient/v/scaled = Mul(epl_gradient/v/rows, epl_gradient/v/scaled/factor)
        """,
        "value",
    )
    assert result.nodes["train"].inputs == (("t", 0), ("epl_gradient/v/ids", 0), ("epl_gradient/v/scaled", 0))


def test_duplicates_are_merged_before_rows_travel():
    _, added = gradients(SPARSE.replace("shape: [5, 2]", "shape: [50, 2]"), task(m=2, ranks=2))
    gathers = {n.name: n.inputs[0][0] for n in added.nodes.values() if n.op == "EplAllGather"}
    assert gathers == {"epl_gradient/v/all_rows": "epl_gradient/v/merged", "epl_gradient/v/all_ids": "epl_gradient/v/unique"}
    assert added.nodes["epl_gradient/v/merged"].op == "UnsortedSegmentSum"


@pytest.mark.parametrize("change", [
    ("train = ResourceScatterSub(t, i, v)", "square = Square(v)\n    train = ResourceScatterSub(t, i, square)"),
    ("targets: train", "rows = Size(v)\n    targets: train, rows"),
    ("targets: train", "rows = Shape(i)\n    targets: train, rows"),
    ("targets: train", "fetches: v:0\n    targets: train"),
])  # fmt: skip
@pytest.mark.parametrize("dense", [False, True])
def test_rows_that_are_used_otherwise_are_not_merged(change, dense):
    _, added = gradients(SPARSE.replace(*change), task(m=2, ranks=2, sparse_as_dense=dense))
    assert not [n for n in added.nodes.values() if n.op in ("UnsortedSegmentSum", "Unique")]
    assert added.nodes["epl_gradient/v/all_rows"].inputs[0][0] == "epl_gradient/v/rows"


def test_a_deduplicated_gradient_may_be_merged_before():
    text = SPARSE.replace("train = ResourceScatterSub(t, i, v)", """u = Unique(i)
    n = Size(u)
    summed = UnsortedSegmentSum(v, u:1, n)
    train = ResourceScatterSub(t, u, summed)""")  # fmt: skip
    _, added = gradients(text, task(ranks=2))
    assert "epl_gradient/v/merged" in added.nodes


def test_indices_of_two_gradients_are_not_merged():
    second = "second = Abs(x)  # raw=1/u/values\n    s = VarHandleOp() {shape: [5, 2]}\n    other = ResourceScatterSub(s, i, second)\n    train ="
    text = SPARSE.replace("train =", second)
    result, added = gradients(text.replace("targets: train", "targets: train, other"), task(ranks=2))
    assert not [n for n in added.nodes.values() if n.op == "Unique"]
    assert {n.name: n.inputs[0][0] for n in added.nodes.values() if n.op == "EplAllGather"} == {
        "epl_gradient/v/all_rows": "v", "epl_gradient/v/all_ids": "i", "epl_gradient/second/all_rows": "second",
    }  # fmt: skip
    assert result.nodes["other"].inputs[1] == ("epl_gradient/v/all_ids", 0)


def test_sparse_gradients_may_travel_as_dense_ones():
    dense = """
        zero = Const() {value: 0}
        d = VarHandleOp() {shape: [2]}
        gd = Sum(x, zero)  # raw=1/d
        dense = AssignSubVariableOp(d, gd)
    """
    text = SPARSE + dense + "\ntargets: dense"
    result, added = gradients(text, task(m=2, ranks=2, sparse_as_dense=True))
    parts = ("epl_gradient/gd/of_0/add_1", "epl_gradient/v/used", "epl_gradient/v/dense")
    assert added.nodes["epl_all_reduce/1_1_0"].inputs == tuple((name, 0) for name in parts)
    assert result.nodes["train"].inputs[1:] == (("epl_gradient/v/ids_of_table", 0), ("epl_gradient/v/rows_of_table", 0))
    assert added.nodes["epl_gradient/v/where"].inputs == (("epl_all_reduce/1_1_0", 1),)
    assert not [n for n in added.nodes.values() if n.op == "EplAllGather"]


def test_without_ranks_nothing_travels():
    _, added = gradients(SPARSE, task(m=2, sparse_as_dense=True))
    assert "epl_gradient/v/rows" in added.nodes and "epl_gradient/v/dense" not in added.nodes


@pytest.mark.parametrize("part", [FIRST, MIDDLE, LAST])
def test_rows_of_several_runs_are_kept(part):
    text = SPARSE.replace("targets: train", "fetches: v:0\n    targets: train")
    result, added = gradients(text, task(m=3, in_run=False, part=part))
    kept = [n for n in added.nodes if n.endswith("/keep")]
    assert len(kept) == (0 if part == LAST else 2) and set(kept) <= set(result.targets)
    joined = "epl_accumulator/epl_gradient/v/rows/joined"
    assert (joined in added.nodes) == (part != FIRST)
    own = {FIRST: "v", MIDDLE: "v", LAST: "epl_gradient/v/scaled"}[part]
    assert result.fetches == ((own, 0),), "a run that accumulates returns its own rows"


@pytest.mark.parametrize("half", ["v", "i"])
def test_half_a_sparse_gradient(half):
    """Only the norm of the rows is used, or only the indices."""
    text = SPARSE.replace("targets: train", "size = Size(%s)\n    targets: size" % half)
    result, added = gradients(parse(text).pruned(), task(m=2, ranks=2))
    (gather,) = (n for n in added.nodes.values() if n.op == "EplAllGather")
    assert gather.inputs == (("epl_gradient/%s/rows" % half, 0),)
    assert result.nodes["size"].inputs[0][0] == ("epl_gradient/v/scaled" if half == "v" else gather.name)


def test_gradients_of_later_calls_travel_apart():
    """A later gradient may wait for an earlier update: one all-reduce of both would wait for itself."""
    extra = """
        v = VarHandleOp() {shape: [2]}
        g2 = Mul(rows, rate, ^train)  # backward=2 raw=2/v
        last = ResourceApplyGradientDescent(v, rate, g2)
    """
    result, added = gradients(training(extra, targets="last"), task(ranks=2))
    travel = {n.name: n.inputs[0][0] for n in added.nodes.values() if n.op == "EplAllReduce"}
    assert travel == {"epl_all_reduce/1_1_0": "g", "epl_all_reduce/2_1_0": "g2"}
    result.topological()
