"""Random annotated programs and layouts, and their comparison with plain TensorFlow.

A program is data: a list of blocks, each of which makes one tensor of WIDTH columns out of
two earlier ones in the scope of a taskgraph. So a failure can be written down and run again.
"""

import contextlib
import dataclasses
from typing import NamedTuple, Optional, Tuple

import numpy as np
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from epl.ir import op_table
from epl.ir.graph import GraphKeys
from epl.passes.assign import assign
from epl.passes.communicate import Communicate
from epl.passes.cut import RECEIVE
from epl.planner.plan import Task
from epl.planner.schedules.factory import chunk_devices
from epl.runtime.compiler import compile_program
from tests.unit.machine import Machine, Plain, user_graph

WIDTH, CLASSES, WORDS = 4, 3, 7
STEPS = 3


class Block(NamedTuple):
    """kind: a key of KINDS. stage: its scope, or None outside of scopes. a, b: which earlier tensors it takes, the newest is 0."""

    kind: str
    stage: Optional[int]
    a: int = 0
    b: int = 1


class Spec(NamedTuple):
    """A program.

    extra: stages with a loss of their own. total: whether the sum of losses is built in the last
    scope. rows: of one batch. static: whether placeholders say so.
    """

    stages: int = 2
    blocks: Tuple[Block, ...] = ()
    optimizer: str = "sgd"
    resource: bool = True
    v2: bool = False
    extra: Tuple[int, ...] = ()
    total: bool = True
    clip: bool = False
    rate: bool = False
    penalty: bool = False
    weight_decay: bool = False
    collected: bool = True
    rows: int = 2
    static: bool = False


class Layout(NamedTuple):
    """ranks x devices hold replicas of as many stages as the program has, `per_device` of them on each device."""

    ranks: int = 1
    devices: int = 1
    m: int = 1
    schedule: str = "PreferBackward"
    near: bool = True
    per_device: int = 1

    def width(self, stages: int) -> int:
        """Devices of a replica."""
        return stages // self.per_device

    def replicas(self, stages: int) -> int:
        return self.ranks * self.devices // self.width(stages)


class Layers:
    """Builds a program; `kind` methods make one tensor each."""

    def __init__(self, spec, batch):
        rows = batch if spec.static else None
        self.x = tf.placeholder(tf.float32, [rows, WIDTH], "x")
        self.ids = tf.placeholder(tf.int32, [rows], "ids")
        self.y = tf.placeholder(tf.int64, [rows], "y")
        self.flag = tf.placeholder(tf.bool, [], "flag")
        self.scale = tf.placeholder(tf.float32, [], "scale")
        self.step = tf.train.get_or_create_global_step()
        self.values = [self.x]
        self.tables, self.weights = [], []
        self.prefix = ""

    def block(self, number, block):
        self.prefix = "b%d/" % number
        a, b = (self.values[-1 - i % len(self.values)] for i in (block.a, block.b))
        with taskgraph(block.stage):
            a, b = (v if v.dtype == tf.float32 else tf.cast(v, tf.float32) for v in (a, b))
            value = getattr(self, block.kind)(a, b)
            value.set_shape([None, WIDTH])
            self.values.append(value)

    def variable(self, name, shape, scale=0.7, trainable=True):
        name = self.prefix + name
        values = np.asarray(scale * np.random.RandomState(sum(map(ord, name))).uniform(-1, 1, shape), np.float32)
        return tf.get_variable(name, initializer=tf.constant(values), trainable=trainable)

    def dense(self, a, b):
        self.weights.append(self.variable("w", [WIDTH, WIDTH]))
        return tf.tanh(tf.matmul(a, self.weights[-1]) + self.variable("b", [WIDTH]))

    def tied(self, a, b):
        return tf.tanh(tf.matmul(a, self.weights[0], transpose_b=True) + b) if self.weights else self.dense(a, b)

    def mix(self, a, b):
        return 0.5 * a + 0.5 * tf.sin(b)

    def gain(self, a, b):
        return a * self.variable("gain", []) + b

    def halves(self, a, b):
        first, second = tf.split(tf.concat([a, b], 1), 2, axis=1)
        return tf.tanh(first) - 0.5 * second

    def turned(self, a, b):
        square = tf.transpose(tf.reshape(a, [-1, 2, 2]), [0, 2, 1])
        return tf.reshape(square, [-1, WIDTH]) + tf.reduce_sum(b, 1, keepdims=True) * 0.1

    def product(self, a, b):
        squares = [tf.reshape(tf.tanh(v), [-1, 2, 2]) for v in (a, b)]
        return tf.reshape(tf.matmul(*squares), tf.shape(a))

    def lookup(self, a, b):
        self.tables.append(self.variable("table", [WORDS, WIDTH]))
        return tf.nn.embedding_lookup(self.tables[-1], self.ids) + 0.5 * a

    def lookup_again(self, a, b):
        return tf.gather(self.tables[0], (self.ids + 1) % WORDS) * 0.5 + tf.tanh(a) if self.tables else self.lookup(a, b)

    def attend(self, a, b):
        """Dense and sparse gradients of one table."""
        if not self.tables:
            return self.lookup(a, b)
        return tf.matmul(tf.nn.softmax(tf.matmul(a, self.tables[-1], transpose_b=True)), self.tables[-1]) + 0.3 * b

    def norm(self, a, b):
        mean, variance = tf.nn.moments(a, [1], keepdims=True)
        return (a - mean) * tf.rsqrt(variance + 0.1) * self.variable("gamma", [WIDTH]) + self.variable("beta", [WIDTH])

    def loop(self, a, b):
        """More iterations than run in parallel."""
        w = self.variable("w", [WIDTH, WIDTH])
        return tf.while_loop(lambda i, v: i < 12, lambda i, v: (i + 1, 0.5 * tf.tanh(tf.matmul(v, w)) + 0.3 * b), [tf.constant(0), a])[1]

    def cond(self, a, b):
        w = self.variable("w", [WIDTH])
        return tf.cond(self.flag, lambda: tf.tanh(a * w) + b, lambda: 0.5 * b)

    def nested(self, a, b):
        def body(i, v):
            return i + 1, tf.cond(self.flag, lambda: 0.5 * tf.sin(v), lambda: 0.7 * v)

        return tf.while_loop(lambda i, v: i < 2, body, [tf.constant(0), a])[1] + 0.2 * b

    def double(self, a, b):
        return tf.cast(tf.sin(tf.cast(a, tf.float64) * 0.7), tf.float32) + 0.1 * b

    def wide(self, a, b):
        """A tensor of another type, which its users cast."""
        return tf.cast(a, tf.float64) * 0.7 + tf.cast(b, tf.float64)

    def whole(self, a, b):
        return tf.one_hot((self.ids * 3 + 1) % WIDTH, WIDTH, 2, -1, dtype=tf.int32)

    def truth(self, a, b):
        return tf.equal(tf.range(WIDTH)[None], self.ids[:, None] % WIDTH)

    def choice(self, a, b):
        return tf.where(tf.tile((self.ids % 2)[:, None] > 0, [1, WIDTH]), tf.sin(a), b)

    def like(self, a, b):
        return tf.tanh(a + tf.zeros(tf.shape(b)) + tf.ones_like(b) * 0.2)

    def scaled(self, a, b):
        return a * self.scale + 0.2 * b

    def timed(self, a, b):
        return a * (1 + 0.1 * tf.cos(tf.cast(self.step, tf.float32))) + 0.1 * b

    def stopped(self, a, b):
        return tf.tanh(a) + 0.5 * tf.stop_gradient(b)

    def after(self, a, b):
        """A control edge, perhaps from another stage."""
        with tf.control_dependencies([tf.identity(b)]):
            return tf.tanh(a * 1.1)

    def moving(self, a, b):
        moving = self.variable("moving", [WIDTH], trainable=False)
        update = tf.assign(moving, 0.9 * moving + 0.1 * tf.reduce_mean(a, 0))
        with tf.control_dependencies([update]):
            return tf.tanh(a) + 0.1 * b

    def dropout(self, a, b):
        return tf.nn.dropout(a, rate=0.3, seed=11) + 0.1 * b


LOOPS = ("loop", "nested")
ONE_BATCH = ("moving",)
"""The result depends on the number of micro-batches, but not on that of replicas."""
ONE_INSTANCE = ("dropout",)
KINDS = [n for n, f in vars(Layers).items() if callable(f) and not n.startswith("_") and n not in ("block", "variable")]
OPTIMIZERS = {
    "sgd": lambda rate: tf.train.GradientDescentOptimizer(rate),
    "momentum": lambda rate: tf.train.MomentumOptimizer(rate, 0.9),
    "adam": lambda rate: tf.train.AdamOptimizer(rate, epsilon=1e-3),
    "adagrad": lambda rate: tf.train.AdagradOptimizer(rate),
}
UPDATES = ("GradientDescent/", "Momentum/", "Adam/", "Adagrad/")
"""Name scopes of the optimizers' ops."""
SCHEDULES = ("PreferForward", "PreferBackward", "PreferBackwardOptimizer", "ZeroBubbleH1", "ZeroBubbleH2")
CHUNKED = ("Interleaved", "ZeroBubbleV")


@contextlib.contextmanager
def taskgraph(stage):
    """What `epl.replicate` does to the nodes of its scope; nothing for None."""
    if stage is None:
        yield
        return
    with tf.get_default_graph()._attr_scope({"_epl_taskgraph": AttrValue(i=stage)}):
        yield


def build(spec, batch):
    """Build a program in the default graph; returns the names of its variables."""
    layers = Layers(spec, batch)
    losses = []
    with taskgraph(0):
        layers.prefix = "first/"
        layers.values.append(layers.dense(layers.x, None))
    for number, block in enumerate(spec.blocks):
        layers.block(number, block)
        if block.stage in spec.extra and block.kind not in ("whole", "truth"):
            with taskgraph(block.stage):
                losses.append(0.05 * tf.reduce_mean(tf.square(tf.cast(layers.values[-1], tf.float32))))
    with taskgraph(spec.stages - 1):
        layers.prefix = "last/"
        top = tf.identity(layers.dense(tf.cast(layers.values[-1], tf.float32), None), name="top")
        logits = tf.matmul(top, layers.variable("out", [WIDTH, CLASSES]))
        losses.append(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=layers.y, logits=logits)))
    if spec.penalty:
        inner = tf.gradients(tf.reduce_sum(top), layers.x)[0]
        if inner is not None:
            losses.append(0.05 * tf.reduce_mean(tf.square(inner)))
    with taskgraph(spec.stages - 1 if spec.total else None):
        if spec.weight_decay:
            losses.append(0.01 * tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()]))
        loss = tf.add_n(losses, name="loss")
    if spec.collected:
        tf.add_to_collection(GraphKeys.GLOBAL_MEAN_OBJECTS, loss)
    rate = tf.train.exponential_decay(0.05, layers.step, 2, 0.8) if spec.rate else tf.constant(0.05)
    optimizer = OPTIMIZERS[spec.optimizer](rate)
    pairs = [(g, v) for g, v in optimizer.compute_gradients(loss) if g is not None]
    norm = tf.global_norm([g for g, _ in pairs])
    if spec.clip:
        clipped, _ = tf.clip_by_global_norm([g for g, _ in pairs], 0.05, use_norm=norm)
        pairs = list(zip(clipped, [v for _, v in pairs]))
    tf.identity(norm, name="norm")
    with tf.control_dependencies([optimizer.apply_gradients(pairs, global_step=layers.step)]):
        tf.no_op(name="train")
    tf.group(tf.global_variables_initializer(), name="init")
    for v in tf.global_variables():
        tf.identity(v.read_value(), name="value/" + v.op.name)
    return [v.op.name for v in tf.global_variables()]


def graph_of(spec, batch):
    """The whole of a program as the graph index gives it, and the names of its variables."""
    with user_graph(v2=spec.v2, resource=spec.resource) as index:
        names = build(spec, batch)
        whole = index()
        _ = [whole.shape_of((n, 0)) for n in whole.nodes]
        return (whole.replace(assignment=assign(whole)) if spec.stages > 1 else whole), names


def nothing_is_sent_in_vain(position, one, before, after, seconds):
    """An instrument of the passes: every value that comes from another rank is used."""
    if isinstance(one, Communicate):
        received = {n.name for n in before.nodes.values() if n.op == RECEIVE}
        used = before.ancestors([ref[0] for ref in before.fetches] + [name for name in before.targets if name not in received])
        assert sorted(received - used.keys()) == []


class Ranks(Machine):
    """A layout in which devices may hold several stages, and replicas that lie within one process are told to be, as a plan does."""

    def __init__(self, whole, layout, stages):
        width = layout.width(stages)
        super().__init__(whole, layout.devices, layout.ranks, layout.m, stages=width, near=layout.near, schedule=layout.schedule)
        if layout.per_device > 1:
            rows = self.rows or tuple(((rank, name),) for rank in range(layout.ranks) for name in self.names)
            on = chunk_devices(stages, width, layout.schedule == "ZeroBubbleV")
            self.rows = tuple(tuple(row[device] for device in on) for row in rows)
            places = tuple(tuple(rank for rank, _ in row) for row in self.rows)
            self.plan = dataclasses.replace(self.plan, places=places, pipeline_devices=width)
        self.mine = ()
        counts = [sum({rank for rank, _ in row} == {r} for row in self.rows) for r in range(layout.ranks)]
        if self.rows and sum(counts) == len(self.rows) and len(set(counts)) == 1:
            names = [[tuple(name for _, name in row) for row in self.rows if row[0][0] == r] for r in range(layout.ranks)]
            self.mine = tuple(map(tuple, names))
            self.rows = ()
            self.plan = dataclasses.replace(self.plan, places=(), devices_per_rank=counts[0])

    def _task(self, rank, part):
        if not self.mine:
            return super()._task(rank, part)
        rows = self.mine[rank]
        return Task(plan=self.plan, rank=rank, devices=tuple(row[0] for row in rows), stages=rows, part=part, key="sync")

    def _compile(self, rank, signature, traits, part):
        executable = compile_program(self.whole, signature, traits, self.plan, self._task(rank, part), [nothing_is_sent_in_vain])
        self.executables.append(executable)
        return executable

    def first_replica(self, rank):
        return self.plan.first_replica(rank) if self.rows else rank * self.plan.devices_per_rank


def in_order(whole):
    """Plain TensorFlow may update a variable that a gradient or the loss still reads: here it waits."""
    waits = {ref[0] for ref in whole.raw_gradients} | {"loss", "top"}
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
            "x:0": draw.uniform(-1, 1, (rows, WIDTH)).astype(np.float32),
            "ids:0": draw.randint(0, WORDS, rows).astype(np.int32),
            "y:0": draw.randint(0, CLASSES, rows),
            "flag:0": np.bool_(step % 2),
            "scale:0": np.float32(0.5 + 0.2 * step),
        }


def compare(spec, layout):
    """Train in a layout and plainly: losses, outputs and variables must be equal."""
    replicas = layout.replicas(spec.stages)
    rows = spec.rows * layout.m * replicas
    whole, names = graph_of(spec, spec.rows)
    same, _ = graph_of(spec, rows) if spec.static else (whole, names)
    machine, plain = Ranks(whole, layout, spec.stages), Plain(in_order(same))
    machine.run("init"), plain.run("init")
    for step, feeds in enumerate(batches(rows)):
        fetches = ("loss:0", "top:0", "norm:0", "train")
        wanted, found = plain.run(fetches, feeds), machine.run(fetches, feeds)
        _compare_step(spec, machine, wanted, found, replicas, "step %d" % step)
    # A random op starts anew in another program, in plain TensorFlow it goes on.
    same = not spec.static and not any(b.kind in ONE_INSTANCE for b in spec.blocks)
    if same:
        evaluated = plain.run("top:0", feeds)[0]
        for rank, values in enumerate(machine.run("top:0", feeds)):
            _equal(values[0], evaluated, "evaluation on rank %d" % rank)
    for name in names:
        wanted = plain.run("value/%s:0" % name)[0]
        for rank, values in enumerate(machine.run("value/%s:0" % name)):
            _equal(values[0], wanted, "%s on rank %d" % (name, rank))


def _compare_step(spec, machine, wanted, found, replicas, label):
    firsts = [machine.first_replica(rank) for rank in range(len(found))]
    for rank, (loss, top, norm) in enumerate(found):
        where = "%s on rank %d" % (label, rank)
        _equal(norm, wanted[2], "norm, " + where)
        _equal(top, np.split(wanted[1], replicas)[firsts[rank]], "top, " + where)
        if spec.collected or replicas == 1:
            _equal(loss, wanted[0], "loss, " + where)
    if set(firsts) == set(range(replicas)):
        _equal(np.mean([found[firsts.index(g)][0] for g in range(replicas)]), wanted[0], "mean loss, " + label)


def _equal(found, wanted, label):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=label)


# Drawing programs. `draw` is a random.Random, hypothesis' own or a seeded one.


def draw_spec(draw, kinds=None, stages=(1, 2, 2, 2, 3, 3, 4, 4, 4, 6)):
    stages = draw.choice(stages)
    v2 = draw.random() < 0.25
    blocks, stage = [], 0
    for left in range(draw.randint(stages, 8), 0, -1):
        stage = min(stages - 1, stage + draw.choice([0, 0, 1, 1, 2])) if left > 1 else stages - 1
        # Now and then outside of scopes, or back in an earlier stage.
        place = stage if draw.random() < 0.86 else draw.choice([None, None, draw.randint(0, stages - 1)])
        blocks.append(Block(draw.choice(kinds or KINDS), place, draw.choice([0, 0, 0, 1, 2]), draw.randint(0, 7)))
    chance = lambda p: draw.random() < p  # noqa: E731
    loops = any(b.kind in LOOPS for b in blocks)
    return Spec(
        stages,
        tuple(blocks),
        draw.choice(sorted(OPTIMIZERS)),
        resource=chance(0.7),
        v2=v2,
        extra=tuple(s for s in range(stages) if chance(0.3)),
        total=chance(0.6),
        clip=chance(0.4),
        rate=chance(0.4),
        penalty=not loops and chance(0.2),
        weight_decay=chance(0.3),
        collected=chance(0.6),
        rows=draw.choice([1, 2, 2, 3]),
        static=chance(0.25),
    )


def draw_layout(draw, stages, widths=(1, 2, 3, 4, 6)):
    """widths: how many devices a replica may have."""
    chunks = [n for n in range(1, stages + 1) if stages % n == 0 and stages // n in widths]
    choices = [(name, 1) for name in SCHEDULES if 1 in chunks] + [("Interleaved", n) for n in chunks] + [("ZeroBubbleV", 2)] * (2 in chunks)
    schedule, per_device = draw.choice(choices)
    width = stages // per_device
    ranks, devices = draw.choice([(r, d) for r in range(1, 5) for d in range(1, 5) if r * d % width == 0 and r * d <= 8])
    return Layout(ranks, devices, draw.choice([1, 1, 2, 2, 3, 4]), schedule, draw.random() < 0.7, per_device)


def draw_case(draw, pipeline=False):
    """A program and a layout; `pipeline`: every replica has several devices."""
    spec = draw_spec(draw, stages=(2, 2, 3, 3, 4, 4, 4, 6)) if pipeline else draw_spec(draw)
    layout = draw_layout(draw, spec.stages, widths=(2, 3, 4, 6)) if pipeline else draw_layout(draw, spec.stages)
    banned = set()
    if layout.m > 1:
        banned.update(ONE_BATCH)
    if layout.m > 1 or layout.replicas(spec.stages) > 1:
        banned.update(ONE_INSTANCE)
    return spec._replace(blocks=tuple(b._replace(kind="mix") if b.kind in banned else b for b in spec.blocks)), layout


@st.composite
def cases(draw):
    return draw_case(draw(st.randoms(use_true_random=False)))


@st.composite
def pipelines(draw):
    return draw_case(draw(st.randoms(use_true_random=False)), pipeline=True)


__all__ = ["Block", "Layout", "Spec", "cases", "compare", "draw_case", "pipelines"]
