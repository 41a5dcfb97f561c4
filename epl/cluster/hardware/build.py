"""Hardware out of names and counts: from the hosts of a job, or made up."""

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Union

from epl.cluster.hardware import catalogue
from epl.cluster.hardware.document import Item
from epl.cluster.hardware.fields import read_link, slowest
from epl.cluster.hardware.spec import Device, Hardware, Link, Node
from epl.cluster.hosts import Hosts, machine_of, split_hosts
from epl.errors import ClusterError

AnyDevice = Union[str, Device]
AnyLink = Union[str, Link]
Find = Callable[[str], Optional[catalogue.Entry]]
"""The catalogue's entry for a kind, if there is one."""


def default_link(devices: Sequence[Device], where: str, find: Find = catalogue.find) -> Optional[Link]:
    """The slowest of the devices' own links: "intra", "host" or "nvlink". None where one of them has none, or is not known."""
    entries = [find(kind) for kind in dict.fromkeys(device.kind for device in devices)]
    links = [getattr(entry, where) if entry else None for entry in entries]
    known = [link for link in links if link is not None]
    return slowest(known) if known and len(known) == len(links) else None


def links_for(devices: Sequence[Device], find: Find = catalogue.find) -> Dict[str, Link]:
    """The links that descriptions may name between these devices."""
    nvlink = default_link(devices, "nvlink", find)
    return dict(catalogue.named_links(), **({"nvlink": nvlink} if nvlink else {}))


def make_node(
    name: str,
    devices: Sequence[Device],
    inter: Optional[Link] = None,
    intra: Optional[Link] = None,
    host: Optional[Link] = None,
    price: float = 0.0,
    find: Find = catalogue.find,
) -> Node:
    """A node; links that are not given are those of the devices in the catalogue.

    `inter` may be left out where nothing else is in the cluster. Raises ClusterError
    when a link is neither given nor known.
    """
    host = host or default_link(devices, "host", find)
    if host is None:
        raise _unknown_link(name, "host", devices, "'pcie3'", find)
    intra = intra or (default_link(devices, "intra", find) if len(devices) > 1 else host)
    if intra is None:
        raise _unknown_link(name, "intra", devices, "'pcie3' or '300 GB/s'", find)
    return Node(name, tuple(devices), intra, inter or intra, host, price)


def _unknown_link(name: str, where: str, devices: Sequence[Device], example: str, find: Find) -> ClusterError:
    unknown = [device.kind for device in devices if find(device.kind) is None]
    why = "%r is not in the catalogue" % unknown[0] if unknown else "it has no devices"
    return ClusterError("node %r needs %r, because %s; give a link such as %s" % (name, where, why, example))


def from_hosts(
    hosts: Hosts,
    devices_per_host: Union[int, Sequence[int]],
    kinds: Union[AnyDevice, Sequence[AnyDevice]],
    inter: Optional[AnyLink] = None,
    intra: Optional[AnyLink] = None,
    host: Optional[AnyLink] = None,
    price: float = 0.0,
) -> Hardware:
    """The machines of a job.

    Args:
      hosts: the addresses of its workers, "h1:8000,h2:8000" or a list; workers on one machine share a node.
      devices_per_host: how many devices each worker has, or the number of each.
      kinds: names for the catalogue (those of TensorFlow's device details too) or devices; one for all workers, or one for each.
      inter: the link of a node to the network, such as "50 Gb/s"; needed for several machines.
      intra, host: links within each node; by default those of the catalogue.
      price: US dollars an hour of each node besides its devices.

    Raises ClusterError.
    """
    workers = split_hosts(hosts, "hosts")
    counts = _for_each(devices_per_host, len(workers), "devices_per_host", (int,))
    chosen = _for_each(kinds, len(workers), "kinds", (str, Device))
    machines: Dict[str, List[Device]] = {}
    for address, count, kind in zip(workers, counts, chosen):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ClusterError("devices_per_host is %r for %s; expected a number of at least 1" % (count, address))
        machines.setdefault(machine_of(address), []).extend([_device(kind)] * count)
    if not machines:
        raise ClusterError("hosts is empty; expected addresses such as '10.0.0.1:8000'")
    return _hardware(machines, inter, intra, host, price)


def simulated(
    kind_counts: Mapping[str, int],
    per_node: Union[int, Mapping[str, int]] = 8,
    inter: Optional[AnyLink] = None,
    intra: Optional[AnyLink] = None,
    host: Optional[AnyLink] = None,
    price: float = 0.0,
) -> Hardware:
    """A made-up cluster: for each kind so many devices, in nodes of one kind and `per_node` devices, the last one with the rest.

    Nodes are named after their kind: V100-32GB-0, V100-32GB-1, ... Links and `price` are
    as in `from_hosts`. Raises ClusterError.
    """
    machines: Dict[str, List[Device]] = {}
    for name, count in kind_counts.items():
        device = catalogue.device(name)
        most = per_node.get(name, 8) if isinstance(per_node, Mapping) else per_node
        for what, number in (("kind_counts[%r]" % name, count), ("per_node", most)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ClusterError("%s is %r; expected a number of at least 1" % (what, number))
        for first in range(0, count, most):
            machines["%s-%d" % (device.kind, first // most)] = [device] * min(most, count - first)
    if not machines:
        raise ClusterError("kind_counts is empty; expected numbers of devices such as {'V100-32GB': 16}")
    return _hardware(machines, inter, intra, host, price)


def _hardware(
    machines: Mapping[str, Sequence[Device]], inter: Optional[AnyLink], intra: Optional[AnyLink], host: Optional[AnyLink], price: float
) -> Hardware:
    if inter is None and len(machines) > 1:
        raise ClusterError("inter is not given, but there are %d nodes; give their link to the network, such as '50 Gb/s'" % len(machines))
    outside = _link(inter, "inter", {}, catalogue.network_latency())
    nodes = []
    for name, devices in machines.items():
        named = links_for(devices)
        inside = _link(intra, "intra", named, catalogue.local_latency())
        nodes.append(make_node(name, devices, outside, inside, _link(host, "host", named, catalogue.local_latency()), price))
    return Hardware(tuple(nodes))


def _link(link: Optional[AnyLink], name: str, named: Mapping[str, Link], latency: float) -> Optional[Link]:
    return link if link is None or isinstance(link, Link) else read_link(Item.of(link, name), named, latency)


def _device(kind: AnyDevice) -> Device:
    return kind if isinstance(kind, Device) else catalogue.device(kind)


def _for_each(given: Any, workers: int, name: str, one: tuple) -> List[Any]:
    """`given` for each worker: the same for all if it is one, else as many as there are workers."""
    if isinstance(given, one):
        return [given] * workers
    if not isinstance(given, (list, tuple)) or len(given) != workers:
        raise ClusterError("%s is %r; expected one for all %d workers, or a list with one for each" % (name, given, workers))
    return list(given)
