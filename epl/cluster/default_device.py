"""The worker's first accelerator as the default device of a tf.Graph.

Ops then show a device even where the user names none. Without accelerators, real or
pretended, graphs are left alone.
"""

from typing import TYPE_CHECKING, Any, Callable, Container, Optional

from epl.cluster.devices import GPU
from epl.utils.common import get_device_string

if TYPE_CHECKING:
    from epl.cluster.cluster import Cluster

_MARK = "_epl_default_device"


def default_device(cluster: "Cluster") -> Optional[str]:
    """The name of the worker's first accelerator; None without one."""
    first = cluster.local_devices()[0]
    return first.name if first.kind == GPU else None


def host_device(cluster: "Cluster") -> str:
    """The name of the worker's host memory."""
    return get_device_string(task=cluster.worker_index, device_type="CPU")


def push_default_device(graph: Any, cluster: "Cluster", on_host: Container[str] = ()) -> bool:
    """Give `graph` the worker's first accelerator as default device, for good.

    Meant for a graph that was just made: what is pushed there is never taken off.
    Ops of the types `on_host` get the host instead. Returns whether the graph got it. Graphs of functions are left alone, since they
    inherit their caller's devices, and so is a graph that has this device already.
    """
    name = default_device(cluster)
    if name is None or graph.building_function or getattr(graph, _MARK, None) == name:
        return False
    # Imported here, so that laying out a cluster from plain data needs no TensorFlow.
    from epl import compat

    compat.push_device(graph, _apart(name, host_device(cluster), on_host) if on_host else name)
    setattr(graph, _MARK, name)
    return True


def _apart(name: str, host: str, on_host: Container[str]) -> Callable[[Any], str]:
    return lambda op: host if op.type in on_host else name
