"""Recompute: what is computed again, from what, and when."""

import pytest

from epl.ir.program import BACKWARD
from epl.passes.clone import Clone
from epl.passes.recompute import PREFIX, Recompute
from epl.passes.shard.build import RESHARD
from tests.unit.graph_text import parse
from tests.unit.passes.steps import apply, before, task, upto

LAYER = """
    w{0} = VarHandleOp() {{shape: [4, 4], shared_name: w{0}}}
    r{0} = ReadVariableOp(w{0})
    m{0} = MatMul({1}, r{0})
    s{0} = Softsign(m{0})
    h{0} = Tanh(s{0})
"""
GRADIENT = """
    dt{0} = TanhGrad(h{0}, {2})  # backward=1
    ds{0} = SoftsignGrad(dt{0}, m{0})  # backward=1
    g{0} = MatMul({1}, ds{0}) {{transpose_a: true}}  # backward=1 raw=1/w{0}
    train{0} = ResourceApplyGradientDescent(w{0}, rate, g{0})
"""
EARLIER = "d{0} = MatMul(ds{0}, r{0}) {{transpose_b: true}}  # backward=1"


def layers(count, extra="", backward="", replace=(), checkpoints=""):
    """Training of h = tanh(softsign(h w)) a few times."""
    lines = ["x = Placeholder() {shape: [?, 4]}", "rate = Const() {value: 0.1}"]
    lines += [LAYER.format(i, "h%d" % (i - 1) if i else "x") for i in range(count)]
    lines += [extra, "one = OnesLike(h%d)  # backward=1 seed=1" % (count - 1)]
    for i in reversed(range(count)):
        lines.append(GRADIENT.format(i, "h%d" % (i - 1) if i else "x", "d%d" % (i + 1) if i < count - 1 else "one"))
        lines.append(EARLIER.format(i) if i else "")
    lines += [backward, "feeds: x (divide)", "targets: " + ", ".join("train%d" % i for i in range(count))]
    text = "\n".join(lines)
    for old, new in replace:
        assert old in text
        text = text.replace(old, new)
    return parse(text + ("\ncheckpoints: " + checkpoints if checkpoints else ""))


def recomputed(program, kind="collection", **options):
    job = task(recompute=kind, **options)
    return apply(Recompute(), before(Recompute, program, job), job)


def copies(program):
    return [name[len(PREFIX) :] for name in program.nodes if name.startswith(PREFIX) and "arrived" not in name]


def edges(program, name):
    node = program.nodes[name]
    return [source for source, _ in node.inputs], list(node.controls)


def test_a_segment_is_computed_again_from_its_checkpoint_when_its_gradient_is_there():
    program = recomputed(layers(4, checkpoints="h0, h2"))
    assert copies(program) == ["m0", "m1", "s1", "h1", "m2"]
    # The first one waits for the gradient of the checkpoint behind it, the rest for what it is given.
    assert edges(program, PREFIX + "m1") == (["h0", "r1"], ["h2_gc_sg"])
    assert edges(program, PREFIX + "s1") == ([PREFIX + "m1"], [])
    assert edges(program, PREFIX + "m2") == ([PREFIX + "h1", "r2"], [])
    gate = program.nodes["h2_gc_sg"]
    assert gate.op == "StopGradient" and gate.inputs == (("h2", 0),)
    (arrived,) = gate.controls
    assert program.nodes[arrived].inputs == (("dt2", 0),)
    # The backward part is given the copies, and what is kept as it is.
    assert edges(program, "dt2") == (["h2", "d3"], [])
    assert edges(program, "ds2") == (["dt2", PREFIX + "m2"], [])
    assert edges(program, "g2") == ([PREFIX + "h1", "ds2"], [])
    assert edges(program, "g1") == (["h0", "ds1"], [])
    # What comes after the last checkpoint is kept: its gradients are due at once.
    assert edges(program, "ds3") == (["dt3", "m3"], [])


def test_copies_belong_to_the_backward_part_and_to_each_micro_batch():
    program = recomputed(layers(3, checkpoints="h1"))
    for name in copies(program):
        copy = program.nodes[PREFIX + name]
        assert copy.phase == BACKWARD and copy.op == program.nodes[name].op and PREFIX + name in program.facts.batch


def test_nothing_is_added_without_checkpoints():
    program = layers(3)
    job = task(recompute="collection")
    given = before(Recompute, program, job)
    assert Recompute()(given, job) is given
    assert Recompute()(given, task()) is given


@pytest.mark.parametrize("count", [3, 4, 9, 16, 24])
def test_auto_keeps_about_a_root_of_the_layers(count):
    program = recomputed(layers(count), "auto")
    again = copies(program)
    assert len(again) == len(set(again))
    kept = {source for node in program.nodes.values() if node.phase == BACKWARD for source, _ in node.inputs if source[0] in "mh"}
    assert len(kept) <= 3 * (count**0.5 + 1)
    if count > 4:
        assert len(again) >= count


def test_auto_ends_at_a_taskgraph():
    def marked(line):
        return line + "  # taskgraph=%d" % (int(line[1]) // 4)

    lines = [line.strip() for i in range(8) for line in LAYER.format(i, "h%d" % (i - 1) if i else "x").strip().splitlines()]
    program = layers(8, replace=[(line, marked(line)) for line in lines if line[0] in "msh"])
    later = {"%s%d" % (kind, i) for kind in "msh" for i in (4, 5, 6, 7)}
    assert later.intersection(copies(recomputed(program, "auto")))
    ended = copies(recomputed(program, "auto", recompute_last=0))
    assert ended and later.isdisjoint(ended)


MASK = [
    ("s1 = Softsign(m1)", "n1 = Shape(m1)\nu1 = RandomUniform(n1) {dtype: float, seed: 3}\nk1 = Softsign(u1)\ns1 = Mul(m1, k1)"),
    ("ds1 = SoftsignGrad(dt1, m1)", "ds1 = Mul(dt1, k1)"),
]


def test_random_numbers_are_drawn_once():
    program = recomputed(layers(4, replace=MASK, checkpoints="h0, h2"))
    assert "u1" not in copies(program) and "k1" not in copies(program)
    # What is made of the numbers alone and is no larger is kept in their place.
    assert edges(program, PREFIX + "s1") == ([PREFIX + "m1", "k1"], [])
    assert not [n for n in program.nodes.values() if n.phase == BACKWARD and ("u1", 0) in n.inputs]


def test_a_smaller_mask_is_kept_rather_than_the_numbers():
    mask = "n1 = Shape(m1)\nu1 = RandomUniform(n1) {dtype: float, seed: 3}\np1 = Const() {value: 0.5}\nb1 = Greater(u1, p1)\n"
    mask += "k1 = Cast(b1) {SrcT: bool, DstT: float}\ns1 = Mul(m1, k1)"
    program = recomputed(layers(4, replace=[(MASK[0][0], mask), MASK[1]], checkpoints="h0, h2"))
    assert edges(program, PREFIX + "k1")[0] == ["b1"] and "b1" not in copies(program)


def test_shapes_are_taken_of_the_first_values():
    extra = [("ds1 = SoftsignGrad(dt1, m1)", "n1 = Shape(m1)  # backward=1\nq1 = Reshape(dt1, n1)  # backward=1\nds1 = SoftsignGrad(q1, m1)")]
    program = recomputed(layers(4, replace=extra, checkpoints="h0, h2"))
    assert edges(program, "n1") == (["m1"], []) and edges(program, "q1") == (["dt1", "n1"], [])


def test_what_is_computed_of_activations_before_the_gradient_waits_for_it():
    """The gradient of softplus multiplies by the sigmoid of an activation: that is as large as what is saved."""
    extra = [("ds1 = SoftsignGrad(dt1, m1)", "q1 = Sigmoid(m1)  # backward=1\nds1 = Mul(dt1, q1)")]
    program = recomputed(layers(4, replace=extra, checkpoints="h0, h2"))
    assert "q1" not in program.nodes
    assert edges(program, PREFIX + "q1") == ([PREFIX + "m1"], [])
    assert edges(program, "ds1")[0] == ["dt1", PREFIX + "q1"]


def test_what_reads_a_variable_that_the_step_writes_is_not_done_twice():
    extra = [
        ("m1 = MatMul(h0, r1)", "v = VarHandleOp() {shape: [4], shared_name: v}\nmean = ReadVariableOp(v)\nm1 = MatMul(h0, r1)"),
        ("s1 = Softsign(m1)", "c1 = Add(m1, mean)\nput = AssignAddVariableOp(v, mean)\ns1 = Softsign(c1)"),
        ("ds1 = SoftsignGrad(dt1, m1)", "ds1 = SoftsignGrad(dt1, c1)"),
        ("targets: ", "targets: put, "),
    ]
    program = recomputed(layers(4, replace=extra, checkpoints="h0, h2"))
    again = copies(program)
    assert "put" not in again and "mean" not in again
    # The value that was read is kept: a later read would see what has been added.
    assert "c1" not in again or edges(program, PREFIX + "c1")[0] == [PREFIX + "m1", "mean"]


def test_what_several_segments_use_is_kept():
    extra = [("m0 = MatMul(x, r0)", "a = Softsign(x)\nm0 = MatMul(a, r0)")]
    extra += [("s%d = Softsign(m%d)" % (i, i), "s%d = Mul(m%d, a)" % (i, i)) for i in (1, 2)]
    extra += [("ds%d = SoftsignGrad(dt%d, m%d)" % (i, i, i), "ds%d = Mul(dt%d, a)" % (i, i)) for i in (1, 2)]
    program = recomputed(layers(4, replace=extra, checkpoints="h0, h1, h2"))
    assert "a" not in copies(program)


def test_each_micro_batch_has_copies_of_its_own():
    program = upto(Clone, layers(3, checkpoints="h1"), task(m=2, devices=2, recompute="collection"))
    copy = program.nodes["EPL_REPLICA_1/EPL_MICRO_BATCH_1/" + PREFIX + "m1"]
    assert copy.device == "/device:CPU:1"
    assert copy.inputs[0] == ("EPL_REPLICA_1/EPL_MICRO_BATCH_1/" + PREFIX + "h0", 0)
    entry = program.nodes["EPL_REPLICA_1/EPL_MICRO_BATCH_1/" + PREFIX + "m0"]
    assert entry.controls == ("EPL_REPLICA_1/EPL_MICRO_BATCH_1/h1_gc_sg",)


def test_row_74_the_same_tensors_named_or_chosen_give_the_same_copies():
    chosen = recomputed(layers(16), "auto")
    again = copies(chosen)
    kept = {source for name in again for source, _ in chosen.nodes[PREFIX + name].inputs if source[0] in "mh"}
    row = ["%s%d" % (kind, i) for i in range(16) for kind in "msh"]
    kept.add(row[max(map(row.index, again)) + 1])  # what the last segment leads to
    named = recomputed(layers(16, checkpoints=", ".join(sorted(kept))))
    assert set(copies(named)) == set(again)


def test_what_devices_exchange_is_not_exchanged_again():
    """Of a split taskgraph each device computes its part again from what it was given."""
    marks = [("m%d = MatMul(%s, r%d)" % (i, "h%d" % (i - 1) if i else "x", i),) * 2 for i in range(6)]
    program = layers(6, replace=[(old, new + "  # taskgraph=0") for old, new in marks])
    job = task(devices=2, lanes=2, split=(0,), recompute="auto", in_run=True)
    given = before(Recompute, program, job)
    result = apply(Recompute(), given, job)
    exchanged = [node.name for node in given.nodes.values() if node.op == RESHARD]
    assert exchanged and [node.name for node in result.nodes.values() if node.op == RESHARD] == exchanged
    assert copies(result)
