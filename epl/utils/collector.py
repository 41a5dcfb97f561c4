"""Pausing Python's cyclic garbage collector while many objects are made."""

import functools
import gc
from typing import Any, Callable, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


def without_collection(function: _Function) -> _Function:
    """Run a function with the collector paused.

    Compiling makes hundreds of thousands of objects and drops few in cycles; full
    collections over all of TensorFlow's objects took seconds of it.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return cast(_Function, run)
