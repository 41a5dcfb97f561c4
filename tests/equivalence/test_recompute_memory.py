"""What recomputation and micro-batches save, by TensorFlow's allocator: row 75, the predicted peak, and a limit."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.harness.parametrize import together
from tests.harness.pool import request

LAYERS, WIDTH, ROWS = 24, 32, 2048
UNKNOWN = 16
"""Rows for which EPL predicts where a batch has no fixed size."""


def chain(h, number):
    weights = tf.get_variable("w%d" % number, [WIDTH, WIDTH], initializer=tf.glorot_uniform_initializer(seed=number))
    return tf.nn.tanh(tf.nn.softsign(tf.matmul(h, weights)))


def residual(h, number):
    inner = tf.get_variable("v%d" % number, [WIDTH, 4 * WIDTH], initializer=tf.glorot_uniform_initializer(seed=number))
    outer = tf.get_variable("w%d" % number, [4 * WIDTH, WIDTH], initializer=tf.glorot_uniform_initializer(seed=number))
    gate = tf.nn.tanh(tf.matmul(h, inner))
    return h + tf.matmul(gate * tf.nn.softplus(gate), outer)


LAYER = {"chain": chain, "residual": residual}


def peaks(run, layer, kind="", limit=0):
    """Bytes that a step has allocated at most, what was predicted, and how many nodes are copies."""
    import epl
    from epl.passes import recompute

    predicted = []
    find = recompute.find_segments
    recompute.find_segments = lambda program, task: predicted.append(find(program, task)) or predicted[-1]
    try:
        with run.program({"gradient_checkpoint.type": kind, "gradient_checkpoint.memory_limit": limit}):
            h = x = tf.placeholder(tf.float32, [None if run.layout.m > 1 else ROWS, WIDTH])
            for number in range(LAYERS):
                h = LAYER[layer](h, number)
                if number % 5 == 4:
                    tf.add_to_collection("checkpoints", h)
            loss = tf.reduce_mean(tf.square(h))
            train = tf.train.GradientDescentOptimizer(0.001).minimize(loss)
            feeds = {x: np.random.RandomState(0).randn(ROWS, WIDTH).astype(np.float32)}
            with run.session() as session:
                losses = [float(session.run([loss, train], feeds)[0]) for _ in range(3)]
                found = [measured(session, train, feeds) for _ in range(3)]
            copies = [op for op in epl.Graph.get().operations.values() if op.name.startswith("EPL_GRADIENT_CHECKPOINTS")]
    finally:
        recompute.find_segments = find
    return {"peak": min(found), "predicted": predicted[-1].bytes.get(None, 0.0) if predicted else 0.0, "copies": len(copies), "losses": losses}


def measured(session, train, feeds):
    metadata = tf.RunMetadata()
    session.run(train, feeds, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    return most_held([node for device in metadata.step_stats.dev_stats for node in device.node_stats])


def most_held(nodes):
    """Bytes that ops of a step have allocated at most at any time."""
    records = [record for node in nodes for memory in node.memory for record in memory.allocation_records]
    held = most = 0
    for record in sorted(records, key=lambda record: record.alloc_micros):
        held += record.alloc_bytes
        most = max(most, held)
    return most


def each_kind(layer):
    return {kind or "plain": request(peaks, "1x1", layer=layer, kind=kind) for kind in ("", "auto", "collection")}


def each():
    return [pytest.param(each_kind(layer), id=layer, marks=[pytest.mark.slow] if layer == "residual" else []) for layer in LAYER]


@pytest.mark.parametrize("outcomes", each(), indirect=True)
def test_row_75_a_third_of_the_memory_and_as_predicted(outcomes):
    plain, auto, collection = (outcomes[kind].ranks[0] for kind in ("plain", "auto", "collection"))
    assert plain["copies"] == 0 < auto["copies"] and collection["copies"] > 0
    assert auto["losses"] == plain["losses"] == collection["losses"]
    assert auto["peak"] <= 0.35 * plain["peak"]
    assert auto["peak"] == pytest.approx(auto["predicted"], rel=0.15)
    assert collection["peak"] <= 0.5 * plain["peak"]


@together(least=request(peaks, "1x1", layer="chain", kind="auto"), limited=request(peaks, "1x1", layer="chain", kind="auto", limit=7))
def test_a_limit_is_kept_and_less_is_computed_again(outcomes):
    least, limited = (outcomes[name].ranks[0] for name in ("least", "limited"))
    assert least["peak"] < limited["peak"] <= 7e6
    assert limited["copies"] < least["copies"]


@pytest.mark.slow
@together(one=request(peaks, "1x1", layer="residual"), four=request(peaks, "1x1-m4run", layer="residual"))
def test_micro_batches_of_a_run_go_one_after_the_other(outcomes):
    one, four = (outcomes[name].ranks[0]["peak"] for name in ("one", "four"))
    assert four <= 0.4 * one


def stages(run, kind=""):
    """For each device of a pipeline the bytes that it held at most in a step, and what was predicted."""
    from epl.passes import recompute

    predicted = []
    find = recompute.find_segments
    recompute.find_segments = lambda program, task: predicted.append(find(program, task)) or predicted[-1]
    try:
        with run.program({"gradient_checkpoint.type": kind}):
            h = x = tf.placeholder(tf.float32, [None, WIDTH])
            for stage in range(run.layout.stages):
                with run.stage(stage):
                    for number in range(6):
                        h = residual(h, 6 * stage + number)
                    if stage == run.layout.stages - 1:
                        loss = tf.reduce_mean(tf.square(h))
            train = tf.train.GradientDescentOptimizer(0.001).minimize(loss)
            feeds = {x: np.random.RandomState(0).randn(ROWS * run.layout.m, WIDTH).astype(np.float32)}
            with run.session() as session:
                session.run(train, feeds)
                found = [by_device(session, train, feeds) for _ in range(2)]
    finally:
        recompute.find_segments = find
    of_stage = predicted[-1].bytes if predicted else {}
    return {"peaks": [min(peaks) for peaks in zip(*found)], "predicted": [of_stage[stage] * ROWS / UNKNOWN for stage in sorted(of_stage)]}


def by_device(session, train, feeds):
    metadata = tf.RunMetadata()
    session.run(train, feeds, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    return [most_held(list(device.node_stats)) for device in sorted(metadata.step_stats.dev_stats, key=lambda d: d.device) if device.node_stats]


@pytest.mark.slow
@together(plain=request(stages, "1x4-s4-m8"), auto=request(stages, "1x4-s4-m8", kind="auto"))
def test_stages_hold_what_their_schedule_lets_them(outcomes):
    plain, auto = (outcomes[name].ranks[0] for name in ("plain", "auto"))
    assert len(plain["peaks"]) == len(auto["peaks"]) == 4
    for before, peak, predicted in zip(plain["peaks"], auto["peaks"], auto["predicted"]):
        assert peak == pytest.approx(predicted, rel=0.15) and peak <= 0.35 * before
