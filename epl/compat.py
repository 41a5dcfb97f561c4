"""Every private TensorFlow symbol that EPL touches, one function each.

The names below exist in TensorFlow 1.15 and 2.12 to 2.15 unless a function says
otherwise. Nothing outside this module imports from `tensorflow.python`.
"""

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.python.client import session as session_lib
from tensorflow.python.framework import function_def_to_graph as function_lib
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import gradients_util
from tensorflow.python.training import saver as saver_lib

Saveables = List[Any]


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
    call = session._make_callable_from_options(options)  # pylint: disable=protected-access

    def run(*values: Any, **keywords: Any) -> List[Any]:
        # Unlike `Session.run` this call returns arrays that share the buffers of variables and constants.
        return [v.copy() if isinstance(v, np.ndarray) and not v.flags.owndata else v for v in call(*values, **keywords)]

    return run


def is_resource_variable(variable: Any) -> bool:
    """True for a resource variable, False for a reference variable or anything else."""
    from tensorflow.python.ops import resource_variable_ops

    return resource_variable_ops.is_resource_variable(variable)


def control_flow_context(op: tf.Operation) -> Any:
    """The v1 while or cond context of an op, or None."""
    return op._get_control_flow_context()  # pylint: disable=protected-access


def optimizer_slots(optimizer: tf.train.Optimizer) -> Dict[str, Dict[Any, Any]]:
    """The slot dictionary of a v1 optimizer: slot name -> variable key -> slot variable."""
    return optimizer._slots  # pylint: disable=protected-access


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

    packages = ("tensorflow", "tensorflow_estimator", "keras", "tf_keras")
    found = []
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] in packages and getattr(module, "__dict__", {}).get(name) is value:
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


def function_body_graph(graph: Any, name: str, input_shapes: Sequence[Any]) -> Optional[Any]:
    """A function's body as a graph with `.inputs` and `.outputs`, its shapes inferred from the inputs'.

    Args:
      graph: the graph that calls the function; functions of the graphs around it are found too.
      name: the function. None is returned when it is not there or takes another number of inputs.
      input_shapes: one shape per argument, each something that `tf.TensorShape` accepts.
    """
    scope, function = graph, None
    while scope is not None and function is None:
        function = scope._functions.get(name)
        scope = getattr(scope, "outer_graph", None)
    if function is None:
        return None
    original = function.cached_definition if hasattr(function, "cached_definition") else function.definition
    definition = type(original)()
    definition.CopyFrom(original)
    for argument in definition.arg_attr.values():  # TensorFlow prefers these to the shapes that it is given
        argument.attr.pop("_output_shapes", None)
    if len(definition.signature.input_arg) != len(input_shapes):
        return None
    with graph.as_default():
        return function_lib.function_def_to_graph(definition, input_shapes=[tf.TensorShape(s) for s in input_shapes])


def set_variable_initializer(variable: tf.Variable, value: tf.Tensor, initializer: tf.Operation) -> None:
    """Make `initializer` the op that initialises a ref or resource variable, with `value` as its initial value."""
    variable._initializer_op = initializer
    variable._initial_value = value


def save_slice(variable: tf.Variable) -> Optional[Tuple[str, List[int], List[int]]]:
    """(name of the whole, its shape, offset of this part) of a partitioned variable's part, else None."""
    info = variable._get_save_slice_info()
    if info is None:
        return None
    return info.full_name, list(info.full_shape), list(info.var_offset)


class GroupingSaverBuilder(saver_lib.BaseSaverBuilder):
    """The builder behind `tf.train.Saver` with its private steps as methods to override.

    A sharded saver writes one file per group and builds one save and one restore op
    for each, under the dependencies that `before` returns.
    """

    def regroup(self, groups: List[Tuple[str, Saveables]]) -> List[Tuple[str, Saveables]]:
        """Replace the (device, saveables) groups that TensorFlow made, one per device."""
        return groups

    def before(self, kind: str, saveables: Saveables) -> List[Any]:
        """Ops or tensors that must be done before a group is saved ("save") or restored ("restore")."""
        return []

    def built(self, kind: str, saveables: Saveables, op: Any) -> None:
        """Called with what was built for a group."""

    def _GroupByDevices(self, saveables):  # noqa: N802
        return self.regroup(super()._GroupByDevices(saveables))

    def _AddSaveOps(self, filename_tensor, saveables):  # noqa: N802
        with tf.control_dependencies(self.before("save", saveables)):
            result = super()._AddSaveOps(filename_tensor, saveables)
        self.built("save", saveables, result)
        return result

    def _AddRestoreOps(self, filename_tensor, saveables, restore_sequentially, *args, **kwargs):  # noqa: N802
        waits = self.before("restore", saveables) if restore_sequentially else []
        with tf.control_dependencies(waits):
            result = super()._AddRestoreOps(filename_tensor, saveables, restore_sequentially, *args, **kwargs)
        self.built("restore", saveables, result)
        return result


def checkpoint_management() -> Any:
    """The module that finds, records and deletes checkpoints: `update_checkpoint_state_internal`, `_delete_file_if_exists`."""
    return saver_lib.checkpoint_management  # it lies elsewhere in other versions


def meta_graph_module() -> Any:
    """The module whose `create_meta_graph_def` makes every MetaGraphDef."""
    from tensorflow.python.framework import meta_graph

    return meta_graph


def write_graph_function() -> Callable[..., str]:
    """The function behind `tf.train.write_graph` and `tf.io.write_graph`, which hooks and savers call too."""
    from tensorflow.python.framework import graph_io

    return graph_io.write_graph


def saved_model_load_function() -> Callable[..., Any]:
    """The function behind `tf.saved_model.load` of the v1 API."""
    from tensorflow.python.saved_model import loader_impl

    return loader_impl.load


def checkpoint_reader_function() -> Callable[..., Any]:
    """The function behind `tf.train.load_checkpoint`, which `load_variable` and `list_variables` call."""
    from tensorflow.python.training import checkpoint_utils

    return checkpoint_utils.load_checkpoint


def event_writer_of(writer: Any, event_writer: Any, graph: Any, graph_def: Any) -> None:
    """Initialise a `tf.summary.FileWriter` over an event writer of our own."""
    from tensorflow.python.summary.writer import writer as writer_lib

    writer._closed = False
    writer_lib.SummaryToEventTransformer.__init__(writer, event_writer, graph, graph_def)


def monitored_session() -> Any:
    """The module of `MonitoredTrainingSession`, `_MonitoredSession` (has `_hooks`) and `_HookedSession` (has `_hooks`)."""
    from tensorflow.python.training import monitored_session as module

    return module


def as_chief_creator(creator: tf.train.WorkerSessionCreator) -> tf.train.ChiefSessionCreator:
    """A session creator that initialises the model where `creator` would wait for another process to do so."""
    return tf.train.ChiefSessionCreator(scaffold=creator._scaffold, master=creator._master, config=creator._config)


def supervisor_summary_thread() -> type:
    """The class of the thread in which a `tf.train.Supervisor` computes summaries; has `_sess`."""
    from tensorflow.python.training import supervisor

    return supervisor.SVSummaryThread


def profiler_hook_writer() -> Tuple[type, str]:
    """The class and the name of the method with which a `tf.train.ProfilerHook` writes a file."""
    return tf.train.ProfilerHook, "_save"


def timer_state(timer: tf.train.SecondOrStepTimer) -> Tuple[Optional[float], Optional[float]]:
    """(seconds between triggers, time of the last one) of a hook's timer; None for what it has not."""
    return timer._every_secs, timer._last_triggered_time


def estimator_modules() -> Optional[Tuple[Any, Any]]:
    """The modules of the Estimator and of `train_and_evaluate`, or None without tensorflow_estimator."""
    try:
        from tensorflow_estimator.python.estimator import estimator, training
    except ImportError:
        return None
    return estimator, training


def drop_distribution(estimator: Any) -> List[str]:
    """Make an estimator train alone in its process; returns what of its configuration that overrules."""
    config = estimator._config
    names = ("train_distribute", "eval_distribute", "device_fn")
    dropped = [name for name in names if getattr(config, name) is not None]
    alone = config.replace(train_distribute=None, eval_distribute=None, device_fn=None, experimental_distribute=None) if dropped else config
    if config.cluster_spec:
        dropped.append("the cluster in TF_CONFIG")
        alone = alone.replace()
        alone._init_distributed_setting_from_environment_var({})
    if dropped:
        alone._distribute_coordinator_mode = None
        estimator._config = alone
        estimator._train_distribution = estimator._eval_distribution = estimator._device_fn = None
    return dropped


def set_model_dir(estimator: Any, folder: str) -> None:
    """Let an estimator work in another folder than it was made with."""
    if estimator.model_dir != folder:
        estimator._model_dir = folder
        estimator._config = estimator._config.replace(model_dir=folder)


def registered_ops() -> Dict[str, Any]:
    """Op type -> OpDef of all ops that this TensorFlow knows."""
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session as c_api

    ops = op_def_pb2.OpList()
    ops.ParseFromString(c_api.TF_GetBuffer(c_api.TF_GetAllOpList()))
    return {op.name: op for op in ops.op}


def push_device(graph: tf.Graph, name: Any) -> None:
    """Give a graph a default device, or a function from op to device, for good.

    `graph.device(name)`, entered and never left, would be closed by the garbage
    collector, which complains when it does so on another thread.
    """
    graph._add_device_to_stack(name)  # pylint: disable=protected-access


def all_saveables() -> List[Any]:
    """What a SavedModel saves of the default graph: its variables and other saveable objects."""
    from tensorflow.python.ops import variables

    return list(variables._all_saveable_objects())


def without_summary(hook: Any) -> Any:
    """Let a `SummarySaverHook` ask for no summary in this run; returns the tensor of its global step."""
    hook._request_summary = False
    return hook._global_step_tensor
