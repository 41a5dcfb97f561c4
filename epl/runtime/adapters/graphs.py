"""Adapter of graph construction: new graphs get the cluster's default device."""

import functools
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from epl.cluster.default_device import push_default_device
from epl.env import Env
from epl.ir import op_table
from epl.runtime.adapters import Patches


def install(patches: Patches) -> None:
    patches.replace(tf.Graph, "__init__", _init)


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: tf.Graph, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        env = Env.get()
        if env.initialized and env.cluster is not None and type(self) is tf.Graph and not env.building_store:
            push_default_device(self, env.cluster, op_table.VARIABLES if env.config.offload.level else ())

    return init
