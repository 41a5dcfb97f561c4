"""Static shapes of a whole graph, with the batch size taken from the datasets that feed it."""

from typing import Any, Dict, List, Mapping, Optional, Set

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.framework import attr_value_pb2

from epl.errors import ProgramError
from epl.utils.dataset_shapes import iterator_shapes
from epl.utils.loop_shapes import shape_links
from epl.utils.static_shapes import Dims, as_dims, is_known, refine

_GROWTH_ROUNDS = 16
_ALL_ROUNDS = 32
"""Graphs with loops are inferred several times: values of one loop enter the next."""

_NEXT_ELEMENT = frozenset(("IteratorGetNext", "IteratorGetNextSync"))


def infer_shape(tf_graph: tf.Graph) -> None:
    """Fill in the static shapes of a graph's tensors, in place.

    A dataset's batch size counts as static even if the last batch may be smaller.
    This is meant for analysis after the whole graph was built: TensorFlow's gradient
    functions read static shapes, so that a backward part that is built afterwards
    would have this batch size built in.

    Args:
      tf_graph: a v1 graph. Only its tensors' static shapes change.

    Raises:
      ProgramError: the shapes set in the script contradict the dataset's.
    """
    for name, shape in inferred_shapes(tf_graph).items():
        if shape is not None:
            tf_graph.get_tensor_by_name(name).set_shape(shape)


def get_tf_tensor_shape(tensor: Any) -> Optional[List[int]]:
    """The static shape of a tensor as a list, or None if its rank or a dimension is unknown."""
    shape = as_dims(tensor.shape)
    return [int(d) for d in shape if d is not None] if shape is not None and is_known(shape) else None


def inferred_shapes(tf_graph: tf.Graph) -> Dict[str, Dims]:
    """What `infer_shape` would set: tensor name -> shape. The graph stays as it is.

    Raises:
      ProgramError: the shapes set in the script contradict the dataset's.
    """
    sources = _source_shapes(tf_graph)
    links = shape_links(tf_graph)
    graph_def = tf_graph.as_graph_def(add_shapes=True)
    if not links:
        return _shapes(_copy(graph_def, sources, {}))
    return _LinkedInference(graph_def, sources, links).run()


def _source_shapes(graph: tf.Graph) -> Dict[str, Dims]:
    found: Dict[str, Dims] = {}
    for op in graph.get_operations():
        if op.type in _NEXT_ELEMENT:
            for tensor, shape in zip(op.outputs, iterator_shapes(op)):
                found[tensor.name] = refine(as_dims(tensor.shape), shape)
    return found


class _LinkedInference:
    """Infer with what the links suggest; keep only what they prove.

    First everything is assumed that follows if loops keep their shapes. Then each
    assumption must be what all sources of its tensor have; one that is not is cut down
    and everything is inferred and checked again. What is left holds by induction: the
    first value of a run to break it would have come from values that keep it.
    """

    def __init__(self, graph_def: Any, sources: Dict[str, Dims], links: List[Any]):
        self._graph_def = graph_def
        self._sources = sources
        self._links = links
        self._assumed: Dict[str, Dims] = {}
        self._ceiling: Dict[str, Dims] = {}
        self._values: Dict[str, Any] = {}
        self._varying: Set[str] = set()

    def run(self) -> Dict[str, Dims]:
        graph = _copy(self._graph_def, self._sources, {})
        plain = shapes = _shapes(graph)
        for turn in range(_ALL_ROUNDS):
            grown = turn < _GROWTH_ROUNDS and self._grow(graph, shapes)
            if not grown and not self._refute(graph, shapes):
                return shapes
            known = dict(self._sources)
            known.update({name: refine(plain.get(name), shape) for name, shape in self._assumed.items() if shape is not None})
            graph = _copy(self._graph_def, known, self._values)
            shapes = _shapes(graph)
        return plain

    def _grow(self, graph: tf.Graph, shapes: Dict[str, Dims]) -> bool:
        """Assume what the links suggest; True when there was something new."""
        grown = False
        for link in self._links:
            if link.target not in self._values and link.target not in self._varying:
                value = _value(graph, link.copied())
                if value is not None:
                    self._values[link.target] = value
                    grown = True
            current = shapes.get(link.target)
            if is_known(current):
                continue
            guess = link.guess(shapes.get)
            if link.target in self._ceiling:
                guess = _common(guess, self._ceiling[link.target])
            better = refine(current, guess)
            if better != current:
                self._assumed[link.target] = better
                grown = True
        return grown

    def _refute(self, graph: tf.Graph, shapes: Dict[str, Dims]) -> bool:
        """Cut down what not all sources support; True when there was something to cut."""
        refuted = False
        for link in self._links:
            value = self._values.get(link.target)
            if value is not None and not _same(value, _value(graph, link.copied())):
                del self._values[link.target]
                self._varying.add(link.target)
                refuted = True
            shape = self._assumed.get(link.target)
            if shape is None:
                continue
            supported = _common(shape, link.proven(shapes.get))
            if supported != shape:
                self._assumed[link.target] = self._ceiling[link.target] = supported
                refuted = True
        return refuted


def _common(shape: Dims, other: Dims) -> Dims:
    """The dimensions of `shape` that `other` has too."""
    if shape is None or other is None or len(shape) != len(other):
        return None
    return tuple(a if a == b else None for a, b in zip(shape, other))


def _value(graph: tf.Graph, name: Optional[str]) -> Optional[Any]:
    """The value of a small integer tensor, such as a shape, if it is constant; else None."""
    if name is None:
        return None
    tensor = graph.get_tensor_by_name(name)
    if tensor.dtype not in (tf.int32, tf.int64) or tensor.shape.ndims not in (0, 1):
        return None
    return tf.get_static_value(tensor)


def _same(value: Any, other: Optional[Any]) -> bool:
    return other is not None and np.array_equal(value, other)


def _shapes(graph: tf.Graph) -> Dict[str, Dims]:
    return {t.name: as_dims(t.shape) for op in graph.get_operations() for t in op.outputs}


def _copy(graph_def: Any, known: Mapping[str, Dims], values: Mapping[str, Any]) -> tf.Graph:
    """A copy of a graph in which some tensors' shapes or values are given.

    TensorFlow's import infers all other shapes from scratch and evaluates what they
    are computed from (Shape, Pack, StridedSlice, ...) wherever it is constant by then.
    The copy is not for running: a given value replaces its op.
    """
    copy = type(graph_def)()
    copy.CopyFrom(graph_def)
    by_op: Dict[str, Dict[int, Dims]] = {}
    for name, shape in known.items():
        op, _, output = name.partition(":")
        by_op.setdefault(op, {})[int(output)] = shape
    for node in copy.node:
        value = values.get(node.name + ":0")
        if value is not None:
            _give_value(node, value)
            continue
        for index, given in by_op.get(node.name, {}).items():
            _give_shape(node, index, given)
    graph = tf.Graph()
    try:
        with graph.as_default():
            tf.import_graph_def(copy, name="")
    except ValueError as error:
        raise ProgramError(
            "The static shapes of the graph contradict the batch size of its datasets; look for a set_shape or reshape "
            "with another batch size than the dataset's. TensorFlow says: %s" % error
        ) from error
    return graph


def _give_value(node: Any, value: Any) -> None:
    controls = [i for i in node.input if i.startswith("^")]
    node.op = "Const"
    del node.input[:]
    node.input.extend(controls)
    node.attr.clear()
    proto = tf.make_tensor_proto(value)
    node.attr["value"].tensor.CopyFrom(proto)
    node.attr["dtype"].type = proto.dtype


def _give_shape(node: Any, index: int, shape: Dims) -> None:
    proto = tf.TensorShape(shape).as_proto()
    if node.op in _NEXT_ELEMENT:  # the shape function of these reads an attribute
        node.attr["output_shapes"].list.shape[index].CopyFrom(proto)
    given = node.attr["_output_shapes"].list.shape
    if index < len(given):
        given[index].CopyFrom(proto)
    else:
        given.extend([attr_value_pb2.AttrValue().shape] * (index - len(given)) + [proto])
