"""Rows about pipeline stages: 7, 8, 11, 12, 82, 96 to 98."""

import numpy as np
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, judge_variables, regression, scalar
from tests.equivalence.test_cases_accumulation import judge_undividable, undividable
from tests.equivalence.test_cases_stages import REPLICAS, STAGES
from tests.harness.context import variables
from tests.harness.parametrize import cases


def placed(run):
    """Where the matrix products of two layers ran, forward and backward, and their updates: {name: device}."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, 4])
        with run.stage(0):
            h = tf.layers.dense(x, 4, tf.tanh, name="first")
        with run.stage(1):
            loss = tf.reduce_mean(tf.square(tf.layers.dense(h, 4, name="second")))
        train = tf.train.AdamOptimizer().minimize(loss)
        metadata = tf.RunMetadata()
        with run.session() as session:
            options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
            session.run(train, {x: np.ones([4, 4], np.float32)}, options=options, run_metadata=metadata)
    found = {}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            if any(kind in node.timeline_label for kind in (" = MatMul(", " = ResourceApplyAdam(", " = TanhGrad(", " = BiasAddGrad(")):
                found[node.node_name] = device.device
    return found


def stage_of(name):
    return "second" if "second" in name else "first" if "first" in name else None


@cases(placed, "1x2-s2", "1x2-s2-m2")
def test_row_07_backward_and_apply_are_on_the_device_of_their_stage(outcome):
    (found,) = outcome.ranks
    for stage, device in (("first", "CPU:0"), ("second", "CPU:1")):
        devices = {where for name, where in found.items() if stage_of(name) == stage}
        assert devices and all(where.endswith(device) for where in devices), found
        assert sum("gradients" in name for name in found if stage_of(name) == stage) >= 2, found


@cases(placed, "2x1-s2", "2x1-s2-m2")
def test_row_07_backward_and_apply_are_on_the_rank_of_their_stage(outcome):
    for rank, stage in enumerate(("first", "second")):
        assert {stage_of(name) for name in outcome.ranks[rank]} == {stage}, outcome.ranks[rank]


def bare(run, first):
    """A first stage without variables, or a second one with nothing but the variable of the first; ZeRO is left out."""
    with run.program():
        ids, t = tf.placeholder(tf.int32, [None]), tf.placeholder(tf.float32, [None])
        initial = tf.random_normal_initializer(seed=1)
        if first:
            with run.stage(0):
                h = tf.reshape(tf.one_hot(ids, 6), [-1, 6])
            with run.stage(1):
                out = tf.matmul(h, tf.get_variable("table", [6, 1], initializer=initial))[:, 0]
                loss = run.merge(tf.reduce_mean(tf.square(out - t)))
        else:
            with run.stage(0):
                table = tf.get_variable("table", [6, 4], initializer=initial)
                h = tf.gather(table, ids)
            with run.stage(1):
                out = tf.reduce_sum(tf.matmul(tf.tanh(h), table, transpose_b=True), 1)
                loss = run.merge(tf.reduce_mean(tf.square(out - t)))
        train = tf.train.AdamOptimizer(0.1).minimize(loss, global_step=tf.train.get_or_create_global_step())
        with run.session() as session:
            feeds = {ids: np.array([1, 4, 4, 0, 5, 2, 1, 1], np.int32), t: np.arange(8, dtype=np.float32)}
            losses = run.train(session, loss, train, [feeds] * 4)
            return dict(variables(session), losses=np.float32(losses))


@cases(bare, *STAGES, *REPLICAS, "4x1-s2-m2", compare=True, first=True)
def test_row_08_a_stage_without_variables(outcome):
    judge_variables(outcome)


@cases(bare, *STAGES, *REPLICAS, "4x1-s2-m2", compare=True, first=False)
def test_row_08_a_stage_with_tied_variables_only(outcome):
    judge_variables(outcome)


def tied(run):
    """Row 11: a table that two stages use: the gradient's norm in each step, all variables, and what a checkpoint has."""
    with run.program():
        ids, word = tf.placeholder(tf.int32, [None]), tf.placeholder(tf.int32, [None])
        with run.stage(0):
            table = tf.get_variable("table", [6, 4], initializer=tf.random_normal_initializer(seed=1))
            h = tf.gather(table, ids)
        with run.stage(1):
            h = tf.layers.dense(h, 4, tf.tanh, kernel_initializer=tf.glorot_uniform_initializer(seed=2), name="hidden")
            logits = tf.matmul(h, table, transpose_b=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=word, logits=logits))
        optimizer = tf.train.AdamOptimizer(0.05)
        gradients, trained = zip(*optimizer.compute_gradients(loss))
        clipped, norm = tf.clip_by_global_norm(gradients, 0.1)
        train = optimizer.apply_gradients(zip(clipped, trained))
        saver = tf.train.Saver()
        with run.session() as session:
            feeds = {ids: np.array([1, 4, 4, 0], np.int32), word: np.array([2, 4, 0, 5], np.int32)}
            norms = [run.step(session, [norm, train], feeds)[-1][0] for _ in range(3)]
            found = dict(variables(session), norms=np.float32(norms))
            path = saver.save(session, run.path("tied.ckpt")) or run.path("tied.ckpt")
    keys = [[name, shape] for name, shape in tf.train.list_variables(path)]
    return {"values": found, "keys": keys}


@cases(tied, *STAGES, *REPLICAS, compare=True)
def test_row_11_a_tied_variable_is_one_variable(outcome):
    for number, rank in enumerate(outcome.ranks):
        assert rank["keys"] == outcome.plain["keys"]
        for name, value in outcome.plain["values"].items():
            np.testing.assert_allclose(rank["values"][name], value, rtol=1e-5, atol=1e-6, err_msg="%s on rank %d" % (name, number))


def pairs(run, varying):
    """Features go to the first stage and their labels to the last: they must meet, and every element is used once."""
    total = 4 * run.layout.batches
    with run.program():
        lengths = np.arange(total) % 3 + 1 if varying else np.full(total, 2)

        def element(number, length):
            return tf.fill([length], number), tf.cast(length, tf.float32) * number

        first = [rank for rank in range(run.ranks) if run.layout.replicas_of(rank)]
        mine = np.array_split(np.arange(total), len(first))[first.index(run.rank)] if run.rank in first else np.arange(0)
        dataset = tf.data.Dataset.from_tensor_slices((mine.astype(np.float32), lengths[mine].astype(np.int32))).map(element)
        features, label = run.next_batch(dataset)
        with run.stage(0):
            w = scalar("w", 1)
            total_of_features = tf.reduce_sum(features) * w
        with run.stage(1):
            mismatch = run.merge(tf.square(total_of_features - label))
        number = run.merge(tf.reshape(features[0], [1]), "GLOBAL_CONCAT_OBJECTS")
        train = tf.train.GradientDescentOptimizer(0.0).minimize(mismatch)
        found, wrong = [], 0.0
        with run.session() as session:
            for _ in range(4):
                values = session.run([number, mismatch, train])
                found += values[0].tolist()
                wrong += float(values[1])
    return {"found": found, "wrong": wrong, "total": total}


@cases(pairs, "2x1-s2", "2x1-s2-m4", "1x2-s2-m2", "4x1-s2-m2", "2x2-s2", varying=False)
def test_row_12_features_meet_their_labels_in_the_last_stage(outcome):
    for rank in outcome.ranks:
        assert rank["wrong"] == 0 and sorted(rank["found"]) == list(range(rank["total"]))


@cases(pairs, "2x1-s2", "1x2-s2", "4x1-s2", "2x1-s2-m4", "1x2-s2-m2", "4x1-s2-m2", varying=True)
def test_row_97_also_when_shapes_vary_between_stages(outcome):
    for rank in outcome.ranks:
        assert rank["wrong"] == 0 and sorted(rank["found"]) == list(range(rank["total"]))


def half(run):
    """Row 82: a loss of type float16, fetched on all ranks, and w after three steps."""
    with run.program():
        x = tf.placeholder(tf.float16, [None])
        with run.stage(0):
            w = tf.get_variable("w", [], tf.float16, tf.constant_initializer(0.5))
            y = w * x
        with run.stage(1):
            loss = tf.reduce_mean(tf.square(y - x))
        train = tf.train.GradientDescentOptimizer(0.125).minimize(loss)
        with run.session() as session:
            losses = [run.step(session, [loss, train], {x: np.float16([1, 1, 0.5, 0.5])})[-1][0] for _ in range(3)]
            return {"losses": np.array(losses), "w": session.run(w)}


@cases(half, "2x1-s2", "2x1-s2-m2", "4x1-s2-m2", compare=True)
def test_row_82_a_float16_loss_has_its_type_on_all_ranks(outcome):
    for rank in outcome.ranks:
        assert rank["losses"].dtype == np.float16
        np.testing.assert_allclose(rank["w"], outcome.plain["w"], rtol=2e-3)
    for first, last in zip(outcome.ranks[::2], outcome.ranks[1::2]):
        np.testing.assert_array_equal(first["losses"], last["losses"], err_msg="the ranks of one replica")
    np.testing.assert_allclose(np.mean([rank["losses"] for rank in outcome.ranks], 0), outcome.plain["losses"], rtol=1e-2)


@cases(undividable, "2x1-s2-m4", "1x2-s2-m4")
def test_row_96_undividable_feed_of_stages_is_an_error(outcome):
    judge_undividable(outcome)


def other_batch(run):
    """Row 98: batches of 4 samples for training, 7 for evaluation; what evaluation gives on each rank."""
    with run.program():
        x, w, loss, train, _ = regression(run, "adam")
        with run.stage(1):
            error = tf.abs(3.0 * x - w * x)
        with run.session() as session:
            found = []
            for _ in range(2):
                run.step(session, train, {x: X})
                found.append(session.run([error, loss], {x: np.arange(1, 8, dtype=np.float32)}))
            return {"errors": np.array([one[0] for one in found]), "losses": np.array([one[1] for one in found])}


@cases(other_batch, *STAGES, *REPLICAS, "4x1-s2-m2", compare=True)
def test_row_98_evaluation_has_its_own_batch_size(outcome):
    for rank in outcome.ranks:
        np.testing.assert_allclose(rank["errors"], outcome.plain["errors"], rtol=1e-5)
        np.testing.assert_allclose(rank["losses"], outcome.plain["losses"], rtol=1e-5)
