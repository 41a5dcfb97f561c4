"""Holds back a process that a C++ library is about to abort.

When a connection of Horovod's Gloo breaks while Horovod starts, an exception that
nobody catches ends the process in the same millisecond, before it can have heard which
rank has died. C++ lets a program say what happens then.
"""

import contextlib
import ctypes
import os
from typing import Any, Callable, Iterator

_HANDLER = ctypes.CFUNCTYPE(None)


@contextlib.contextmanager
def held_back(before: Callable[[], None]) -> Iterator[None]:
    """While it lasts, a thread that ends the process by a C++ exception calls `before` first.

    Without effect where C++'s standard library is not GCC's.
    """
    try:
        set_terminate: Any = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):
        yield
        return
    set_terminate.restype = ctypes.c_void_p
    set_terminate.argtypes = [ctypes.c_void_p]
    pid = os.getpid()

    def call() -> None:
        try:
            if os.getpid() == pid:  # else a forked child, which has its own reasons
                before()
        finally:
            _HANDLER(previous)()  # says what the exception was, and aborts

    handler = _HANDLER(call)
    previous = set_terminate(ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        set_terminate(previous)
