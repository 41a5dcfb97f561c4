"""What the search finds by itself, where sizes leave no doubt."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.ir import attrs as A
from epl.passes.shard.hold import training_sharding, with_held
from epl.planner.plan import Plan
from epl.planner.sharding.spec import Group, R, S, canonical
from tests.unit.machine import user_graph

K = 4


def dense(h, columns, name):
    return tf.matmul(h, tf.get_variable(name, [int(h.shape[-1]), columns]))


def column_then_row():
    """Few samples, large weights: activations travel, weights don't."""
    x = tf.placeholder(tf.float32, [8, 512], "x")
    return tf.reduce_mean(tf.square(dense(tf.nn.relu(dense(x, 4096, "up")), 512, "down")))


def classifier():
    x, y = tf.placeholder(tf.float32, [64, 512], "x"), tf.placeholder(tf.int64, [64], "y")
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=dense(x, 100001, "head")))


def tied_embedding():
    tokens = tf.placeholder(tf.int64, [8, 16], "tokens")
    table = tf.get_variable("table", [50001, 256])
    h = tf.reshape(tf.nn.embedding_lookup(table, tokens), [-1, 256])
    logits = tf.matmul(h, table, transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.reshape(tokens, [-1]), logits=logits))


def attention():
    """16 heads of 64 columns, few samples."""
    x = tf.placeholder(tf.float32, [2, 16, 1024], "x")

    def heads(name):
        return tf.transpose(tf.reshape(dense(tf.reshape(x, [-1, 1024]), 1024, name), [-1, 16, 16, 64]), [0, 2, 1, 3])

    scores = tf.nn.softmax(tf.matmul(heads("q"), heads("k"), transpose_b=True))
    joined = tf.reshape(tf.transpose(tf.matmul(scores, heads("v")), [0, 2, 1, 3]), [-1, 1024])
    return tf.reduce_mean(tf.square(dense(joined, 1024, "o")))


def chosen(model, known=None):
    """known: forms of variables that are given."""
    with user_graph() as index:
        with tf.get_default_graph()._attr_scope({A.TASKGRAPH: A.of_int(0)}):
            loss = model()
        tf.train.AdamOptimizer(0.1).minimize(loss, name="train")
        whole = index()
    return training_sharding(whole, Plan(devices_per_rank=K, lanes=K, split=(0,)), known)


def largest_moves(sharding, count=1):
    group = Group.of(K)
    moves = [(sharding.sent(ref, source, target, group), ref) for ref, forms in sharding.forms.items() for target, source in forms.items()]
    return sorted(moves, reverse=True)[:count]


def test_a_column_and_a_row_divided_product():
    sharding = chosen(column_then_row)
    held = sharding.held()
    assert (held["up"], held["down"]) == (S(1), S(0)) and held["up/Adam"] == S(1) and held["down/Adam_1"] == S(0)
    size, ref = largest_moves(sharding)[0]
    assert size < 4 * 512 * 4096 / 4, "%s is as large as a part of the weights" % (ref,)


def test_a_cross_entropy_of_divided_classes():
    sharding = chosen(classifier)
    assert sharding.held()["head"] == S(1)
    loss = next(way for name, way in sharding.strategies.items() if sharding.items[name].op.type == "SparseSoftmaxCrossEntropyWithLogits")
    assert loss.how == "sparse_cross_entropy"
    assert largest_moves(sharding)[0][0] < 64 * 100001, "no logits travel"


def test_a_divided_vocabulary():
    sharding = chosen(tied_embedding)
    assert sharding.held()["table"] == S(0)
    hows = {sharding.items[name].op.type: way.how for name, way in sharding.strategies.items()}
    assert hows["ResourceGather"] == "gather" and hows["SparseSoftmaxCrossEntropyWithLogits"] == "sparse_cross_entropy"
    assert largest_moves(sharding)[0][0] < 4 * 50001 * 256 / 4, "neither a part of the table nor logits travel"


def test_attention_by_heads():
    sharding = chosen(attention)
    held = {name: canonical(form, [1024, 1024], Group.of(K)) for name, form in sharding.held().items()}
    assert [held[name] for name in ("q", "k", "v", "o")] == [S(1), S(1), S(1), S(0)]
    products = [way for name, way in sharding.strategies.items() if sharding.items[name].op.type.startswith("BatchMatMul")]
    assert len(products) == 6 and all(way.outputs[0] == S(1) for way in products), "the dimension of the heads, forward and backward"
    activations = 4 * 2 * 16 * 1024
    assert sharding.bytes == 3 * (K - 1) * activations, "the samples there, a sum back, its gradient there"


USUAL = {"up": S(1), "down": S(0), "table": S(0), "head": S(1), "q": S(1), "k": S(1), "v": S(1), "o": S(0)}
"""How others divide these variables."""


@pytest.mark.parametrize("model", [column_then_row, classifier, tied_embedding, attention])
def test_nothing_usual_is_cheaper(model):
    assert chosen(model).seconds <= 1.01 * chosen(model, USUAL).seconds


@pytest.mark.parametrize("classes, samples", [(60000, None), (20000, 8), (300000, 512)])
def test_a_large_head_stays_where_it_is(classes, samples):
    """Neither it nor its gradient travels, also where the head is the only layer and the batch is not known."""

    def model():
        x, y = tf.placeholder(tf.float32, [samples, 8], "x"), tf.placeholder(tf.int64, [samples], "y")
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=dense(x, classes, "head")))

    sharding = chosen(model)
    assert sharding.held()["head"] == S(1) and largest_moves(sharding)[0][0] < 8 * classes


def test_products_of_batches_of_unknown_length():
    """Their gradients are summed over axes that depend on shapes, but both have the same samples."""

    def gated():
        x = tf.placeholder(tf.float32, [None, 512], "x")
        return tf.reduce_mean(tf.square(dense(tf.nn.relu(dense(x, 4096, "up")) * dense(x, 4096, "gate"), 512, "down") + x))

    sharding = chosen(gated)
    held = sharding.held()
    assert [held[name] for name in ("up", "gate", "down")] == [S(1), S(1), S(0)]
    products = [way for name, way in sharding.strategies.items() if sharding.items[name].op.type == "MatMul"]
    assert len(products) == 9 and all(S(1) in way.inputs + way.outputs for way in products), "forward and backward"
    assert sharding.bytes == 3 * (K - 1) * 4 * 64 * 512, "the samples there, a sum back, its gradient there"


def test_what_was_decided_stays():
    with user_graph() as index:
        with tf.get_default_graph()._attr_scope({A.TASKGRAPH: A.of_int(0)}):
            tf.train.AdamOptimizer(0.1).minimize(column_then_row(), name="train")
        whole = index()
    plan = Plan(devices_per_rank=K, lanes=K, split=(0,))
    assert with_held(whole, plan, {"up": S(0), "down": S(1)}).held["up"] == S(0)
    assert R not in with_held(whole, plan).held.values()


def test_rows_of_a_sparse_gradient_are_those_of_all_lanes():
    """How many there are is not what its shape says, which is that of one lane: they can't be divided by it."""
    with user_graph() as index:
        tokens = tf.placeholder(tf.int64, [64, 64], "tokens")
        h = tf.nn.embedding_lookup(tf.get_variable("table", [500, 64]), tokens)
        with tf.get_default_graph()._attr_scope({A.TASKGRAPH: A.of_int(0)}):
            loss = tf.reduce_mean(tf.square(tf.einsum("btm,mn->btn", h, tf.get_variable("w", [64, 64]))))
        made = tf.train.MomentumOptimizer(0.1, 0.9)
        gradients, variables = zip(*made.compute_gradients(loss))
        clipped, _ = tf.clip_by_global_norm(gradients, 1.0)
        made.apply_gradients(zip(clipped, variables), name="train")
        whole = index()
    sharding = training_sharding(whole, Plan(devices_per_rank=K, lanes=K, split=(0,)))
    found = 0
    for name, item in sharding.items.items():
        for ref, form, tensor in zip(item.inputs, sharding.strategies[name].inputs, item.op.inputs):
            if ref[0].startswith("epl_sum/") and "embedding_lookup_grad" in ref[0]:
                found += 1
                assert tensor.dim(0) is None and form != S(0), (name, str(form))
    assert found >= 3, "the norm, the clipped rows and their indices"


PARTS = [((1, 1, 1), 7, 1, (2, 2, 3)), ((2, 1), 9, 1, (6, 3)), ((1, 1), 12, 4, (4, 8)), ((1,) * 4, 2, 1, (0, 1, 0, 1))]


@pytest.mark.parametrize("shares, length, unit, wanted", PARTS)
def test_parts_of_a_dimension(shares, length, unit, wanted):
    group = Group(shares)
    assert group.lengths(length, unit) == wanted and sum(wanted) == length
    assert list(np.diff(group.bounds(length, unit))) == list(wanted)
