"""Static shapes of what an iterator yields, found by walking the ops of its dataset.

TensorFlow leaves the batch dimension unknown unless `drop_remainder` is set, because
the last batch may be smaller. For costs and memory the usual batch is what matters:
here a batch has the size of the batch op, or all elements when there are fewer.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

from epl import compat
from epl.utils.static_shapes import Dims, agree, as_dims, refine

INFINITE = -1


class Element(NamedTuple):
    """What a dataset yields: one shape per component, and how many elements it has."""

    shapes: List[Dims]
    num: Optional[int] = None
    """Number of elements, INFINITE, or None when it is not known."""


def iterator_shapes(get_next: tf.Operation) -> List[Dims]:
    """The shapes of the outputs of an `IteratorGetNext` op, as far as its dataset tells them.

    An iterator that is initialised from several datasets has the shapes they agree on;
    one that is chosen at run time (a string handle) has the declared ones.
    """
    declared = _declared(get_next)
    handle = _behind(get_next.inputs[0].op)
    if handle.type == "OneShotIterator":
        body = _body(handle, "dataset_factory", [])
        elements = [_element(body.outputs[0].op)] if body is not None else []
    else:
        makers = [op for op in get_next.graph.get_operations() if op.type == "MakeIterator" and _behind(op.inputs[1].op) is handle]
        elements = [_element(op.inputs[0].op) for op in makers]
    if not elements or any(len(e.shapes) != len(declared) for e in elements):
        return declared
    return [refine(d, agree(column)) for d, column in zip(declared, zip(*[e.shapes for e in elements]))]


def function_output_shapes(graph: tf.Graph, name: str, input_shapes: Sequence[Dims]) -> Optional[List[Dims]]:
    """The shapes a function of a graph's library returns for given arguments, or None if it is not there."""
    body = compat.function_body_graph(graph, name, input_shapes)
    return None if body is None else [as_dims(t.shape) for t in body.outputs]


def _behind(op: tf.Operation) -> tf.Operation:
    while op.type == "Identity":
        op = op.inputs[0].op
    return op


def _declared(op: tf.Operation) -> List[Dims]:
    try:
        return [as_dims(s) for s in op.get_attr("output_shapes")]
    except ValueError:  # not every op of the kind has the attribute
        return []


def _constant(tensor: tf.Tensor) -> Optional[Any]:
    value = tf.get_static_value(tensor)
    return None if value is None else value.item()


def _body(op: tf.Operation, attr: str, input_shapes: Sequence[Dims]) -> Optional[Any]:
    return compat.function_body_graph(op.graph, op.node_def.attr[attr].func.name, input_shapes)


def _element(op: tf.Operation) -> Element:
    """What a dataset op yields. An op that is not known yields what it declares."""
    op = _behind(op)
    rule = _RULES.get(op.type)
    declared = _declared(op)
    element = rule(op) if rule is not None else Element(declared)
    if len(element.shapes) != len(declared):
        return Element(declared or element.shapes, element.num)
    return Element([refine(d, s) for d, s in zip(declared, element.shapes)], element.num)


def _source(op: tf.Operation) -> Element:
    return _element(op.inputs[0].op)


def _like_input(op: tf.Operation) -> Element:
    return _source(op)


def _uncounted(op: tf.Operation) -> Element:
    return Element(_source(op).shapes)


def _tensor_slices(op: tf.Operation) -> Element:
    shapes = [as_dims(t.shape) for t in op.inputs]
    counts = {s[0] for s in shapes if s and s[0] is not None}
    return Element([None if s is None else s[1:] for s in shapes], counts.pop() if len(counts) == 1 else None)


def _tensors(op: tf.Operation) -> Element:
    return Element([as_dims(t.shape) for t in op.inputs], 1)


def _range(op: tf.Operation) -> Element:
    start, stop, step = (_constant(t) for t in op.inputs[:3])
    if start is None or stop is None or not step:
        return Element([()])
    return Element([()], len(range(start, stop, step)))


def _repeated(element: Element, times: Optional[int]) -> Element:
    if element.num == 0 or times == 0:
        return Element(element.shapes, 0)
    if times is not None and times < 0 or element.num == INFINITE:
        return Element(element.shapes, INFINITE)
    if times is None or element.num is None:
        return Element(element.shapes)
    return Element(element.shapes, element.num * times)


def _repeat(op: tf.Operation) -> Element:
    return _repeated(_source(op), _constant(op.inputs[1]))


def _shuffle_and_repeat(op: tf.Operation) -> Element:
    return _repeated(_source(op), _constant(op.inputs[4]))


def _take(op: tf.Operation) -> Element:
    element, limit = _source(op), _constant(op.inputs[1])
    if limit is None or limit < 0:  # a negative number takes all
        return Element(element.shapes, element.num if limit is not None else None)
    if element.num is None:
        return Element(element.shapes)
    return Element(element.shapes, limit if element.num == INFINITE else min(limit, element.num))


def _skip(op: tf.Operation) -> Element:
    element, number = _source(op), _constant(op.inputs[1])
    if element.num == INFINITE or element.num is None or number is None:
        return Element(element.shapes, element.num if number is not None and number >= 0 else None)
    return Element(element.shapes, 0 if number < 0 else max(0, element.num - number))


def _batch_of(size_input: int, drop_input: Optional[int]) -> Callable[[tf.Operation], Element]:
    """The rule of an op that stacks elements; its size and drop_remainder are the given inputs."""

    def rule(op: tf.Operation) -> Element:
        size = _constant(op.inputs[size_input])
        drop = _constant(op.inputs[drop_input]) if drop_input is not None else False
        element = _source(op)
        count = element.num
        if count == INFINITE or count is None or not size or drop is None:
            leading, batches = size, count if count == INFINITE else None
        elif drop:
            leading, batches = size, count // size
        else:
            leading, batches = (min(size, count) or size), -(-count // size)
        inner = element.shapes if op.type in _STACKS_AS_IS else [None if d is None else d[1:] for d in _declared(op)]
        return Element([None if s is None else (leading,) + tuple(s) for s in inner], batches)

    return rule


_STACKS_AS_IS = frozenset(("BatchDataset", "BatchDatasetV2", "ParallelBatchDataset"))
"""Batch ops whose components keep their shapes; others pad or map, so that the declared shapes count."""


def _mapped(op: tf.Operation) -> Element:
    element = _source(op)
    body = _body(op, "f", element.shapes + [as_dims(t.shape) for t in op.inputs[1:][: _captures(op)]])
    return Element(_declared(op) if body is None else [as_dims(t.shape) for t in body.outputs], element.num)


def _flattened(op: tf.Operation) -> Element:
    """The function returns a dataset; it is walked like any other."""
    body = _body(op, "f", _source(op).shapes + [as_dims(t.shape) for t in op.inputs[1:][: _captures(op)]])
    return Element(_declared(op) if body is None else _element(body.outputs[0].op).shapes)


def _captures(op: tf.Operation) -> int:
    """How many tensors a dataset's function captured; they follow the input dataset."""
    return len(op.get_attr("Targuments"))


def _zip(op: tf.Operation) -> Element:
    elements = [_element(t.op) for t in op.inputs]
    finite = [e.num for e in elements if e.num != INFINITE]
    count = None if None in finite else min((c for c in finite if c is not None), default=INFINITE)
    return Element([s for e in elements for s in e.shapes], count)


def _either(elements: List[Element], count: Optional[int]) -> Element:
    if len({len(e.shapes) for e in elements}) != 1:
        return Element([])
    return Element([agree(column) for column in zip(*[e.shapes for e in elements])], count)


def _concatenate(op: tf.Operation) -> Element:
    elements = [_element(t.op) for t in op.inputs]
    counts = [e.num for e in elements]
    if INFINITE in counts:
        return _either(elements, INFINITE)
    return _either(elements, None if None in counts else sum(c for c in counts if c is not None))


def _selected(op: tf.Operation) -> Element:
    return _either([_element(t.op) for t in op.inputs[1:]], None)


Rule = Callable[[tf.Operation], Element]


def _table(*groups: Tuple[str, Rule]) -> Dict[str, Rule]:
    return {name: rule for names, rule in groups for name in names.split()}


_RULES = _table(
    ("TensorSliceDataset", _tensor_slices),
    ("TensorDataset", _tensors),
    ("RangeDataset", _range),
    ("RepeatDataset", _repeat),
    ("ShuffleAndRepeatDataset ShuffleAndRepeatDatasetV2", _shuffle_and_repeat),
    ("TakeDataset", _take),
    ("SkipDataset", _skip),
    ("BatchDataset", _batch_of(1, None)),
    ("BatchDatasetV2", _batch_of(1, 2)),
    ("ParallelBatchDataset", _batch_of(1, 3)),
    ("PaddedBatchDataset", _batch_of(1, None)),
    ("PaddedBatchDatasetV2", _batch_of(1, -1)),
    ("MapAndBatchDataset ExperimentalMapAndBatchDataset", _batch_of(-3, -1)),
    ("MapDataset ParallelMapDataset ParallelMapDatasetV2", _mapped),
    (
        "FlatMapDataset InterleaveDataset ParallelInterleaveDataset ParallelInterleaveDatasetV2 ParallelInterleaveDatasetV3 "
        "ParallelInterleaveDatasetV4 LegacyParallelInterleaveDatasetV2",
        _flattened,
    ),
    ("ZipDataset", _zip),
    ("ConcatenateDataset", _concatenate),
    ("DirectedInterleaveDataset ExperimentalDirectedInterleaveDataset", _selected),
    (
        "ShuffleDataset ShuffleDatasetV2 ShuffleDatasetV3 CacheDataset CacheDatasetV2 PrefetchDataset OptionsDataset OptimizeDataset "
        "OptimizeDatasetV2 ModelDataset FinalizeDataset AssertCardinalityDataset AssertNextDataset LatencyStatsDataset "
        "MaxIntraOpParallelismDataset PrivateThreadPoolDataset ThreadPoolDataset SetStatsAggregatorDataset NonSerializableDataset "
        "UnwrapDatasetVariant WrapDatasetVariant",
        _like_input,
    ),
    (
        "FilterDataset ParallelFilterDataset TakeWhileDataset IgnoreErrorsDataset IgnoreErrorsDatasetV2 UniqueDataset SamplingDataset ShardDataset",
        _uncounted,
    ),
)
