"""Measured rates of devices and links, and how they replace the catalogue's. Measuring is not done here.

A profile is a YAML file:

    source: 2026-11-30, TensorFlow 2.15
    devices:
      V100-32GB:
        flops: {float32: 13.9 TFLOP/s}
        bandwidth: 790 GB/s
        overhead: 6 us
        intra: {bandwidth: 122 GB/s, latency: 9 us}
        host: {bandwidth: 11 GB/s, latency: 12 us}
    inter: {bandwidth: 4.9 GB/s, latency: 60 us}
    nodes:
      v100-1: {inter: {bandwidth: 2.4 GB/s}}

Rates are those that large products, copies and messages reached. Whatever is not there
was not measured.
"""

import dataclasses
import pathlib
from typing import Any, Dict, List, Mapping, Optional, Union

import yaml

from epl.cluster.hardware import catalogue
from epl.cluster.hardware.document import Document, Item, read_file, read_text
from epl.cluster.hardware.fields import read_rates, slowest
from epl.cluster.hardware.spec import Device, Hardware, Link, Node
from epl.cluster.hardware.units import FLOPS, RATE, SECONDS, write
from epl.errors import ClusterError

LINKS = ("intra", "inter", "host")


@dataclasses.dataclass(frozen=True)
class MeasuredLink:
    """Bytes/s of large messages and seconds of empty ones; None: not measured."""

    bandwidth: Optional[float] = None
    latency: Optional[float] = None

    def applied(self, link: Link) -> Link:
        """A link with these numbers: its specified bandwidth stays, its efficiency follows."""
        if self.bandwidth is not None:
            link = dataclasses.replace(link, efficiency=self.bandwidth / link.bandwidth)
        return link if self.latency is None else dataclasses.replace(link, latency=self.latency)


@dataclasses.dataclass(frozen=True)
class MeasuredDevice:
    """What a kind of device reached.

    Attributes:
      flops: dtype -> FLOP/s of large products.
      bandwidth: bytes/s of its memory.
      overhead: seconds that each op costs besides its work.
      intra: between two of them in a node.
      host: from one of them to host memory.
    """

    flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bandwidth: Optional[float] = None
    overhead: Optional[float] = None
    intra: Optional[MeasuredLink] = None
    host: Optional[MeasuredLink] = None

    def applied(self, device: Device) -> Device:
        """A device with these numbers: its peaks stay, its efficiency follows. A dtype without a peak gets the measured one."""
        peaks = dict(self.flops, **device.flops)
        efficiency = dict(device.efficiency, **{dtype: rate / peaks[dtype] for dtype, rate in self.flops.items()})
        return dataclasses.replace(
            device,
            flops=peaks,
            efficiency=efficiency,
            bandwidth=device.bandwidth if self.bandwidth is None else self.bandwidth,
            overhead=device.overhead if self.overhead is None else self.overhead,
        )


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measured rates.

    Attributes:
      devices: kind -> what it reached.
      inter: of each node's link to the network.
      nodes: name of a node -> "intra", "inter" or "host" -> its own links, which win over those above.
      source: when and how this was measured.
    """

    devices: Mapping[str, MeasuredDevice] = dataclasses.field(default_factory=dict)
    inter: Optional[MeasuredLink] = None
    nodes: Mapping[str, Mapping[str, MeasuredLink]] = dataclasses.field(default_factory=dict)
    source: str = ""


def read_profile(path: Union[str, pathlib.Path]) -> Profile:
    """Raises ClusterError that names the file and the place in it."""
    return _read(read_file(path, "a profile"))


def parse_profile(text: str, name: str = "the profile") -> Profile:
    """The same for the text of a file."""
    return _read(read_text(text, name))


def _read(document: Document) -> Profile:
    fields = document.root.fields(("source", "devices", "inter", "nodes"), "a profile's source, devices, inter, nodes")
    devices = fields["devices"].entries("kinds of devices") if "devices" in fields else {}
    nodes = fields["nodes"].entries("names of nodes") if "nodes" in fields else {}
    return Profile(
        devices={kind: _read_device(item) for kind, item in devices.items()},
        inter=_read_link(fields["inter"]) if "inter" in fields else None,
        nodes={name: {key: _read_link(link) for key, link in item.fields(LINKS, "links").items()} for name, item in nodes.items()},
        source=fields["source"].text("a text") if "source" in fields else "",
    )


def _read_device(item: Item) -> MeasuredDevice:
    fields = item.fields(("flops", "bandwidth", "overhead", "intra", "host"), "flops, bandwidth, overhead, intra, host")
    return MeasuredDevice(
        flops=read_rates(fields["flops"]) if "flops" in fields else {},
        bandwidth=fields["bandwidth"].quantity(RATE) if "bandwidth" in fields else None,
        overhead=fields["overhead"].quantity(SECONDS, zero=True) if "overhead" in fields else None,
        intra=_read_link(fields["intra"]) if "intra" in fields else None,
        host=_read_link(fields["host"]) if "host" in fields else None,
    )


def _read_link(item: Item) -> MeasuredLink:
    fields = item.fields(("bandwidth", "latency"), "bandwidth and latency")
    return MeasuredLink(
        fields["bandwidth"].quantity(RATE) if "bandwidth" in fields else None,
        fields["latency"].quantity(SECONDS, zero=True) if "latency" in fields else None,
    )


def profile_data(profile: Profile) -> Dict[str, Any]:
    """Plain data with what was measured, as in a file. Reading it gives the same profile."""
    data: Dict[str, Any] = {}
    if profile.source:
        data["source"] = profile.source
    if profile.devices:
        data["devices"] = {kind: _device_data(device) for kind, device in profile.devices.items()}
    if profile.inter is not None:
        data["inter"] = _link_data(profile.inter)
    if profile.nodes:
        data["nodes"] = {name: {key: _link_data(link) for key, link in links.items()} for name, links in profile.nodes.items()}
    return data


def profile_yaml(profile: Profile) -> str:
    """The text of a file."""
    return yaml.safe_dump(profile_data(profile), sort_keys=False, allow_unicode=True)


def _device_data(device: MeasuredDevice) -> Dict[str, Any]:
    data: Dict[str, Any] = {}
    if device.flops:
        data["flops"] = {dtype: write(rate, FLOPS) for dtype, rate in device.flops.items()}
    if device.bandwidth is not None:
        data["bandwidth"] = write(device.bandwidth, RATE)
    if device.overhead is not None:
        data["overhead"] = write(device.overhead, SECONDS)
    for key, link in (("intra", device.intra), ("host", device.host)):
        if link is not None:
            data[key] = _link_data(link)
    return data


def _link_data(link: MeasuredLink) -> Dict[str, str]:
    data = {} if link.bandwidth is None else {"bandwidth": write(link.bandwidth, RATE)}
    return data if link.latency is None else dict(data, latency=write(link.latency, SECONDS))


def merge_profiles(older: Profile, newer: Profile) -> Profile:
    """Both; what both measured is the newer one's."""
    devices = dict(older.devices)
    for kind, device in newer.devices.items():
        before = devices.get(kind, MeasuredDevice())
        devices[kind] = _newer(dataclasses.replace(device, flops=dict(before.flops, **device.flops)), before)
    nodes = {name: dict(links) for name, links in older.nodes.items()}
    for name, links in newer.nodes.items():
        nodes.setdefault(name, {})
        for key, link in links.items():
            nodes[name][key] = _newer(link, nodes[name].get(key))
    return Profile(devices, _newer(newer.inter, older.inter), nodes, newer.source or older.source)


def _newer(newer: Any, older: Any) -> Any:
    """Field by field; what the newer one does not have is the older one's."""
    if newer is None or older is None or not dataclasses.is_dataclass(newer):
        return older if newer is None else newer
    return type(newer)(**{field.name: _newer(getattr(newer, field.name), getattr(older, field.name)) for field in dataclasses.fields(newer)})


def apply_profile(hardware: Hardware, profile: Profile) -> Hardware:
    """The same cluster with measured rates where there are any.

    Kinds are matched by name, or by alias in the catalogue; those that the cluster does
    not have are left out. Where kinds meet in a node, the slowest of their links counts.
    Raises ClusterError for nodes that the cluster does not have.
    """
    unknown = [name for name in profile.nodes if name not in {node.name for node in hardware.nodes}]
    if unknown:
        names = ", ".join(node.name for node in hardware.nodes[:8]) + (", ..." if len(hardware.nodes) > 8 else "")
        raise ClusterError("the profile has links of the node %r, but the cluster's nodes are %s; measure again, or remove it" % (unknown[0], names))
    measured = {_canonical(kind): device for kind, device in profile.devices.items()}
    return Hardware(tuple(_applied(node, profile, measured) for node in hardware.nodes))


def _canonical(kind: str) -> str:
    found = catalogue.find(kind)
    return found.kind if found else kind


def _applied(node: Node, profile: Profile, measured: Mapping[str, MeasuredDevice]) -> Node:
    known: Dict[str, Device] = {}
    links: Dict[str, List[Link]] = {"intra": [], "host": []}
    for device in node.devices:
        if device.kind in known:
            continue
        found = measured.get(_canonical(device.kind), MeasuredDevice())
        known[device.kind] = found.applied(device)
        links["intra"].append((found.intra or MeasuredLink()).applied(node.intra))
        links["host"].append((found.host or MeasuredLink()).applied(node.host))
    own = profile.nodes.get(node.name, {})
    return dataclasses.replace(
        node,
        devices=tuple(known[device.kind] for device in node.devices),
        intra=own.get("intra", MeasuredLink()).applied(slowest(links["intra"]) if links["intra"] else node.intra),
        inter=own.get("inter", MeasuredLink()).applied((profile.inter or MeasuredLink()).applied(node.inter)),
        host=own.get("host", MeasuredLink()).applied(slowest(links["host"]) if links["host"] else node.host),
    )
