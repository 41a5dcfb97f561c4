"""Clone: where one value is made out of those of several instances."""

import pytest

from epl.errors import ProgramError
from epl.passes.clone import Clone
from epl.passes.instances import tensor_label
from epl.passes.merge_rules import merge_rule
from tests.unit.graph_text import expect, parse, subset
from tests.unit.passes.steps import TRAIN, task, training, upto

DRAW = """
    i = %s {output_types: [float], output_shapes: [[?]]}
    n = IteratorGetNext(i) {output_types: [float], output_shapes: [[?]]}
"""


def clone(program, job=None):
    return upto(Clone, program, job or task(devices=2, m=2))


def part(program, *words):
    return subset(program, [n for n in program.nodes if any(w in n for w in words)])


EXTRA = """
    key = Const() {value: "k"}
    summary = ScalarSummary(key, loss)
    count = Size(x)
    big = Greater(loss, rate)
    steer = Identity(big, ^g)
    number = Identity(count, ^g)
    scaled = Mul(loss, rate, ^g)
"""


def test_updates_and_summaries_use_values_of_all_instances():
    program = clone(training(EXTRA, fetches="summary:0, steer:0, number:0, scaled:0"))
    expect(
        part(program, "summary", "steer", "number", "scaled", "epl_merge", "epl_whole"),
        """
        summary = ScalarSummary(key, epl_merge/loss)
        steer = Identity(epl_whole/big, ^g, ^EPL_MICRO_BATCH_1/g)
        EPL_REPLICA_1/steer = Identity(EPL_REPLICA_1/epl_whole/big, ^EPL_REPLICA_1/g, ^EPL_REPLICA_1/EPL_MICRO_BATCH_1/g)
        number = Identity(epl_whole/count, ^g, ^EPL_MICRO_BATCH_1/g)
        EPL_REPLICA_1/number = Identity(EPL_REPLICA_1/epl_whole/count, ^EPL_REPLICA_1/g, ^EPL_REPLICA_1/EPL_MICRO_BATCH_1/g)
        scaled = Mul(epl_merge/loss, rate, ^g, ^EPL_MICRO_BATCH_1/g)
        EPL_REPLICA_1/scaled = Mul(epl_merge/loss, EPL_REPLICA_1/rate, ^EPL_REPLICA_1/g, ^EPL_REPLICA_1/EPL_MICRO_BATCH_1/g)
        epl_merge/loss = EplMerge(loss, EPL_MICRO_BATCH_1/loss, EPL_REPLICA_1/loss, EPL_REPLICA_1/EPL_MICRO_BATCH_1/loss) {rule: mean, across: True}
        epl_whole/big = Greater(epl_merge/loss, rate)
        EPL_REPLICA_1/epl_whole/big = Greater(epl_merge/loss, EPL_REPLICA_1/rate)
        epl_whole/count = Size(epl_merge/x)
        epl_merge/x = EplMerge(x, EPL_MICRO_BATCH_1/x, EPL_REPLICA_1/x, EPL_REPLICA_1/EPL_MICRO_BATCH_1/x) {rule: concat, across: True}
        EPL_REPLICA_1/epl_whole/count = Size(epl_merge/x)
        """,
        "rule",
        "across",
    )
    assert program.fetches == (("summary", 0), ("steer", 0), ("number", 0), ("scaled", 0))


def test_an_update_uses_one_draw_of_a_random_number():
    """Noise that is added to a gradient would shrink if the draws of all instances were averaged."""
    text = "shape = Const() {value: [2]}\nr = RandomUniform(shape) {dtype: float, seed: 1}\ntwice = Add(r, r)\nnoisy = Add(g, twice)"
    program = clone(training(text, targets="noisy"), task(devices=2, m=2, ranks=2))
    node = program.nodes["epl_merge/twice"]
    assert (node.inputs, node.info["rule"]) == ((("twice", 0),), "first")
    mixed = clone(training(text.replace("Add(r, r)", "Add(r, y)"), targets="noisy"))
    assert mixed.nodes["epl_merge/twice"].info["rule"] == "concat"
    flag = text.replace("noisy = Add(g, twice)", "half = Const() {value: [0.5, 0.5]}\nbig = Greater(twice, half)\nnoisy = Identity(big, ^g)")
    program = clone(training(flag, targets="noisy"))
    assert program.nodes["noisy"].inputs == program.nodes["EPL_REPLICA_1/noisy"].inputs == (("big", 0),), "also what has no mean"


def test_a_fetched_number_that_can_not_be_averaged_is_the_last_micro_batchs():
    assert clone(training(EXTRA, fetches="count:0")).fetches == (("EPL_MICRO_BATCH_1/count", 0),)


def test_steering_by_a_drawn_flag_is_refused():
    text = DRAW.replace("float", "bool").replace("[[?]]", "[[]]") % "IteratorV2()" + "steer = Identity(n, ^g)"
    error = "Node 'n' of type 'IteratorGetNext' depends on the batch and steers the update, but its values of several replicas or micro-batches"
    with pytest.raises(ProgramError, match=error):
        clone(training(text, targets="train, steer"))
    clone(training(text, targets="train, steer"), task())


@pytest.mark.parametrize("collection, rule, across", [
    ("global_mean_objects", "mean", True), ("local_concat_objects", "concat", False), ("global_sum_objects", "sum", True),
])  # fmt: skip
@pytest.mark.parametrize("source", ["loss", "read"])
def test_collections_say_how_a_fetch_is_merged(collection, rule, across, source):
    program = training("v = Identity(%s)  # collection=%s" % (source, collection), fetches="v:0")
    (node,) = (n for n in clone(program).nodes.values() if n.op == "EplMerge")
    assert (node.info["rule"], node.info["across"], len(node.inputs)) == (rule, across, 4 if across else 2)
    assert all(s.endswith("v") for s, _ in node.inputs)


def test_values_of_several_ranks_meet_also_when_each_has_one():
    program = clone(training("v = Identity(loss)  # collection=global_mean_objects", fetches="v:0, loss:0"), task(ranks=2))
    assert [program.nodes[n].op for n, _ in program.fetches] == ["EplMerge", "Mean"]


def test_outputs_and_nodes_of_similar_names_do_not_mix():
    text = "axis = Const() {value: 1}\ns = Split(axis, y) {num_split: 2}\ns_1 = Neg(y)"
    program = clone(training(text, fetches="s:1, s_1:0"))
    merged = [program.nodes[n].inputs[0] for n, _ in program.fetches]
    assert merged == [("s", 1), ("s_1", 0)]
    assert tensor_label(("s", 1)) == "s/epl_output_1" and tensor_label(("s_1", 0)) == "s_1"


def test_gradients_of_similar_names_do_not_mix():
    extra = "v = VarHandleOp() {shape: [1]}\ns = Split(zero, g) {num_split: 2}  # backward=1 raw:1=1/v\ns_1 = Neg(s)  # backward=1 raw=1/u\n"
    text = TRAIN.replace("  # backward=1 raw=1/w", "  # backward=1")
    program = clone(training(extra + "end = AddN(s:1, s_1)", text=text, fetches="", targets="end"))
    assert [program.nodes[n].inputs[0] for n, _ in program.nodes["end"].inputs] == [("s", 1), ("s_1", 0)]


def test_the_parts_of_a_sparse_gradient_come_in_the_same_instances():
    text = """
        x = Placeholder() {shape: [2]}
        ids = Const() {value: [1, 3]}  # raw=1/t/indices
        values = Neg(x)  # raw=1/t/values
        t = VarHandleOp() {shape: [5]}
        end = ResourceScatterSub(t, ids, values)
        feeds: x (divide)
        targets: end
    """
    other = text.replace("Placeholder() {shape: [2]}", "Const() {value: [1.0, 2.0]}").replace("feeds: x", "feeds: ids")
    other = other.replace("Const() {value: [1, 3]}", "Placeholder() {shape: [2], dtype: int32}")
    for given in (text, other):
        program = clone(given)
        values, ids = program.nodes["epl_gradient/values"], program.nodes["epl_gradient/ids"]
        assert len(values.inputs) == len(ids.inputs) == 4 and values.info["batch"] and ids.info["batch"]
        assert (values.info["indices"], ids.info["values"]) == (("ids", 0), ("values", 0))


@pytest.mark.parametrize("text, ref, collection, rule", [
    ("v = Const() {value: 1.0}", ("v", 0), "", "mean"),
    ("v = Const() {value: 1}", ("v", 0), "", "last"),
    ("v = Const() {value: 1}", ("v", 0), "global_sum_objects", "sum"),
    ("v = Placeholder() {shape: [?, 3]}", ("v", 0), "", "concat"),
    ("v = Placeholder() {shape: [?, 3]}", ("v", 0), "local_mean_objects", "mean"),
    ("v = Placeholder() {shape: ?, dtype: int32}", ("v", 0), "", "last"),
    ("x = Placeholder() {shape: [4, 3]}\nv = Neg(x)\nfeeds: x (divide)", ("v", 0), "", "concat"),
    ("x = Placeholder() {shape: [4, 3]}\nv = Neg(x)\nfeeds: x (each)", ("v", 0), "", "mean"),
    ("x = Placeholder() {shape: [4, 3]}\nv = Const() {value: [1.0, 2.0]}\nfeeds: x (divide)", ("v", 0), "", "mean"),
])  # fmt: skip
def test_merge_rules(text, ref, collection, rule):
    assert merge_rule(parse(text), ref, collection) == rule
