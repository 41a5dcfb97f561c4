"""EPL, the Easy Parallel Library: distributed training from a single-device script."""

import importlib
from typing import Any, List

_EXPORTS = {
    "Cluster": "epl.cluster",
    "Config": "epl.config",
    "Env": "epl.env",
    "Graph": "epl.ir.graph",
    "GraphKeys": "epl.ir.graph",
    "VERSION": "epl.version",
    "add_to_collection": "epl.ir.graph",
    "get_all_collections": "epl.ir.graph",
    "get_collection": "epl.ir.graph",
    "init": "epl.setup",
    "replicate": "epl.strategies",
    "set_default_strategy": "epl.strategies",
    "shutdown": "epl.setup",
    "split": "epl.strategies",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    # Names are found on first use: the command line must answer without TensorFlow.
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if name == "__version__":
        return __getattr__("VERSION")
    if not name.startswith("_"):
        try:
            return importlib.import_module("epl." + name)
        except ModuleNotFoundError as error:
            if error.name != "epl." + name:
                raise
    raise AttributeError("module 'epl' has no attribute %r" % name)


def __dir__() -> List[str]:
    return sorted(list(globals()) + __all__)
