"""A cluster described in YAML: nodes, their devices and links. docs/en/hardware.md shows how.

What is not written is taken from the catalogue. A profile of measured rates, if one is
named, replaces both.
"""

import pathlib
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

from epl.cluster.hardware import catalogue
from epl.cluster.hardware.build import links_for, make_node
from epl.cluster.hardware.document import Document, Item, read_file, read_text
from epl.cluster.hardware.fields import DEVICE_KEYS, read_device, read_link
from epl.cluster.hardware.profile import apply_profile, read_profile
from epl.cluster.hardware.spec import Device, Hardware, Link, Node
from epl.errors import ClusterError

TOP_KEYS = ("kinds", "nodes", "intra", "inter", "host", "price", "profile")
NODE_KEYS = ("name", "names", "count", "devices", "intra", "inter", "host", "price")
MOST_NODES = 100000
MOST_PER_ENTRY = 4096
MOST_DEVICES = 1000000
"""In a cluster, in an entry of a node's devices, in a cluster: a slip of the keyboard must not fill the memory."""


def read_description(path: Union[str, pathlib.Path]) -> Hardware:
    """The cluster that a YAML file describes. Raises ClusterError that names the file and the place in it."""
    return _read(read_file(path, "the description of a cluster"), pathlib.Path(path).parent)


def parse_description(text: str, name: str = "the description", folder: Union[str, pathlib.Path] = ".") -> Hardware:
    """The same for the text of a file; `folder` is where the path of a profile starts."""
    return _read(read_text(text, name), pathlib.Path(folder))


def from_data(data: Any, name: str = "the description", folder: Union[str, pathlib.Path] = ".") -> Hardware:
    """The same for plain data: dicts, lists, texts and numbers, as `to_data` makes them."""
    return _read(Document(name, data), pathlib.Path(folder))


def _read(document: Document, folder: pathlib.Path) -> Hardware:
    what = "a cluster's " + ", ".join(TOP_KEYS)
    fields = document.root.fields(TOP_KEYS, what)
    if "nodes" not in fields:
        raise document.root.missing("nodes", "a list of nodes with their devices")
    own = _Kinds(fields.get("kinds"))
    entries = fields["nodes"].items("nodes with their devices")
    groups = [_Group(item, fields, own) for item in entries]
    total, devices = (sum(sizes) for sizes in zip(*((group.count, group.count * len(group.devices)) for group in groups)))
    if total > MOST_NODES or devices > MOST_DEVICES:
        place = document.place(("nodes",))
        raise ClusterError("%s: there are %d nodes with %d devices; expected at most %d with %d" % (place, total, devices, MOST_NODES, MOST_DEVICES))
    nodes: List[Node] = []
    unnamed = 0
    taken: Dict[str, Item] = {}
    for group in groups:
        names = group.names(unnamed)
        unnamed += 0 if group.named else len(names)
        for name in names:
            if name in taken:
                other = taken[name].document.place(taken[name].path)
                raise group.item.error("another name", "is a node named %r as is %s" % (name, other))
            taken[name] = group.item
        nodes += group.nodes(names, alone=total == 1)
    hardware = Hardware(tuple(nodes))
    if "profile" not in fields:
        return hardware
    return apply_profile(hardware, read_profile(folder / fields["profile"].text("the path of a profile")))


class _Kinds:
    """The kinds of a description: its own ones, then those of the catalogue."""

    def __init__(self, item: Optional[Item]):
        self.own: Dict[str, Device] = {}
        self.bases: Dict[str, Optional[catalogue.Entry]] = {}
        for name, one in (item.entries("names of kinds to their numbers") if item and item.value is not None else {}).items():
            if catalogue.normal(name) in self.own:
                raise one.error("another name", "is a second kind of that name")
            fields = one.fields(DEVICE_KEYS + ("base",), "a device's " + ", ".join(DEVICE_KEYS + ("base",)))
            base = _base(name, fields)
            self.own[catalogue.normal(name)] = read_device(name, one, fields, base.device if base else None)
            self.bases[name] = base

    def entry(self, kind: str) -> Optional[catalogue.Entry]:
        """What the catalogue knows of a kind, or of its base: links."""
        return self.bases[kind] if kind in self.bases else catalogue.find(kind)

    def device(self, item: Item) -> Device:
        name = item.text("the name of a device, such as 'V100-32GB'")
        if catalogue.normal(name) in self.own:
            return self.own[catalogue.normal(name)]
        found = catalogue.find(name)
        if found is None:
            raise item.error("a device of the catalogue or of 'kinds'; " + catalogue.nearest(name))
        return found.device


def _base(name: str, fields: Mapping[str, Item]) -> Optional[catalogue.Entry]:
    """The entry whose numbers a kind has where it gives none: its base, or that of its own name."""
    if "base" not in fields:
        return catalogue.find(name)
    base = fields["base"].text("a device of the catalogue, or 'none'")
    if base == "none":
        return None
    found = catalogue.find(base)
    if found is None:
        raise fields["base"].error("a device of the catalogue, or 'none'; " + catalogue.nearest(base))
    return found


class _Group:
    """An entry of `nodes`: one node, or several that are alike."""

    def __init__(self, item: Item, defaults: Mapping[str, Item], own: _Kinds):
        self.item = item
        self.fields = item.fields(NODE_KEYS, "a node's " + ", ".join(NODE_KEYS))
        self.defaults = defaults
        self.entry = own.entry
        if "devices" not in self.fields:
            raise item.missing("devices", "such as {kind: V100-32GB, count: 8}")
        self.devices = _devices(self.fields["devices"], own)
        if "names" in self.fields and ("name" in self.fields or "count" in self.fields):
            raise item.error("either 'names', or 'name' and 'count'", "has both")
        self.named = "names" in self.fields or "name" in self.fields
        self.count = self.fields["count"].count(MOST_NODES) if "count" in self.fields else 1
        if "names" in self.fields:
            self.count = len(self.fields["names"].items("names"))

    def names(self, first: int) -> List[str]:
        """One for each node; `first` is the number of the first one that has none."""
        if "names" in self.fields:
            return [one.text("the name of a node") for one in self.fields["names"].items("names")]
        if not self.named:
            return ["node-%d" % (first + index) for index in range(self.count)]
        name = self.fields["name"].text("the name of a node")
        return ["%s-%d" % (name, index) for index in range(self.count)] if "count" in self.fields else [name]

    def nodes(self, names: List[str], alone: bool) -> List[Node]:
        named = links_for(self.devices, self.entry)
        intra = self.link("intra", named, catalogue.local_latency())
        host = self.link("host", named, catalogue.local_latency())
        inter = self.link("inter", {}, catalogue.network_latency())
        if inter is None and not alone:
            raise self.item.missing("inter", "the link of each node to the network, such as '50 Gb/s', here or for the whole cluster")
        price = self.field("price")
        dollars = price.number("US dollars an hour of a node besides its devices") if price else 0.0
        try:
            model = make_node(names[0], self.devices, inter, intra, host, dollars, self.entry)
        except ClusterError as error:
            raise ClusterError("%s: %s" % (self.item.document.place(self.item.path), error)) from None
        return [Node(name, model.devices, model.intra, model.inter, model.host, model.price) for name in names]

    def field(self, key: str) -> Optional[Item]:
        """Of this entry, or of the whole description."""
        return self.fields.get(key, self.defaults.get(key))

    def link(self, key: str, named: Mapping[str, Link], latency: float) -> Optional[Link]:
        item = self.field(key)
        if item is None:
            return None
        if "nvlink" in _texts(item) and "nvlink" not in named and key != "inter":
            without = next(device.kind for device in self.devices if not getattr(self.entry(device.kind), "nvlink", None))
            raise item.error("one of: %s, or a bandwidth such as '300 GB/s'" % ", ".join(named), "the catalogue does not know for %s" % without)
        return read_link(item, named, latency)


def _texts(item: Item) -> Tuple[str, ...]:
    """The names of links in an item."""
    value = item.value.get("link") if isinstance(item.value, dict) else item.value
    return (value.strip().lower(),) if isinstance(value, str) else ()


def _devices(item: Item, own: _Kinds) -> List[Device]:
    """A kind, {kind, count}, or a list of both."""
    if item.value == []:  # a machine that only holds memory
        return []
    if isinstance(item.value, list):
        return [device for one in item.items("devices") for device in _devices(one, own)]
    if isinstance(item.value, str):
        return [own.device(item)]
    fields = item.fields(("kind", "count"), "kind and count of devices; write other numbers under 'kinds'")
    if "kind" not in fields:
        raise item.missing("kind", "the name of a device, such as 'V100-32GB'")
    return [own.device(fields["kind"])] * (fields["count"].count(MOST_PER_ENTRY) if "count" in fields else 1)
