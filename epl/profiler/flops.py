"""Floating-point operations of a graph, counted from its ops and shapes.

The numbers come from the graph, not from a trace: an op counts once whether a run
executed it or not, and so do the ops in a loop's body and on both sides of a v1 cond.
An `If` counts as its most expensive branch. What counts as an operation is defined
in `epl.planner.op_costs`.
"""

import collections
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import tensorflow.compat.v1 as tf
from absl import logging

from epl import compat
from epl.errors import ConfigError
from epl.planner.op_costs import FLOP_RULES, TensorSpec, op_flops, plain_attrs
from epl.utils.loop_shapes import ShapeOf, call_arguments, called_functions, is_loop
from epl.utils.shape_inference import inferred_shapes
from epl.utils.static_shapes import Dims, as_dims, is_known

COMMANDS = ("scope", "op", "graph")
"""Views of the report: by name scope, by op type, op by op in the order of creation."""


def count_flops(tf_graph: tf.Graph, run_metadata: Optional[Any] = None) -> Dict[str, int]:
    """FLOPs of every op that does arithmetic: op name -> FLOPs.

    Ops whose shapes are unknown are left out; a debug message names them.

    Args:
      tf_graph: the graph; it stays as it is.
      run_metadata: a `tf.RunMetadata` with a full trace. The shapes it observed are
        taken where inference finds none, for example behind a placeholder.

    Raises:
      ProgramError: the shapes set in the script contradict the dataset's.
    """
    static = inferred_shapes(tf_graph)
    observed = observed_shapes(run_metadata) if run_metadata is not None else {}

    def shape_of(name: str) -> Dims:
        shape = static.get(name)
        return shape if is_known(shape) else observed.get(name, shape)

    flops, unknown = _count(tf_graph.get_operations(), shape_of)
    if unknown:
        logging.debug("FLOPs: %d ops have unknown shapes and are not counted: %s", len(unknown), ", ".join(unknown))
    return flops


def observed_shapes(run_metadata: Any) -> Dict[str, Dims]:
    """The output shapes a traced run recorded: tensor name -> shape at its first execution."""
    found: Dict[str, Dims] = {}
    for device in run_metadata.step_stats.dev_stats:
        for node in device.node_stats:
            for output in node.output:
                name = "%s:%d" % (node.node_name, output.slot)
                found.setdefault(name, tuple(d.size for d in output.tensor_description.shape.dim))
    return found


def profile_flops(sess: Any, run_metadata: Optional[Any] = None, cmds: Union[str, Sequence[str]] = "scope") -> int:
    """Count a session's graph, log one report per view, and return the total FLOPs.

    Args:
      sess: a session, or anything with a `graph`.
      run_metadata: `tf.RunMetadata` of a traced run, or None (see `count_flops`).
      cmds: a view or a list of views out of `COMMANDS`.

    Raises:
      ValueError: an unknown view.
    """
    views = _checked(cmds)
    flops = count_flops(sess.graph, run_metadata)
    total = sum(flops.values())
    for view in views:
        logging.info("FLOPs of the graph: %s in all, by %s\n%s", format(total, ","), view, format_report(sess.graph, flops, view))
    return total


class FlopsProfilerHook(tf.train.SessionRunHook):
    """Reports the FLOPs of the graph after the first run of a monitored session.

    Args:
      cmds: a view or a list of views out of `COMMANDS`.

    Raises:
      ValueError: an unknown view.
    """

    def __init__(self, cmds: Union[str, Sequence[str]] = "scope"):
        self._cmds = _checked(cmds)
        self.total_flops: Optional[int] = None
        """FLOPs of the graph; None before the first run."""

    def before_run(self, run_context: Any) -> Optional[Any]:
        """Trace the first run, so that shapes behind placeholders are known."""
        if self.total_flops is not None:
            return None
        return tf.train.SessionRunArgs(None, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE))

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self.total_flops is None:
            self.total_flops = profile_flops(run_context.session, run_values.run_metadata, self._cmds)


def format_report(tf_graph: tf.Graph, flops: Mapping[str, int], view: str) -> str:
    """One view of the FLOPs per op as aligned text, with each line's share of the total."""
    rows = {"scope": _scope_rows, "op": _type_rows, "graph": _graph_rows}[view](tf_graph, flops)
    total = sum(flops.values()) or 1
    width = max([len(format(n, ",")) for _, n in rows] + [1])
    return "\n".join("%*s %5.1f%%  %s" % (width, format(n, ","), 100.0 * n / total, label) for label, n in rows)


def _checked(cmds: Union[str, Sequence[str]]) -> List[str]:
    views = [cmds] if isinstance(cmds, str) else cmds
    if not isinstance(views, (list, tuple)) or not all(v in COMMANDS for v in views):
        raise ConfigError("cmds=%r: expected one of %s, or a list of them" % (cmds, ", ".join(COMMANDS)))
    return list(views)


def _count(ops: Iterable[tf.Operation], shape_of: ShapeOf) -> Tuple[Dict[str, int], List[str]]:
    """FLOPs by op name, and the names of the ops that can't be counted."""
    flops: Dict[str, int] = {}
    unknown: List[str] = []
    for op in ops:
        functions = called_functions(op)
        if functions:
            number: Optional[int] = _call_flops(op, functions, shape_of)
        elif op.type in FLOP_RULES:
            number = op_flops(op.type, plain_attrs(op.node_def.attr), _specs(op.inputs, shape_of), _specs(op.outputs, shape_of))
        else:
            continue
        if number is None:
            unknown.append(op.name)
        elif number:
            flops[op.name] = number
    return flops, unknown


def _call_flops(op: tf.Operation, functions: List[str], shape_of: ShapeOf) -> int:
    """FLOPs of the most expensive function an op may call, as far as they are known."""
    arguments = op.outputs if is_loop(op) else call_arguments(op)
    shapes = [shape_of(t.name) for t in arguments]
    counts = [0]
    for name in functions:
        body = compat.function_body_graph(op.graph, name, shapes)
        if body is not None:
            inner = {t.name: as_dims(t.shape) for o in body.get_operations() for t in o.outputs}
            counts.append(sum(_count(body.get_operations(), inner.get)[0].values()))
    return max(counts)


def _specs(tensors: Iterable[tf.Tensor], shape_of: ShapeOf) -> List[TensorSpec]:
    return [TensorSpec(shape_of(t.name), t.dtype.base_dtype.name) for t in tensors]


Rows = List[Tuple[str, int]]


def _scope_rows(graph: tf.Graph, flops: Mapping[str, int]) -> Rows:
    """Scopes and ops as a tree in the order of creation, each with what is below it."""
    sums: Dict[str, int] = collections.OrderedDict()
    for name, number in flops.items():
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            scope = "/".join(parts[:depth])
            sums[scope] = sums.get(scope, 0) + number
    order = {name: i for i, name in enumerate(sums)}

    def path(name: str) -> List[int]:
        parts = name.split("/")
        return [order["/".join(parts[: d + 1])] for d in range(len(parts))]

    return [("  " * name.count("/") + name.rpartition("/")[2], sums[name]) for name in sorted(sums, key=path)]


def _type_rows(graph: tf.Graph, flops: Mapping[str, int]) -> Rows:
    """Op types, the most expensive first, with the number of ops."""
    sums: Dict[str, int] = collections.Counter()
    numbers: Dict[str, int] = collections.Counter()
    for name, number in flops.items():
        op_type = graph.get_operation_by_name(name).type
        sums[op_type] += number
        numbers[op_type] += 1
    return [("%s (%d)" % (t, numbers[t]), sums[t]) for t in sorted(sums, key=lambda t: (-sums[t], t))]


def _graph_rows(graph: tf.Graph, flops: Mapping[str, int]) -> Rows:
    return [("%s = %s" % (name, graph.get_operation_by_name(name).type), number) for name, number in flops.items()]
