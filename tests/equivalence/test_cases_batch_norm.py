"""Batch normalisation, seeds and random ops: H4 (without recompute), rows 22, 63 to 67."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.harness.context import variables
from tests.harness.parametrize import cases, together
from tests.harness.pool import request

X = np.float32([[1], [2], [3], [6]])
TARGET = np.float32([[0], [1], [0], [2]])


def batch_norm(run, steps, policy="mean", sync=False, recompute=""):
    """H4: the loss of each step, and all variables after it."""
    options = {"communication.statistics_reduce": policy, "communication.sync_batch_norm": sync, "gradient_checkpoint.type": recompute}
    with run.program(options):
        x, t = tf.placeholder(tf.float32, [None, 1]), tf.placeholder(tf.float32, [None, 1])
        out = tf.layers.batch_normalization(x, momentum=0.9, training=True, name="bn")
        tf.add_to_collection("checkpoints", out)
        loss = tf.reduce_mean(tf.square(out - t))
        run.merge(loss)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        history = []
        with run.session() as session:
            for _ in range(steps):
                (value,) = run.train(session, loss, train, [{x: X, t: TARGET}])
                found = {name.split("/")[-1]: float(np.ravel(value)[0]) for name, value in variables(session).items() if "accum" not in name}
                history.append(dict(found, loss=value))
        return history


def statistics(outcome, step=0):
    return [(rank[step]["moving_mean"], rank[step]["moving_variance"]) for rank in outcome.ranks]


def judge_one_device(outcome):
    first = {"loss": 0.91359895, "moving_mean": 0.3, "moving_variance": 1.25, "gamma": 0.93366867, "beta": 0.15}
    second = {"loss": 0.67149925, "moving_mean": 0.57, "moving_variance": 1.475, "gamma": 0.8805998, "beta": 0.27}
    for rank in outcome.ranks:
        assert rank == [pytest.approx(first, rel=1e-5), pytest.approx(second, rel=1e-5)]


@cases(batch_norm, "1x1", steps=2)
def test_row_65_one_device(outcome):
    judge_one_device(outcome)


@cases(batch_norm, "1x2", "2x1", "2x2", steps=2, sync=True)
def test_row_64_synchronised_statistics_are_those_of_one_device(outcome):
    judge_one_device(outcome)


@cases(batch_norm, "1x1-m2", "1x1-m2run", steps=1)
def test_row_65_one_update_per_micro_batch_in_order(outcome):
    for found in statistics(outcome):
        assert found == pytest.approx((0.585, 1.0575), rel=1e-5)


@cases(batch_norm, "1x2", "2x1", steps=1)
def test_row_63_statistics_are_averaged_over_replicas(outcome):
    for found in statistics(outcome):
        assert found == pytest.approx((0.30, 1.025), rel=1e-5)


@cases(batch_norm, "1x2", "2x1", steps=1, policy="first")
def test_row_63_statistics_of_the_first_replica(outcome):
    for found in statistics(outcome):
        assert found == pytest.approx((0.15, 0.925), rel=1e-5)


@cases(batch_norm, "2x1", "1x2", "2x1-m2", "2x1-m2run", "2x2", steps=3)
def test_row_63_replicas_stay_equal(outcome):
    first = outcome.ranks[0]
    for rank in outcome.ranks[1:]:
        assert rank == first
    assert len({step["moving_mean"] for step in first}) == 3 and all(np.isfinite(list(step.values())).all() for step in first)


def counted(run, parts):
    """BERT's way to train, in the scope of UPDATE_OPS: the learning rate reads the step there, and the script counts it there.

    Plainly the loss is the mean over `parts` of the batch, each normalised for itself: (losses, variables but for the statistics).
    """
    data = np.random.RandomState(5).randn(6, 16, 4).astype(np.float32)
    with run.program():
        x = tf.placeholder(tf.float32, [None, 4])
        losses = []
        for part in tf.split(x, parts) if run.plain else [x]:
            with tf.variable_scope("net", reuse=tf.AUTO_REUSE):
                with run.stage(0):
                    h = tf.layers.dense(part, 6, use_bias=False, kernel_initializer=tf.glorot_uniform_initializer(seed=1), name="first")
                    h = tf.tanh(tf.layers.batch_normalization(h, momentum=0.9, epsilon=0.1, training=True, name="bn"))
                with run.stage(run.layout.stages - 1):
                    h = tf.layers.dense(h, 1, kernel_initializer=tf.glorot_uniform_initializer(seed=2), name="last")
                    losses.append(tf.reduce_mean(tf.square(h - 1.0)))
        loss = run.merge(tf.add_n(losses) / len(losses))
        step = tf.train.get_or_create_global_step()
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            rate = tf.train.polynomial_decay(0.5, step, 6, 0.1)
            trainable = tf.trainable_variables()
            gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, trainable), 0.5)
            updates = [v.assign(v - rate * g) for v, g in zip(trainable, gradients)]
            # BERT's script does not say that the step is counted after the rate has read it; EPL sees to that.
            with tf.control_dependencies(updates if run.plain else []):
                train = tf.group(*updates, step.assign(step + 1))
        with run.session() as session:
            found = run.train(session, loss, train, [{x: batch} for batch in data])
            return dict({n: v for n, v in variables(session).items() if "moving" not in n and "accum" not in n}, losses=np.float32(found))


@cases(counted, "1x2", "2x1", "1x1-m2run", "1x1-m2", "2x1-s2-m2", compare=True, parts=2)
def test_what_only_waits_for_updates_happens_once_per_step(outcome):
    for rank in outcome.ranks:
        for name, value in outcome.plain.items():
            np.testing.assert_allclose(rank[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def evaluated(run):
    """Train a net with batch normalisation, then evaluate with the moving statistics on data that all ranks share."""
    random = np.random.RandomState(3)
    with run.program():
        x = tf.placeholder(tf.float32, [None, 4])

        def net(training):
            with tf.variable_scope("net", reuse=tf.AUTO_REUSE):
                h = tf.layers.dense(x, 4, tf.nn.relu, kernel_initializer=tf.glorot_uniform_initializer(seed=1), name="hidden")
                return tf.layers.batch_normalization(h, momentum=0.9, training=training, name="bn")

        loss = tf.reduce_mean(tf.square(net(True) - 1.0))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.AdamOptimizer(0.01).minimize(loss)
        evaluation = tf.reduce_mean(tf.square(net(False) - 1.0))
        with run.session() as session:
            for _ in range(5):
                run.step(session, train, {x: random.randn(8, 4).astype(np.float32)})
            return float(session.run(evaluation, {x: np.ones([8, 4], np.float32)}))


@cases(evaluated, "2x1", "2x2", "2x1-m2run")
def test_row_22_ranks_evaluate_alike(outcome):
    first = outcome.ranks[0]
    assert np.isfinite(first) and all(rank == first for rank in outcome.ranks)


def same_seed(run, earlier=None):
    """With one graph seed and no other: the initial weight, the numbers of the records read first, the losses, which depend on dropout.

    earlier: the result of another run, which is not used; it takes this one into another job.
    """
    with run.program(seed=1):
        w = tf.get_variable("w", [3, 3], initializer=tf.glorot_uniform_initializer())
        records = tf.data.Dataset.range(32).shard(run.ranks, run.rank).shuffle(32).batch(4)
        number = run.next_batch(records)
        loss = tf.reduce_sum(w * tf.nn.dropout(tf.ones([3, 3]), rate=0.5)) * tf.reduce_mean(tf.cast(number, tf.float32) + 1.0)
        train = tf.train.GradientDescentOptimizer(0.001).minimize(loss)
        run.merge(number, "GLOBAL_CONCAT_OBJECTS" if run.layout.devices > 1 else "LOCAL_CONCAT_OBJECTS")
        with run.session() as session:
            before = session.run(w)
            steps = [session.run([number, loss, train])[:2] for _ in range(3)]
            after = session.run(w)
        return {"w": before, "read": [read.tolist() for read, _ in steps], "losses": np.float32([loss for _, loss in steps]), "after": after}


SAME_SEED = {layout: request(same_seed, layout) for layout in ("2x1", "1x2")}


@cases(same_seed, "2x1", compare=True)
def test_row_66_same_weights_other_data(outcome):
    first, second = outcome.ranks
    np.testing.assert_array_equal(first["w"], second["w"])
    np.testing.assert_array_equal(first["w"], outcome.plain["w"])
    numbers = [set(np.ravel(rank["read"])) for rank in outcome.ranks]
    assert len(numbers[0]) == len(numbers[1]) == 12 and not numbers[0] & numbers[1]
    assert np.all(first["losses"] != second["losses"])


@pytest.mark.parametrize(
    "outcomes",
    [pytest.param({"first": one, "again": request(same_seed, layout, inputs={"earlier": one})}, id=layout) for layout, one in SAME_SEED.items()],
    indirect=True,
)
def test_row_66_another_run_reads_and_computes_the_same(outcomes):
    for first, again in zip(outcomes["first"].ranks, outcomes["again"].ranks):
        assert first["read"] == again["read"] and np.ravel(first["read"]).tolist() != sorted(np.ravel(first["read"])), "shuffled, and alike"
        for name in ("w", "losses", "after"):
            np.testing.assert_array_equal(first[name], again[name], err_msg=name)
        assert len(set(first["losses"].tolist())) == 3 and np.any(first["after"] != first["w"])


def masks(run, op_seed=11):
    """Dropout masks of three steps, [step, user batch, 64], in the order of the global batch; the rank's own ones."""
    with run.program(seed=3):
        x = tf.placeholder(tf.float32, [None, 64])
        w = tf.get_variable("w", [64], initializer=tf.ones_initializer())
        dropped = tf.nn.dropout(x, rate=0.5, seed=op_seed)
        mask = tf.cast(tf.not_equal(dropped, 0.0), tf.int32)
        run.merge(mask, "LOCAL_CONCAT_OBJECTS" if run.layout.devices == 1 else "GLOBAL_CONCAT_OBJECTS")
        train = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_mean(dropped * w))
        ones = np.ones([run.layout.batches, 64], np.float32)
        with run.session() as session:
            return [np.concatenate([values[0] for values in run.step(session, [mask, train], {x: ones})]) for _ in range(3)]


def rows_of(outcome):
    """The masks of all replicas: those of rank after rank, or the merged ones."""
    return [np.concatenate(step) for step in zip(*outcome.ranks)]


DROPOUT = {layout: request(masks, layout) for layout in ("1x2", "2x1", "1x2-m2run", "2x1-m2run", "1x1-m4run")}


@together(**DROPOUT)
def test_row_67_every_replica_and_micro_batch_has_its_own_mask(outcomes):
    for layout, outcome in outcomes.items():
        steps = rows_of(outcome)
        rows = np.concatenate(steps)
        assert len(np.unique(rows, axis=0)) == len(rows), "a mask repeats in %s" % layout
        assert 0.3 < rows.mean() < 0.7


@together(**DROPOUT)
def test_row_67_masks_do_not_depend_on_ranks(outcomes):
    for one, other in (("1x2", "2x1"), ("1x2-m2run", "2x1-m2run")):
        for step, (first, second) in enumerate(zip(rows_of(outcomes[one]), rows_of(outcomes[other]))):
            np.testing.assert_array_equal(first, second, err_msg="%s and %s in step %d" % (one, other, step))


def masks_again(run):
    return [masks(run), masks(run)]


@cases(masks_again, "1x2", "2x1", "2x1-m2run")
def test_row_67_masks_are_reproducible(outcome):
    for first, second in outcome.ranks:
        np.testing.assert_array_equal(first, second)


@cases(masks, "1x1", compare=True)
def test_row_67_one_device_has_the_masks_of_the_plain_script(outcome):
    for plain, epl in zip(outcome.plain, outcome.ranks[0]):
        np.testing.assert_array_equal(plain, epl)
