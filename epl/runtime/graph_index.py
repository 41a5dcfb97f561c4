"""The index of a user's graph: the whole of it as a program, kept until the graph grows."""

from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.graph import Graph, GraphKeys
from epl.ir.inputs import ragged_components
from epl.ir.program import Program, Ref, Shape, program_from_graph_def
from epl.ir.tags import outer_tags
from epl.passes.assign import Assigned, assign
from epl.utils.collector import without_collection
from epl.utils.constant import GC_COLLECTION_NAME


class GraphIndex:
    """Converts a `tf.Graph` to the IR, once per version of it."""

    def __init__(self, graph: tf.Graph):
        self.graph = graph
        self._version: Tuple[int, ...] = ()
        self._whole: Optional[Program] = None
        self._placed: Dict[str, Assigned] = {}
        self._positions: Optional[Dict[str, int]] = None

    @without_collection
    def whole(self) -> Program:
        """All nodes of the graph, with gradient tags, merge collections, shapes and taskgraphs."""
        collections = self._collections()
        annotated = Graph.of(self.graph)
        stages = annotated.num_stages if annotated is not None else 0
        defaults = annotated.defaults if annotated is not None else ()
        checkpoints = [(t.op.name, t.value_index) for t in self.graph.get_collection(GC_COLLECTION_NAME) if isinstance(t, tf.Tensor)]
        version = (self.graph.version, len(collections), stages, len(defaults), len(checkpoints))
        if self._whole is None or version != self._version:
            program = program_from_graph_def(_unplaced_functions(self.graph.as_graph_def())).replace(shape_of=self._shape_of)
            program = program.replace(
                raw_gradients=outer_tags(program),
                apply_gradients=outer_tags(program, A.APPLY_GRADIENT),
                collections=collections,
                ragged=ragged_components(program),
                checkpoints=checkpoints,
            )
            if stages > 1 or annotated is not None and any(t.is_split for t in annotated.taskgraphs):
                program = with_defaults(program, defaults)
                program = program.replace(assignment=self._assign(program))
            self._whole = program
            self._positions = None
            self._version = version
        return self._whole

    def position_of(self, name: str) -> int:
        """The place of an op in the order in which the graph was built; past the end for one that is not in it."""
        whole = self.whole()
        if self._positions is None:
            self._positions = {node: position for position, node in enumerate(whole.nodes)}
        return self._positions.get(name, len(self._positions))

    def _assign(self, program: Program) -> Mapping[str, Assigned]:
        """A variable that programs may have been compiled for stays where it is when the graph grows."""
        assignment = assign(program, self._placed)
        self._placed = {n.name: assignment[n.name] for n in program.nodes.values() if n.op in op_table.VARIABLES}
        return assignment

    def _collections(self) -> Dict[Ref, str]:
        found: Dict[Ref, str] = {}
        for key in GraphKeys.ALL_COLLECTION_KEYS:
            for tensor in self.graph.get_collection(key):
                found[tensor.op.name, tensor.value_index] = key
        return found

    def _shape_of(self, ref: Ref) -> Shape:
        try:
            shape: Any = self.graph.get_tensor_by_name("%s:%d" % ref).shape
        except (KeyError, ValueError):
            return None
        return None if shape.ndims is None else tuple(shape.as_list())


def _unplaced_functions(graph_def: tf.GraphDef) -> tf.GraphDef:
    """Take the cluster's device names out of functions, in place: their nodes run where the call does, which no session calls so."""
    for function in graph_def.library.function:
        for node in function.node_def:
            if node.device and tf.DeviceSpec.from_string(node.device).job == "worker":
                node.device = ""
    return graph_def


def with_defaults(program: Program, defaults: Sequence[Tuple[int, int]]) -> Program:
    """Mark the nodes built outside scopes with the taskgraph of the default strategy of their time.

    Args:
      program: the whole graph, in order of creation.
      defaults: (number of ops in the graph, taskgraph) each time a default strategy was set.
    """
    if not defaults:
        return program
    nodes = {}
    current: Optional[int] = None
    left = list(defaults)
    for position, node in enumerate(program.nodes.values()):
        while left and left[0][0] <= position:
            current = left.pop(0)[1]
        if current is not None and node.attr(A.TASKGRAPH) is None:
            node = node.replace(attrs=dict(node.attrs, **{A.DEFAULT: A.of_int(current)}))
        nodes[node.name] = node
    return program.replace(nodes=nodes)
