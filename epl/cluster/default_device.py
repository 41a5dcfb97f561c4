"""The worker's first accelerator as the default device of a tf.Graph.

Ops then show a device even where the user names none. Without accelerators, real or
pretended, graphs are left alone.
"""

from typing import TYPE_CHECKING, Any, Optional

from epl.cluster.devices import GPU

if TYPE_CHECKING:
    from epl.cluster.cluster import Cluster

_MARK = "_epl_default_device"


def default_device(cluster: "Cluster") -> Optional[str]:
    """The name of the worker's first accelerator; None without one."""
    first = cluster.local_devices()[0]
    return first.name if first.kind == GPU else None


def push_default_device(graph: Any, cluster: "Cluster") -> bool:
    """Give `graph` the worker's first accelerator as default device, for good.

    Meant for a graph that was just made: what is pushed there is never taken off.
    Returns whether the graph got it. Graphs of functions are left alone, since they
    inherit their caller's devices, and so is a graph that has this device already.
    """
    name = default_device(cluster)
    if name is None or graph.building_function or getattr(graph, _MARK, None) == name:
        return False
    # Imported here, so that laying out a cluster from plain data needs no TensorFlow.
    from epl import compat

    compat.push_device(graph, name)
    setattr(graph, _MARK, name)
    return True
