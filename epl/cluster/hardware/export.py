"""The inverse of a description: a cluster as plain data and as YAML."""

import itertools
from typing import Any, Dict, List, Sequence, Tuple

import yaml

from epl.cluster.hardware import catalogue
from epl.cluster.hardware.spec import Device, Hardware, Link, Node
from epl.cluster.hardware.units import BYTES, FLOPS, RATE, SECONDS, write
from epl.errors import ClusterError


def to_data(hardware: Hardware) -> Dict[str, Any]:
    """A cluster as plain data; `description.from_data` turns it into an equal one.

    Devices that are the catalogue's are written by name, others with all numbers.
    Neighbouring nodes that are alike are written once. Raises ClusterError when two kinds
    that differ have one name.
    """
    data: Dict[str, Any] = {}
    kinds = _kinds(hardware)
    if kinds:
        data["kinds"] = kinds
    data["nodes"] = [_group_data(list(nodes)) for _, nodes in itertools.groupby(hardware.nodes, _alike)]
    return data


def to_yaml(hardware: Hardware) -> str:
    """The text of a file that describes a cluster."""
    return yaml.dump(to_data(hardware), Dumper=_Plain, sort_keys=False, allow_unicode=True, width=140)


class _Plain(yaml.SafeDumper):
    """Writes equal links out each time: anchors are hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _kinds(hardware: Hardware) -> Dict[str, Any]:
    found: Dict[str, Device] = {}
    for device in hardware.devices:
        key = catalogue.normal(device.kind)
        if found.setdefault(key, device) != device:
            raise ClusterError("the cluster has two different devices of the kind %r; give each kind a name of its own" % device.kind)
    return {device.kind: _device_data(device) for device in found.values() if not _is_known(device)}


def _is_known(device: Device) -> bool:
    known = catalogue.find(device.kind)
    return known is not None and known.device == device


def _device_data(device: Device) -> Dict[str, Any]:
    data: Dict[str, Any] = {
        "base": "none",
        "flops": {dtype: write(rate, FLOPS) for dtype, rate in device.flops.items()},
        "memory": write(device.memory, BYTES),
        "bandwidth": write(device.bandwidth, RATE),
    }
    if device.price is not None:
        data["price"] = device.price
    if device.efficiency:
        data["efficiency"] = dict(device.efficiency)
    if device.overhead:
        data["overhead"] = write(device.overhead, SECONDS)
    if device.source:
        data["source"] = device.source
    return data


def _alike(node: Node) -> Tuple[List[str], Link, Link, Link, float]:
    """What nodes have in common that one entry describes."""
    return ([device.kind for device in node.devices], node.intra, node.inter, node.host, node.price)


def _group_data(nodes: Sequence[Node]) -> Dict[str, Any]:
    first = nodes[0]
    data: Dict[str, Any] = _names([node.name for node in nodes])
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(device.kind for device in first.devices)]
    devices: List[Dict[str, Any]] = [{"kind": kind, "count": count} for kind, count in runs]
    data["devices"] = devices[0] if len(devices) == 1 else devices
    data["intra"], data["inter"], data["host"] = (_link_data(link) for link in (first.intra, first.inter, first.host))
    if first.price:
        data["price"] = first.price
    return data


def _names(names: List[str]) -> Dict[str, Any]:
    """As "name" and "count" where the names are numbered from 0."""
    stem, dash, number = names[0].rpartition("-")
    if stem and dash and number == "0" and names == ["%s-%d" % (stem, index) for index in range(len(names))]:
        return {"name": stem, "count": len(names)}
    return {"name": names[0]} if len(names) == 1 else {"names": names}


def _link_data(link: Link) -> Dict[str, Any]:
    data: Dict[str, Any] = {"bandwidth": write(link.bandwidth, RATE), "latency": write(link.latency, SECONDS)}
    if link.efficiency != 1:
        data["efficiency"] = link.efficiency
    return data
