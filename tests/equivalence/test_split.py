"""Models of which a part is split over the devices of a group, against plain TensorFlow."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.harness.context import variables
from tests.harness.parametrize import cases

LAYOUTS = ("1x3-p3", "2x1-p2", "4x1-p2", "2x1-p2-m2")
MORE = ("1x2-p2", "4x1-p4", "2x2-p2", "2x2-p4", "1x2-p2-m2", "4x1-p2-m2")
ROWS = 24


def dense(h, columns, name, bias=True):
    kernel = tf.get_variable(name + "/kernel", [int(h.shape[-1]), columns], initializer=tf.glorot_uniform_initializer(seed=3))
    product = tf.tensordot(h, kernel, [[-1], [0]])
    return tf.nn.bias_add(product, tf.get_variable(name + "/bias", [columns], initializer=tf.zeros_initializer())) if bias else product


def optimizer(name, rate=0.01):
    return {
        "sgd": tf.train.GradientDescentOptimizer(rate),
        "momentum": tf.train.MomentumOptimizer(rate, 0.9),
        "adam": tf.train.AdamOptimizer(rate),
        # Where the sums of a gradient over places cancel, Adam with its own epsilon makes full steps out of round-off.
        "damped": tf.train.AdamOptimizer(rate, epsilon=1e-4),
        "adagrad": tf.train.AdagradOptimizer(rate),
    }[name]


def finish(run, loss, feeds, how="adam", clip=0.0):
    """Five steps; the losses and all variables."""
    run.merge(loss)
    made = optimizer(how)
    pairs = made.compute_gradients(loss)
    if clip:
        pairs = list(zip(tf.clip_by_global_norm([g for g, _ in pairs], clip)[0], [v for _, v in pairs]))
    step = tf.train.get_or_create_global_step()
    train = made.apply_gradients(pairs, global_step=step)
    with run.session() as session:
        losses = run.train(session, loss, train, feeds)
        return dict(variables(session), losses=losses)


def judge(outcome):
    for rank in outcome.ranks:
        assert sorted(rank) == sorted(outcome.plain)
        for name, wanted in outcome.plain.items():
            np.testing.assert_allclose(rank[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def classes_of(run, classes):
    """Features in data parallelism, and a softmax over many classes that is split: the loss, and what five steps are fed."""
    x, y = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.int64, [None])
    h = tf.nn.relu(dense(x, 8, "features"))
    with run.split():
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=dense(h, classes, "head")))
    feeds = []
    for step in range(5):
        random = np.random.RandomState(step)
        feeds.append({x: random.randn(ROWS, 6).astype(np.float32), y: random.randint(0, classes, ROWS)})
    return loss, feeds


def classifier(run, classes, how="adam", clip=0.0, shares=""):
    with run.program({"cluster.split_shares": shares}):
        return finish(run, *classes_of(run, classes), how, clip)


@cases(classifier, *LAYOUTS, classes=1000, compare=True)
def test_classifier(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(classifier, *MORE, "3x2-p3", classes=1000, compare=True)
def test_classifier_in_more_layouts(outcome):
    judge(outcome)


@cases(classifier, "1x3-p3", "2x1-p2", classes=103, how="momentum", clip=0.3, compare=True)
def test_classifier_with_uneven_classes_and_clipped_gradients(outcome):
    judge(outcome)


def transformer(run):
    """A transformer block: attention of 12 heads and a feed-forward layer of two matrices, with layer norms and a residual path."""
    x = tf.placeholder(tf.float32, [None, 5, 24])

    def heads(h, name):
        # A bias of the keys has no gradient but round-off, which Adam would make steps of.
        return tf.transpose(tf.reshape(dense(h, 24, name, bias=name != "k"), [-1, 5, 12, 2]), [0, 2, 1, 3])

    def norm(h, name):
        mean, variance = tf.nn.moments(h, [-1], keepdims=True)
        gamma = tf.get_variable(name + "/gamma", [24], initializer=tf.ones_initializer())
        beta = tf.get_variable(name + "/beta", [24], initializer=tf.zeros_initializer())
        return (h - mean) * tf.rsqrt(variance + 1e-3) * gamma + beta

    with run.split():
        h = norm(x, "before")
        scores = tf.nn.softmax(tf.matmul(heads(h, "q"), heads(h, "k"), transpose_b=True) / np.sqrt(2.0))
        joined = tf.reshape(tf.transpose(tf.matmul(scores, heads(h, "v")), [0, 2, 1, 3]), [-1, 5, 24])
        h = x + dense(joined, 24, "out")
        h = h + dense(tf.nn.relu(dense(norm(h, "middle"), 48, "up")), 24, "down")
    loss = tf.reduce_mean(tf.square(h - 1.0))
    return loss, [{x: np.random.RandomState(step).randn(ROWS, 5, 24).astype(np.float32)} for step in range(5)]


def block(run, how="adam", shares=""):
    with run.program({"cluster.split_shares": shares}):
        return finish(run, *transformer(run), how)


@cases(block, "1x3-p3", "2x1-p2", compare=True)
def test_transformer_block(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(block, "1x2-p2", "1x4-p4", "4x1-p4", "4x1-p2-m2", compare=True)
def test_transformer_block_in_more_layouts(outcome):
    judge(outcome)


def tied(run, vocabulary=37):
    """An embedding whose table is also the output layer."""
    tokens = tf.placeholder(tf.int64, [None, 4])
    with run.split():
        table = tf.get_variable("table", [vocabulary, 8], initializer=tf.random_normal_initializer(stddev=0.3, seed=2))
        h = tf.nn.tanh(dense(tf.nn.embedding_lookup(table, tokens), 8, "mix"))
        logits = tf.matmul(tf.reshape(h, [-1, 8]), table, transpose_b=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.reshape(tokens, [-1]), logits=logits))
    return loss, [{tokens: np.random.RandomState(step).randint(0, vocabulary, [ROWS, 4])} for step in range(5)]


def language_model(run, how="adam", vocabulary=37, shares=""):
    with run.program({"cluster.split_shares": shares}):
        return finish(run, *tied(run, vocabulary), how)


@cases(language_model, "1x3-p3", "2x1-p2", compare=True)
def test_tied_embedding(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(language_model, "1x2-p2", "4x1-p2", "2x1-p2-m2", compare=True)
def test_tied_embedding_in_more_layouts(outcome):
    judge(outcome)


@cases(language_model, "2x1-p2", how="adagrad", compare=True)
def test_tied_embedding_with_sparse_slots(outcome):
    judge(outcome)


@cases(classifier, "2x1-p2", classes=103, how="momentum", shares="3,1", compare=True)
def test_classifier_over_unequal_devices(outcome):
    judge(outcome)


@cases(block, "1x3-p3", how="momentum", shares="1,4,2", compare=True)
def test_transformer_block_over_unequal_devices(outcome):
    judge(outcome)


@cases(language_model, "1x3-p3", how="momentum", shares="2,1,5", compare=True)
def test_tied_embedding_over_unequal_devices(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(classifier, "4x1-p2", "1x2-a2", classes=7, how="momentum", shares="9,1", compare=True)
def test_a_device_that_gets_next_to_nothing(outcome):
    judge(outcome)


def datasets(run):
    """Batches from a dataset, the last one smaller."""
    with run.program():
        rows = [{"x": np.random.RandomState(step).randn(ROWS, 6).astype(np.float32)} for step in range(4)]
        drawn = run.next_batch(run.dataset(rows, missing=3))["x"]
        with run.split():
            h = dense(tf.nn.relu(dense(drawn, 8, "up")), 6, "down")
        loss = tf.reduce_mean(tf.reduce_sum(tf.square(h - drawn), 1))
        run.merge(loss)
        train = tf.train.AdamOptimizer(0.05).minimize(loss)
        with run.session() as session:
            losses = []
            for _ in range(4):
                losses.append(float(np.mean([session.run([loss, train])[0] for _ in range(run.runs)])))
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(train)
            return dict(variables(session), losses=losses)


@cases(datasets, "2x1-p2", "4x1-p2", compare=True)
def test_datasets_with_a_smaller_last_batch(outcome):
    judge(outcome)


def evaluation(run):
    """The mean of what a split model gives for drawn batches, without training."""
    with run.program():
        rows = [{"x": np.random.RandomState(step).randn(ROWS, 6).astype(np.float32)} for step in range(3)]
        drawn = run.next_batch(run.dataset(rows))["x"]
        with run.split():
            h = dense(tf.nn.relu(dense(drawn, 8, "up")), 6, "down")
        result = tf.reduce_mean(tf.square(h - drawn))
        with run.session() as session:
            return [float(session.run(result)) for _ in range(2)]


@cases(evaluation, "2x1-p2", "2x1-a2", compare=True)
def test_evaluation_of_drawn_batches(outcome):
    np.testing.assert_allclose(np.mean(outcome.ranks, axis=0), outcome.plain, rtol=1e-5)


def checkpoints(run):
    """Steps, a checkpoint, more steps; then the checkpoint in a new session, and the same steps again."""
    found = {}
    path = run.path("model.ckpt")
    with run.program():
        x, y = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.int64, [None])
        with run.split():
            logits = dense(tf.nn.relu(dense(x, 8, "up")), 11, "head")
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        run.merge(loss)
        train = tf.train.AdamOptimizer(0.01).minimize(loss)
        saver = tf.train.Saver()
        feeds = [
            {x: np.random.RandomState(step).randn(ROWS, 6).astype(np.float32), y: np.random.RandomState(step).randint(0, 11, ROWS)}
            for step in range(4)
        ]
        with run.session() as session:
            run.train(session, loss, train, feeds[:2])
            saver.save(session, path)
            found["first"] = run.train(session, loss, train, feeds[2:])
        with tf.Session() as session:
            saver.restore(session, path)
            found["again"] = run.train(session, loss, train, feeds[2:])
            found["variables"] = variables(session)
    found["saved"] = dict(tf.train.list_variables(path))
    reader = tf.train.load_checkpoint(path)
    found["values"] = {name: reader.get_tensor(name) for name in found["saved"]}
    return found


@cases(checkpoints, "2x1-p2", "1x3-p3", compare=True)
def test_a_checkpoint_has_whole_variables(outcome):
    for rank in outcome.ranks:
        assert rank["saved"] == outcome.plain["saved"]
        np.testing.assert_allclose(rank["first"], outcome.plain["first"], rtol=1e-5)
        np.testing.assert_allclose(rank["again"], rank["first"], rtol=1e-6)
        for part in ("values", "variables"):
            for name, wanted in outcome.plain[part].items():
                np.testing.assert_allclose(rank[part][name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def held_bytes(run):
    """The largest variable that this process holds of a classifier's weights, after a step."""
    from epl.runtime.adapters.sessions import rank_session

    with run.program():
        x, y = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.int64, [None])
        with run.split():
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=dense(x, 1001, "head")))
        train = tf.train.AdamOptimizer(0.01).minimize(loss)
        with run.session() as session:
            run.step(session, train, {x: np.ones([ROWS, 6], np.float32), y: np.arange(ROWS)})
            shapes = set()
            for program in rank_session(session).programs():
                for node in program.nodes.values():
                    if node.op == "VarHandleOp" and (node.origin or "").startswith("head/kernel"):
                        shapes.add((node.origin, tuple(d.size for d in node.attr("shape").shape.dim)))
            return sorted(shapes)


@cases(held_bytes, "2x1-p2")
def test_no_process_holds_a_whole_variable(outcome):
    for rank in outcome.ranks:
        assert [name for name, _ in rank] == ["head/kernel", "head/kernel/Adam", "head/kernel/Adam_1"]
        assert all(np.prod(shape) <= 6 * 1001 / 2 + 6 for _, shape in rank), rank


def files(run, sharded=False):
    """What the programs that save and restore do with a variable in two parts, of which one is divided further; and what is in the file."""
    from epl.runtime.adapters.sessions import rank_session

    path = run.path("model.ckpt")
    with run.program():
        x = tf.placeholder(tf.float32, [None, 6])
        with run.split():
            parts = tf.get_variable("parts", [6, 10], partitioner=tf.fixed_size_partitioner(2), initializer=tf.random_normal_initializer(seed=4))
            loss = tf.reduce_mean(tf.square(tf.matmul(x, tf.concat(list(parts), 0)) - 1.0))
        whole = tf.get_variable("whole", [3], initializer=tf.ones_initializer())
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss + tf.reduce_sum(whole * whole))
        saver = tf.train.Saver(sharded=sharded)
        with run.session() as session:
            run.step(session, train, {x: np.random.RandomState(1).randn(ROWS, 6).astype(np.float32)})
            saved = saver.save(session, path)
            wanted = variables(session)
        with tf.Session() as session:
            saver.restore(session, saved)
            again = variables(session)
            programs = [] if run.plain else [list(p.nodes.values()) for p in rank_session(session).programs()]
    values = {name: tf.train.load_variable(saved, name) for name, _ in tf.train.list_variables(saved)}
    restoring = next((nodes for nodes in programs if any(n.op == "RestoreV2" for n in nodes)), [])
    slices = [v.decode() for n in restoring if n.op == "Const" and "slices" in n.name for v in tf.make_ndarray(n.attr("value").tensor)]
    return {"wanted": wanted, "again": again, "values": values, "slices": slices, "ops": sorted({n.op for n in restoring if "Horovod" in n.op})}


def judge_files(outcome):
    for rank in outcome.ranks:
        for found in (rank["wanted"], rank["again"]):
            for name, value in outcome.plain["wanted"].items():
                np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        assert sorted(rank["values"]) == sorted(outcome.plain["values"])
        for name, value in outcome.plain["values"].items():
            np.testing.assert_allclose(rank["values"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        assert not rank["ops"]  # each reads what it holds
        assert any("10" in text.split() and "-" not in text for text in rank["slices"]), rank["slices"]


@cases(files, "2x1-p2", "1x3-p3", compare=True)
def test_lanes_save_and_restore_their_slices(outcome):
    judge_files(outcome)


@cases(files, "2x1-a2", sharded=True, compare=True)
def test_lanes_save_slices_of_a_sharded_checkpoint(outcome):
    judge_files(outcome)
