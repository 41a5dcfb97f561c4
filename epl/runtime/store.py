"""The store: one TensorFlow graph and session that hold all programs of a user's session.

Programs share nodes. A node of a new program that is the same as one already there
(same name, op, attributes, device and inputs) is used again, so that programs which
differ in a fetch cost next to nothing, and kernels with state (random generators) keep
it across programs as they do in plain TensorFlow. A node that differs gets a suffix
made of the program's key.
"""

import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import graph_pb2

from epl import compat
from epl.env import Env
from epl.errors import PassError
from epl.ir import attrs as A
from epl.ir.program import LOOP_BACK, Node, Program, fill_node_def
from epl.utils.collector import without_collection


class Written(NamedTuple):
    """A node as it stands in the graph."""

    node: Node
    inputs: Tuple[Tuple[str, int], ...]
    controls: frozenset


class Loaded(NamedTuple):
    """A program in the graph: final names of what a run feeds, fetches and triggers."""

    feeds: Tuple[str, ...]
    fetches: Tuple[str, ...]
    targets: Tuple[str, ...]


def local_config(given: Optional[tf.ConfigProto]) -> tf.ConfigProto:
    """A copy of the user's session configuration with what the devices of this process need."""
    config = tf.ConfigProto()
    if given is not None:
        config.CopyFrom(given)
    config.allow_soft_placement = True
    cluster = Env.get().cluster
    cpus = sum(1 for device in cluster.local_devices() if "CPU" in device.runtime_name)
    if cpus > 1:
        config.device_count["CPU"] = max(cpus, config.device_count.get("CPU", 0))
    if cluster.visible_device_list and not config.gpu_options.visible_device_list:
        config.gpu_options.visible_device_list = cluster.visible_device_list
    return config


class Store:
    """Holds programs; `load` adds one, `callable_of` runs it."""

    def __init__(self, config: Optional[tf.ConfigProto] = None):
        env = Env.get()
        env.building_store = True
        try:
            self.graph = tf.Graph()
            self.session = tf.Session(graph=self.graph, config=config)
        finally:
            env.building_store = False
        self._writer = compat.GraphWriter(self.graph)
        self._written: Dict[str, Written] = {}
        self._scopes: Set[str] = set()
        self._functions: Set[str] = set()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._written)

    @without_collection
    def load(self, program: Program, key: str) -> Loaded:
        """Add what is new of a program; returns the names to run it by."""
        with self._lock:
            names, fresh = self._assign(program, key)
            self._write(program, names, fresh)
        fetches = tuple("%s:%d" % (names[n], i) for n, i in program.fetches)
        feeds = tuple("%s:0" % names[f.node] for f in program.feeds)
        return Loaded(feeds, fetches, tuple(names[t] for t in program.targets))

    def names(self, program: Program, key: str) -> Dict[str, str]:
        """The final name of every node of a program that was loaded under this key."""
        with self._lock:
            return self._assign(program, key)[0]

    def callable_of(self, loaded: Loaded) -> Callable[..., List[Any]]:
        """A function of the feed values, in order, that returns the fetched values."""
        if not loaded.fetches and not loaded.targets:
            return lambda *values, **keywords: []  # a stage may have nothing to do in a program; TensorFlow refuses that
        return compat.raw_callable(self.session, list(loaded.feeds), list(loaded.fetches), list(loaded.targets))

    def close(self) -> None:
        self.session.close()

    def _assign(self, program: Program, key: str) -> Tuple[Dict[str, str], List[Node]]:
        """Final names of all nodes, and those that are not in the graph yet."""
        order = program.topological()
        forced: Set[str] = set()
        while True:
            names: Dict[str, str] = {n.name: self._free(n.name) for n in order if n.op in LOOP_BACK}
            fresh: List[Node] = []
            for node in order:
                own = self._free(node.name)
                known = self._written.get(own)
                if known is None:
                    names[node.name] = own
                    fresh.append(node)
                elif node.name not in forced and self._same(node, known, names):
                    names[node.name] = own
                else:
                    name, there = self._suffixed(node, key, names)
                    names[node.name] = name
                    if not there:
                        fresh.append(node)
            # A loop whose back edge moved must move as a whole.
            moved = {
                n.name
                for n in order
                if self._free(n.name) in self._written
                and n.name not in forced
                and names[n.name] == self._free(n.name)
                and self._back_moved(n, program, names)
            }
            if not moved:
                return names, fresh
            forced |= moved

    def _free(self, name: str) -> str:
        """The name under which a node stands or can stand: TensorFlow adds no node that is called like a scope that is there."""
        return name + "/epl_node" if name in self._scopes and name not in self._written else name

    def _suffixed(self, node: Node, key: str, names: Dict[str, str]) -> Tuple[str, bool]:
        """The name of a node that differs from its namesake, and whether that very node is there already."""
        if node.op.startswith("Horovod"):
            raise PassError("Collective '%s' exists with other inputs; ranks could not agree on a second name" % node.name)
        name = "%s/epl_%s" % (node.name, key)
        count = 0
        while name in self._written:
            if self._same(node, self._written[name], names):
                return name, True
            count += 1
            name = "%s/epl_%s_%d" % (node.name, key, count)
        return name, False

    def _back_moved(self, node: Node, program: Program, names: Dict[str, str]) -> bool:
        return any(program.nodes[s].op in LOOP_BACK and names[s] != self._free(s) for s, _ in node.inputs)

    @staticmethod
    def _same(node: Node, known: Written, names: Dict[str, str]) -> bool:
        other = known.node
        if node.op != other.op or node.device != other.device or len(node.inputs) != len(known.inputs):
            return False
        if any(names.get(s, s) != t or i != j for (s, i), (t, j) in zip(node.inputs, known.inputs)):
            return False
        if frozenset(names.get(c, c) for c in node.controls) != known.controls:
            return False
        return _same_attrs(node, other)

    def _write(self, program: Program, names: Dict[str, str], fresh: Sequence[Node]) -> None:
        graph = graph_pb2.GraphDef()
        if program.versions is not None:
            graph.versions.CopyFrom(program.versions)
        for function in program.library.function:
            if function.signature.name not in self._functions:
                graph.library.function.add().CopyFrom(function)
        known = {f.signature.name for f in graph.library.function}
        graph.library.gradient.extend(g for g in program.library.gradient if g.function_name in known)
        new = {names[n.name] for n in fresh}
        written: Dict[str, Written] = {}
        tensors: Dict[Tuple[str, int], None] = {}
        controls: Dict[str, None] = {}
        for node in fresh:
            final = node.replace(
                name=names[node.name],
                inputs=[(names[s], i) for s, i in node.inputs],
                controls=tuple(dict.fromkeys(names[c] for c in node.controls)),
            )
            fill_node_def(graph.node.add(), final)
            tensors.update((ref, None) for ref in final.inputs if ref[0] not in new)
            controls.update((c, None) for c in final.controls if c not in new)
            written[final.name] = Written(node, final.inputs, frozenset(final.controls))
        if graph.node or graph.library.function:
            self._writer.write(graph, list(tensors), list(controls))
            self._functions |= known
            self._written.update(written)
            for name in written:
                scope = name.rpartition("/")[0]
                while scope and scope not in self._scopes:
                    self._scopes.add(scope)
                    scope = scope.rpartition("/")[0]


def _same_attrs(node: Node, other: Node) -> bool:
    if node.proto is other.proto and node.attrs == other.attrs:
        return True
    ours, theirs = _attrs(node), _attrs(other)
    return ours.keys() == theirs.keys() and all(ours[k] == theirs[k] for k in ours)


def _attrs(node: Node) -> Dict[str, Any]:
    found = dict(node.proto.attr) if node.proto is not None else {}
    found.update(node.attrs)
    return {k: v for k, v in found.items() if v is not None and k not in A.PRIVATE}
