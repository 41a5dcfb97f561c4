"""Links and devices out of written data: what the catalogue, descriptions and profiles have in common."""

import dataclasses
import re
from typing import Dict, Mapping, Optional, Sequence

from epl.cluster.hardware.document import Item
from epl.cluster.hardware.spec import Device, Link
from epl.cluster.hardware.units import BYTES, FLOPS, RATE, SECONDS

LINK_KEYS = ("link", "bandwidth", "latency", "efficiency", "reached")
DEVICE_KEYS = ("flops", "memory", "bandwidth", "price", "efficiency", "overhead", "source")


def read_link(item: Item, named: Mapping[str, Link], latency: float = 0.0) -> Link:
    """A link as a name, as a bandwidth, or as a mapping.

    In a mapping, "link" takes the numbers of a named one; the other keys replace them.
    "reached" is the rate of large messages and stands for an efficiency. `latency` is
    that of links without a name for which none is written. Raises ClusterError.
    """
    if isinstance(item.value, str):
        return _text_link(item, named, latency)
    fields = item.fields(LINK_KEYS, "a link's " + ", ".join(LINK_KEYS))
    if "efficiency" in fields and "reached" in fields:
        raise item.error("either its 'efficiency' or its 'reached' rate", "has both")
    if "link" in fields:
        link = _named_link(fields["link"], named)
    elif "bandwidth" in fields:
        link = Link(0.0, latency)
    else:
        raise item.missing("bandwidth", "one such as '50 Gb/s'" + (", or a 'link' of: %s" % ", ".join(named) if named else ""))
    if "bandwidth" in fields:
        link = dataclasses.replace(link, bandwidth=fields["bandwidth"].quantity(RATE))
    if "latency" in fields:
        link = dataclasses.replace(link, latency=fields["latency"].quantity(SECONDS, zero=True))
    if "efficiency" in fields:
        link = dataclasses.replace(link, efficiency=read_efficiency(fields["efficiency"]))
    if "reached" in fields:
        link = dataclasses.replace(link, efficiency=fields["reached"].quantity(RATE) / link.bandwidth)
    return link


def _text_link(item: Item, named: Mapping[str, Link], latency: float) -> Link:
    if re.match(r"\s*[A-Za-z]", item.value):
        return _named_link(item, named)
    return Link(item.quantity(RATE), latency)


def _named_link(item: Item, named: Mapping[str, Link]) -> Link:
    expected = ("the name of a link (%s), or " % ", ".join(named) if named else "") + "a bandwidth such as '50 Gb/s'"
    name = item.text(expected).strip().lower()
    if name not in named:
        raise item.error(expected)
    return named[name]


def read_efficiency(item: Item) -> float:
    found = item.number("a number greater than 0, such as 0.8")
    if found == 0:
        raise item.error("a number greater than 0, such as 0.8")
    return found


def read_rates(item: Item) -> Dict[str, float]:
    """dtype -> FLOP/s."""
    return {dtype: rate.quantity(FLOPS) for dtype, rate in item.entries("dtype to FLOP/s, such as {float32: 15.7 TFLOP/s}").items()}


def read_device(kind: str, item: Item, fields: Mapping[str, Item], base: Optional[Device] = None) -> Device:
    """A kind of device from the fields of a mapping; what they do not give is that of `base`.

    FLOP/s and efficiency are taken over dtype by dtype. Without a base, the FLOP/s in
    float32, memory and bandwidth are needed. Raises ClusterError.
    """
    flops = dict(base.flops) if base else {}
    if "flops" in fields:
        flops.update(read_rates(fields["flops"]))
    if "float32" not in flops:
        raise fields.get("flops", item).missing("float32" if "flops" in fields else "flops", "such as {float32: 15.7 TFLOP/s}")
    for key, example in (("memory", "16 GB"), ("bandwidth", "900 GB/s")):
        if base is None and key not in fields:
            raise item.missing(key, "one such as %r" % example)
    efficiency = dict(base.efficiency) if base else {}
    if "efficiency" in fields:
        for dtype, part in fields["efficiency"].entries("dtype to the part of its FLOP/s that is reached").items():
            if dtype not in flops:
                raise part.error("an efficiency of a dtype that has FLOP/s: %s" % ", ".join(flops), "is of another dtype")
            efficiency[dtype] = read_efficiency(part)
    return Device(
        kind=kind,
        flops=flops,
        memory=fields["memory"].quantity(BYTES) if "memory" in fields or base is None else base.memory,
        bandwidth=fields["bandwidth"].quantity(RATE) if "bandwidth" in fields or base is None else base.bandwidth,
        price=fields["price"].number("US dollars an hour") if "price" in fields else base.price if base else None,
        efficiency=efficiency,
        overhead=fields["overhead"].quantity(SECONDS, zero=True) if "overhead" in fields else base.overhead if base else 0.0,
        source=fields["source"].text("a text") if "source" in fields else base.source if base else "",
    )


def slowest(links: Sequence[Link]) -> Link:
    """The least rate and the largest latency of some links."""
    first = links[0]
    if all(link == first for link in links):
        return first
    return Link(min(link.rate for link in links), max(link.latency for link in links))
