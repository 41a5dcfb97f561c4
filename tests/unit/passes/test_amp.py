"""Mixed precision: which ops compute in half precision, where casts are, how gradients are scaled and steps skipped."""

import pytest
import tensorflow.compat.v1 as tf

from epl import compat
from epl.passes.amp import FINITE, SCALE, STATE, UNSCALE, Mixed, SaveScale, Skip
from epl.passes.amp.lists import ALLOW, INFER
from epl.planner.plan import FIRST, LAST, MIDDLE
from tests.unit.graph_text import expect, parse, subset
from tests.unit.passes.steps import apply, before, task

DENSE = """
    x = Placeholder() {shape: [?, 4]}
    w = VarHandleOp() {shape: [4, 4], shared_name: w}
    r = ReadVariableOp(w)
    m = MatMul(x, r)
    t = Tanh(m)
    e = Exp(t)
    rate = Const() {value: 0.1}
    axes = Const() {value: [0, 1]}
    loss = Mean(e, axes)
    one = OnesLike(e)  # backward=1 seed=1
    de = Mul(one, e)  # backward=1
    dt = TanhGrad(t, de)  # backward=1
    g = MatMul(x, dt) {transpose_a: true}  # backward=1 raw=1/w
    train = ResourceApplyGradientDescent(w, rate, g)
    targets: train
    fetches: t:0
    feeds: x (divide)
"""
STATISTICS = """
    s = VarHandleOp() {shape: [], shared_name: s}
    set = AssignAddVariableOp(s, loss)
"""
BFLOAT16, HALF = "bfloat16", "float16"


def mixed(text=DENSE, scale=128.0, **options):
    job = task(amp=options.pop("amp", HALF), loss_scale=scale, **options)
    program = before(Mixed, parse(text), job)
    return program, apply(Mixed(), program, job)


def with_line(line, after="train", text=DENSE):
    """The program with one more line behind the one of a node."""
    lines = text.splitlines()
    at = next(number for number, one in enumerate(lines) if one.strip().startswith(after + " ="))
    return "\n".join(lines[: at + 1] + ["    " + one for one in line.splitlines()] + lines[at + 1 :])


def test_the_lists_are_of_ops_and_disjoint():
    assert not ALLOW & INFER
    assert [op for op in sorted(ALLOW | INFER) if compat.op_def(op) is None] in ([], ["Conv1D"])


def test_products_and_what_follows_them_are_half_with_one_cast_per_tensor():
    program, result = mixed()
    casts = {name: (node.inputs[0], node.attr("DstT").type) for name, node in result.nodes.items() if node.op == "Cast"}
    assert casts == {
        "EPL_AMP/x_0/half": (("x", 0), 19),
        "EPL_AMP/r_0/half": (("r", 0), 19),
        "EPL_AMP/t_0/whole": (("t", 0), 1),
        "EPL_AMP/dt_0/half": (("dt", 0), 19),
        "EPL_AMP/g_0/whole": (("g", 0), 1),
    }
    assert {name for name, node in result.nodes.items() if node.attr("T") is not None and node.attr("T").type == 19} == {"m", "t", "g"}
    # The cast of x serves the forward and the backward product, the fetch is of float32.
    assert result.nodes["m"].inputs[0] == result.nodes["g"].inputs[0] == ("EPL_AMP/x_0/half", 0)
    assert result.fetches[0] == ("EPL_AMP/t_0/whole", 0) and result.nodes["e"].inputs[0] == ("EPL_AMP/t_0/whole", 0)
    assert [result.nodes["EPL_AMP/%s_0/%s" % pair].phase for pair in (("x", "half"), ("dt", "half"))] == ["FORWARD", "BACKWARD"]


def test_bfloat16():
    _, result = mixed(amp=BFLOAT16)
    assert result.nodes["m"].attr("T").type == 14


def test_without_products_nothing_is_half():
    _, result = mixed(DENSE.replace("MatMul(x, r)", "AddV2(x, r)").replace("MatMul(x, dt) {transpose_a: true}", "AddV2(x, dt)"))
    assert not any(node.op == "Cast" for node in result.nodes.values())


def test_what_does_not_depend_on_the_batch_stays_whole():
    _, result = mixed(with_line("v = MatMul(r, r)\nq = Tanh(v)", "r") + "\n    targets: train, q")
    assert result.nodes["v"].attr("T").type == 1 and result.nodes["q"].attr("T").type == 1


def test_a_fixed_scale_is_on_the_seed_and_off_the_gradient():
    program, result = mixed()
    assert result.nodes["de"].inputs[0] == ("EPL_AMP/scaled/one", 0)
    assert result.nodes["train"].inputs[2] == (UNSCALE + "EPL_AMP/g_0/whole", 0)
    assert SCALE + ":0" not in ["%s:0" % feed.node for feed in result.feeds] and len(result.fetches) == 1
    constants = {name: node.attr("value").tensor for name, node in result.nodes.items() if name in (SCALE, "EPL_AMP/inverse")}
    assert {name: float(tf.make_ndarray(value)) for name, value in constants.items()} == {SCALE: 128.0, "EPL_AMP/inverse": 1 / 128}


def test_a_dynamic_scale_is_fed_and_a_flag_is_fetched():
    program, result = mixed(scale=0.0)
    assert result.feeds[-1].node == SCALE and result.fetches[-1] == (FINITE, 0)
    flags = subset(result, [name for name in result.nodes if name.startswith(FINITE)])
    expect(
        flags,
        """
        EPL_AMP/finite/EPL_AMP/g_0/whole/good = IsFinite(EPL_AMP/g_0/whole)
        EPL_AMP/finite/EPL_AMP/g_0/whole/not = LogicalNot(EPL_AMP/finite/EPL_AMP/g_0/whole/good)
        EPL_AMP/finite/EPL_AMP/g_0/whole/bad = Cast(EPL_AMP/finite/EPL_AMP/g_0/whole/not)
        EPL_AMP/finite/EPL_AMP/g_0/whole/all = Const()
        EPL_AMP/finite/EPL_AMP/g_0/whole/flat = Reshape(EPL_AMP/finite/EPL_AMP/g_0/whole/bad, EPL_AMP/finite/EPL_AMP/g_0/whole/all)
        EPL_AMP/finite/EPL_AMP/g_0/whole/axes = Const()
        EPL_AMP/finite/EPL_AMP/g_0/whole/sum = Sum(EPL_AMP/finite/EPL_AMP/g_0/whole/flat, EPL_AMP/finite/EPL_AMP/g_0/whole/axes)
        EPL_AMP/finite/one = Const()
        EPL_AMP/finite = Less(EPL_AMP/finite/EPL_AMP/g_0/whole/sum, EPL_AMP/finite/one)
        """,
        only=lambda name: True,
    )


@pytest.mark.parametrize("part, decides", [(FIRST, False), (MIDDLE, False), (LAST, True)])
def test_only_the_last_run_of_a_step_decides(part, decides):
    _, result = mixed(scale=0.0, part=part, m=3, in_run=False)
    assert (result.fetches[-1] == (FINITE, 0)) == decides and result.feeds[-1].node == SCALE


def test_gradients_that_a_loss_is_made_of_are_not_scaled():
    inner = with_line("square = Mul(g2, g2)\nup = OnesLike(square)  # backward=2 seed=2\nd2 = Mul(up, g2)  # backward=2\n"
                      "h = MatMul(x, d2) {transpose_a: true}  # backward=2 raw=2/w\nlast = ResourceApplyGradientDescent(w, rate, h)", "train",
                      with_line("g2 = Tanh(de)  # backward=1", "de"))  # fmt: skip
    _, result = mixed(inner.replace("targets: train", "targets: last").replace("train = ResourceApplyGradientDescent(w, rate, g)", ""))
    scaled = [name for name in result.nodes if name.startswith("EPL_AMP/scaled/") and result.nodes[name].op == "Mul"]
    assert scaled == ["EPL_AMP/scaled/up"]


def test_nothing_happens_without_the_option():
    program, result = mixed(amp="")
    assert result is program


# Skipping.


def skipped(text, **options):
    job = task(amp=HALF, loss_scale=0.0, **options)
    program = before(Skip, parse(text), job)
    result = apply(Skip(), program, job)
    return program, result, [name for name in result.nodes if name not in program.nodes]


def test_an_update_is_given_its_handle_only_where_the_flag_is_set():
    program, result, new = skipped(DENSE)
    expect(
        result,
        """
        train = ResourceApplyGradientDescent(EPL_AMP/skip/train/state:1, rate, UNSCALE_GRADIENTS/EPL_AMP/g_0/whole, ^r)
        EPL_AMP/skip/train/state = Switch(w, EPL_AMP/finite)
        EPL_AMP/skip/train/done = Identity(EPL_AMP/skip/train/state:1, ^train)
        EPL_AMP/skip/train/skipped = Identity(EPL_AMP/skip/train/state)
        EPL_AMP/skip/train/end = Merge(EPL_AMP/skip/train/skipped, EPL_AMP/skip/train/done)
        """,
        only=lambda name: name == "train" or name in new,
    )
    assert result.targets == ("EPL_AMP/skip/train/end",)


def test_what_waits_for_an_update_waits_for_its_end():
    text = with_line("c = VarHandleOp() {shape: [], shared_name: c}\none_more = Const() {value: 1.0}\n"
                     "count = AssignAddVariableOp(c, one_more, ^train)", "train").replace("targets: train", "targets: count")  # fmt: skip
    _, result, _ = skipped(text)
    assert result.nodes["count"].controls == ("EPL_AMP/skip/train/end",) and result.targets == ("EPL_AMP/skip/count/end",)
    assert result.nodes["count"].inputs[0] == ("EPL_AMP/skip/count/state", 1)


def test_a_reference_is_switched_as_a_reference():
    text = DENSE.replace("VarHandleOp() {shape: [4, 4], shared_name: w}", "VariableV2() {shape: [4, 4]}").replace("ReadVariableOp(w)", "Identity(w)")
    text = text.replace("ResourceApply", "Apply").replace("targets: train", "fetches: train:0")
    _, result, _ = skipped(text)
    assert result.nodes["EPL_AMP/skip/train/state"].op == "RefSwitch"
    assert result.nodes["EPL_AMP/skip/train/value"].op == "RefMerge" and ("EPL_AMP/skip/train/value", 0) in result.fetches


def test_each_replica_has_its_writers_guarded():
    _, result, _ = skipped(DENSE, devices=2)
    assert result.nodes["EPL_REPLICA_1/train"].inputs[0] == ("EPL_AMP/skip/EPL_REPLICA_1/train/state", 1)
    assert result.nodes["EPL_AMP/skip/EPL_REPLICA_1/train/state"].device == result.nodes["EPL_REPLICA_1/train"].device


def test_what_the_forward_part_writes_is_written_back():
    _, result, new = skipped(with_line(STATISTICS, "loss").replace("targets: train", "targets: train, set"))
    expect(
        result,
        """
        set = AssignAddVariableOp(s, loss, ^EPL_AMP/restore/s/before)
        EPL_AMP/restore/s/before = ReadVariableOp(s)
        EPL_AMP/restore/s/state = Switch(s, EPL_AMP/finite)
        EPL_AMP/restore/s/assign = AssignVariableOp(EPL_AMP/restore/s/state, EPL_AMP/restore/s/before, ^set)
        EPL_AMP/restore/s/done = Identity(EPL_AMP/restore/s/state, ^EPL_AMP/restore/s/assign)
        EPL_AMP/restore/s/kept = Identity(EPL_AMP/restore/s/state:1, ^set)
        EPL_AMP/restore/s/end = Merge(EPL_AMP/restore/s/kept, EPL_AMP/restore/s/done)
        """,
        only=lambda name: name == "set" or name.startswith("EPL_AMP/restore"),
    )
    assert "EPL_AMP/restore/s/end" in result.targets


def test_micro_batches_and_means_over_replicas_are_done_before_it_is_written_back():
    _, result, _ = skipped(with_line(STATISTICS, "loss").replace("targets: train", "targets: train, set"), devices=2, m=2)
    waits = set(result.nodes["EPL_AMP/restore/EPL_REPLICA_1/s/assign"].controls)
    assert waits == {"EPL_REPLICA_1/set", "EPL_REPLICA_1/EPL_MICRO_BATCH_1/set", "epl_statistics/s/assign_1"}
    for name in waits:
        assert "EPL_AMP/restore/EPL_REPLICA_1/s/before" in result.nodes[name].controls


# The state in checkpoints.


SAVE = """
    path = Const() {dtype: string, value: "model"}
    names = Const() {dtype: string, value: ["w"]}
    slices = Const() {dtype: string, value: [""]}
    w = VarHandleOp() {shape: [4, 4], shared_name: w}
    r = ReadVariableOp(w)
    save = SaveV2(path, names, slices, r)
    targets: save
"""


def test_the_scale_is_saved_with_the_variables():
    job = task(amp=HALF, loss_scale=0.0)
    program = before(SaveScale, parse(SAVE), job)
    result = apply(SaveScale(), program, job)
    expect(
        result,
        """
        save = SaveV2(path, save/epl_amp_names, save/epl_amp_slices, r, EPL_AMP/state)
        save/epl_amp_names = Const() {value: [b'w', b'EPL_AMP/state']}
        save/epl_amp_slices = Const() {value: [b'', b'']}
        EPL_AMP/state = Placeholder()
        """,
        "value",
        only=lambda name: name.startswith("save") or name == STATE,
    )
    assert result.feeds[-1].node == STATE


@pytest.mark.parametrize("options", [{}, {"amp": HALF, "loss_scale": 128.0}])
def test_other_scales_are_not_saved(options):
    job = task(**options)
    program = before(SaveScale, parse(SAVE), job)
    assert apply(SaveScale(), program, job) is program
