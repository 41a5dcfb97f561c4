"""What all strategies share: a device count, a place in the program, and the scope."""

import contextlib
import inspect
import numbers
import os
from typing import Any, Optional, Tuple, TypeVar

from epl.env import Env
from epl.errors import AnnotationError

_Self = TypeVar("_Self", bound="ParallelStrategy")

_EPL_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CONTEXTLIB = os.path.abspath(contextlib.__file__)


class ParallelStrategy:
    """How the ops of one taskgraph are distributed; a scope while it is entered.

    A strategy stands for one taskgraph: entered again, it goes on with the same one.
    """

    kind = ""
    """The name of the function that makes it, for messages."""

    is_split = False
    """Whether the devices of a replica share the taskgraph's tensors rather than its batches."""

    def __init__(self, device_count: Optional[int] = None, name: Optional[str] = None):
        """Check the arguments; nothing is entered yet.

        Args:
          device_count: the devices of one replica of the model that the taskgraph
            uses, from 1; None leaves it to the cluster.
          name: shown in messages and reports.

        Raises AnnotationError for anything else.
        """
        self.name = _checked_name(name, self.kind)
        self.device_count = _checked_count(device_count, self.kind)
        self.index: Optional[int] = None
        """Its place in the order of first entry in the tf.Graph it was last entered in; None before."""
        self.entered_at: Optional[str] = None
        """The "file:line" of the `with` statement while the scope is open, else None."""
        self._opened: Optional[Tuple[Any, Any]] = None

    @property
    def is_default(self) -> bool:
        """Whether it is the default strategy now."""
        return Env.get().strategy_context.default_strategy is self

    def __enter__(self: _Self) -> _Self:
        """Open the scope. Raises AnnotationError when a scope is open: scopes don't nest."""
        context = Env.get().strategy_context
        where = user_location()
        context.add(self, where)
        self.entered_at = where
        try:
            self.index = context.position(self, default_tf_graph())
            graph = current_ir_graph()
            graph.enter_strategy(self)
        except BaseException:
            self._close(context)
            raise
        # Leaving undoes it where it was done, even if `epl.init` or another default graph came in between.
        self._opened = (context, graph)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._opened is None:
            raise AnnotationError("%r is left but not open; use it in a `with` statement" % self)
        context, graph = self._opened
        try:
            graph.exit_strategy(self)
        finally:
            self._close(context)

    def _close(self, context: Any) -> None:
        self._opened = None
        self.entered_at = None
        context.remove(self)

    def __repr__(self) -> str:
        arguments = [] if self.device_count is None else ["device_count=%d" % self.device_count]
        arguments += [] if self.name is None else ["name=%r" % self.name]
        return "%s(%s)" % (self.kind, ", ".join(arguments))


def current_ir_graph() -> Any:
    """The annotated graph that belongs to TensorFlow's default graph."""
    # Imported here: `epl.ir.graph` builds on the strategies.
    from epl.ir.graph import Graph

    return Graph.get(may_create=True)


def default_tf_graph() -> Any:
    """TensorFlow's default graph; that of the function inside a function."""
    import tensorflow as tf

    return tf.compat.v1.get_default_graph()


def user_location() -> str:
    """The "file:line" of the innermost caller outside EPL."""
    frame = inspect.currentframe()
    while frame is not None:
        path = os.path.abspath(frame.f_code.co_filename)
        if not path.startswith(_EPL_FOLDER) and path != _CONTEXTLIB:
            return "%s:%d" % (frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "an unknown place"


def _checked_count(count: Any, kind: str) -> Optional[int]:
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 1:
        raise AnnotationError("%s(device_count=%r): expected a whole number of devices, 1 or more, or None" % (kind, count))
    return int(count)


def _checked_name(name: Any, kind: str) -> Optional[str]:
    if name is not None and not (isinstance(name, str) and name):
        raise AnnotationError("%s(name=%r): expected a string that is not empty, or None" % (kind, name))
    return name
