"""Adapter of sessions: runs of annotated graphs go to a `RankSession`."""

import functools
from typing import Any, Callable, Optional

import tensorflow.compat.v1 as tf

from epl import compat
from epl.env import Env
from epl.errors import ProgramError
from epl.ir.graph import Graph
from epl.runtime.adapters import Patches

_ATTRIBUTE = "_epl_rank_session"
_CONFIG = "_epl_config"


def install(patches: Patches) -> None:
    base = compat.base_session_class()
    patches.replace(base, "__init__", _init)
    patches.replace(base, "run", _run)
    patches.replace(base, "make_callable", _make_callable)
    patches.replace(base, "partial_run_setup", _partial_run)
    patches.replace(base, "close", _close)


def rank_session(session: Any) -> Optional[Any]:
    """The `RankSession` behind a session, made on first use; None for one that EPL leaves alone."""
    found = session.__dict__.get(_ATTRIBUTE)
    if found is not None:
        return found
    env = Env.get()
    if not env.initialized or session.__dict__.get(_CONFIG, _OWN) is _OWN or not concerns(session.graph):
        return None  # a session made before `epl.init` is not ours either
    from epl.runtime.session import RankSession

    config = session.__dict__.get(_CONFIG)
    session.__dict__[_ATTRIBUTE] = RankSession(session.graph, config)
    return session.__dict__[_ATTRIBUTE]


def concerns(graph: tf.Graph) -> bool:
    """False for a graph that runs exactly as it is: no annotation, and one CPU in the job."""
    env = Env.get()
    annotated = Graph.of(graph)
    if annotated is not None and annotated.annotated and annotated.taskgraphs[0].strategy is not None:
        return True
    cluster = env.cluster
    devices = cluster.local_devices()
    if cluster.total_gpu_num > 1 or devices[0].kind == "GPU":
        return True
    return env.config.pipeline.num_micro_batch > 1


_OWN = object()
"""Stands for the configuration of a session that EPL itself made."""


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, target: str = "", graph: Optional[tf.Graph] = None, config: Optional[tf.ConfigProto] = None) -> None:
        env = Env.get()
        if env.building_store:
            original(self, target, graph, config)
            self.__dict__[_CONFIG] = _OWN
            return
        # The user's own session only holds the graph; its target names servers that EPL does not use.
        original(self, "" if env.initialized else target, graph, config)
        self.__dict__[_CONFIG] = config

    return init


def _run(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        ranked = self.__dict__.get(_ATTRIBUTE) or rank_session(self)
        if ranked is None:
            return original(self, fetches, feed_dict, options, run_metadata)
        if self._closed:
            raise RuntimeError("Attempted to use a closed Session.")
        return ranked.run(fetches, feed_dict, options, run_metadata)

    return run


def _make_callable(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make_callable(self: Any, fetches: Any, feed_list: Any = None, accept_options: bool = False) -> Any:
        ranked = rank_session(self)
        if ranked is None:
            return original(self, fetches, feed_list, accept_options)
        return ranked.make_callable(fetches, feed_list, accept_options)

    return make_callable


def _partial_run(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def partial_run_setup(self: Any, fetches: Any, feeds: Any = None) -> Any:
        if rank_session(self) is None:
            return original(self, fetches, feeds)
        raise ProgramError("partial_run has no meaning for a distributed program; use Session.run with all feeds of the step")

    return partial_run_setup


def _close(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def close(self: Any) -> None:
        ranked = self.__dict__.pop(_ATTRIBUTE, None)
        if ranked is not None:
            ranked.close()
        original(self)

    return close
