"""Which strategies are active."""

import weakref
from typing import Any, List, MutableMapping, Optional

from epl.env import Env
from epl.errors import AnnotationError
from epl.strategies.base import ParallelStrategy, current_ir_graph, default_tf_graph


class StrategyContext:
    """The active strategy: that of the open scope, else the default one, else none."""

    def __init__(self) -> None:
        self._state: List[ParallelStrategy] = []
        self._default: Optional[ParallelStrategy] = None
        self._scope: Optional[ParallelStrategy] = None
        self._order: MutableMapping[Any, List[ParallelStrategy]] = weakref.WeakKeyDictionary()

    @property
    def state(self) -> List[ParallelStrategy]:
        """The active strategies: one or none, since scopes don't nest. Always the same list."""
        return self._state

    @property
    def default_strategy(self) -> Optional[ParallelStrategy]:
        """What applies outside scopes; None until it is set."""
        return self._default

    def add(self, strategy: ParallelStrategy, where: str) -> None:
        """Make `strategy` the open scope. Raises AnnotationError when a scope is open already."""
        if self._scope is not None:
            raise AnnotationError(
                "%r can't be entered at %s: scopes do not nest, and %r, entered at %s, is still open; close that scope before"
                % (strategy, where, self._scope, self._scope.entered_at)
            )
        self._scope = strategy
        self._refresh()

    def remove(self, strategy: ParallelStrategy) -> None:
        """Close the scope of `strategy`. Raises AnnotationError when it is not the open one."""
        if strategy is not self._scope:
            raise AnnotationError("%r can't be closed: the open scope is %r" % (strategy, self._scope))
        self._scope = None
        self._refresh()

    def set_default(self, strategy: ParallelStrategy) -> None:
        """Put `strategy` in the place of the default one.

        Raises AnnotationError for anything but a strategy, or while a scope is open.
        """
        if not isinstance(strategy, ParallelStrategy):
            raise AnnotationError("set_default_strategy(%r): expected a strategy, such as epl.replicate(device_count=1)" % (strategy,))
        if self._scope is not None:
            raise AnnotationError(
                "the default strategy can't be set to %r while %r, entered at %s, is open; set it before the scope or after it"
                % (strategy, self._scope, self._scope.entered_at)
            )
        self._default = strategy
        self._refresh()

    def restore_default(self, strategy: Optional[ParallelStrategy]) -> None:
        """Put back what was the default before a `set_default` that could not be completed."""
        self._default = strategy
        self._refresh()

    def position(self, strategy: ParallelStrategy, graph: Any) -> int:
        """The place of `strategy` in the order of first entry in a tf.Graph, from 0."""
        entered = self._order.setdefault(graph, [])
        for index, known in enumerate(entered):
            if known is strategy:
                return index
        entered.append(strategy)
        return len(entered) - 1

    def _refresh(self) -> None:
        active = self._default if self._scope is None else self._scope
        self._state[:] = [] if active is None else [active]


def set_default_strategy(strategy: ParallelStrategy) -> None:
    """Make `strategy` apply to all ops outside scopes from now on, instead of the one before.

    Raises AnnotationError for anything but a strategy, or inside an open scope.
    """
    context = Env.get().strategy_context
    before = context.default_strategy
    context.set_default(strategy)
    try:
        strategy.index = context.position(strategy, default_tf_graph())
        current_ir_graph().set_default_strategy(strategy)
    except BaseException:
        context.restore_default(before)
        raise
