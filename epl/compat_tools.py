"""Private TensorFlow symbols of the tools: shapes, profilers, checkpoints. To be merged into `epl.compat`.

One small function per symbol. The names exist in TensorFlow 1.15 and 2.12 to 2.15
unless a function says otherwise.
"""

from typing import Any, List, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import function_def_to_graph as function_lib
from tensorflow.python.training import saver as saver_lib

Saveables = List[Any]


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
