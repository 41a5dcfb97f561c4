"""Running programs with TensorFlow alone: plainly, or all ranks of a layout in one session.

The programs of several ranks are put into one graph. Each rank's nodes, variables and
loops get a name of their own, and Horovod's ops are replaced by what they mean: a sum,
a concatenation or the root's value over the ranks. What is compared with plain
TensorFlow is then the very program that a rank would run, without processes.
"""

import contextlib

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from epl import compat
from epl.cluster import Cluster
from epl.config import Config
from epl.env import Env
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import Builder
from epl.ir.program import DIVIDE, EACH, SAME, Node, Program
from epl.passes.communicate import ANCHOR, RANKS
from epl.passes.shard.hold import with_held
from epl.passes.sync import sync_program
from epl.planner.plan import FIRST, LAST, MIDDLE, WHOLE, Plan, Task
from epl.runtime.adapters import Patches, gradients
from epl.runtime.compiler import Signature, compile_program, traits_of
from epl.runtime.feeding import FeedSpec, as_array, check, modes_of
from epl.runtime.graph_index import GraphIndex


@contextlib.contextmanager
def user_graph(v2=False, resource=True, **config):
    """A graph in which gradients, and nothing else, are recorded as after `epl.init`; yields a function that indexes it."""
    resources, flow = tf.resource_variables_enabled(), tf.control_flow_v2_enabled()
    (tf.enable_resource_variables if resource else tf.disable_resource_variables)()
    (tf.enable_control_flow_v2 if v2 else tf.disable_control_flow_v2)()
    env, patches = Env.get(), Patches()
    env.clear()
    try:
        with tf.Graph().as_default() as graph:
            env.config = Config(config)
            env.cluster = Cluster()
            gradients.install(patches)
            env.initialized = True
            yield lambda: GraphIndex(graph).whole()
    finally:
        patches.undo()
        env.clear()
        (tf.enable_resource_variables if resources else tf.disable_resource_variables)()
        (tf.enable_control_flow_v2 if flow else tf.disable_control_flow_v2)()


def _config(devices):
    """Without TensorFlow's graph optimisers, which take longer than the small programs of the tests run."""
    config = tf.ConfigProto(device_count={"CPU": devices}, intra_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


class Plain:
    """The user's graph as it is."""

    def __init__(self, whole):
        graph = tf.Graph()
        with graph.as_default():
            tf.import_graph_def(whole.to_graph_def(), name="")
        self.session = tf.Session(graph=graph, config=_config(1))

    def run(self, fetches, feeds=None):
        names = [fetches] if isinstance(fetches, str) else list(fetches)
        values = self.session.run(names, feeds)
        return [v for n, v in zip(names, values) if ":" in n]


class Machine:
    """All ranks of a layout.

    devices: devices of each rank. m: micro-batches. stages: of each replica, which then lie on
    neighbouring devices over the ranks; `near` False puts the replicas of a stage on neighbours.
    Other options are those of `Plan`.
    """

    def __init__(self, whole, devices=1, ranks=1, m=1, in_run=True, stages=1, near=True, **plan):
        self.names = tuple("/device:CPU:%d" % d for d in range(devices))
        self.rows = ()
        if stages > 1:
            replicas = devices * ranks // stages
            slots = [divmod(d, devices) for d in range(devices * ranks)]
            order = [[g * stages + t if near else t * replicas + g for t in range(stages)] for g in range(replicas)]
            self.rows = tuple(tuple((slots[i][0], self.names[slots[i][1]]) for i in row) for row in order)
            plan["places"] = tuple(tuple(rank for rank, _ in row) for row in self.rows)
        self.plan = Plan(ranks=ranks, devices_per_rank=devices, micro_batches=m, accumulate_in_run=in_run, **plan)
        self.whole = with_held(whole, self.plan) if self.plan.lanes > 1 else whole
        self.graph = tf.Graph()
        self.session = tf.Session(graph=self.graph, config=_config(devices))
        self.dirty = {}
        self.position = {}
        self.executables = []
        self._writer = compat.GraphWriter(self.graph)
        self._loaded = {}
        self._count = 0

    def run(self, fetches, feeds=None):
        """Run on all ranks; each rank is fed its part of each batch, or its item of a tuple.

        Returns a list of the fetched tensors per rank.
        """
        fetches = (fetches,) if isinstance(fetches, str) else tuple(fetches)
        feeds = feeds or {}
        traits = traits_of(self.whole, Signature(fetches, tuple(feeds), (SAME,) * len(feeds)))
        part = self._part(traits)
        values, modes = self._feeds(feeds, traits)
        if traits.parallel and self.dirty:
            self.synchronize()
        names = fetches, tuple(feeds), modes, part
        if names not in self._loaded:
            self._loaded[names] = self._load([self._compile(rank, Signature(*names[:3]), traits, part) for rank in range(self.plan.ranks)])
        results = self._call(self._loaded[names], values)
        self.dirty.update((v, None) for v in self._loaded[names][0][0].written)
        return results

    def synchronize(self):
        """Make all replicas equal, as a session does before a parallel program."""
        variables, self.dirty = sorted(self.dirty), {}
        tasks = [self._task(rank, WHOLE) for rank in range(self.plan.ranks)]
        programs = [sync_program(self.whole, variables, task) for task in tasks]
        if self.plan.replicas > 1 and any(program.targets for program in programs):
            self._call((programs, self._import(programs)), [{} for _ in tasks])

    def value(self, name, rank=0):
        """The value of a variable in one replica's copy, named as in the rank's program."""
        for executable in self.executables:
            if executable.task.rank == rank and name in executable.program.nodes:
                node = executable.program.nodes[name]
                shared = _prefix(self.plan.ranks, rank) + node.str_attr("shared_name")
                with self.graph.as_default(), tf.device(node.device):
                    dtype = tf.as_dtype(node.attr("dtype").type)
                    shape = tf.TensorShape(node.attr("shape").shape)
                    if node.op == "VarHandleOp":
                        handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=shared)
                        return self.session.run(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
                    return self.session.run(tf.raw_ops.VariableV2(shape=shape, dtype=dtype, shared_name=shared))
        raise KeyError(name)

    def _part(self, traits):
        runs = self.plan.runs_per_step if traits.trains else 1
        position = self.position.get(traits.records, 0)
        if runs > 1:
            self.position[traits.records] = (position + 1) % runs
        return WHOLE if runs == 1 else FIRST if position == 0 else LAST if position == runs - 1 else MIDDLE

    def _feeds(self, feeds, traits):
        specs = [FeedSpec(n, self._dtype(n), self.whole.shape_of((n.split(":")[0], int(n.split(":")[1])))) for n in feeds]
        ranks = self.plan.ranks
        firsts = [sum(row[0] == rank for row in self.plan.places) for rank in range(ranks)] if self.rows else [self.plan.devices_per_rank] * ranks
        parts = max(firsts) * (self.plan.batches_per_run if traits.trains else 1)
        given = [[as_array(spec, v) for v in (value if isinstance(value, tuple) else [value])] for spec, value in zip(specs, feeds.values())]
        whole = [np.concatenate(v) if len(v) > 1 else v[0] for v in given]
        modes = modes_of(specs, whole, parts * ranks) if traits.parallel else (SAME,) * len(specs)
        split = [v if len(v) > 1 else self._portions(v[0], firsts) if mode == DIVIDE else v * ranks for v, mode in zip(given, modes)]
        if self.plan.is_shared and not traits.parallel:
            modes = tuple(EACH if np.ndim(v[0]) else SAME for v in split)
        for rank in range(ranks) if not self.rows else ():
            for spec, pieces, mode in zip(specs, split, modes):
                check(spec, pieces[rank], mode, parts)
        return [{spec.name: pieces[rank] for spec, pieces in zip(specs, split)} for rank in range(ranks)], modes

    @staticmethod
    def _portions(value, firsts):
        """The rows of each rank, in the order of the replicas; what a rank without a first stage is fed is of no use."""
        ends = np.cumsum(firsts) * (len(value) // sum(firsts))
        pieces = np.split(value, ends[:-1])
        return [piece if count else np.full_like(value[:1], -7) for piece, count in zip(pieces, firsts)]

    def _dtype(self, name):
        node, index = name.split(":")
        return np.dtype(tf.as_dtype(op_table.dtype_of(self.whole, node, int(index))).as_numpy_dtype)

    def _task(self, rank, part):
        if not self.rows:
            return Task(plan=self.plan, rank=rank, devices=self.names, part=part, key="sync")
        own = self.plan.held(rank)
        stages = tuple(tuple(name if holder == rank else "" for holder, name in self.rows[g]) for g in own)
        devices = tuple(next(name for name in row if name) for row in stages)
        return Task(plan=self.plan, rank=rank, devices=devices, stages=stages, replicas=tuple(own), part=part, key="sync")

    def _compile(self, rank, signature, traits, part):
        executable = compile_program(self.whole, signature, traits, self.plan, self._task(rank, part))
        self.executables.append(executable)
        return executable

    def _load(self, executables):
        return executables, self._import([e.program for e in executables])

    def _import(self, programs):
        """Put programs into the graph under a name of their own; returns a function of the feeds of each rank."""
        scope, self._count = "p%d/" % self._count, self._count + 1
        self._writer.write(join(programs, scope).to_graph_def(), [], [])
        feeds, fetches, targets = [], [], []
        for rank, program in enumerate(programs):
            base = scope + _prefix(len(programs), rank)
            feeds += [base + f.node + ":0" for f in program.feeds]
            fetches += [base + "%s:%d" % ref for ref in program.fetches]
            targets += [base + t for t in program.targets]
        return compat.raw_callable(self.session, feeds, fetches, targets)

    @staticmethod
    def _call(loaded, values):
        items, call = loaded
        programs = [getattr(item, "program", item) for item in items]
        given = [_ZERO if f.node == ANCHOR else values[r]["%s:%d" % f.ref] for r, p in enumerate(programs) for f in p.feeds]
        results = call(*given)
        ends = np.cumsum([len(p.fetches) for p in programs])
        return [list(results[end - len(p.fetches) : end]) for p, end in zip(programs, ends)]


_ZERO = np.zeros((), np.int32)


def train(machine, feeds, fetches="train"):
    """One step; a step of several runs takes their batches in the order of ranks, then runs."""
    runs, ranks = machine.plan.runs_per_step, machine.plan.ranks
    results = []
    for run in range(runs):
        part = {}
        for name, value in feeds.items():
            pieces = [np.split(piece, runs)[run] for piece in np.split(value, ranks)] if np.ndim(value) else value
            part[name] = np.concatenate(pieces) if np.ndim(value) else value
        results.append(machine.run(fetches, part))
    return results


def agree(whole, feeds, names, layout, steps=3, resource=True):
    """Train in a layout and plainly, from the op `init` by the op `train`: the variables must be equal."""
    machine, plain = Machine(whole, **layout), Plain(whole)
    machine.run("init"), plain.run("init")
    for _ in range(steps):
        train(machine, feeds), plain.run("train", feeds)
    for name in names:
        wanted = plain.run("%s/%s:0" % (name, "Read/ReadVariableOp" if resource else "read"))[0]
        for rank in range(machine.plan.ranks):
            np.testing.assert_allclose(machine.value(name, rank), wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def _prefix(ranks, rank):
    return "" if ranks == 1 else "rank%d/" % rank


def join(programs, scope=""):
    """The programs of all ranks as one, with collectives inside the graph; node names start with `scope`."""
    nodes = {}
    collectives = {}
    for rank, program in enumerate(programs):
        for node in program.nodes.values():
            if node.op.startswith("Horovod"):
                listed = node.attr(RANKS)
                wanted = tuple(listed.list.i) if listed is not None else tuple(range(len(programs)))
                collectives.setdefault((node.name, wanted), []).append(rank)
    for (name, wanted), found in collectives.items():
        wanted = list(wanted)
        assert found == wanted, "collective %s of ranks %s is there on %s" % (name, wanted, found)
        assert len(found) == len(programs) or tuple(found) in programs[found[0]].groups
    assert all(p.groups == programs[0].groups for p in programs)
    for rank, program in enumerate(programs):
        prefix = _prefix(len(programs), rank)
        for node in program.nodes.values():
            own = {a: A.of_str(prefix + node.str_attr(a)) for a in ("shared_name", "frame_name") if node.str_attr(a)}
            moved = node.replace(
                name=scope + prefix + node.name,
                inputs=[(scope + prefix + s, i) for s, i in node.inputs],
                controls=[scope + prefix + c for c in node.controls],
                attrs=dict(node.attrs, **own),
            )
            nodes[moved.name] = moved
    for (name, _), ranks in sorted(collectives.items()):
        members = [nodes.pop(scope + _prefix(len(programs), rank) + name) for rank in ranks]
        assert len({m.op for m in members}) == 1 and all(m.str_attr("_epl_collective") == name for m in members)
        given = [[m.inputs[index] for m in members] for index in range(_values(members[0]))]
        splits = [m.inputs[1] for m in members] if members[0].op == "HorovodAlltoall" else []
        found = [
            [_collective(nodes, member, position, i, sources, ranks, splits) for i, sources in enumerate(given)]
            for position, member in enumerate(members)
        ]
        # It is done when all have a copy of what they are given: then what was given may change.
        done = [source for outputs in found for source, _ in outputs]
        for member, outputs in zip(members, found):
            types = AttrValue(list=AttrValue.ListValue(type=[member.attr("T").type] * len(outputs)))
            nodes[member.name] = Node(member.name, "IdentityN", outputs, done, attrs={"T": types})
    return Program(nodes, library=programs[0].library, versions=programs[0].versions)


def _values(member):
    return 1 if member.op == "HorovodAlltoall" else len(member.inputs)


def _collective(nodes, member, position, index, sources, ranks, splits):
    build = Builder(nodes, member.device)
    name = "%s/out_%d" % (member.name, index)
    dtype = member.attr("T").type
    wait = member.controls
    if member.op in ("HorovodAllreduce", "HorovodGroupedAllreduce"):
        build.op("AddN", name + "/sum", sources, wait, T=A.of_type(dtype), N=A.of_int(len(sources)))
        if member.attr("reduce_op").i == 4:
            nodes.pop(name + "/sum")
            stacked = build.pack(name + "/stack", sources, dtype)
            axis = build.const(name + "/axis", 0, 3)
            build.op("Max", name + "/sum", [stacked, axis], wait, T=A.of_type(dtype), Tidx=A.of_type(3), keep_dims=A.of_bool(False))
        return build.mul(name, (name + "/sum", 0), build.const(name + "/factor", member.attr("postscale_factor").f, dtype), dtype)
    if member.op == "HorovodAllgather":
        axis = build.const(name + "/axis", 0, 3)
        return build.op("ConcatV2", name, list(sources) + [axis], wait, T=A.of_type(dtype), Tidx=A.of_type(3), N=A.of_int(len(sources)))
    if member.op == "HorovodAlltoall":
        parts = []
        axis = build.const(name + "/axis", 0, 3)
        for i, (source, sizes) in enumerate(zip(sources, splits)):
            attrs = {"num_split": A.of_int(len(sources)), "T": A.of_type(dtype), "Tlen": A.of_type(3)}
            parts.append((build.op("SplitV", "%s/of_%d" % (name, i), [source, sizes, axis], wait, **attrs)[0], position))
        return build.op("ConcatV2", name, parts + [axis], T=A.of_type(dtype), Tidx=A.of_type(3), N=A.of_int(len(parts)))
    assert member.op == "HorovodBroadcast"
    return build.op("Snapshot", name, [sources[ranks.index(member.attr("root_rank").i)]], wait, T=A.of_type(dtype))
