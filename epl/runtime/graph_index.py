"""The index of a user's graph: the whole of it as a program, kept until the graph grows."""

from typing import Any, Dict, Optional, Tuple

import tensorflow.compat.v1 as tf

from epl.ir import attrs as A
from epl.ir.graph import GraphKeys
from epl.ir.inputs import ragged_components
from epl.ir.program import Program, Ref, Shape, program_from_graph_def
from epl.ir.tags import outer_tags


class GraphIndex:
    """Converts a `tf.Graph` to the IR, once per version of it."""

    def __init__(self, graph: tf.Graph):
        self.graph = graph
        self._version: Tuple[int, int] = (-1, -1)
        self._whole: Optional[Program] = None

    def whole(self) -> Program:
        """All nodes of the graph, with gradient tags, merge collections and shapes."""
        collections = self._collections()
        version = (self.graph.version, len(collections))
        if self._whole is None or version != self._version:
            program = program_from_graph_def(self.graph.as_graph_def()).replace(shape_of=self._shape_of)
            self._whole = program.replace(
                raw_gradients=outer_tags(program),
                apply_gradients=outer_tags(program, A.APPLY_GRADIENT),
                collections=collections,
                ragged=ragged_components(program),
            )
            self._version = version
        return self._whole

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
