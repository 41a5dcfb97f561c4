"""The devices that EPL knows: catalogue.yaml, by name, by alias and by the name that TensorFlow reports."""

import dataclasses
import difflib
import functools
import pathlib
import re
from typing import Dict, Mapping, Optional, Sequence, Tuple

from epl.cluster.hardware.document import Item, read_file
from epl.cluster.hardware.fields import DEVICE_KEYS, read_device, read_link
from epl.cluster.hardware.spec import Device, Link
from epl.cluster.hardware.units import SECONDS, write
from epl.errors import ClusterError

FILE = pathlib.Path(__file__).with_name("catalogue.yaml")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A kind of device with what belongs to it.

    Attributes:
      device: its numbers; `efficiency` and `overhead` are not known from data sheets.
      intra: the link between two such devices of a node, unless a description says otherwise.
      host: the link of one of them to host memory.
      nvlink: its NVLink; None where it has none. Where `intra` is another link, it needs a bridge between two cards.
      names: other names.
      price_source: provider, region and date of `device.price`.
      purchase: US dollars to buy one; None where no source gives it.
      purchase_source: where that is from.
    """

    device: Device
    intra: Link
    host: Link
    nvlink: Optional[Link] = None
    names: Tuple[str, ...] = ()
    price_source: str = ""
    purchase: Optional[float] = None
    purchase_source: str = ""

    @property
    def kind(self) -> str:
        return self.device.kind


def entries() -> Tuple[Entry, ...]:
    """All kinds, in the order of the file."""
    return tuple(_catalogue().entries.values())


def kinds() -> Tuple[str, ...]:
    """The names of all kinds."""
    return tuple(_catalogue().entries)


def find(name: str) -> Optional[Entry]:
    """The entry of a name, or None.

    A name may be a kind ("V100-32GB"), an alias ("v100"), or what TensorFlow's device
    details say ("Tesla V100-SXM2-32GB"). Case, blanks, dashes and the words NVIDIA,
    Tesla and GeForce do not matter. A name that leaves the size of the memory open is the
    smallest one: a plan for it fits the larger one too. A name that leaves the form open
    is the SXM module, but for P100, which clouds have as a card.
    """
    found = _catalogue().kind_of.get(normal(name))
    return None if found is None else _catalogue().entries[found]


def entry(name: str) -> Entry:
    """The entry of a name. Raises ClusterError with the nearest names when there is none."""
    found = find(name)
    if found is None:
        raise ClusterError("there is no device %r in the catalogue; %s" % (name, nearest(name)))
    return found


def device(name: str) -> Device:
    """The device of a name. Raises ClusterError with the nearest names when there is none."""
    return entry(name).device


def named_links() -> Mapping[str, Link]:
    """The links that have a name for all devices: pcie3, pcie4, pcie5."""
    return _catalogue().links


def network_latency() -> float:
    """Seconds of a step over a network for which nothing better is known."""
    return _catalogue().network_latency


def local_latency() -> float:
    """Seconds of a step within a node for which nothing better is known: that of PCI Express."""
    return max(link.latency for link in _catalogue().links.values())


def normal(name: str) -> str:
    """A name without what does not matter in it."""
    words = [word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word not in ("", "nvidia", "tesla", "geforce")]
    return "".join(words)


def nearest(name: str) -> str:
    """For messages: the kinds whose names are most like a name, or all kinds."""
    catalogue = _catalogue()
    close = difflib.get_close_matches(normal(name), list(catalogue.kind_of), n=6, cutoff=0.7)
    found = list(dict.fromkeys(catalogue.kind_of[one] for one in close))[:3]
    if not found:
        return "there are: " + ", ".join(catalogue.entries)
    return "did you mean %s?" % " or ".join(map(repr, found))


@dataclasses.dataclass(frozen=True)
class _Catalogue:
    entries: Mapping[str, Entry]
    kind_of: Mapping[str, str]
    links: Mapping[str, Link]
    network_latency: float


@functools.lru_cache(maxsize=None)
def _catalogue() -> _Catalogue:
    fields = read_file(FILE, "the catalogue").root.fields(("links", "network_latency", "devices"), "the catalogue")
    links = {name: read_link(item, {}) for name, item in fields["links"].entries("links").items()}
    found: Dict[str, Entry] = {}
    kind_of: Dict[str, str] = {}
    for kind, item in fields["devices"].entries("devices").items():
        found[kind] = _read_entry(kind, item, links)
        for name in (kind,) + found[kind].names:
            if kind_of.setdefault(normal(name), kind) != kind:
                raise item.error("names of its own", "shares the name %r with %s" % (name, kind_of[normal(name)]))
    return _Catalogue(found, kind_of, links, fields["network_latency"].quantity(SECONDS))


def _read_entry(kind: str, item: Item, links: Mapping[str, Link]) -> Entry:
    known = DEVICE_KEYS + ("names", "intra", "host", "nvlink", "price_source", "purchase", "purchase_source")
    fields = item.fields(known, "a device")
    nvlink = read_link(fields["nvlink"], {}) if "nvlink" in fields else None
    named = dict(links, nvlink=nvlink) if nvlink else links
    return Entry(
        device=read_device(kind, item, fields),
        intra=read_link(fields["intra"], named),
        host=read_link(fields["host"], named),
        nvlink=nvlink,
        names=tuple(name.text("a name") for name in fields["names"].items("names")),
        price_source=fields["price_source"].text("provider, region and date") if "price_source" in fields else "",
        purchase=fields["purchase"].number("US dollars") if "purchase" in fields else None,
        purchase_source=fields["purchase_source"].text("a source") if "purchase_source" in fields else "",
    )


DTYPES = ("float32", "float16", "bfloat16", "tf32")


def catalogue_table() -> str:
    """The catalogue as two Markdown tables: numbers, and where they are from."""
    lines = [_row(("Kind", *DTYPES, "Memory", "Bandwidth", "To its neighbours", "To the host")), _row(["---"] * 9)]
    for one in entries():
        rates = ["%g" % (one.device.flops[dtype] / 1e12) if dtype in one.device.flops else "" for dtype in DTYPES]
        memory = ["%g GB" % (one.device.memory / 1e9), "%g GB/s" % (one.device.bandwidth / 1e9)]
        lines.append(_row(["`%s`" % one.kind] + rates + memory + [_link_text(one, one.intra), _link_text(one, one.host)]))
    lines += ["", _row(("Kind", "Other names", "Numbers", "US dollars an hour", "To buy")), _row(["---"] * 5)]
    for one in entries():
        price = "" if one.device.price is None else "%s: %s" % (_money(one.device.price), one.price_source)
        purchase = "" if one.purchase is None else "%s: %s" % (_money(one.purchase), one.purchase_source)
        lines.append(_row(["`%s`" % one.kind, ", ".join("`%s`" % name for name in one.names), one.device.source, price, purchase]))
    return "\n".join(lines) + "\n"


def _link_text(one: Entry, link: Link) -> str:
    name = next((name for name, known in named_links().items() if known == link), "nvlink" if link == one.nvlink else "memory")
    text = "%s, %.4g GB/s" % (name, link.bandwidth / 1e9)
    if link.efficiency != 1:
        text += " (%.4g)" % (link.rate / 1e9)
    if link.latency:
        text += ", " + write(link.latency, SECONDS)
    return text


def _money(amount: float) -> str:
    return "%.5g" % amount if amount < 100 else "%d" % amount


def _row(cells: Sequence[str]) -> str:
    return "| %s |" % " | ".join(cells)
