"""Where stages are when the configuration says so: replicas over nodes, and taskgraphs that share devices."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import scalar
from tests.harness.context import variables
from tests.harness.parametrize import cases

STEPS = 4


def net(run, x, t):
    """Two layers in a scope each, the weights of the first one used in the second one too: (loss, train)."""
    with run.stage(0):
        w = tf.get_variable("first/w", [4, 4], initializer=tf.glorot_uniform_initializer(seed=1))
        h = tf.tanh(tf.matmul(x, w, name="first/product"))
    with run.stage(1):
        h = tf.layers.dense(h, 4, tf.tanh, kernel_initializer=tf.glorot_uniform_initializer(seed=2), name="second")
        loss = run.merge(tf.reduce_mean(tf.square(tf.reduce_sum(tf.matmul(h, w, transpose_b=True, name="second/product"), 1) - t)))
    optimizer = tf.train.AdamOptimizer(0.05)
    gradients, trained = zip(*optimizer.compute_gradients(loss))
    train = optimizer.apply_gradients(zip(tf.clip_by_global_norm(gradients, 1.0)[0], trained), tf.train.get_or_create_global_step())
    return loss, train


def batch(step):
    random = np.random.RandomState(step)
    return random.randn(8, 4).astype(np.float32), random.randn(8).astype(np.float32)


def trained(run, session, loss, train, feeds_of):
    """The losses of some steps and all variables, and which layers' products this process computes."""
    losses = [float(run.step(session, [loss, train], feeds_of(step))[-1][0]) for step in range(STEPS)]
    metadata = tf.RunMetadata()
    options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    session.run(train, feeds_of(STEPS), options=options, run_metadata=metadata)
    products = {node.node_name for device in metadata.step_stats.dev_stats for node in device.node_stats if " = MatMul(" in node.timeline_label}
    layers = sorted({layer for layer in ("first", "second") for name in products if layer in name})
    return {"values": dict(variables(session), losses=np.float32(losses)), "layers": layers}


def across(run, source):
    """Replicas over the ranks: rank 0 has the first stages of both, rank 1 the second ones. What rank 1 is fed must not be used."""
    with run.program({"cluster.device_place_prefer_intra_node": False}):
        mine = run.rank == 0
        if source == "feed":
            x, t = tf.placeholder(tf.float32, [None, 4]), tf.placeholder(tf.float32, [None])
        else:
            rows = [np.concatenate(part)[: None if mine else 0] for part in zip(*(batch(step) for step in range(STEPS + 1)))]
            x, t = run.next_batch(tf.data.Dataset.from_tensor_slices(tuple(rows)).batch(8 if run.plain else 8 // run.layout.batches))
        loss, train = net(run, x, t)

        def feeds_of(step):
            return {key: value if mine else np.full_like(value, np.nan) for key, value in zip((x, t), batch(step))} if source == "feed" else {}

        # `run.step` would divide a batch by replicas that lie within ranks.
        with run.session() as session:
            run.step = lambda session, fetches, feeds: [session.run(fetches, feeds)]
            return trained(run, session, loss, train, feeds_of)


@cases(across, "2x2-s2", "2x2-s2-m2", compare=True, source="feed")
def test_replicas_over_nodes_are_fed_on_the_first_one(outcome):
    judge_across(outcome)


@cases(across, "2x2-s2-m2", compare=True, source="dataset")
def test_replicas_over_nodes_read_on_the_first_one(outcome):
    judge_across(outcome)


def judge_across(outcome):
    assert [rank["layers"] for rank in outcome.ranks] == [["first"], ["second"]], "each rank has one stage of both replicas"
    judge_values(outcome)


def judge_values(outcome):
    for number, rank in enumerate(outcome.ranks):
        for name, value in outcome.plain["values"].items():
            np.testing.assert_allclose(rank["values"][name], value, rtol=1e-5, atol=1e-6, err_msg="%s on rank %d" % (name, number))


def colocated(run):
    """Two scopes on the same devices: each device has a replica of the whole model."""
    with run.program({"cluster.colocate_split_and_replicate": True}, annotate="scope"):
        x, t = tf.placeholder(tf.float32, [None, 4]), tf.placeholder(tf.float32, [None])
        loss, train = net(run, x, t)

        def feeds_of(step):
            return dict(zip((x, t), batch(step)))

        with run.session() as session:
            found = trained(run, session, loss, train, feeds_of)
        if not run.plain:
            import epl

            found["replicas"] = epl.Env.get().cluster.virtual_devices[1].num_replicas
        return found


@cases(colocated, "1x2", "2x1", "2x1-m2run", compare=True)
def test_scopes_that_share_devices_are_replicated_together(outcome):
    for rank in outcome.ranks:
        assert rank["layers"] == ["first", "second"] and rank["replicas"] == 2
    judge_values(outcome)


def gradients_first(run):
    """`tf.gradients` of something unrelated before the first scope: w and v after one step, of one scope or of two stages."""
    with run.program(annotate="scope"):
        x = tf.placeholder(tf.float32, [None])
        other = scalar("other", 1)
        tf.gradients(tf.square(other), [other])
        with run.stage(0):
            w = scalar("w", 1)
            y = w * x
        with run.stage(run.layout.stages - 1):
            v = scalar("v", 1)
            loss = tf.reduce_mean(tf.square(v * y))
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss, var_list=[w, v])
        with run.session() as session:
            run.step(session, train, {x: np.float32([1, 2, 3, 4])})
            return [float(value) for value in session.run([w, v])]


@cases(gradients_first, "1x2-s2", "2x1", compare=True)
def test_gradients_before_the_first_scope_are_no_stage(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx(outcome.plain)
