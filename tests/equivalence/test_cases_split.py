"""Rows 4, 19, 20, 35, 56, 68, 69 and 109 where something is split."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import SPLIT_DEVICES, SPLIT_RANKS, SPLIT_UNEVEN, held, judge_variables, normal, traffic
from tests.harness.context import variables
from tests.harness.parametrize import cases
from tests.harness.pool import request

# --- Variables of one device alone --------------------------------------------------------


def heads(run, steps=4, classes=60000):
    """Features that all ranks share, and a head of which each rank has classes of its own."""
    with run.program():
        x, y = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.int64, [None])
        h = tf.nn.relu(tf.matmul(x, normal("shared", 6, 8)))
        with run.split():
            logits = tf.matmul(h, normal("head", 8, classes, seed=2))
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        run.merge(loss)
        train = tf.train.MomentumOptimizer(0.5, 0.9).minimize(loss)
        feeds = []
        for step in range(steps + 1):
            draw = np.random.RandomState(step)
            feeds.append({x: draw.randn(8, 6).astype(np.float32), y: draw.randint(0, classes, 8)})
        with run.session() as session:
            losses = run.train(session, loss, train, feeds[:-1])
            moved = traffic(session, train, {key: run.local(value) for key, value in feeds[-1].items()})
            found = dict(variables(session), losses=losses)
            if not run.plain:
                found.update({"/moved": moved, "/held": held(session, "head")})
            return found


@cases(heads, SPLIT_RANKS, "4x1-p4", compare=True)
def test_row_4_a_head_of_which_each_rank_has_its_own_part(outcome):
    judge_variables(outcome)
    shards = len(outcome.ranks)
    for rank in outcome.ranks:
        np.testing.assert_array_equal(rank["shared"], outcome.ranks[0]["shared"])
        largest = max(np.prod(shape, dtype=int) for _, shapes in rank["/moved"] for shape in shapes)
        assert largest < 8 * (60000 // shards), "neither the head nor its gradient travels: %s" % rank["/moved"]
    assert [rank["/held"] for rank in outcome.ranks] == [[[8, 60000 // shards]]] * shards


def dense_step(run):
    """Features of each replica into a divided layer of 4 x 6 weights; one step of gradient descent."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, 3])
        h = tf.tanh(tf.matmul(x, normal("features", 3, 4)))
        with run.split():
            loss = tf.reduce_mean(tf.square(tf.matmul(h, normal("kernel", 4, 6, seed=2)) - 1.0))
        run.merge(loss)
        kernel = tf.trainable_variables()[1]
        gradient = tf.gradients(loss, kernel)[0]
        train = tf.train.GradientDescentOptimizer(1.0).apply_gradients([(gradient, kernel)])
        with run.session() as session:
            before = session.run(kernel)
            (values,) = run.step(session, [gradient, train], {x: np.random.RandomState(1).randn(12, 3).astype(np.float32)})
            return {"gradient": values[0], "before": before, "after": session.run(kernel)}


@cases(dense_step, SPLIT_RANKS, SPLIT_DEVICES, SPLIT_UNEVEN, "2x2-p2", compare=True)
def test_row_19_gradients_of_divided_weights_are_those_of_one_device(outcome):
    judge_variables(outcome)
    for rank in outcome.ranks:
        np.testing.assert_allclose(rank["before"] - rank["after"], outcome.plain["gradient"], rtol=1e-5, atol=1e-6)


def norms(run, clip):
    """The norm of gradients whose two parts have the squares 20 and 100, beside a replicated one of square 24; w after a step."""
    parts = np.float32([[2, 4], [6, 8]])
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        shared = tf.get_variable("shared", [], initializer=tf.zeros_initializer())
        with run.split():
            w = tf.get_variable("w", [2, 2], initializer=tf.zeros_initializer())
            loss = tf.reduce_mean(x) * tf.reduce_sum(w * parts)
        total = loss + tf.reduce_mean(x) * shared * np.sqrt(24)
        both = tf.gradients(total, [w, shared])
        divided, every = tf.global_norm(both[:1]), tf.global_norm(both)
        gradients = tf.clip_by_global_norm(both, clip)[0] if clip else both
        train = tf.train.GradientDescentOptimizer(1.0).apply_gradients(zip(gradients, [w, shared]))
        with run.session() as session:
            (values,) = run.step(session, [divided, every, train], {x: np.float32([0.5, 1.5, 0.8, 1.2])})
            return {"norms": values[:2], "w": session.run(w), "shared": session.run(shared)}


@cases(norms, SPLIT_RANKS, SPLIT_DEVICES, "2x2-p4", "2x1-p2-m2", clip=0.0)
def test_row_20_the_norm_of_divided_gradients(outcome):
    for rank in outcome.ranks:
        np.testing.assert_allclose(rank["norms"], [10.954452, 12.0], rtol=1e-6)
        np.testing.assert_allclose(rank["w"], [[-2, -4], [-6, -8]], rtol=1e-6)


@cases(norms, SPLIT_RANKS, SPLIT_DEVICES, clip=1.0)
def test_row_20_all_parts_are_clipped_alike(outcome):
    for rank in outcome.ranks:
        np.testing.assert_allclose(rank["w"], np.float32([[-2, -4], [-6, -8]]) / 12, rtol=1e-5)
        np.testing.assert_allclose(rank["shared"], -np.sqrt(24) / 12, rtol=1e-5)


# --- Checkpoints --------------------------------------------------------------------------


def saved(run, earlier=None):
    """Perhaps a checkpoint is restored; a step, and a checkpoint after it: what was restored, what is there, and where it was saved."""
    with run.program():
        x = tf.placeholder(tf.float32, [None, 5])
        with run.split():
            loss = tf.reduce_mean(tf.square(tf.matmul(tf.tanh(tf.matmul(x, normal("up", 5, 7))), normal("down", 7, 5, seed=2)) - x))
        run.merge(loss)
        train = tf.train.AdamOptimizer(0.1).minimize(loss)
        saver = tf.train.Saver()
        with run.session() as session:
            found = {}
            if earlier is not None:
                saver.restore(session, earlier["path"])
                found["restored"] = variables(session)
            run.step(session, train, {x: np.random.RandomState(3).randn(12, 5).astype(np.float32)})
            saver.save(session, run.path("model.ckpt"))
            reader = tf.train.load_checkpoint(run.path("model.ckpt"))
            found["file"] = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
            return dict(found, path=run.path("model.ckpt"), after=variables(session))


PLAIN_FILE = request(saved, "1x1", plain=True)


def pair(before, after):
    """A checkpoint of one layout that is restored in another; "plain" is plain TensorFlow."""
    first = PLAIN_FILE if before == "plain" else request(saved, before)
    plain = after == "plain"
    second = request(saved, "1x1" if plain else after, inputs={"earlier": first}, plain=plain)
    return pytest.param({"first": first, "second": second}, id="%s-then-%s" % (before, after))


ORDERS = "2x1-p2 then plain,1x3-p3 then plain,plain then 2x1-p2,plain then 1x3-p3,2x1-p2 then 1x3-p3,1x3-p3 then 2x2-p4".split(",")


@pytest.mark.parametrize("outcomes", [pair(*names.split(" then ")) for names in ORDERS], indirect=True)
def test_row_35_a_checkpoint_has_no_layout(outcomes):
    first, second = outcomes["first"].ranks[0], outcomes["second"].ranks
    assert sorted(first["file"]) == sorted(first["after"]) and len(first["file"]) == 8
    for name, value in first["file"].items():
        np.testing.assert_array_equal(first["after"][name], value, err_msg="%s in the file" % name)
        for rank in second:
            np.testing.assert_array_equal(rank["restored"][name], value, err_msg="%s after restoring" % name)


# --- Conditionals -------------------------------------------------------------------------


def under_condition(run, v2):
    """Divided layers before, in and after a conditional with the same predicate everywhere, and a lookup in its other branch."""
    with run.program(control_flow_v2=v2):
        x, ids, flag = tf.placeholder(tf.float32, [None, 5]), tf.placeholder(tf.int32, [None]), tf.placeholder(tf.bool, [])
        with run.split():
            h = tf.tanh(tf.matmul(x, normal("before", 5, 8)))
            inside, table = normal("inside", 8, 6, seed=2), normal("table", 9, 6, seed=3)
            h = tf.cond(flag, lambda: tf.nn.softmax(tf.matmul(h, inside)), lambda: tf.nn.embedding_lookup(table, ids))
            loss = tf.reduce_mean(tf.square(tf.matmul(h, normal("after", 6, 4, seed=4)) - 1.0))
        run.merge(loss)
        train = tf.train.AdamOptimizer(0.05).minimize(loss)
        feeds = []
        for step in range(4):
            draw = np.random.RandomState(step)
            feeds.append({x: draw.randn(12, 5).astype(np.float32), ids: draw.randint(0, 9, 12).astype(np.int32), flag: step % 2 == 0})
        with run.session() as session:
            losses = run.train(session, loss, train, feeds)
            found = dict(variables(session), losses=losses)
            if not run.plain:
                found["/held"] = {name: held(session, name) for name in ("before", "inside", "after")}
            return found


@cases(under_condition, SPLIT_RANKS, SPLIT_UNEVEN, compare=True, v2=False)
def test_row_56_divided_layers_around_a_conditional_v1(outcome):
    judge_condition(outcome)


@cases(under_condition, SPLIT_RANKS, SPLIT_DEVICES, compare=True, v2=True)
def test_row_56_divided_layers_around_a_conditional_v2(outcome):
    judge_condition(outcome)


def judge_condition(outcome):
    judge_variables(outcome)
    for rank in outcome.ranks:
        assert rank["/held"]["inside"][0] == [8, 6], "in a conditional each lane computes for itself"
        assert np.prod(rank["/held"]["before"][0]) < 40 and np.prod(rank["/held"]["after"][0]) < 24, "what is around it is divided"


# --- Initial values, experts, order -------------------------------------------------------


def initial(run, seed):
    """Kernels as they are initialised, by an initialiser's own seed, by the graph's, by another variable's value."""
    with run.program(seed=seed):
        x = tf.placeholder(tf.float32, [None, 5])
        with run.split():
            first = tf.get_variable("first", [5, 103], initializer=tf.glorot_uniform_initializer(seed=4 if seed else None))
            second = tf.get_variable("second", [103, 64], initializer=tf.truncated_normal_initializer(stddev=0.5))
            third = tf.get_variable("third", initializer=tf.transpose(second.initial_value) * 2.0)
            loss = tf.reduce_mean(tf.square(tf.matmul(tf.matmul(tf.matmul(x, first), second), third)))
        train = tf.train.AdamOptimizer(0.01).minimize(loss)
        with run.session() as session:
            values = variables(session)
            run.step(session, train, {x: np.ones([12, 5], np.float32)})
            return dict({name: values[name] for name in ("first", "second", "third")}, **({} if run.plain else {"/held": held(session, "second")}))


@cases(initial, SPLIT_RANKS, SPLIT_DEVICES, SPLIT_UNEVEN, compare=True, seed=1)
def test_row_68_parts_start_as_slices_of_the_whole(outcome):
    for rank in outcome.ranks:
        for name, value in outcome.plain.items():
            np.testing.assert_array_equal(rank[name], value, err_msg=name)
        assert np.prod(rank["/held"][0]) < 103 * 64


@cases(initial, SPLIT_RANKS, SPLIT_DEVICES, seed=0)
def test_row_68_parts_without_a_seed_are_independent(outcome):
    for rank in outcome.ranks:
        for name, value in rank.items():
            np.testing.assert_array_equal(outcome.ranks[0][name], value, err_msg=name) if name[0] != "/" else None
        second = rank["second"]
        parts = np.split(second, 2, 1) if second.shape != (103, 64) or rank["/held"][0][1] < 64 else [second[:51], second[51:102]]
        assert abs(np.corrcoef(np.ravel(parts[0]), np.ravel(parts[1]))[0, 1]) < 0.2
        assert 0.38 < np.std(second) < 0.5 and all(0.38 < np.std(part) < 0.5 for part in parts)
        np.testing.assert_allclose(rank["third"], 2 * second.T, rtol=1e-6)


def experts(run, count=4, capacity=8):
    """Top-2 experts with room for all tokens: dispatched by einsum, computed by all experts at once, combined."""
    with run.program():
        x, y = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.float32, [None, 6])
        with run.split():
            gates = tf.nn.softmax(tf.matmul(x, normal("gate", 6, count, stddev=1.0)))
            combine, taken, used = 0.0, 0.0, tf.zeros([count])
            for _ in range(2):
                choice = tf.one_hot(tf.argmax(gates * (1.0 - taken), 1), count)
                place = tf.cumsum(choice, exclusive=True) + used
                used += tf.reduce_sum(choice, 0)
                slot = tf.one_hot(tf.cast(tf.reduce_sum(place * choice, 1), tf.int32), capacity)
                combine += tf.einsum("se,sc->sec", gates * choice, slot)
                taken += choice
            dispatched = tf.einsum("sec,sm->ecm", tf.cast(combine > 0.0, tf.float32), x)
            h = tf.nn.relu(tf.einsum("ecm,emh->ech", dispatched, normal("up", count, 6, 10, seed=2)))
            out = tf.einsum("sec,ecm->sm", combine, tf.einsum("ech,ehm->ecm", h, normal("down", count, 10, 6, seed=3)))
            loss = tf.reduce_mean(tf.square(x + out - y))
        run.merge(loss)
        train = tf.train.AdamOptimizer(0.02).minimize(loss)
        feeds = []
        for step in range(4):
            draw = np.random.RandomState(step)
            feeds.append({x: draw.randn(8, 6).astype(np.float32), y: draw.randn(8, 6).astype(np.float32)})
        with run.session() as session:
            losses = run.train(session, loss, train, feeds)
            return dict(variables(session), losses=losses)


@cases(experts, SPLIT_RANKS, SPLIT_DEVICES, "1x4-p4", "2x2-p2", compare=True)
def test_row_69_experts_with_room_for_all_tokens(outcome):
    judge_variables(outcome)


def branches(run, steps):
    """Six divided branches, ready in an order that differs from rank to rank and from step to step."""
    random, order = np.random.RandomState(run.rank), []

    def dawdle(value, number):
        time.sleep(random.rand() * 0.004)
        order.append(int(number))
        return value

    with run.program():
        x = tf.placeholder(tf.float32, [None, 6])
        losses, updates = [], []
        for number in range(6):
            slow = tf.py_func(dawdle, [x, number], tf.float32, stateful=False)
            slow.set_shape([None, 6])
            with run.split():
                h = tf.tanh(tf.matmul(slow, normal("up%d" % number, 6, 40, seed=number)))
                losses.append(tf.reduce_mean(tf.square(tf.matmul(h, normal("down%d" % number, 40, 2, seed=number + 9)) - 1.0)))
            own = [v for v in tf.trainable_variables() if v.op.name.endswith(str(number))]
            updates.append(tf.train.MomentumOptimizer(0.01, 0.9).minimize(losses[-1], var_list=own))
        loss = run.merge(tf.add_n(losses))
        feeds = [{x: np.random.RandomState(step).randn(4, 6).astype(np.float32)} for step in range(steps)]
        with run.session() as session:
            values = run.train(session, loss, updates, feeds)
            moved = traffic(session, updates, {key: run.local(value) for key, value in feeds[0].items()})
            found = dict(variables(session), losses=np.float32(values))
            if not run.plain:
                found.update({"/moved": moved, "/orders": len({tuple(row) for row in np.reshape(order, [steps + 1, -1])}), "/order": order})
            return found


def judge_branches(outcome):
    judge_variables(outcome)
    for rank in outcome.ranks:
        assert len(rank["/moved"]) >= 12, "each branch has collectives of its own: %s" % rank["/moved"]
        assert rank["/orders"] > 5, "the branches end in orders that vary"
    assert outcome.ranks[0]["/order"] != outcome.ranks[1]["/order"]


@cases(branches, SPLIT_RANKS, compare=True, steps=30)
def test_row_109_independent_branches_in_any_order(outcome):
    judge_branches(outcome)


@pytest.mark.slow
@cases(branches, "4x1-p2", "3x1-p3", compare=True, steps=200)
def test_row_109_many_steps(outcome):
    judge_branches(outcome)
