"""Every private TensorFlow symbol that EPL touches, one function each.

The names below exist in TensorFlow 1.15 and 2.12 to 2.15 unless a function says
otherwise. Nothing outside this module imports from `tensorflow.python`.
"""

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.client import session as session_lib
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import gradients_util

AttrValue = attr_value_pb2.AttrValue


def tf_version() -> Tuple[int, int]:
    """(major, minor) of the TensorFlow in use."""
    major, minor = tf.__version__.split(".")[:2]
    return int(major), int(minor)


def base_session_class() -> type:
    """The class whose `run`, `make_callable`, `partial_run` and `close` every session uses."""
    return session_lib.BaseSession


def gradients_module() -> Any:
    """The module whose `_GradientsHelper` builds every symbolic gradient, and `_AggregatedGrads` sums partial ones."""
    return gradients_util


def is_function_graph(graph: tf.Graph) -> bool:
    """True for the graph of a function body (v2 control flow, `tf.function`, datasets)."""
    return getattr(graph, "building_function", False) or hasattr(graph, "outer_graph")


@contextlib.contextmanager
def attr_scope(graph: tf.Graph, attrs: Dict[str, Optional[AttrValue]]) -> Iterator[None]:
    """Put node attributes on every op created inside; None takes an outer one away."""
    current = graph._attr_scope_map  # pylint: disable=protected-access
    known = {k: v for k, v in attrs.items() if v is not None or k in current}
    with graph._attr_scope(known):  # pylint: disable=protected-access
        yield


def set_op_attr(op: tf.Operation, name: str, value: AttrValue) -> None:
    """Set or replace one attribute of an op of the user's graph."""
    op._set_attr(name, value)  # pylint: disable=protected-access


def original_op(op: tf.Operation) -> Optional[tf.Operation]:
    """The forward op for which a gradient op was created, else None."""
    return op._original_op  # pylint: disable=protected-access


def op_count(graph: tf.Graph) -> int:
    """How many ops a graph has; ops are appended, so this marks a point in time."""
    return len(graph.get_operations())


def new_ops(graph: tf.Graph, since: int) -> List[tf.Operation]:
    """The ops created after `op_count` returned `since`."""
    return graph.get_operations()[since:]


def op_def(name: str) -> Any:
    """The registered OpDef of an op type, or None."""
    getter = getattr(op_def_registry, "get", None)
    if getter is not None:
        return getter(name)
    return op_def_registry.get_registered_ops().get(name)  # TensorFlow 1.15


def fetch_mapper(fetches: Any) -> Any:
    """TensorFlow's mapping of a nested fetch: `.unique_fetches()`, `.build_results(values)`."""
    return session_lib._FetchMapper.for_fetch(fetches)  # pylint: disable=protected-access


def expand_feed(feed: Any, value: Any) -> List[Tuple[Any, Any]]:
    """The (tensor, value) pairs behind one feed, for example of a sparse tensor."""
    for tensor_type, _, feed_fn, _ in session_lib._REGISTERED_EXPANSIONS:  # pylint: disable=protected-access
        if isinstance(feed, tensor_type):
            return feed_fn(feed, value)
    raise TypeError("Feed argument %r has invalid type %r" % (feed, type(feed)))


def raw_callable(session: tf.Session, feeds: List[str], fetches: List[str], targets: List[str], run_options: Any = None) -> Callable[..., List[Any]]:
    """A fast call into a session: takes the feed values in order, returns the fetched values."""
    from tensorflow.core.protobuf import config_pb2

    options = config_pb2.CallableOptions(feed=feeds, fetch=fetches, target=targets)
    if run_options is not None:
        options.run_options.CopyFrom(run_options)
    return session._make_callable_from_options(options)  # pylint: disable=protected-access


def is_resource_variable(variable: Any) -> bool:
    """True for a resource variable, False for a reference variable or anything else."""
    from tensorflow.python.ops import resource_variable_ops

    return resource_variable_ops.is_resource_variable(variable)


def eager_enabled() -> bool:
    """True when TensorFlow runs ops at once, outside any graph."""
    return tf.executing_eagerly()


def control_flow_context(op: tf.Operation) -> Any:
    """The v1 while or cond context of an op, or None."""
    return op._get_control_flow_context()  # pylint: disable=protected-access


def optimizer_slots(optimizer: tf.train.Optimizer) -> Dict[str, Dict[Any, Any]]:
    """The slot dictionary of a v1 optimizer: slot name -> variable key -> slot variable."""
    return optimizer._slots  # pylint: disable=protected-access


def graph_mutation_lock(graph: tf.Graph) -> Any:
    """The lock under which a graph may be changed while sessions run it, or a free one."""
    group = getattr(graph, "_mutation_lock", None)
    return group() if group else contextlib.suppress()


class GraphWriter:
    """Appends GraphDefs to a graph through the C API, without Python objects for the nodes.

    `tf.import_graph_def` spends most of its time making `tf.Operation` objects, which a
    program that is run by names never needs. New nodes may refer to nodes written
    before by their names. Symbols: `TF_GraphImportGraphDefWithResults` and the
    `TF_ImportGraphDefOptions` family (2.12 to 2.15).
    """

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        self._operations: Dict[str, Any] = {}

    def write(self, graph_def: Any, tensors: List[Tuple[str, int]], controls: List[str]) -> None:
        """Append nodes under their own names.

        Args:
          graph_def: the new nodes, and functions (known ones may be repeated).
          tensors: outputs of nodes written before that the new nodes read.
          controls: nodes written before that the new nodes wait for.
        """
        from tensorflow.python.client import pywrap_tf_session as c_api
        from tensorflow.python.framework import c_api_util

        scoped = c_api_util.ScopedTFImportGraphDefOptions()
        options = scoped.options
        c_api.TF_ImportGraphDefOptionsSetValidateColocationConstraints(options, False)
        for name, index in tensors:
            output = c_api.TF_Output()
            output.oper = self._operations[name]
            output.index = index
            c_api.TF_ImportGraphDefOptionsAddInputMapping(options, name, index, output)
        for name in controls:
            c_api.TF_ImportGraphDefOptionsRemapControlDependency(options, name, self._operations[name])
        names = [node.name for node in graph_def.node]
        for name in names:
            c_api.TF_ImportGraphDefOptionsAddReturnOperation(options, name)
        graph = self._graph
        with graph._mutation_lock():  # pylint: disable=protected-access
            with c_api_util.tf_buffer(graph_def.SerializeToString()) as serialized:
                with graph._c_graph.get() as c_graph:  # pylint: disable=protected-access
                    results = c_api_util.ScopedTFImportGraphDefResults(c_api.TF_GraphImportGraphDefWithResults(c_graph, serialized, options))
        self._operations.update(zip(names, c_api.TF_ImportGraphDefResultsReturnOperations(results.results)))



def is_global_default_graph(graph: tf.Graph) -> bool:
    """True when no `as_default()` is open, so that the default graph may be reset."""
    from tensorflow.python.framework import ops

    stack = ops._default_graph_stack  # pylint: disable=protected-access
    return not stack.stack and not is_function_graph(graph)


def moments_function() -> Callable[..., Any]:
    """The function behind `tf.nn.moments` of all API versions."""
    from tensorflow.python.ops import nn_impl

    return nn_impl.moments


def fused_batch_norm_function() -> Callable[..., Any]:
    """The function behind `tf.compat.v1.nn.fused_batch_norm`, which Keras calls too."""
    from tensorflow.python.ops import nn_impl

    return nn_impl.fused_batch_norm


def modules_with(name: str, value: Any) -> List[Any]:
    """The loaded TensorFlow and Keras modules in which `name` is that very function."""
    import sys

    found = []
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] in ("tensorflow", "keras", "tf_keras") and getattr(module, "__dict__", {}).get(name) is value:
            found.append(module)
    return found


def file_dataset_classes() -> List[type]:
    """The classes that read files by name; the v1 classes make one of these."""
    from tensorflow.python.data.ops import readers

    names = ("TextLineDatasetV2", "TFRecordDatasetV2", "FixedLengthRecordDatasetV2")
    return [getattr(readers, name) for name in names if hasattr(readers, name)]


def list_files_owners() -> List[type]:
    """The dataset class that defines `list_files`; that of v1 calls it."""
    from tensorflow.python.data.ops import dataset_ops

    return [dataset_ops.DatasetV2]
