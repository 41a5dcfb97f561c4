"""The intermediate representation: an immutable program of immutable nodes.

A `Program` is one run signature (feeds, fetches, targets) of an annotated graph
with the nodes it needs. It is not a `tf.Graph`: nodes are plain Python objects
with edges by name, and a node keeps the NodeDef it came from as the source of its
attributes. Passes build new programs; they never change a node or a program.
"""

from collections import defaultdict, deque
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2, versions_pb2

from epl.errors import ProgramError
from epl.ir import attrs as A

Ref = Tuple[str, int]
"""One output of a node: (node name, output index)."""

Shape = Optional[Tuple[Optional[int], ...]]
"""A static shape: None for an unknown rank, None inside for an unknown dimension."""

FORWARD, BACKWARD, APPLY = "FORWARD", "BACKWARD", "APPLY"


def parse_ref(text: str) -> Ref:
    """'name', 'name:2' or '^name' as (name, index); a control input has index -1."""
    if text.startswith("^"):
        return text[1:], -1
    name, _, index = text.partition(":")
    return name, int(index or 0)


def ref_text(ref: Ref) -> str:
    """The canonical text of a reference; index 0 is left out as in a GraphDef."""
    return ref[0] if ref[1] == 0 else "%s:%d" % ref


class Node:
    """One operation.

    Attributes:
      name: unique in its program.
      op: TensorFlow op type, or a pseudo-op (`Epl...`) that a later pass lowers.
      inputs: data inputs in order.
      controls: names of the nodes that must run before.
      proto: NodeDef that attributes come from (its name and inputs mean nothing here).
      attrs: attributes that replace or extend those of `proto`; None removes one.
      device: runtime device, for example "/device:GPU:1", or "".
      origin: name of the user's node this is an instance of, or "" for an added node.
      replica: local replica index. micro_batch: index, or None when it runs once per step.
      phase: FORWARD, BACKWARD or APPLY.
      taskgraph: index of the taskgraph, or None.
      info: what a pseudo-op needs, as plain values.
    """

    __slots__ = ("name", "op", "inputs", "controls", "proto", "attrs", "device", "origin", "replica", "micro_batch", "phase", "taskgraph", "info")

    def __init__(
        self,
        name: str,
        op: str,
        inputs: Sequence[Ref] = (),
        controls: Sequence[str] = (),
        proto: Optional[node_def_pb2.NodeDef] = None,
        attrs: Optional[Mapping[str, Any]] = None,
        device: str = "",
        origin: str = "",
        replica: int = 0,
        micro_batch: Optional[int] = None,
        phase: str = FORWARD,
        taskgraph: Optional[int] = None,
        info: Optional[Mapping[str, Any]] = None,
    ):
        self.name = name
        self.op = op
        self.inputs = tuple(inputs)
        self.controls = tuple(controls)
        self.proto = proto
        self.attrs = attrs or {}
        self.device = device
        self.origin = origin
        self.replica = replica
        self.micro_batch = micro_batch
        self.phase = phase
        self.taskgraph = taskgraph
        self.info = info or {}

    def replace(self, **changes: Any) -> "Node":
        """A copy with some fields changed."""
        fields = {k: getattr(self, k) for k in self.__slots__}
        fields.update(changes)
        return Node(**fields)

    def attr(self, name: str) -> Optional[Any]:
        """The AttrValue of an attribute, or None."""
        if name in self.attrs:
            return self.attrs[name]
        if self.proto is not None and name in self.proto.attr:
            return self.proto.attr[name]
        return None

    def int_attr(self, name: str) -> Optional[int]:
        value = self.attr(name)
        return None if value is None else int(value.i)

    def str_attr(self, name: str) -> str:
        value = self.attr(name)
        return "" if value is None else value.s.decode()

    def strs_attr(self, name: str) -> List[str]:
        value = self.attr(name)
        return [] if value is None else [s.decode() for s in value.list.s]

    def __repr__(self) -> str:
        edges = [ref_text(r) for r in self.inputs] + ["^" + c for c in self.controls]
        return "%s = %s(%s)%s" % (self.name, self.op, ", ".join(edges), " @" + self.device if self.device else "")


DIVIDE, EACH, SAME = "divide", "each", "same"


class Feed(NamedTuple):
    """One fed tensor: the user's tensor, the node it becomes, and how the value is used.

    mode: DIVIDE, the value is this process's batch and is divided over its instances;
    EACH, every instance takes the whole value; SAME, the value is the same on all ranks.
    """

    ref: Ref
    node: str
    mode: str = SAME

    @property
    def is_batch(self) -> bool:
        """True when values may differ between instances or ranks."""
        return self.mode != SAME


class Program:
    """A run signature with the nodes it needs.

    Attributes:
      nodes: name -> Node, in the order of creation of the user's graph.
      fetches: the values returned, in order.
      targets: names of nodes that must run although nothing of them is returned.
      feeds: fed tensors in order.
      library: the functions of the graph.
      facts: what the classify pass found (`epl.passes.classify.Facts`), else None.
      raw_gradients, apply_gradients: tensors that are raw gradients, or that were passed
        to `apply_gradients`, with their tags (`epl.ir.tags`).
      collections: merge collection of a tensor, for example "global_mean_objects".
      shape_of: static shape of a tensor of the user's graph, None for an unknown rank.
      ragged: drawn tensors whose dimension 0 is a batch that may be smaller at the end.
      agreement: what the agree pass added (`epl.passes.agree.Agreement`), else None.
      assignment: node -> its taskgraph (`epl.passes.assign.Assigned`), as decided on the whole
        graph; None for a graph with one taskgraph.
      groups: the groups of processes that talk among themselves, the same list on all ranks.
      checkpoints: tensors that recomputation is to keep, of the collection `checkpoints`.
      held: variable -> the form in which the devices of a group hold it; those that are not in it are whole on each.
      sharding: how they compute the training step of the whole graph (`epl.planner.sharding.graph.Sharding`), else None.
    """

    def __init__(
        self,
        nodes: Dict[str, Node],
        fetches: Sequence[Ref] = (),
        targets: Sequence[str] = (),
        feeds: Sequence[Feed] = (),
        library: Optional[function_pb2.FunctionDefLibrary] = None,
        versions: Optional[versions_pb2.VersionDef] = None,
        facts: Any = None,
        raw_gradients: Optional[Mapping[Ref, Any]] = None,
        apply_gradients: Optional[Mapping[Ref, Any]] = None,
        collections: Optional[Mapping[Ref, str]] = None,
        shape_of: Callable[[Ref], Shape] = lambda ref: None,
        ragged: Sequence[Ref] = (),
        agreement: Any = None,
        assignment: Optional[Mapping[str, Any]] = None,
        groups: Sequence[Tuple[int, ...]] = (),
        held: Optional[Mapping[str, Any]] = None,
        sharding: Any = None,
        checkpoints: Sequence[Ref] = (),
    ):
        self.nodes = nodes
        self.fetches = tuple(fetches)
        self.targets = tuple(targets)
        self.feeds = tuple(feeds)
        self.library = library if library is not None else function_pb2.FunctionDefLibrary()
        self.versions = versions
        self.facts = facts
        self.raw_gradients = raw_gradients or {}
        self.apply_gradients = apply_gradients or {}
        self.collections = collections or {}
        self.shape_of = shape_of
        self.ragged = tuple(ragged)
        self.agreement = agreement
        self.assignment = assignment
        self.groups = tuple(groups)
        self.held = held
        self.sharding = sharding
        self.checkpoints = tuple(checkpoints)
        self._functions: Optional[Dict[str, function_pb2.FunctionDef]] = None
        self._consumers: Optional[Dict[str, List[Tuple[str, int]]]] = None

    def replace(self, **changes: Any) -> "Program":
        """A copy with some fields changed; the nodes' dictionary is shared unless replaced."""
        fields = {k: getattr(self, k) for k in _FIELDS}
        fields.update(changes)
        return Program(**fields)

    @property
    def consumers(self) -> Dict[str, List[Tuple[str, int]]]:
        """Node name -> [(consumer's name, output index or -1 for a control edge)]."""
        if self._consumers is None:
            found: Dict[str, List[Tuple[str, int]]] = defaultdict(list)
            for node in self.nodes.values():
                for source, index in node.inputs:
                    found[source].append((node.name, index))
                for source in node.controls:
                    found[source].append((node.name, -1))
            self._consumers = found
        return self._consumers

    def taskgraph_of(self, name: str) -> Optional[int]:
        """The taskgraph of a node, as the classify pass set it; None for a node that belongs nowhere."""
        return self.nodes[name].taskgraph

    def function(self, name: str) -> Optional[function_pb2.FunctionDef]:
        """A function of the library by name, or None."""
        if self._functions is None:
            self._functions = {item.signature.name: item for item in self.library.function}
        return self._functions.get(name)

    def topological(self) -> List[Node]:
        """The nodes, sources first; the back edges of v1 while loops don't count.

        Raises:
          ProgramError: the graph has a cycle outside a loop.
        """
        waiting: Dict[str, int] = {}
        for node in self.nodes.values():
            count = 0
            for source, _ in node.inputs:
                if self.nodes[source].op not in LOOP_BACK:
                    count += 1
            for source in node.controls:
                if self.nodes[source].op not in LOOP_BACK:
                    count += 1
            waiting[node.name] = count
        ready = deque(n for n, c in waiting.items() if c == 0)
        order: List[Node] = []
        consumers = self.consumers
        while ready:
            name = ready.popleft()
            node = self.nodes[name]
            order.append(node)
            if node.op in LOOP_BACK:
                continue
            for consumer, _ in consumers.get(name, ()):
                waiting[consumer] -= 1
                if waiting[consumer] == 0:
                    ready.append(consumer)
        if len(order) != len(self.nodes):
            stuck = sorted(n for n, c in waiting.items() if c > 0)[:5]
            raise ProgramError("The graph has a cycle outside a while loop, through: %s" % ", ".join(stuck))
        return order

    def ancestors(self, names: Iterable[str]) -> Dict[str, None]:
        """The nodes that the given ones depend on (data and control), themselves included."""
        seen = dict.fromkeys(n for n in names if n in self.nodes)
        stack = list(seen)
        while stack:
            node = self.nodes[stack.pop()]
            for source, _ in node.inputs:
                if source not in seen:
                    seen[source] = None
                    stack.append(source)
            for source in node.controls:
                if source not in seen:
                    seen[source] = None
                    stack.append(source)
        return seen

    def pruned(self) -> "Program":
        """Only what the fetches and targets need, in the old order.

        What the agree pass added stays: later passes hang effects behind it.
        """
        roots = [ref[0] for ref in self.fetches] + list(self.targets) + [f.node for f in self.feeds]
        if self.agreement is not None:
            roots.extend(self.agreement.nodes())
        keep = self.ancestors(roots)
        if len(keep) == len(self.nodes):
            return self
        return self.replace(nodes={name: node for name, node in self.nodes.items() if name in keep})

    def to_graph_def(self) -> graph_pb2.GraphDef:
        """The GraphDef of the nodes as they are (pseudo-ops included)."""
        graph = graph_pb2.GraphDef()
        if self.versions is not None:
            graph.versions.CopyFrom(self.versions)
        graph.library.CopyFrom(self.library)
        for node in self.nodes.values():
            fill_node_def(graph.node.add(), node)
        return graph


_FIELDS = (
    "nodes", "fetches", "targets", "feeds", "library", "versions", "facts", "raw_gradients", "apply_gradients", "collections", "shape_of",
    "ragged", "agreement", "assignment", "groups", "held", "checkpoints", "sharding",
)

LOOP_BACK = ("NextIteration", "RefNextIteration")


def fill_node_def(out: node_def_pb2.NodeDef, node: Node) -> None:
    """Write a node into an empty NodeDef."""
    out.name = node.name
    out.op = node.op
    out.device = node.device
    out.input.extend([ref_text(r) for r in node.inputs])
    out.input.extend(["^" + c for c in node.controls])
    overlay = node.attrs
    if node.proto is not None:
        for key, value in node.proto.attr.items():
            if key not in overlay and key not in A.PRIVATE:
                out.attr[key].CopyFrom(value)
    for key, value in overlay.items():
        if value is not None and key not in A.PRIVATE:
            out.attr[key].CopyFrom(value)


def node_from_def(proto: node_def_pb2.NodeDef) -> Node:
    """A node of the user's graph."""
    inputs: List[Ref] = []
    controls: List[str] = []
    for text in proto.input:
        if text.startswith("^"):
            controls.append(text[1:])
        else:
            inputs.append(parse_ref(text))
    taskgraph = int(proto.attr[A.TASKGRAPH].i) if A.TASKGRAPH in proto.attr else None
    return Node(proto.name, proto.op, inputs, controls, proto=proto, device=proto.device, origin=proto.name, taskgraph=taskgraph)


def program_from_graph_def(graph: graph_pb2.GraphDef, fetches: Sequence[str] = (), targets: Sequence[str] = ()) -> Program:
    """The whole of a GraphDef as a program."""
    nodes = {proto.name: node_from_def(proto) for proto in graph.node}
    return Program(nodes, [parse_ref(f) for f in fetches], targets, library=graph.library, versions=graph.versions)
