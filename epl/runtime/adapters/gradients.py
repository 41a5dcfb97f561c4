"""Adapter of gradient construction: raw gradients and what optimizers are given are recorded."""

import functools
from typing import Any, Callable, Dict, List

import tensorflow.compat.v1 as tf

from epl import compat
from epl.env import Env
from epl.errors import AnnotationError
from epl.ir import attrs as A
from epl.ir.graph import Graph
from epl.planner import auto_stage
from epl.runtime.adapters import Patches

_WRAPPED = "_epl_wrapped"
_SUMS = ("AddN", "AccumulateNV2", "ConcatV2")
"""The ops by which TensorFlow adds up dense and sparse partial gradients."""


class Depth:
    """How many wrapped calls are open; only the outermost one records."""

    def __init__(self) -> None:
        self.gradients = 0
        self.apply = 0


def install(patches: Patches) -> None:
    depth = Depth()
    patches.replace(compat.gradients_module(), "_GradientsHelper", lambda original: _gradients(original, depth))
    patches.replace(compat.gradients_module(), "_AggregatedGrads", lambda original: _sums(original, depth))
    patches.replace(tf.train.Optimizer, "apply_gradients", lambda original: _apply(original, depth))
    patches.replace(tf.train.Optimizer, "__init__", lambda original: _optimizer_init(original, patches, depth))


def _gradients(original: Callable[..., Any], depth: Depth) -> Callable[..., Any]:
    @functools.wraps(original)
    def helper(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        graph = tf.get_default_graph()
        if depth.gradients or compat.is_function_graph(graph) or not Env.get().initialized:
            return original(ys, xs, *args, **kwargs)
        depth.gradients += 1
        try:
            return _record(original, graph, ys, xs, args, kwargs)
        finally:
            depth.gradients -= 1

    return helper


def _record(original: Callable[..., Any], graph: tf.Graph, ys: Any, xs: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
    annotated = Graph.of(graph, may_create=True)
    assert annotated is not None
    if Env.get().config.auto.auto_parallel and not annotated.annotated:
        auto_stage.annotate(annotated)
    annotated.gradient_calls += 1
    call = annotated.gradient_calls
    start = compat.op_count(graph)
    # minimize() inside a scope must not put the backward in the scope's taskgraph: it follows its forward op.
    with compat.attr_scope(graph, {A.TASKGRAPH: None, A.BACKWARD: A.of_int(call)}):
        result = original(ys, xs, *args, **kwargs)
    for op in compat.new_ops(graph, start):
        taskgraph = _forward_taskgraph(op)
        forward = compat.original_op(op)
        if taskgraph is not None:
            compat.set_op_attr(op, A.TASKGRAPH, A.of_int(taskgraph))
        elif forward is not None:
            compat.set_op_attr(op, A.FORWARD_OP, A.of_str(forward.name))
        if op.type in ("Fill", "OnesLike") and op.name.rpartition("/")[2].startswith("grad_ys_"):
            compat.set_op_attr(op, A.SEED, A.of_int(call))
    variables: List[Any] = list(xs) if isinstance(xs, (list, tuple)) else [xs]
    annotated.record_gradients(ys, variables, result, call)
    return result


def _sums(original: Callable[..., Any], depth: Depth) -> Callable[..., Any]:
    """Mark the sums of partial gradients with the forward op of whose outputs they are."""

    @functools.wraps(original)
    def aggregated(grads: Any, op: tf.Operation, *args: Any, **kwargs: Any) -> Any:
        result = original(grads, op, *args, **kwargs)
        if depth.gradients:
            for gradient in result:
                parts = [gradient.values, gradient.indices] if isinstance(gradient, tf.IndexedSlices) else [gradient]
                for tensor in parts:
                    made = getattr(tensor, "op", None)
                    if made is not None and made.type in _SUMS and compat.original_op(made) is None:
                        compat.set_op_attr(made, A.SUMMED, A.of_str(op.name))
        return result

    return aggregated


def _forward_taskgraph(op: tf.Operation) -> Any:
    current = compat.original_op(op)
    while current is not None:
        try:
            return int(current.get_attr(A.TASKGRAPH))
        except ValueError:
            current = compat.original_op(current)
    return None


def _apply(original: Callable[..., Any], depth: Depth) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_gradients(self: tf.train.Optimizer, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        graph = tf.get_default_graph()
        env = Env.get()
        if depth.apply or not env.initialized or compat.is_function_graph(graph):
            return original(self, grads_and_vars, *args, **kwargs)
        pairs = list(grads_and_vars)
        annotated = Graph.of(graph, may_create=True)
        assert annotated is not None
        _refuse_no_gradient(pairs, self)
        annotated.gradient_calls += 1
        annotated.record_apply(pairs, annotated.gradient_calls)
        depth.apply += 1
        try:
            with compat.attr_scope(graph, {A.TASKGRAPH: None, A.UPDATE: A.of_int(annotated.gradient_calls)}):
                result = original(self, pairs, *args, **kwargs)
        finally:
            depth.apply -= 1
        _add_accumulators(self, pairs, annotated)
        return result

    setattr(apply_gradients, _WRAPPED, True)
    return apply_gradients


def _refuse_no_gradient(pairs: List[Any], optimizer: tf.train.Optimizer) -> None:
    if pairs and all(g is None for g, _ in pairs):
        names = ", ".join("'%s'" % getattr(v, "name", v) for _, v in pairs[:5])
        raise AnnotationError(
            "No variable has a gradient: %s. The loss given to %s does not depend on them" % (names, optimizer.get_name() or type(optimizer).__name__)
        )


def _add_accumulators(optimizer: tf.train.Optimizer, pairs: List[Any], annotated: Graph) -> None:
    """Steps that span several runs show a slot named `accum`, as in the original.

    The sums themselves are kept by the runtime; these variables are in no collection,
    take no memory and are in no checkpoint.
    """
    pipeline = Env.get().config.pipeline
    if pipeline.num_micro_batch == 1 or pipeline.accumulate_in_run or annotated.num_stages > 1:
        return
    slots = compat.optimizer_slots(optimizer)
    if slots is None:
        return
    named = slots.setdefault("accum", {})
    for gradient, variable in pairs:
        if gradient is not None:
            named.setdefault((variable.op.graph, getattr(variable, "_shared_name", variable.op.name)), variable)


def _optimizer_init(original: Callable[..., None], patches: Patches, depth: Depth) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: tf.train.Optimizer, *args: Any, **kwargs: Any) -> None:
        # A subclass may override apply_gradients without calling the base class.
        for cls in type(self).__mro__:
            own = vars(cls).get("apply_gradients")
            if own is not None and issubclass(cls, tf.train.Optimizer) and not getattr(own, _WRAPPED, False):
                patches.replace(cls, "apply_gradients", lambda method: _apply(method, depth))
        original(self, *args, **kwargs)

    return init
