"""The annotated graph: taskgraphs, gradients and views on a `tf.Graph`."""

import collections
import contextlib
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

from epl import compat
from epl.env import Env
from epl.errors import AnnotationError, ClusterError
from epl.ir import attrs as A
from epl.ir.phase import ModelPhase
from epl.ir.tags import GradientTag
from epl.ir.taskgraph import Taskgraph
from epl.planner.schedules import ScheduleError, chunks_of_stages

PipelineConfig = collections.namedtuple("PipelineConfig", "num_stages num_micro_batch strategy")


class GraphKeys:
    """Names of the collections that say how a fetched tensor is merged."""

    GLOBAL_CONCAT_OBJECTS = "global_concat_objects"
    GLOBAL_MEAN_OBJECTS = "global_mean_objects"
    GLOBAL_SUM_OBJECTS = "global_sum_objects"
    LOCAL_CONCAT_OBJECTS = "local_concat_objects"
    LOCAL_MEAN_OBJECTS = "local_mean_objects"
    LOCAL_SUM_OBJECTS = "local_sum_objects"
    ALL_COLLECTION_KEYS = [
        GLOBAL_CONCAT_OBJECTS,
        GLOBAL_MEAN_OBJECTS,
        GLOBAL_SUM_OBJECTS,
        LOCAL_CONCAT_OBJECTS,
        LOCAL_MEAN_OBJECTS,
        LOCAL_SUM_OBJECTS,
    ]


def root_graph(graph: tf.Graph) -> tf.Graph:
    """The graph that a function body is part of; a graph outside functions is its own."""
    while compat.is_function_graph(graph) and getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    return graph


class Graph:
    """What EPL knows of one `tf.Graph`. `Graph.get()` finds that of the default graph."""

    def __init__(self, tf_graph: tf.Graph):
        self.tf_graph = tf_graph
        self.model_mode: Optional[str] = None
        self._taskgraphs: List[Taskgraph] = []
        self._devices: List[Any] = []
        self._by_strategy: List[Tuple[Any, Taskgraph]] = []
        self._scopes: List[Any] = []
        self._user_default_taskgraph: Optional[Taskgraph] = None
        self._epl_default_taskgraph: Optional[Taskgraph] = None
        self.defaults: List[Tuple[int, int]] = []
        """(number of ops, taskgraph) each time a default strategy was set: it holds for the ops created from then on."""
        self._current_model_phase = ModelPhase.FORWARD
        self.gradient_calls = 0
        self.losses: Dict[str, None] = {}
        """Names of the ops whose outputs were differentiated, in order."""
        self._gradients: Dict[str, Tuple[Any, Any]] = {}
        self._views: Any = None
        default = Env.get().strategy_context.default_strategy
        if default is not None:
            self._set_default(default, 0)

    @classmethod
    def get(cls, may_create: bool = False) -> Optional["Graph"]:
        """The annotated graph of the default `tf.Graph`, or None when there is none yet."""
        return cls.of(tf.get_default_graph(), may_create)

    @classmethod
    def of(cls, tf_graph: tf.Graph, may_create: bool = False) -> Optional["Graph"]:
        """The annotated graph of a `tf.Graph`."""
        tf_graph = root_graph(tf_graph)
        for known in reversed(Env.get().epl_graphs):
            if known.tf_graph is tf_graph:
                return known
        if not may_create:
            return None
        made = cls(tf_graph)
        Env.get().epl_graphs.append(made)
        return made

    # Strategies.

    def taskgraph_for(self, strategy: Any) -> Taskgraph:
        """The taskgraph of a strategy; a new one for a strategy that was not used before."""
        for known, taskgraph in self._by_strategy:
            if known is strategy:
                return taskgraph
        if not self._by_strategy and self._taskgraphs:
            # A gradient call before the first scope took the program for one without scopes.
            self._taskgraphs.clear()
            self._devices.clear()
        taskgraph = Taskgraph(self, len(self._taskgraphs), strategy)
        self._taskgraphs.append(taskgraph)
        self._by_strategy.append((strategy, taskgraph))
        return taskgraph

    def enter_strategy(self, strategy: Any) -> None:
        """Stamp the ops created from now on with the taskgraph of a strategy."""
        taskgraph = self.taskgraph_for(strategy)
        scope = compat.attr_scope(tf.get_default_graph(), {A.TASKGRAPH: A.of_int(taskgraph.index)})
        scope.__enter__()
        self._scopes.append((strategy, scope))

    def exit_strategy(self, strategy: Any) -> None:
        """Undo `enter_strategy`."""
        if not self._scopes or self._scopes[-1][0] is not strategy:
            raise AnnotationError("%r is left but was not the last one entered" % (strategy,))
        _, scope = self._scopes.pop()
        scope.__exit__(None, None, None)
        taskgraph = self.taskgraph_for(strategy)
        if taskgraph is not self._user_default_taskgraph:
            self._epl_default_taskgraph = taskgraph

    def set_default_strategy(self, strategy: Any) -> None:
        """Ops outside scopes belong to the taskgraph of this strategy from now on."""
        self._set_default(strategy, compat.op_count(self.tf_graph))

    def _set_default(self, strategy: Any, since: int) -> None:
        taskgraph = self.taskgraph_for(strategy)
        if taskgraph is not self._user_default_taskgraph:
            self.defaults.append((since, taskgraph.index))
        self._user_default_taskgraph = taskgraph
        if Env.get().config.cluster.colocate_split_and_replicate:
            self.lay_out()

    @property
    def taskgraphs(self) -> List[Taskgraph]:
        """The taskgraphs in the order in which their strategies were first used."""
        return self._taskgraphs

    @property
    def num_stages(self) -> int:
        return len(self._taskgraphs)

    @property
    def annotated(self) -> bool:
        """True when a strategy was used in this graph."""
        return bool(self._taskgraphs)

    def lay_out(self) -> None:
        """Derive the virtual devices from the taskgraphs."""
        cluster = Env.get().cluster
        if cluster is None:
            return
        if not self._taskgraphs:
            # A program without annotations is one replicated taskgraph.
            self._taskgraphs.append(Taskgraph(self, 0, None))
        config = Env.get().config.cluster
        counts = [t.device_count for t in self._taskgraphs]
        splits = [t.is_split for t in self._taskgraphs]
        chunks = [] if config.colocate_split_and_replicate else self._chunks(counts, splits, cluster.total_gpu_num)
        cluster.generate_virtual_devices(counts, config.colocate_split_and_replicate, config.device_place_prefer_intra_node, splits, chunks)
        self._devices = list(cluster.virtual_devices)

    @staticmethod
    def _chunks(counts: Sequence[Optional[int]], splits: Sequence[bool], devices: int) -> Sequence[int]:
        """The device of a replica that each stage is on, when the schedule puts several on one."""
        if len(counts) < 2 or any(splits) or any((count or 1) > 1 for count in counts):
            return []
        pipeline = Env.get().config.pipeline
        return chunks_of_stages(pipeline.strategy, len(counts), pipeline.stages_per_device, devices)

    def virtual_device(self, index: int) -> Any:
        """The virtual device of a taskgraph; derived on first use."""
        if len(self._devices) != len(self._taskgraphs):
            self.lay_out()
        return self._devices[index]

    # Gradients.

    def record_gradients(self, ys: Sequence[Any], xs: Sequence[Any], gradients: Sequence[Any], call: int) -> None:
        """Mark the outputs of a gradient call as raw gradients of variables."""
        self.losses.update((y.op.name, None) for y in (ys if isinstance(ys, (list, tuple)) else [ys]) if isinstance(y, tf.Tensor))
        for x, gradient in zip(xs, gradients):
            name = variable_name(x)
            if gradient is None or name is None:
                continue
            mark_gradient(gradient, GradientTag(call, name, "dense"), A.RAW_GRADIENT)
        # A gradient inside the loss comes before the last stages do: what can't be laid out yet is judged when it is applied.
        with contextlib.suppress(ClusterError, ScheduleError):
            self.lay_out()

    def record_apply(self, grads_and_vars: Sequence[Tuple[Any, Any]], call: int) -> None:
        """Mark what `apply_gradients` is given; the views list it."""
        for gradient, variable in grads_and_vars:
            name = variable_name(variable)
            if gradient is None or name is None:
                continue
            mark_gradient(gradient, GradientTag(call, name, "dense"), A.APPLY_GRADIENT)
            self._gradients.setdefault(name, (gradient, variable))
        if self._taskgraphs:
            self.lay_out()

    @property
    def gradients(self) -> List[Any]:
        """What the optimizers are given, one tensor per variable, sorted by name."""
        return sorted((g for g, _ in self._gradients.values()), key=lambda g: gradient_tensor(g).name)

    @property
    def trains(self) -> bool:
        """Whether a gradient of a variable has been taken."""
        return bool(self.losses)

    def gradients_with_variables(self) -> List[Tuple[Any, Any]]:
        """(gradient, variable) pairs as given to the optimizers."""
        return list(self._gradients.values())

    # Phases and modes.

    @property
    def current_model_phase(self) -> str:
        return self._current_model_phase

    def set_model_phase(self, phase: str) -> None:
        self._current_model_phase = phase

    @property
    def need_parallel(self) -> bool:
        """True when the graph trains on the whole cluster; evaluation runs on one replica."""
        return self.model_mode in (None, "train")

    def get_pipeline_config(self) -> PipelineConfig:
        """The number of stages and micro-batches and the schedule."""
        config = Env.get().config.pipeline
        return PipelineConfig(max(1, self.num_stages), config.num_micro_batch, config.strategy)

    # Views.

    def views(self) -> Any:
        """The operations of the graph and of its training program (`epl.ir.views.Views`)."""
        from epl.ir.views import Views

        if self._views is None or self._views.version != Views.version_of(self):
            self._views = Views(self)
        return self._views

    @property
    def operations(self) -> Dict[str, Any]:
        """Name -> Operation: the user's ops, their clones and what EPL added for training."""
        return self.views().operations

    @property
    def tensors(self) -> Dict[str, Any]:
        """Name -> operation of every tensor of `operations`."""
        return self.views().tensors

    def get_operation_by_name(self, name: str) -> Any:
        """The operation of that name; KeyError when there is none."""
        return self.operations[name]

    def format(self, max_depth: Optional[int] = None, prefix_list: Optional[Sequence[str]] = None) -> str:
        """The forward part of each taskgraph and replica as an indented text."""
        return self.views().format(max_depth, prefix_list)

    def __iter__(self) -> Iterator[Taskgraph]:
        return iter(self._taskgraphs)


def variable_name(x: Any) -> Optional[str]:
    """Name of the variable's node when `x` is a variable, its handle, reference or read; else None."""
    tensor = getattr(x, "handle", None)
    if tensor is None:
        tensor = x
    op = getattr(tensor, "op", None)
    for _ in range(8):
        if op is None:
            return None
        if op.type in ("VarHandleOp", "VariableV2", "Variable"):
            return op.name
        if op.type not in ("ReadVariableOp", "Identity") or not op.inputs:
            return None
        op = op.inputs[0].op
    return None


def gradient_tensor(gradient: Any) -> tf.Tensor:
    """The tensor that stands for a gradient: its values when it is sparse."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def mark_gradient(gradient: Any, tag: GradientTag, attribute: str) -> None:
    """Write a gradient's tag on the ops that make it."""
    if isinstance(gradient, tf.IndexedSlices):
        parts = [("values", gradient.values), ("indices", gradient.indices), ("shape", gradient.dense_shape)]
    else:
        parts = [("dense", gradient)]
    for component, tensor in parts:
        if tensor is None:
            continue
        op = tensor.op
        try:
            texts = [s.decode() for s in op.get_attr(attribute)]
        except ValueError:
            texts = []
        text = tag._replace(component=component).text(tensor.value_index)
        if text not in texts:
            compat.set_op_attr(op, attribute, A.of_strs(texts + [text]))


def add_to_collection(tensor: tf.Tensor, key: str) -> None:
    """Say how a tensor is merged over micro-batches and replicas when it is fetched.

    Raises AnnotationError for a key that is not one of `GraphKeys.ALL_COLLECTION_KEYS`.
    """
    if key not in GraphKeys.ALL_COLLECTION_KEYS:
        raise AnnotationError("add_to_collection: unknown key %r; expected one of %s" % (key, ", ".join(GraphKeys.ALL_COLLECTION_KEYS)))
    tensor = tf.convert_to_tensor(tensor)
    for other in GraphKeys.ALL_COLLECTION_KEYS:
        if other != key and any(t is tensor for t in tensor.graph.get_collection(other)):
            raise AnnotationError("Tensor '%s' is in the collection %r already; it can't be merged by %r too" % (tensor.name, other, key))
    tensor.graph.add_to_collection(key, tensor)


def get_collection(key: str) -> List[tf.Tensor]:
    """The tensors of the default graph in one merge collection."""
    return tf.get_collection(key)


def get_all_collections() -> Dict[str, List[tf.Tensor]]:
    """All merge collections of the default graph: key -> tensors, in the order of the keys."""
    return {key: tf.get_collection(key) for key in GraphKeys.ALL_COLLECTION_KEYS}
