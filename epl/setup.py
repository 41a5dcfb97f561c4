"""`epl.init` and `epl.shutdown`."""

from typing import Optional

import tensorflow.compat.v1 as tf

from epl.cluster import Cluster
from epl.config import Config
from epl.env import Env
from epl.errors import ConfigError


def init(config: Optional[Config] = None) -> None:
    """Start afresh: new configuration, no strategies, no taskgraphs, a new cluster.

    The default `tf.Graph` is reset, unless the call is made inside
    `with tf.Graph().as_default()`. May be called any number of times.

    Args:
      config: the configuration; None takes defaults, environment and YAML file.

    Raises:
      ConfigError: `config` is not a `Config`.
      ClusterError: hosts, ranks or devices don't fit together.
    """
    if config is not None and not isinstance(config, Config):
        raise ConfigError("epl.init takes an epl.Config, got %r; write epl.init(epl.Config({...}))" % (config,))
    from epl.runtime.adapters import Adapters

    env = Env.get()
    env.clear()
    if config is not None:
        env.config = config
    layout = "all" if env.config.cluster.colocate_split_and_replicate else "auto"
    env.cluster = Cluster(layout=layout)
    if env.adapters is None:
        adapters = Adapters()
        adapters.install()
        env.adapters = adapters
    env.initialized = True
    if not tf.executing_eagerly() and _is_global_default(tf.get_default_graph()):
        tf.reset_default_graph()


def _is_global_default(graph: tf.Graph) -> bool:
    """True when the default graph is not one that the user made current."""
    from epl import compat

    return compat.is_global_default_graph(graph)


def shutdown() -> None:
    """Take EPL out of TensorFlow and leave the job. `epl.init` may follow."""
    env = Env.get()
    if env.adapters is not None:
        env.adapters.remove()
        env.adapters = None
    if env.control is not None or env.backend is not None:
        from epl.runtime.job import disconnect_job

        disconnect_job()
    env.clear()
