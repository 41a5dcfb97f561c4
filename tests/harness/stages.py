"""Cuts models into pipeline stages.

A model names its quarters with `at(1)`, `at(2)` and `at(3)`; what comes before is the
first one. Outside `cut_into`, or with a single stage, that does nothing.
"""

import contextlib
from typing import Callable, Iterator, List

QUARTERS = 4

_cuts: List["_Cut"] = []


class _Cut:
    def __init__(self, stages: int, open_scope: Callable[[int], contextlib.AbstractContextManager]):
        self._stages = stages
        self._open_scope = open_scope
        self._stage = -1
        self._scope = contextlib.ExitStack()

    def move(self, quarter: int) -> None:
        stage = quarter * self._stages // QUARTERS
        if stage != self._stage:
            self._scope.close()
            self._scope.enter_context(self._open_scope(stage))
            self._stage = stage

    def close(self) -> None:
        self._scope.close()


@contextlib.contextmanager
def cut_into(stages: int, open_scope: Callable[[int], contextlib.AbstractContextManager]) -> Iterator[None]:
    """Meanwhile the quarters of a model become so many stages; `open_scope` gives the scope of a stage, also when one is entered again."""
    if stages > QUARTERS:
        raise ValueError("models have %d quarters and can't have %d stages" % (QUARTERS, stages))
    cut = _Cut(stages, open_scope)
    _cuts.append(cut)
    try:
        cut.move(0)
        yield
    finally:
        _cuts.pop()
        cut.close()


def at(quarter: int) -> None:
    """What follows belongs to the given quarter of the model, from 0."""
    if _cuts:
        _cuts[-1].move(quarter)
