"""Offload of activations: where they wait, when they come back, and the same results."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.harness.context import variables
from tests.harness.parametrize import cases
from tests.harness.pool import request

LAYERS, ROWS, WIDTH, STEPS = 6, 16, 64, 4


def net(run, x):
    h = x
    stages = run.layout.stages
    for number in range(LAYERS):
        with run.stage(number * stages // LAYERS) if stages > 1 else run.split():
            weights = tf.get_variable("w%d" % number, [WIDTH, WIDTH], initializer=tf.glorot_uniform_initializer(seed=number))
            h = tf.nn.tanh(tf.nn.softsign(tf.matmul(h, weights)))
            if number == LAYERS - 1:
                return run.merge(tf.reduce_mean(tf.square(h - 0.1)))
    return None


def trained(run, level="v2", recompute=""):
    with run.program({"offload.level": level, "gradient_checkpoint.type": recompute}):
        x = tf.placeholder(tf.float32, [None, WIDTH])
        loss = net(run, x)
        train = tf.train.AdamOptimizer(0.01).minimize(loss)
        feeds = [{x: np.random.RandomState(step).randn(ROWS, WIDTH).astype(np.float32)} for step in range(STEPS)]
        with run.session() as session:
            losses = run.train(session, loss, train, feeds)
            values = variables(session)
            return {"losses": losses, "variables": values, "ran": None if run.plain else ran(run, session, [loss, train], feeds[0])}


def ran(run, session, fetches, feeds):
    """What the copies and the ops that they wait for did: name -> [device, begin, end]; for each copy back what it waits for."""
    from epl.runtime.adapters.sessions import rank_session

    metadata = tf.RunMetadata()
    session.run(fetches, {key: run.local(value) for key, value in feeds.items()}, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
    times = {}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            times[node.node_name] = [device.device.rsplit("/device:", 1)[1], node.all_start_micros, node.all_start_micros + node.all_end_rel_micros]
    gates = {}
    for program in rank_session(session).programs():
        for node in program.nodes.values():
            if node.name.endswith("/device") and "EPL_OFFLOAD/" in node.name:
                gates[node.name] = [node.device.rsplit("/device:", 1)[1], [c for c in node.controls if not c.startswith("epl_")]]
    return {"times": times, "gates": gates}


def judge_values(outcome):
    for rank in outcome.ranks:
        assert rank["losses"] == pytest.approx(outcome.plain["losses"], rel=1e-5)
        for name, value in outcome.plain["variables"].items():
            np.testing.assert_allclose(rank["variables"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@cases(trained, "1x2", "1x2-m2run", "1x2-s2-m4", "2x2-s2-m2", compare=True)
def test_activations_wait_on_the_host_and_come_back_in_time(outcome):
    """Seen on the second device of each process: the first one is the host itself."""
    judge_values(outcome)
    for rank in outcome.ranks:
        times, gates = rank["ran"]["times"], rank["ran"]["gates"]
        moved = [name for name, (device, _) in gates.items() if device == "CPU:1"]
        assert len(moved) >= 4
        for name in moved:
            host = name[: -len("device")] + "host"
            assert times[host][0] == "CPU:0" and times[name][0] == "CPU:1"
            assert times[host][2] <= times[name][1], "%s came back before it was away" % name
            waits = [times[gate] for gate in gates[name][1] if gate in times]
            for _, _, end in waits:
                assert end <= times[name][1] + 1, "%s came back before it was due" % name
        assert any(gates[name][1] for name in moved)


@cases(trained, "2x1", "2x1-p2", "1x2-p2", compare=True)
def test_other_layouts(outcome):
    judge_values(outcome)


@cases(trained, "1x2", "1x2-s2-m4", compare=True, recompute="auto")
def test_with_recomputation(outcome):
    judge_values(outcome)


@pytest.mark.parametrize("level", ["v0", "v1"])
def test_other_levels_move_no_activations(level, pool):
    outcome = pool.outcome(request(trained, "1x2", level=level, compare=True))
    judge_values(outcome)
    assert all(not rank["ran"]["gates"] for rank in outcome.ranks)
