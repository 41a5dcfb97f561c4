"""EPL, the Easy Parallel Library: distributed training from a single-device script."""

from epl.cluster import Cluster
from epl.config import Config
from epl.env import Env
from epl.ir.graph import Graph, GraphKeys, add_to_collection, get_all_collections, get_collection
from epl.setup import init, shutdown
from epl.strategies import replicate, set_default_strategy, split
from epl.version import VERSION

__version__ = VERSION

__all__ = [
    "Cluster",
    "Config",
    "Env",
    "Graph",
    "GraphKeys",
    "VERSION",
    "add_to_collection",
    "get_all_collections",
    "get_collection",
    "init",
    "replicate",
    "set_default_strategy",
    "shutdown",
    "split",
]
