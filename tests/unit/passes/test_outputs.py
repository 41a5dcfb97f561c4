"""Outputs: the values of several instances become one."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.errors import ProgramError
from epl.passes.outputs import Outputs
from tests.unit.graph_text import expect, fingerprint, parse, subset
from tests.unit.machine import Machine, user_graph
from tests.unit.passes.steps import apply, before, task, training


def outputs(program, job):
    program = before(Outputs, program, job)
    result = apply(Outputs(), program, job)
    assert not [n for n in result.nodes.values() if n.op == "EplMerge"]
    return result, subset(result, [n for n in result.nodes if n not in program.nodes])


def collected(source, collection, **job):
    return outputs(training("v = Identity(%s)  # collection=%s" % (source, collection), fetches="v:0", targets=""), task(**job))


def test_a_scalar_is_averaged_over_micro_batches():
    result, added = outputs(training(), task(m=2))
    expect(
        added,
        """
        epl_merge/loss/of_0/sum = AddN(loss, EPL_MICRO_BATCH_1/loss) @/device:CPU:0
        epl_merge/loss/of_0/mean/factor = Const() {value: 0.5} @/device:CPU:0
        epl_merge/loss/of_0/mean = Mul(epl_merge/loss/of_0/sum, epl_merge/loss/of_0/mean/factor) @/device:CPU:0
        """,
        "value",
        devices=True,
    )
    assert result.fetches == (("epl_merge/loss/of_0/mean", 0),)


def test_what_is_not_merged_is_left_as_it_is():
    for job in (task(), task(devices=2, parallel=False)):
        program = before(Outputs, training(mode="same" if not job.parallel else "divide", targets=""), job)
        assert fingerprint(apply(Outputs(), program, job)) == fingerprint(program)


def test_ranks_add_an_all_reduce():
    _, added = collected("loss", "global_mean_objects", devices=2, ranks=3)
    expect(
        added,
        """
        epl_merge/v/global_mean_objects/sum = AddN(v, EPL_REPLICA_1/v)
        epl_merge/v/global_mean_objects/reduce = EplAllReduce(epl_merge/v/global_mean_objects/sum) {scale: 0.16666666666666666}
        """,
        "scale",
    )
    _, added = collected("loss", "global_sum_objects", ranks=3)
    assert added.nodes["epl_merge/v/global_sum_objects/reduce"].info["scale"] == 1.0


def test_ranks_gather_rows():
    _, added = collected("y", "global_concat_objects", ranks=2)
    assert [(n.op, n.inputs) for n in added.nodes.values()] == [("EplAllGather", (("v", 0),))]


def test_scalars_are_joined_to_a_vector():
    _, added = collected("loss", "global_concat_objects", m=2)
    assert [n.op for n in added.nodes.values()] == ["Pack"]
    _, added = collected("loss", "global_concat_objects", ranks=2)
    assert [n.op for n in added.nodes.values()] == ["Pack", "EplAllGather"]


@pytest.mark.parametrize("text, collection, error", [
    ("v = AsString(y)", "local_sum_objects", "Tensor 'v' of type string can't be merged over replicas; take it out of the collection"),
    ("v = AsString(y)", "global_mean_objects", "Tensor 'v' of type string can't be merged over replicas"),
    ("v = Greater(y, read)", "local_mean_objects", "Tensor 'v' of type bool can't be averaged; put it in a sum or concat collection, or cast it"),
    ("v = Size(x)", "global_mean_objects", "Tensor 'v' of type int32 can't be averaged"),
])  # fmt: skip
def test_values_that_can_not_be_merged(text, collection, error):
    with pytest.raises(ProgramError, match=error):
        outputs(training("%s  # collection=%s" % (text, collection), fetches="v:0"), task(m=2))


def test_strings_can_be_joined_in_one_process_only():
    text = "v = AsString(y)  # collection=%s_concat_objects"
    _, added = outputs(training(text % "local", fetches="v:0"), task(m=2))
    assert "epl_merge/v/local_concat_objects/concat" not in added.nodes and len(added.nodes) == 2
    with pytest.raises(ProgramError, match="can't be merged over replicas"):
        outputs(training(text % "global", fetches="v:0"), task(m=2, ranks=2))


def test_unequal_batches_count_by_their_samples():
    text = """
        i = IteratorV2() {output_types: [float], output_shapes: [[?]]}
        x = IteratorGetNext(i) {output_types: [float], output_shapes: [[?]]}
        zero = Const() {value: 0}
        v = Mean(x, zero)  # collection=global_mean_objects
        fetches: v:0
    """
    _, added = outputs(parse(text).replace(ragged=[("x", 0)]), task(m=2, ranks=2))
    expect(
        added,
        """
        epl_merge/v/global_mean_objects/part_0 = Mul(v, epl_batch/size_0_0)
        epl_merge/v/global_mean_objects/part_1 = Mul(EPL_MICRO_BATCH_1/v, epl_batch/size_0_1)
        epl_merge/v/global_mean_objects/sum = AddN(epl_merge/v/global_mean_objects/part_0, epl_merge/v/global_mean_objects/part_1)
        epl_merge/v/global_mean_objects/reduce = EplAllReduce(epl_merge/v/global_mean_objects/sum, ^epl_gate)
        epl_merge/v/global_mean_objects/mean = RealDiv(epl_merge/v/global_mean_objects/reduce, epl_agree/total)
        """,
    )


# With TensorFlow: what each replica and micro-batch computes of its rows.

X = np.arange(24, dtype=np.float32).reshape(12, 2)
LAYOUTS = [dict(), dict(m=3), dict(devices=2), dict(devices=2, m=3), dict(ranks=2, m=3), dict(ranks=3, devices=2, m=2)]


def model(collection):
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        tensors = dict(mean=tf.reduce_mean(x), rows=x * 2.0, count=tf.shape(x)[0], weights=w + 1.0)
        for name, value in tensors.items():
            value = tf.identity(value, name="v_" + name)
            if collection and not (name == "count" and "mean" in collection):
                epl.add_to_collection(value, collection)
        tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_mean(x * w), name="train")
        tf.global_variables_initializer()
        return index()


def instances(machine):
    parts = np.split(X, machine.plan.replicas * machine.plan.micro_batches)
    size = len(parts) // machine.plan.ranks
    return parts, [parts[rank * size :][:size] for rank in range(machine.plan.ranks)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("where", ["", "local_mean", "global_mean", "local_concat", "global_concat", "local_sum", "global_sum"])
def test_fetches(where, layout):
    machine = Machine(model(where and where + "_objects"), **layout)
    machine.run("init")
    results = machine.run(["v_mean:0", "v_rows:0", "v_count:0", "v_weights:0", "train"], {"x:0": X})
    everything, by_rank = instances(machine)
    how = where.partition("_")[2]
    for rank, values in enumerate(results):
        used = everything if where.startswith("global") else by_rank[rank][: machine.plan.micro_batches]
        scalars, rows, counts = [p.mean() for p in used], [p * 2 for p in used], [len(p) for p in used]
        weights = [np.full(2, 2.0)] * len(used)
        join = {"mean": lambda v: np.mean(v, 0), "sum": lambda v: np.sum(v, 0)}
        if how == "concat":
            wanted = [scalars, np.concatenate(rows), counts, np.concatenate(weights)]
            if len(used) == 1:
                wanted[0], wanted[2] = scalars[0], counts[0]
        elif how:
            wanted = [join[how](scalars), join[how](rows), join[how](counts), join[how](weights)]
            wanted[2] = counts[-1] if how == "mean" else wanted[2]
        else:
            wanted = [np.mean(scalars), np.concatenate(rows), counts[-1], weights[0]]
        for value, want in zip(values, wanted):
            np.testing.assert_allclose(value, want, rtol=1e-6, err_msg=str((rank, want)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_summaries_show_the_whole(layout):
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        tf.summary.scalar("average", tf.reduce_mean(x))
        tf.summary.scalar("count", tf.cast(tf.shape(x)[0], tf.int32))
        tf.summary.histogram("rows", x)
        tf.identity(tf.summary.merge_all(), name="summary")
        tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_mean(x * w), name="train")
        tf.global_variables_initializer()
        whole = index()
    machine = Machine(whole, **layout)
    machine.run("init")
    for (text,) in machine.run(["summary:0", "train"], {"x:0": X}):
        found = {v.tag: v for v in tf.Summary.FromString(text).value}
        assert found["average"].simple_value == pytest.approx(X.mean()) and found["count"].simple_value == len(X)
        assert found["rows"].histo.num == X.size and found["rows"].histo.max == X.max()
