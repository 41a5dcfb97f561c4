"""Speed, measured roughly: rows 112, 113. The measuring tests are slow ones: other work on the machine disturbs them."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, regression
from tests.equivalence.test_cases_input import logged
from tests.harness.parametrize import cases

ROUNDS = 7
STEPS = 100


def wide_net(width, batch):
    """(input, loss, train op, a batch) of a network whose step takes a few milliseconds."""
    x = tf.placeholder(tf.float32, [None, width])
    h = x
    for layer in range(3):
        h = tf.layers.dense(h, width, tf.nn.relu, kernel_initializer=tf.glorot_uniform_initializer(seed=layer), name="layer%d" % layer)
    loss = tf.reduce_mean(tf.square(h))
    return x, loss, tf.train.GradientDescentOptimizer(0.01).minimize(loss), np.random.RandomState(0).randn(batch, width).astype(np.float32)


def seconds_per_step(session, loss, train, feeds):
    """The best of several rounds of steps."""
    session.run([loss, train], feeds)
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(STEPS):
            session.run([loss, train], feeds)
        best = min(best, (time.perf_counter() - started) / STEPS)
    return best


def overhead(run):
    """Seconds of a step in plain TensorFlow and under EPL with one device, in one process."""
    measured = {}
    with tf.Graph().as_default():
        x, loss, train, batch = wide_net(256, 256)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            measured["plain"] = seconds_per_step(session, loss, train, {x: batch})
    with run.program():
        x, loss, train, batch = wide_net(256, 256)
        with run.session() as session:
            measured["epl"] = seconds_per_step(session, loss, train, {x: batch})
    return measured


def batch_lines(run):
    """The lines of the log about the global batch, of two training programs and an evaluation."""
    with run.program(), logged() as lines:
        x, w, loss, train, _ = regression(run)
        with run.session() as session:
            for fetches in (train, [train, loss]):
                run.step(session, fetches, {x: np.repeat(X, 4)})
            session.run(loss, {x: run.local(X)})
    return {"found": [line for line in lines if "global batch" in line], "replicas": run.layout.replicas, "m": run.layout.m}


@cases(batch_lines, "1x1", "1x2", "2x1-m2", "2x1-m2run")
def test_row_112_the_global_batch_is_logged_once(outcome):
    replicas, m = outcome.ranks[0]["replicas"], outcome.ranks[0]["m"]
    (line,) = outcome.ranks[0]["found"]
    assert "16 samples: %d replicas x %d micro-batches x %d rows" % (replicas, m, 16 // replicas // m) in line
    assert "learning rate and number of steps are not scaled" in line
    assert [rank["found"] for rank in outcome.ranks[1:]] == [[]] * (len(outcome.ranks) - 1), "only rank 0 says it"


@pytest.mark.slow
@cases(overhead, "1x1")
def test_row_112_one_process_costs_less_than_five_percent(outcome):
    (measured,) = outcome.ranks
    assert measured["epl"] < 1.05 * measured["plain"], measured


def overlap(run):
    """Seconds in which matrix products of two replicas ran at the same time, and all seconds of the second replica's."""
    with run.program():
        x, loss, train, batch = wide_net(512, 512)
        metadata = tf.RunMetadata()
        with run.session() as session:
            for _ in range(3):
                options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
                session.run([loss, train], {x: batch}, options=options, run_metadata=metadata)
    spans = {False: [], True: []}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            if "MatMul" in node.node_name:
                begin = node.all_start_micros + node.op_start_rel_micros
                spans["EPL_REPLICA_1" in node.node_name].append((begin, begin + node.op_end_rel_micros - node.op_start_rel_micros))
    shared = sum(max(0, min(end, other_end) - max(begin, other)) for begin, end in spans[True] for other, other_end in spans[False])
    return {"shared": shared * 1e-6, "second": sum(end - begin for begin, end in spans[True]) * 1e-6, "first": len(spans[False])}


@pytest.mark.slow
@cases(overlap, "1x2")
def test_row_113_replicas_run_at_the_same_time(outcome):
    (measured,) = outcome.ranks
    assert measured["first"] and measured["shared"] > 0.2 * measured["second"] > 0, measured
