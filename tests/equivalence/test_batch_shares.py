"""Unequal shares of a step (`cluster.batch_shares`): every sample counts alike, so that training is that of one device on all of them."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.harness.context import variables
from tests.harness.parametrize import cases
from tests.harness.pool import request

STEPS, ROWS, WIDTH = 4, 48, 6
DATA = np.random.RandomState(0).randn(STEPS, ROWS, WIDTH + 1).astype(np.float32)


def model(run, x):
    """Two layers, the second in the last stage: (loss, train)."""
    with run.stage(0):
        x, y = x[:, :WIDTH], x[:, WIDTH:]
        h = tf.layers.dense(x, 8, tf.nn.tanh, kernel_initializer=tf.glorot_uniform_initializer(seed=1))
    with run.stage(run.layout.stages - 1):
        out = tf.layers.dense(h, 1, kernel_initializer=tf.glorot_uniform_initializer(seed=2))
        loss = run.merge(tf.reduce_mean(tf.square(out - y)))
    optimizer = tf.train.AdamOptimizer(0.02)
    gradients, weights = zip(*optimizer.compute_gradients(loss))
    clipped, _ = tf.clip_by_global_norm(gradients, 0.5)
    return loss, optimizer.apply_gradients(zip(clipped, weights), tf.train.get_or_create_global_step())


def rows_of(run, shares):
    """For each run of a step the rows of the global batch that this process is given: parts of those of its replicas."""
    if run.plain:
        return [np.arange(ROWS)]
    weights = [int(share) for share in shares.split(",")]
    edges = np.cumsum([0] + weights) * ROWS // sum(weights)
    own = [np.split(np.arange(edges[r], edges[r + 1]), run.runs) for r in run.layout.replicas_of(run.rank)]
    # What is fed to a process without a first stage is not used.
    return [np.concatenate([parts[k] for parts in own]) if own else np.arange(edges[1]) for k in range(run.runs)]


def trained(run, shares, draws="feed", config=None):
    """Losses, variables, and for a dataset whether it ends with the last step."""
    rows = rows_of(run, shares)
    with run.program(dict(config or {}, **{"cluster.batch_shares": "" if run.plain else shares})):
        with run.stage(0):
            if draws == "feed":
                x = tf.placeholder(tf.float32, [None, WIDTH + 1])
            else:
                stream = DATA[:, np.concatenate(rows)].reshape(-1, WIDTH + 1)
                # The script's batch size, as if all replicas were equal.
                data = tf.data.Dataset.from_tensor_slices(stream).batch(ROWS if run.plain else ROWS // run.layout.batches)
                if draws == "one shot":
                    x = tf.data.make_one_shot_iterator(data.prefetch(2)).get_next()
                else:
                    x = run.next_batch(data.map(lambda batch: batch + 0.0).prefetch(1))
        loss, train = model(run, x)
        with run.session() as session:
            losses = []
            for batch in DATA:
                values = [session.run([loss, train], {x: batch[own]} if draws == "feed" else None)[0] for own in rows]
                losses.append(np.mean(values))
            ended = draws == "feed"
            if not ended:
                try:
                    session.run([loss, train])
                except tf.errors.OutOfRangeError:
                    ended = True
            found = {name: value for name, value in variables(session).items() if "accum" not in name}
    return dict(found, losses=np.float32(losses), ended=ended)


def judge(outcome):
    assert outcome.plain["ended"] and all(rank["ended"] for rank in outcome.ranks)
    for rank in outcome.ranks:
        for name, value in outcome.plain.items():
            np.testing.assert_allclose(rank[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


LAYOUTS = (
    "1x2 3,1", "2x1 1,3", "1x3 3,2,1", "1x3 5,7,11", "2x2 1,1,3,3", "1x2-m4run 5,1", "1x2-m4run 3,4", "2x1-m2 2,1",
    "2x2-s2-m2 2,1", "4x1-s2-m2 1,5", "1x4-s2 1,2",
)  # fmt: skip


def each():
    for case in LAYOUTS:
        layout, shares = case.split()
        for draws in ("feed", "dataset"):
            yield pytest.param(request(trained, layout, compare=True, shares=shares, draws=draws), id="%s by %s, %s" % (layout, shares, draws))


@pytest.mark.parametrize("outcome", each(), indirect=True)
def test_every_sample_counts_alike(outcome):
    judge(outcome)


@cases(trained, "1x2", "2x1-m2run", "2x2-s2-m2", compare=True, shares="2,1", draws="one shot")
def test_one_shot_iterators(outcome):
    judge(outcome)


@cases(trained, "2x1", "1x2-m2run", compare=True, shares="2,1", config={"zero.level": "v1"})
def test_with_zero(outcome):
    judge(outcome)


@cases(trained, "2x1", compare=True, shares="2,1", config={"gradient_checkpoint.type": "auto", "offload.level": "v0", "optimizer.num_apply_group": 2})
def test_with_other_options(outcome):
    judge(outcome)
