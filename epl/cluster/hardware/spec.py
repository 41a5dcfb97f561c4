"""What a cluster is made of: devices, links, nodes. Pure data in bytes, seconds and FLOP/s."""

import dataclasses
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from epl.errors import ClusterError


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
      kind: its name in catalogues and descriptions, such as "V100-32GB".
      flops: dtype -> peak FLOP/s of dense products; "float32" is always there.
      memory: bytes.
      bandwidth: bytes/s of its memory.
      price: US dollars an hour; None where it is not known.
      efficiency: dtype -> the part of the peak that large products reach; what is missing counts as 1.
      overhead: seconds that each op costs besides its work.
      source: where the numbers are from.
    """

    kind: str
    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    price: Optional[float] = None
    efficiency: Mapping[str, float] = dataclasses.field(default_factory=dict)
    overhead: float = 0.0
    source: str = ""

    def rate(self, dtype: str = "float32") -> float:
        """FLOP/s that products of a dtype reach; a dtype without a number of its own runs as float32."""
        known = dtype if dtype in self.flops else "float32"
        return self.flops[known] * self.efficiency.get(known, 1.0)

    def seconds(self, flops: float, moved: float, dtype: str = "float32") -> float:
        """Roofline: the longer of computing and moving bytes. Source: Williams et al., CACM 52(4), 2009."""
        return max(flops / self.rate(dtype), moved / self.bandwidth)


@dataclasses.dataclass(frozen=True)
class Link:
    """One direction of a connection.

    Attributes:
      bandwidth: bytes/s as specified.
      latency: seconds of a message without bytes.
      efficiency: the part of the bandwidth that large messages reach.
    """

    bandwidth: float
    latency: float = 0.0
    efficiency: float = 1.0

    @property
    def rate(self) -> float:
        """Bytes/s that large messages reach."""
        return self.bandwidth * self.efficiency

    def seconds(self, moved: float) -> float:
        """The time of one message: latency + bytes / (efficiency * bandwidth)."""
        return self.latency + moved / self.rate


@dataclasses.dataclass(frozen=True)
class Node:
    """One machine.

    Attributes:
      name: its host or a made-up name; different for each node.
      devices: its devices, in their order.
      intra: the link between two of its devices.
      inter: its link to the network, shared by its devices.
      host: the link of one of its devices to host memory.
      price: US dollars an hour besides its devices'.
    """

    name: str
    devices: Tuple[Device, ...]
    intra: Link
    inter: Link
    host: Link = Link(12e9, 10e-6)
    price: float = 0.0


class Place(NamedTuple):
    """One device of a cluster: number of its node, number in the node."""

    node: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Hardware:
    """All machines of a job."""

    nodes: Tuple[Node, ...]

    def __post_init__(self) -> None:
        if not any(node.devices for node in self.nodes):
            raise ClusterError("the cluster has no device; give each node at least one")
        names = [node.name for node in self.nodes]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ClusterError("the cluster has several nodes named %s; give each its own name" % ", ".join(map(repr, twice)))

    @property
    def places(self) -> List[Place]:
        """All devices, node by node: the order in which the job counts them."""
        return [Place(n, k) for n, node in enumerate(self.nodes) for k in range(len(node.devices))]

    def device(self, place: Place) -> Device:
        return self.nodes[place.node].devices[place.slot]

    @property
    def devices(self) -> List[Device]:
        """The device of each of `places`."""
        return [device for node in self.nodes for device in node.devices]

    def counts(self) -> Dict[str, int]:
        """Kind -> how many devices there are of it, in the order in which they first come."""
        found: Dict[str, int] = {}
        for device in self.devices:
            found[device.kind] = found.get(device.kind, 0) + 1
        return found

    def link(self, a: Place, b: Place) -> Link:
        """The way from one device to another: within the node, or the slower of the two nodes' network links."""
        if a.node == b.node:
            return self.nodes[a.node].intra
        one, other = self.nodes[a.node].inter, self.nodes[b.node].inter
        return Link(min(one.rate, other.rate), max(one.latency, other.latency))

    def nodes_of(self, group: Iterable[Place]) -> List[int]:
        """The nodes that some devices lie on."""
        return sorted({place.node for place in group})

    def price(self, group: Optional[Sequence[Place]] = None) -> Optional[float]:
        """US dollars an hour of some devices and their nodes, or of all; None when a price is not known."""
        chosen = self.places if group is None else group
        prices = [self.device(place).price for place in chosen]
        known = [price for price in prices if price is not None]
        if len(known) < len(prices):
            return None
        return sum(known) + sum(self.nodes[n].price for n in self.nodes_of(chosen))
