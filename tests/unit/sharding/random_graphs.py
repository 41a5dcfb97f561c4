"""Random programs with `split` scopes in random layouts, and their comparison with plain TensorFlow.

A program is data: a list of blocks, each of which makes one tensor in a scope. So a
failure can be written down and run again. What computes a program is random too: the
search may find other costs than those of a machine, so that ways are taken that would
never be the cheapest.
"""

import contextlib
import dataclasses
import zlib
from typing import NamedTuple, Optional, Tuple

import numpy as np
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from epl.ir import op_table
from epl.ir.graph import GraphKeys
from epl.passes.shard import hold, rewrite
from epl.planner.sharding import graph, solve
from epl.planner.sharding.op import rule_of
from tests.unit.machine import Machine, Plain, user_graph
from tests.unit.sharding.random_functions import ONCE, UNARY
from tests.unit.sharding.random_layers import CLASSES, COLUMNS, KINDS, LOOPS, MIXING, PLACES, WORDS, Layers

STEPS = 2


class Block(NamedTuple):
    """kind: a method of `Layers`. scope: number of its split, 0 outside of them. a, b, c: what the kind makes of them."""

    kind: str
    scope: int = 1
    a: int = 0
    b: int = 0
    c: int = 0


class Spec(NamedTuple):
    """A program.

    scopes: of `split`. head: the scope of the last layer and its loss. total: that of the sum of losses.
    rows: of one batch. static: whether placeholders say so. stamped: whether what is outside of
    scopes belongs to a default strategy's taskgraph. joined: whether fetching a tensor in the
    middle gives all replicas' rows. second: whether another optimizer trains some of the variables
    with a loss of their own, in a run of its own.
    """

    blocks: Tuple[Block, ...] = ()
    optimizer: str = "sgd"
    scopes: int = 1
    head: int = 1
    total: int = 0
    resource: bool = True
    v2: bool = False
    clip: bool = False
    rate: bool = False
    penalty: bool = False
    rows: int = 2
    static: bool = False
    stamped: bool = True
    joined: bool = False
    second: bool = False


class Layout(NamedTuple):
    """ranks x devices, of which `lanes` neighbours share what is split.

    mood: 0 for the costs of a machine, else a seed of random ones; weight: how much the ways to
    compute an op differ, in seconds. dense: sparse gradients travel as tables. groups: of variables
    that are updated after each other. at, method: where and how gradients are aggregated.
    """

    ranks: int = 1
    devices: int = 2
    lanes: int = 2
    m: int = 1
    mood: int = 0
    weight: float = 1e-3
    dense: bool = False
    groups: int = 1
    at: str = "raw"
    method: str = "mean"

    @property
    def replicas(self):
        return self.ranks * self.devices

    @property
    def is_plain(self):
        """Whether plain TensorFlow computes the same."""
        return self.at == "raw" and self.method == "mean"

    @property
    def plan(self):
        return {"sparse_as_dense": self.dense, "apply_groups": self.groups, "aggregate_at": self.at, "reduce_method": self.method}


@dataclasses.dataclass(frozen=True)
class Dice(solve.Machine):
    """A machine on which the cost of each way to compute an op is drawn."""

    mood: int = 1
    weight: float = 1e-3

    def computes(self, item, way, group):
        text = "%d %s %s" % (self.mood, item.name, way)
        return self.weight * zlib.crc32(text.encode()) / 2**32


class Seen:
    """In which ways ops could be computed, and in which they were: (rule, forms of inputs and outputs, how).

    What holds for all ops of a rule, such as that of element-wise ones, counts once: of the hundred types, each with
    its ways, most come up a few times only. `test_rules` has every type in every way.

    Terms of a sum are made by ops alone: nothing brings a tensor into that form. So a way that takes terms
    could be taken only where the op before has one that makes them, and what has to be divided, or was
    decided for another program, is no choice.

    Not counted is what computes initial values, where sums of terms never come up.
    """

    def __init__(self):
        self.possible, self.taken = set(), set()

    def note(self, sharding, group):
        units = solve.hinted_units(list(sharding.items.values()))
        sums = set()
        for name, item in sharding.items.items():
            ways = [w for w in solve.ways_of(item, group, units) if all(form.kind != "P" or ref in sums for form, ref in zip(w.inputs, item.inputs))]
            sums.update((name, index) for w in ways for index, form in enumerate(w.outputs) if form.kind == "P")
            if item.free and not item.ways and not item.prepares:
                self.taken.add(self._kind(item, sharding.strategies[name]))
                self.possible.update(self._kind(item, w) for w in ways)

    @staticmethod
    def _kind(item, way):
        return rule_of(item.op.type), tuple((s.kind, s.dim) for s in way.inputs), tuple((s.kind, s.dim) for s in way.outputs), way.how


@contextlib.contextmanager
def costs(machine, seen=None):
    """Let programs be planned for a machine."""

    def plan(program, job, parallel, held=None, _=None, decided=None, known=None):
        found = graph.plan_sharding(program, job, parallel, held, machine, decided, known)
        if seen is not None:
            seen.note(found, job.group)
        return found

    before = hold.plan_sharding, rewrite.plan_sharding
    hold.plan_sharding = rewrite.plan_sharding = plan
    try:
        yield
    finally:
        hold.plan_sharding, rewrite.plan_sharding = before


OPTIMIZERS = {
    "sgd": lambda rate: tf.train.GradientDescentOptimizer(rate),
    "momentum": lambda rate: tf.train.MomentumOptimizer(rate, 0.9),
    "adam": lambda rate: tf.train.AdamOptimizer(rate, epsilon=1e-2),
    "adagrad": lambda rate: tf.train.AdagradOptimizer(rate, initial_accumulator_value=0.3),
    "rmsprop": lambda rate: tf.train.RMSPropOptimizer(rate, epsilon=0.1),
    "ftrl": lambda rate: tf.train.FtrlOptimizer(rate, initial_accumulator_value=0.3, l1_regularization_strength=0.01),
    "adadelta": lambda rate: tf.train.AdadeltaOptimizer(rate, epsilon=0.01),
}
UPDATES = ("GradientDescent/", "Momentum/", "Adam/", "Adagrad/", "RMSProp/", "Ftrl/", "Adadelta/", "Second/")
"""Name scopes of the optimizers' ops."""


def _scope(spec, number):
    """What scopes do to the nodes in them."""
    number = min(number, spec.scopes)
    if not number and not spec.stamped:
        return contextlib.nullcontext()
    return tf.get_default_graph()._attr_scope({"_epl_taskgraph": AttrValue(i=number)})


def build(spec, batch):
    """Build a program in the default graph; returns the tensors with the values of its variables, and a gradient."""
    with _scope(spec, 0):
        layers = Layers(batch if spec.static else None)
    for number, block in enumerate(spec.blocks):
        layers.prefix = "b%d/" % number
        with _scope(spec, block.scope):
            layers.keep(getattr(layers, block.kind)(block.a, block.b, block.c))
    with _scope(spec, spec.head):
        layers.prefix = "last/"
        top = tf.identity(layers.dense(0, 0, 3), name="top")
        out = layers.two(0) if not layers.keep(top) else None
        logits = tf.matmul(out, layers.variable("out", int(out.shape[1]), CLASSES))
        layers.losses.append(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=layers.y, logits=logits)))
    with _scope(spec, spec.blocks[len(spec.blocks) // 2].scope if spec.blocks else 0):
        probe = tf.identity(layers.values[len(spec.blocks) // 2], name="probe")
        if spec.joined:
            tf.add_to_collection(GraphKeys.GLOBAL_CONCAT_OBJECTS, probe)
    with _scope(spec, spec.total):
        inner = tf.gradients(tf.reduce_sum(top), layers.x)[0] if spec.penalty else None
        if inner is not None:
            layers.losses.append(0.05 * tf.reduce_mean(tf.square(inner)))
        loss = tf.add_n(layers.losses, name="loss")
    with _scope(spec, 0):
        tf.add_to_collection(GraphKeys.GLOBAL_MEAN_OBJECTS, loss)
        rate = tf.train.exponential_decay(0.1, layers.step, 2, 0.8) if spec.rate else tf.constant(0.1)
        optimizer = OPTIMIZERS[spec.optimizer](rate)
        pairs = [(g, v) for g, v in optimizer.compute_gradients(loss) if g is not None]
        norm = tf.global_norm([g for g, _ in pairs])
        if spec.clip:
            clipped, _ = tf.clip_by_global_norm([g for g, _ in pairs], 0.1, use_norm=norm)
            pairs = list(zip(clipped, [v for _, v in pairs]))
        tf.identity(norm, name="norm")
        gradient = next(g for g, v in pairs if v.op.name == "last/out")
        with tf.control_dependencies([optimizer.apply_gradients(pairs, global_step=layers.step)]):
            tf.no_op(name="train")
        if spec.second:
            some = [v for v in tf.trainable_variables() if v.op.name.endswith("w") or v.op.name.startswith("last")]
            tf.train.MomentumOptimizer(0.05, 0.5, name="Second").minimize(layers.losses[-1], var_list=some, name="second")
        tf.group(tf.global_variables_initializer(), name="init")
        return [tf.identity(v.read_value(), name="value/" + v.op.name).name for v in tf.global_variables()], gradient.name


def graph_of(spec, batch):
    """The whole of a program as the graph index gives it, and what `build` returns."""
    with user_graph(v2=spec.v2, resource=spec.resource) as index:
        reads, gradient = build(spec, batch)
        return index(), reads, gradient


def in_order(whole):
    """Plain TensorFlow may update a variable that a gradient or the loss still reads: here it waits."""
    waits = {ref[0] for ref in whole.raw_gradients} | {"loss", "top", "probe"}
    nodes = {}
    for name, node in whole.nodes.items():
        if name.startswith(UPDATES) and op_table.writes_state(node.op):
            node = node.replace(controls=tuple(dict.fromkeys(node.controls + tuple(sorted(waits)))))
        nodes[name] = node
    return whole.replace(nodes=nodes)


def batches(rows):
    for step in range(STEPS):
        draw = np.random.RandomState(step)
        yield {
            "x:0": draw.uniform(-1, 1, (rows, COLUMNS)).astype(np.float32),
            "words:0": draw.randint(0, WORDS, (rows, PLACES)),
            "y:0": draw.randint(0, CLASSES, rows).astype(np.int32),
            "flag:0": np.bool_(step % 2 == 0),
        }


def compare(spec, layout, seen=None):
    """Train in a layout and plainly: losses, outputs and variables must be equal."""
    rows = spec.rows * layout.m * layout.replicas
    whole, reads, gradient = graph_of(spec, spec.rows)
    machine = Dice(mood=layout.mood, weight=layout.weight) if layout.mood else solve.Machine()
    with costs(machine, seen):
        split = tuple(range(1, spec.scopes + 1))
        shared = Machine(whole, layout.devices, layout.ranks, layout.m, lanes=layout.lanes, split=split, **layout.plan)
        if any(block.kind in MIXING for block in spec.blocks) or not layout.is_plain:
            plain = _Replicas(Machine(whole, layout.replicas, 1, layout.m, **layout.plan))
        else:
            plain = Plain(in_order(graph_of(spec, rows)[0] if spec.static else whole))
        _train(spec, shared, plain, layout, reads, gradient)


class _Replicas:
    """Data parallelism, where which samples are in a batch counts; fetches give what they give to the first replica."""

    def __init__(self, machine):
        self._machine = machine

    def run(self, fetches, feeds=None):
        return self._machine.run(fetches, feeds)[0]


def _train(spec, shared, plain, layout, reads, gradient):
    shared.run(["init"]), plain.run(["init"])
    fetches = ["loss:0", "norm:0", "top:0", "probe:0", gradient, "train"]
    apart = ["top:0"] + ["probe:0"] * (not spec.joined) + ["norm:0"] * (layout.at == "apply")
    mixing = isinstance(plain, _Replicas)
    for step, feeds in enumerate(batches(spec.rows * layout.m * layout.replicas)):
        wanted, found = plain.run(fetches, feeds), shared.run(fetches, feeds)
        for rank, values in enumerate(found):
            for name, value, expected in zip(fetches, values, wanted):
                if name in apart and mixing and rank:
                    continue
                if name in apart and not mixing:
                    expected = np.split(expected, layout.replicas)[rank * layout.devices]
                _equal(value, expected, "%s, step %d, rank %d" % (name, step, rank))
        if spec.second:
            plain.run(["second"], feeds), shared.run(["second"], feeds)
        if step == 0:
            _compare_variables(shared, plain, reads, "after a step")
    _compare_variables(shared, plain, reads, "at the end")
    if not mixing and not spec.static:
        expected = plain.run(["top:0"], feeds)[0]
        for rank, values in enumerate(shared.run(["top:0"], feeds)):
            _equal(values[0], expected, "evaluation on rank %d" % rank)


def _compare_variables(shared, plain, reads, when):
    wanted = plain.run(reads)
    for rank, values in enumerate(shared.run(reads)):
        for name, value, expected in zip(reads, values, wanted):
            _equal(value, expected, "%s on rank %d, %s" % (name, rank, when))


def _equal(found, wanted, label):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=label)


# Drawing programs. `draw` is a random.Random, hypothesis' own or a seeded one.

LAYOUTS = ((1, 2, 2), (1, 3, 3), (1, 4, 4), (1, 4, 2), (2, 1, 2), (3, 1, 3), (2, 2, 4), (2, 2, 2), (4, 1, 2))


def draw_spec(draw, kinds=None):
    chance = lambda p: draw.random() < p  # noqa: E731
    usual = [kind for kind in KINDS if kind not in MIXING]
    choices = kinds or (KINDS if chance(0.2) else usual)
    scopes = draw.choice([1, 1, 1, 2, 3])
    blocks = []
    for _ in range(draw.randint(2, 9)):
        scope = draw.randint(1, scopes) if chance(0.85) else 0
        blocks.append(Block(draw.choice(choices), scope, draw.choice([0, 0, 0, 1, 2]), draw.randint(0, 5), draw.randint(0, 59)))
    once = any(block.kind in LOOPS + MIXING or block.kind == "unary" and block.c % len(UNARY) in ONCE for block in blocks)
    return Spec(
        tuple(blocks),
        draw.choice(sorted(OPTIMIZERS)),
        scopes,
        head=draw.choice([1, 1, 1, scopes, 0]),
        total=draw.choice([0, 1]),
        resource=chance(0.85),
        v2=chance(0.2),
        clip=chance(0.3),
        rate=chance(0.3),
        penalty=not once and chance(0.15),
        rows=draw.choice([1, 2, 2, 3]),
        static=chance(0.3),
        stamped=chance(0.8),
        joined=chance(0.3),
        second=chance(0.2),
    )


def draw_layout(draw, layouts=LAYOUTS):
    ranks, devices, lanes = draw.choice(layouts)
    return Layout(
        ranks,
        devices,
        lanes,
        draw.choice([1, 1, 2]),
        mood=0 if draw.random() < 0.15 else draw.randint(1, 10**6),
        weight=draw.choice([1e-2, 1e-3, 1e-4, 3e-5]),
        dense=draw.random() < 0.2,
        groups=draw.choice([1, 1, 1, 3]),
        at=draw.choice(["raw"] * 9 + ["apply"]),
        method=draw.choice(["mean"] * 9 + ["sum"]),
    )


def draw_case(draw, kinds: Optional[Tuple[str, ...]] = None):
    return draw_spec(draw, kinds), draw_layout(draw)


@st.composite
def cases(draw):
    return draw_case(draw(st.randoms(use_true_random=False)))


__all__ = ["Block", "Layout", "Seen", "Spec", "cases", "compare", "draw_case"]
