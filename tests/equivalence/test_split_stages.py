"""Stages of a pipeline that are split over several devices each, against plain TensorFlow."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.test_split import ROWS, dense, finish, judge
from tests.harness.context import variables
from tests.harness.parametrize import cases


class Scopes:
    """The scopes of the stages: `kinds` says of each whether it is split ("s"), or replicated over all lanes ("r")."""

    def __init__(self, run, kinds):
        self._run = run
        self._kinds = kinds
        self._made = {}

    def __call__(self, number):
        if self._run.plain:
            return contextlib.nullcontext()
        import epl

        if number not in self._made:
            make = {"s": epl.split, "r": epl.replicate}[self._kinds[number]]
            self._made[number] = make(device_count=1 if self._run.layout.narrow and number == 0 else self._run.layout.lanes)
        return self._made[number]


def two_stages(run, kinds, how="momentum", clip=0.0, strategy="PreferBackward"):
    """Features, and a classifier whose first layer they skip to."""
    with run.program({"pipeline.strategy": strategy}):
        scope = Scopes(run, kinds)
        x, y = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.int64, [None])
        with scope(0):
            h = tf.nn.relu(dense(x, 16, "features"))
        with scope(1):
            h = tf.nn.relu(dense(h, 16, "middle")) + h
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=dense(h, 103, "head")))
        feeds = [
            {x: np.random.RandomState(step).randn(ROWS, 6).astype(np.float32), y: np.random.RandomState(step).randint(0, 103, ROWS)}
            for step in range(4)
        ]
        return finish(run, loss, feeds, how, clip)


@cases(two_stages, "1x4-p2-s2-m2", "2x2-p2-s2", kinds="rs", compare=True)
def test_a_replicated_stage_before_a_split_one(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(two_stages, "4x1-p2-s2-m2", "2x2-p2-s2-m2", "4x2-p2-s2-m2", kinds="rs", compare=True)
def test_a_replicated_stage_before_a_split_one_in_more_layouts(outcome):
    judge(outcome)


@cases(two_stages, "1x4-p2-s2-m2", "4x1-p2-s2-m2", kinds="rr", compare=True)
def test_replicated_stages_of_several_devices(outcome):
    judge(outcome)


@cases(two_stages, "1x4-a2-s2-m2", "4x1-a2-s2-m2", kinds="ss", clip=0.3, compare=True)
def test_split_stages(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(two_stages, "2x2-a2-s2-m2", "1x4-a2-s2-m4", kinds="ss", strategy="ZeroBubbleH1", compare=True)
def test_split_stages_by_another_schedule(outcome):
    judge(outcome)


@cases(two_stages, "1x3-n2-s2-m2", kinds="rs", compare=True)
def test_a_stage_on_one_device_before_a_split_one(outcome):
    judge(outcome)


def drawn(run, kinds):
    """Tied weights over stages, batches from a dataset, steps, an evaluation, a checkpoint, and the same in a new session."""
    path, found = run.path("model.ckpt"), {}
    with run.program():
        scope = Scopes(run, kinds)
        rows = [{"ids": np.random.RandomState(step).randint(0, 31, [ROWS, 4])} for step in range(6)]
        ids = run.next_batch(run.dataset(rows))["ids"]
        with scope(0):
            table = tf.get_variable("table", [31, 8], initializer=tf.random_normal_initializer(stddev=0.3, seed=2))
            h = tf.nn.tanh(dense(tf.nn.embedding_lookup(table, ids), 8, "mix"))
        with scope(1):
            logits = tf.matmul(tf.reshape(dense(h, 8, "out"), [-1, 8]), table, transpose_b=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.reshape(ids, [-1]), logits=logits))
        run.merge(loss)
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        saver = tf.train.Saver()
        with run.session() as session:
            found["losses"] = [float(np.mean([session.run([loss, train])[0] for _ in range(run.runs)])) for _ in range(3)]
            saver.save(session, path)
        with run.session() as session:
            saver.restore(session, path)
            found["again"] = variables(session)
            found["more"] = [float(np.mean([session.run([loss, train])[0] for _ in range(run.runs)])) for _ in range(2)]
        reader = tf.train.load_checkpoint(path)
        found["saved"] = {name: reader.get_tensor(name) for name, _ in tf.train.list_variables(path)}
    return found


def judge_drawn(outcome):
    for rank in outcome.ranks:
        for name in ("losses", "more"):
            np.testing.assert_allclose(rank[name], outcome.plain[name], rtol=1e-5, err_msg=name)
        for part in ("saved", "again"):
            assert sorted(rank[part]) == sorted(outcome.plain[part])
            for name, wanted in outcome.plain[part].items():
                np.testing.assert_allclose(rank[part][name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


@cases(drawn, "4x1-a2-s2-m2", kinds="ss", compare=True)
def test_checkpoints_and_datasets(outcome):
    judge_drawn(outcome)


@pytest.mark.slow
@cases(two_stages, "3x1-n2-s2", kinds="rs", compare=True)
def test_a_stage_on_one_rank_before_a_split_one(outcome):
    judge(outcome)


@pytest.mark.slow
@cases(drawn, "3x1-n2-s2-m2", kinds="rs", compare=True)
def test_checkpoints_and_datasets_with_a_stage_on_one_device(outcome):
    judge_drawn(outcome)


def products(run):
    """How often this process computes each matrix product in a micro-batch of a step."""
    from epl.runtime.adapters.sessions import rank_session

    with run.program():
        scope = Scopes(run, "rs")
        x = tf.placeholder(tf.float32, [None, 6])
        with scope(0):
            h = tf.nn.relu(dense(x, 16, "features"))
        with scope(1):
            loss = tf.reduce_mean(tf.square(dense(h, 16, "head")))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with run.session() as session:
            run.step(session, train, {x: np.ones([ROWS, 6], np.float32)})
            nodes = [node for program in rank_session(session).programs() for node in program.nodes.values() if node.op == "MatMul"]
            return sorted(node.origin for node in nodes)


@cases(products, "1x3-n2-s2")
def test_a_stage_on_one_device_is_computed_once(outcome):
    found = [name for rank in outcome.ranks for name in rank]
    assert found.count("Tensordot/MatMul") == 1  # forward, of the first stage
    assert found.count("Tensordot_1/MatMul") == 2  # each device its part


@pytest.mark.slow
@cases(drawn, "1x4-p2-s2", "2x2-p2-s2-m2", "4x1-p2-s2", kinds="rs", compare=True)
def test_checkpoints_and_datasets_with_batches_for_each_lane(outcome):
    judge_drawn(outcome)
