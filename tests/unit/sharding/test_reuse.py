"""Programs of one graph are computed as its training step is, without another search."""

import tensorflow.compat.v1 as tf

from epl.ir import attrs as A
from epl.ir.program import DIVIDE, SAME
from epl.passes.classify import Classify
from epl.passes.extract import extract
from epl.passes.shard.hold import with_held
from epl.planner.plan import Plan, Task
from epl.planner.sharding import graph
from epl.planner.sharding.reuse import as_before
from epl.planner.sharding.spec import S
from epl.planner.sharding.strategy import L
from tests.unit.machine import user_graph

PLAN = Plan(devices_per_rank=2, lanes=2, split=(0,))


def built():
    """The whole graph: a product in a scope, trained; other things are only fetched."""
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 256], "x")
        with tf.get_default_graph()._attr_scope({A.TASKGRAPH: A.of_int(0)}):
            h = tf.nn.relu(tf.matmul(x, tf.get_variable("w", [256, 65536])))
            loss = tf.reduce_mean(tf.reduce_sum(tf.square(h), 1), name="loss")
            tf.reduce_sum(tf.abs(h), 1, name="more")
            tf.square(h, name="squares")
        tf.train.AdamOptimizer(0.1).minimize(loss, name="train")
        return with_held(index(), PLAN)


def program(whole, fetches, mode):
    return Classify()(extract(whole, fetches, ["x:0"], [mode]), Task(PLAN))


def searched(monkeypatch, found, whole, parallel, known):
    """What is chosen for a program, and the names of the items that the search could choose for."""
    tried = []

    def solve(items, group, machine):
        tried.append({item.name for item in items if not item.ways and item.free})
        return before(items, group, machine)

    before = graph.solve
    with monkeypatch.context() as patch:
        patch.setattr(graph, "solve", solve)
        chosen = graph.plan_sharding(found, PLAN, parallel, whole.held, known=known)
    return chosen, tried


def test_a_training_step_is_searched_once(monkeypatch):
    whole = built()
    step = program(whole, ["loss:0", "train"], DIVIDE)
    chosen, tried = searched(monkeypatch, step, whole, True, whole.sharding)
    # Nothing in the step needs the value of the loss; nor, in some versions of TensorFlow, the axes of its mean.
    (names,) = tried
    assert names - {"Const"} == {"loss"}, "all else is known"
    anew, _ = searched(monkeypatch, step, whole, True, None)
    assert chosen.held() == anew.held() and chosen.bytes == anew.bytes


def test_what_is_new_is_chosen_for(monkeypatch):
    whole = built()
    chosen, tried = searched(monkeypatch, program(whole, ["more:0", "train"], DIVIDE), whole, True, whole.sharding)
    assert tried and "more" in tried[0] and "MatMul" not in tried[0]
    assert all(chosen.strategies[name] == way for name, way in whole.sharding.strategies.items() if name in chosen.strategies)


def test_where_it_is_dear_all_is_chosen_anew(monkeypatch):
    """A fetch of each device's own columns needs an exchange that the training step does not: the cheaper of both is taken."""
    whole = built()
    step = program(whole, ["squares:0", "train"], DIVIDE)
    chosen, tried = searched(monkeypatch, step, whole, True, whole.sharding)
    assert len(tried) == 2 and "MatMul" in tried[1]
    anew, _ = searched(monkeypatch, step, whole, True, None)
    assert chosen.seconds <= anew.seconds


def test_other_lanes_are_another_problem(monkeypatch):
    """What is fed to all lanes alike may be computed in other ways."""
    whole = built()
    _, tried = searched(monkeypatch, program(whole, ["loss:0"], SAME), whole, False, whole.sharding)
    assert len(tried) == 1 and "MatMul" in tried[0]


def test_what_does_not_go_together_is_searched_anew(monkeypatch):
    whole = built()
    failed = []

    def solve(items, group, machine):
        if not failed:
            failed.append(True)
            raise graph.ProgramError("no way")
        return before(items, group, machine)

    before = graph.solve
    monkeypatch.setattr(graph, "solve", solve)
    found = graph.plan_sharding(program(whole, ["loss:0", "train"], DIVIDE), PLAN, True, whole.held, known=whole.sharding)
    assert found.strategies["w"].outputs[0] == whole.held["w"]


def test_an_item_keeps_its_way_where_it_can():
    whole = built()
    items, ways = whole.sharding.items, whole.sharding.strategies
    one = items["w"]
    assert as_before([one], items, ways) == [one._replace(ways=(ways["w"],))]
    assert as_before([one._replace(fixed=ways["w"].outputs[0])], items, ways) is not None
    assert as_before([one._replace(fixed=S(0) if ways["w"].outputs[0] != S(0) else S(1))], items, ways) is None, "it is held otherwise"
    assert as_before([one._replace(ways=(ways["w"]._replace(outputs=(L,)),))], items, ways) is None, "it is prescribed otherwise"
    assert as_before([one._replace(free=False)], items, ways) is None and ways["w"].outputs[0].is_sharded, "each device by itself has all of it"
    assert as_before([one._replace(name="other")], items, ways) == [one._replace(name="other")], "nothing is known of it"
