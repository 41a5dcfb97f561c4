"""Every way to compute an op on the devices of a group gives what the op gives, and its gradients."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.ir import attrs as A
from epl.passes.shard import hold, rewrite
from epl.planner.sharding import graph, solve
from epl.planner.sharding.strategy import strategies
from tests.unit.machine import Machine, Plain, user_graph
from tests.unit.sharding.op_cases import FORWARD, H, batch

_SKIPPED = frozenset(("Const", "NoOp", "Placeholder", "VarHandleOp", "EplFetch", graph.SUM))


def program(case):
    """A step of gradient descent on the mean square of an op's results; the batch passes through weights of its own before."""
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, H], "x")
        ids = tf.placeholder(tf.int64, [None], "ids")
        scale = tf.get_variable("scale", [H], initializer=tf.ones_initializer())
        with tf.get_default_graph()._attr_scope({A.TASKGRAPH: A.of_int(0)}):
            out = tf.identity(FORWARD[case](x * scale, ids), name="out")
            loss = tf.reduce_mean(tf.square(out))
        tf.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        tf.group(tf.global_variables_initializer(), name="init")
        names = ["%s/Read/ReadVariableOp:0" % v.op.name for v in tf.global_variables()]
        return index(), names


class Chooser:
    """Replaces the search: one node is computed in one way, the others as it is cheapest."""

    def __init__(self, monkeypatch):
        self.node, self.way = None, None
        self.ways = {}
        self.machine = solve.Machine()
        monkeypatch.setattr(solve, "improve", lambda problem, values: values)  # what is cheapest does not matter here, time does
        for module in (hold, rewrite):
            monkeypatch.setattr(module, "plan_sharding", self)

    def __call__(self, program, plan, parallel, held=None, machine=None, decided=None, known=None):
        group = plan.group
        items = graph.Items(program, plan, group, parallel, held, self.machine, decided or {}).items
        units = solve.hinted_units(items)
        for number, item in enumerate(items):
            if parallel and item.free and item.op.type not in _SKIPPED and not item.ways:
                found = strategies(item.op, item.lanes, item.analysis, group, units)
                self.ways.setdefault(item.name, found)
                if item.name == self.node and self.way in found:
                    items[number] = item._replace(ways=(self.way,))
        return graph.chosen(items, group, self.machine)


def step(machine, names, feeds):
    machine.run("init")
    machine.run("train", feeds)
    return machine.run(names)


def check(case, monkeypatch, layouts, every):
    whole, names = program(case)
    feeds = batch()
    plain = Plain(whole)
    plain.run("init")
    plain.run("train", feeds)
    wanted = plain.run(names)
    chooser = Chooser(monkeypatch)
    tried = 0
    for number, (devices, ranks) in enumerate(layouts):
        lanes = devices * ranks
        chooser.node, chooser.ways = None, {}
        _compare(Machine(whole, devices, ranks, lanes=lanes, split=(0,)), names, feeds, wanted, "as it is cheapest")
        for node, ways in list(chooser.ways.items()):
            for position, way in enumerate(ways[1:]):
                if (position + number) % every:
                    continue
                chooser.node, chooser.way = node, way
                try:
                    machine = Machine(whole, devices, ranks, lanes=lanes, split=(0,))
                except solve.ProgramError:
                    continue  # A variable would have to be in two forms.
                _compare(machine, names, feeds, wanted, "%s: %s on %d lanes" % (node, way, lanes))
                tried += 1
    assert tried


def _compare(machine, names, feeds, wanted, what):
    for rank in step(machine, names, feeds):
        for name, value, expected in zip(names, rank, wanted):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=2e-6, err_msg="%s, %s" % (name, what))


SOME = "bias_add mean_columns softmax sparse_cross_entropy embedding top_k".split()


@pytest.mark.parametrize("case", SOME)
def test_parts_give_what_the_op_gives(case, monkeypatch):
    check(case, monkeypatch, [(2, 1), (1, 3)], 37)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(FORWARD))
def test_parts_give_what_the_op_gives_in_every_way(case, monkeypatch):
    check(case, monkeypatch, [(2, 1), (3, 1), (1, 2), (1, 3)], 1)


