"""ZeRO: what a device holds, what travels, checkpoints in other layouts (H9, row 34), two optimizers (row 6), and what is refused."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.test_recompute_memory import measured
from tests.harness.context import variables
from tests.harness.parametrize import cases, together
from tests.harness.pool import request, without_epl

LEVELS = ("v0", "v1", "v2")
ROWS, WORDS, WIDTH = 16, 37, 6
NAMES = {"table": (WORDS, WIDTH), "w0": (WIDTH, 9), "b0": (9,), "w1": (9, 3), "b1": (3,)}


def model(run, ids, x):
    """A table with sparse gradients and two layers, of sizes that two and four devices do not divide."""
    table = tf.get_variable("table", NAMES["table"], initializer=tf.random_normal_initializer(stddev=0.3, seed=1))
    h = tf.nn.embedding_lookup(table, ids) + x
    for number in range(2):
        weights = tf.get_variable("w%d" % number, NAMES["w%d" % number], initializer=tf.glorot_uniform_initializer(seed=number))
        bias = tf.get_variable("b%d" % number, NAMES["b%d" % number], initializer=tf.zeros_initializer())
        h = tf.tanh(tf.matmul(h, weights) + bias)
    return run.merge(tf.reduce_mean(tf.square(tf.reduce_sum(h, 1) - 0.5)))


def batch(step):
    draw = np.random.RandomState(step)
    return draw.randint(0, WORDS, ROWS).astype(np.int32), draw.randn(ROWS, WIDTH).astype(np.float32)


def script(run):
    ids, x = tf.placeholder(tf.int32, [None]), tf.placeholder(tf.float32, [None, WIDTH])
    loss = model(run, ids, x)
    optimizer = tf.train.AdamOptimizer(0.05)
    gradients, trained = zip(*optimizer.compute_gradients(loss))
    train = optimizer.apply_gradients(zip(tf.clip_by_global_norm(gradients, 0.3)[0], trained), tf.train.get_or_create_global_step())
    return (ids, x), loss, train


def train(run, level="", earlier=None, first=0, last=3, resource=True):
    """Steps from a checkpoint or from the beginning: losses, variables, a checkpoint, and the shapes of what each device holds."""
    with run.program({"zero.level": level}, resource=resource):
        inputs, loss, step = script(run)
        saver = tf.train.Saver()
        with run.session() as session:
            if earlier is not None:
                saver.restore(session, earlier["path"])
            before = variables(session)
            losses = run.train(session, loss, step, [dict(zip(inputs, batch(number))) for number in range(first, last)])
            return {
                "path": saver.save(session, run.path("model.ckpt")),
                "before": before,
                "losses": losses,
                "after": variables(session),
                "held": shapes_of(session) if not run.plain else None,
            }


def shapes_of(session):
    """For each device of this process: variable -> the shape of what it holds."""
    from epl.runtime.adapters.sessions import rank_session

    found = {}
    for program in rank_session(session).programs():
        for node in program.nodes.values():
            if node.op in ("VarHandleOp", "VariableV2") and node.origin:
                found.setdefault(node.device, {})[node.origin] = [d.size for d in node.attr("shape").shape.dim]
    return [found[device] for device in sorted(found)]


def same(actual, expected, what):
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, atol=1e-6, err_msg="%s %s" % (name, what))


def bytes_of(shape):
    return 4 * int(np.prod(shape, dtype=int))


def of(layout, level, marks=()):
    return pytest.param(request(train, layout, level=level, compare=True), int(layout[0]) * int(layout[2]), id="%s-%s" % (layout, level), marks=marks)


@pytest.mark.parametrize("outcome, count", [
    of("2x1", "v0"), of("1x2", "v1"), of("4x1", "v2"), of("2x1", "v2"),
    of("2x1", "v1", pytest.mark.slow), of("1x2", "v0", pytest.mark.slow), of("1x2", "v2", pytest.mark.slow), of("4x1", "v0", pytest.mark.slow),
    of("4x1", "v1", pytest.mark.slow), of("2x2", "v0", pytest.mark.slow), of("2x2", "v1", pytest.mark.slow), of("2x2", "v2", pytest.mark.slow),
], indirect=["outcome"])  # fmt: skip
def test_a_device_holds_its_part_of_weights_and_slots(outcome, count):
    """The largest part of a dimension of n indices is ceil(n / devices); scalars and what is too small are everywhere."""
    devices = [shapes for rank in outcome.ranks for shapes in rank["held"]]
    assert len(devices) == count
    for name, shape in NAMES.items():
        for slot in ("", "/Adam", "/Adam_1"):
            parts = [one[name + slot] for one in devices]
            dim = next((d for d, length in enumerate(shape) if length >= count), None)
            if dim is None:
                assert parts == [list(shape)] * count
                continue
            lengths = [part[dim] for part in parts]
            assert sum(lengths) == shape[dim] and max(lengths) == -(-shape[dim] // count) and max(lengths) - min(lengths) <= 1
            assert all(part[:dim] + part[dim + 1 :] == list(shape[:dim] + shape[dim + 1 :]) for part in parts)
    held = [sum(bytes_of(part) for part in one.values()) for one in devices]
    whole = 3 * sum(map(bytes_of, NAMES.values()))
    # Of 16 bytes a weight (value, two slots) each device has its part, and an index more of each variable at most.
    most = sum(3 * bytes_of(shape) / shape[0] for shape in NAMES.values())
    assert all(abs(one - whole / count) <= most + 3 * bytes_of(NAMES["b1"]) for one in held)
    for rank in outcome.ranks:
        assert rank["losses"] == pytest.approx(outcome.plain["losses"], rel=1e-5)
        same(rank["after"], outcome.plain["after"], "after training")


@cases(train, "2x1", "1x2", level="v1", compare=True, resource=False)
def test_reference_variables(outcome):
    for rank in outcome.ranks:
        same(rank["after"], outcome.plain["after"], "after training")


@cases(train, "2x1-m4", "1x2-m4", "2x1-m2run", level="v1", compare=True)
def test_accumulation(outcome):
    for rank in outcome.ranks:
        assert rank["losses"] == pytest.approx(outcome.plain["losses"], rel=1e-5)
        for name, value in outcome.plain["after"].items():
            np.testing.assert_allclose(rank["after"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


# Checkpoints.


@without_epl
def train_plain(run, earlier=None, first=0, last=3):
    with run.program():
        inputs, loss, step = script(run)
        saver = tf.train.Saver()
        with run.session() as session:
            if earlier is not None:
                saver.restore(session, earlier["path"])
            before = variables(session)
            losses = run.train(session, loss, step, [dict(zip(inputs, batch(number))) for number in range(first, last)])
            found = {"path": saver.save(session, run.path("plain.ckpt")), "before": before, "losses": losses, "after": variables(session)}
    if earlier is not None:
        found["names"] = [name for name, _ in tf.train.list_variables(earlier["path"])]
        with tf.Graph().as_default(), tf.Session() as session:
            tf.train.import_meta_graph(earlier["path"] + ".meta").restore(session, earlier["path"])
            found["imported"] = {variable.op.name: session.run(variable) for variable in tf.global_variables()}
    return found


WHOLE = request(train_plain, "1x1", plain=True, last=6)
SAVED = {name: request(train, name, level="v1") for name in ("2x1", "4x1", "1x2")}
SAVED["plain"] = request(train_plain, "1x1", plain=True)


def judge_resumed(saved, whole, resumed):
    for rank in resumed:
        assert sorted(rank["before"]) == sorted(saved["after"])
        for name, value in saved["after"].items():
            np.testing.assert_array_equal(rank["before"][name], value, err_msg=name)
        assert rank["losses"] == pytest.approx(whole["losses"][3:], rel=1e-5)
        same(rank["after"], whole["after"], "after six steps")


def resumed(before, after, level):
    again = request(train, after, level=level, inputs={"earlier": SAVED[before]}, first=3, last=6)
    return pytest.param({"saved": SAVED[before], "whole": WHOLE, "again": again}, id="%s-then-%s-%s" % (before, after, level or "off"))


@pytest.mark.parametrize("outcomes", [
    resumed("2x1", "4x1", "v1"), resumed("4x1", "1x2", "v2"), resumed("1x2", "2x1", "v0"), resumed("2x1", "1x1", ""),
    resumed("plain", "2x1", "v1"), resumed("2x1", "2x1", ""),
], indirect=True)  # fmt: skip
def test_row_34_another_number_of_devices_resumes(outcomes):
    judge_resumed(outcomes["saved"].ranks[0], outcomes["whole"].ranks[0], outcomes["again"].ranks)


PLAIN = request(train_plain, "1x1", plain=True, inputs={"earlier": SAVED["4x1"]}, first=3, last=6)


@together(saved=SAVED["4x1"], whole=WHOLE, plain=PLAIN)
def test_h9_plain_tensorflow_resumes_it(outcomes):
    found = outcomes["plain"].ranks
    judge_resumed(outcomes["saved"].ranks[0], outcomes["whole"].ranks[0], found)
    slots = [name + slot for name in NAMES for slot in ("", "/Adam", "/Adam_1")]
    assert sorted(found[0]["names"]) == sorted(slots + ["beta1_power", "beta2_power", "global_step"])
    for name, value in found[0]["before"].items():
        np.testing.assert_array_equal(found[0]["imported"][name], value, err_msg=name)


# What travels, and what is there at a time.


def travelled(run, level):
    """The collectives of a step by kind: [[kind, how many], ...]."""
    with run.program({"zero.level": level}):
        inputs, loss, step = script(run)
        metadata = tf.RunMetadata()
        with run.session() as session:
            feeds = {key: run.local(value) for key, value in zip(inputs, batch(0))}
            session.run(step, feeds)
            session.run(step, feeds, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    found = []
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            kind = re.search(r" = Horovod(\w+)\(", node.timeline_label)
            if kind and "epl_agree" not in node.node_name:
                found.append((kind.group(1), node.node_name))
    names = [name for _, name in found]
    assert len(set(names)) == len(names), "a collective ran twice"
    return sorted([kind, sum(kind == other for other, _ in found)] for kind in {kind for kind, _ in found})


@together(**{level: request(travelled, "2x1", level=level) for level in LEVELS})
def test_gradients_meet_where_they_are_used(outcomes):
    counts = {level: dict(outcomes[level].ranks[0]) for level in LEVELS}
    # v1 sends each device the parts of the three gradients that are large enough, v0 adds all of them up everywhere.
    assert counts["v1"]["Alltoall"] >= counts["v0"].get("Alltoall", 0) + 3
    # v2 gathers the weights that the backward part needs once more: w1, since nothing needs the gradient of what w0 is given but the table's.
    assert counts["v2"]["Allgather"] > counts["v1"]["Allgather"]
    for level in LEVELS:
        assert outcomes[level].ranks[0] == outcomes[level].ranks[1]


LAYERS, SIDE = 12, 192
WEIGHT = 4 * SIDE * SIDE


def peak(run, level):
    """Bytes that a step of a deep net allocates at most, in units of one weight."""
    with run.program({"zero.level": level}):
        h = x = tf.placeholder(tf.float32, [8, SIDE])
        for number in range(LAYERS):
            h = tf.nn.tanh(tf.matmul(h, tf.get_variable("w%d" % number, [SIDE, SIDE], initializer=tf.glorot_uniform_initializer(seed=number))))
        train = tf.train.AdamOptimizer(0.001).minimize(tf.reduce_mean(tf.square(h)))
        feeds = {x: np.random.RandomState(run.rank).randn(8, SIDE).astype(np.float32)}
        with run.session() as session:
            session.run(train, feeds)
            return min(measured(session, train, feeds) for _ in range(3)) / WEIGHT


@together(**{level: request(peak, "2x1", level=level) for level in ("v1", "v2")})
def test_v2_does_not_keep_all_weights_for_the_backward_part(outcomes):
    for v1, v2 in zip(outcomes["v1"].ranks, outcomes["v2"].ranks):
        assert v1 > LAYERS
        assert v2 < 0.75 * LAYERS and v2 < 0.6 * v1


# Other rows.


def two_optimizers(run, level):
    """Row 6: each optimizer has its variable, one runs once and the other twice."""
    with run.program({"zero.level": level}):
        x = tf.placeholder(tf.float32, [None])
        ops = []
        for name in "dg":
            variable = tf.get_variable(name, [4], initializer=tf.ones_initializer())
            ops.append(tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(variable[0] * x)), var_list=[variable]))
        with run.session() as session:
            for op in (ops[0], ops[1], ops[1]):
                run.step(session, op, {x: np.float32([1, 2])})
            return [float(value[0]) for value in session.run(tf.global_variables())]


@cases(two_optimizers, "2x1", "1x2", level="v1")
def test_row_6_two_optimizers(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx([0.5, 0.25])


def refused(run, config, split):
    import epl

    with run.program(dict(config), annotate="none"):
        epl.set_default_strategy(epl.replicate(2))
        x = tf.placeholder(tf.float32, [None, 4])
        with epl.split(2) if split else epl.replicate(1):
            loss = tf.reduce_mean(tf.matmul(x, tf.get_variable("w", [4, 4])))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        try:
            with run.session() as session:
                session.run(train, {x: np.zeros([4, 4], np.float32)})
        except epl.errors.ConfigError as error:
            return str(error)
    return ""


@cases(refused, "1x2", config=(("zero.level", "v1"), ("cluster.colocate_split_and_replicate", True)), split=True)
def test_split_scopes_are_refused(outcome):
    assert "both together are not supported. Set zero.level to ''" in outcome.ranks[0]


@cases(refused, "1x2", config=(("zero.level", "v1"), ("cluster.split_shares", "1,2"), ("cluster.colocate_split_and_replicate", True)), split=False)
def test_shares_are_refused(outcome):
    assert "zero.level does not use cluster.split_shares, which is '1,2'" in outcome.ranks[0]
