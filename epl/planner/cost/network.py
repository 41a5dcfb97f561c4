"""The time of collectives over the devices of a group.

A message over a link takes latency + bytes / rate. A collective is a few phases, one
after the other. In a phase all members send and receive at the same time: inside their
nodes each over its own link, across nodes over the link that the devices of a node share.
A phase takes its latency and the longest time that one of its links needs for its bytes:
the slowest member decides (AMP, NeurIPS'22: 2 (n - 1) M / (n B) with the slowest B).

Sizes are what the operation is about: the tensor that each member has before an
all-reduce, a reduce-scatter, a broadcast or an all-to-all, and the whole tensor after an
all-gather. Where members hold parts of different sizes, the largest one times the number
of members.

The algorithms are those of NCCL and MPI, and the cheapest one counts:

    ring               devices in a ring, node after node; n - 1 steps (all-reduce: twice).
                       Patarasuk and Yuan, JPDC 69(2), 2009.
    hierarchical ring  the same inside nodes, then across nodes, each device with its share.
                       Cho et al. (BlueConnect), MLSys 2019.
    two trees          across nodes: two binary trees that each take half. Sanders, Speck and
                       Traeff, Parallel Computing 35(12), 2009.
    chain              a broadcast in small pieces from device to device.
    binomial tree      a broadcast in rounds, each with twice as many devices that have it.
    pairwise           an all-to-all in n - 1 rounds of pairs. Thakur, Rabenseifner and
                       Gropp, IJHPCA 19(1), 2005.
    hierarchical       an all-to-all inside nodes, then one across nodes.

In rings and chains the latencies of the steps add up along the way, while the slowest link
sets the pace for the bytes; NCCL reckons so too (src/graph/tuning.cc).
"""

import math
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Tuple

from epl.cluster.hardware.spec import Hardware, Link, Place
from epl.errors import ClusterError


class Part(NamedTuple):
    """Nodes of a group that are alike.

    Attributes:
      members: in each of them.
      intra: the link between two of these members.
      inter: the link of such a node to the network.
      nodes: their numbers.
    """

    members: int
    intra: Link
    inter: Link
    nodes: Tuple[int, ...]


class Phase(NamedTuple):
    """One phase of a collective.

    Attributes:
      latency: seconds before the bytes count.
      inside: for each part of the group, bytes that a member sends to, and receives from, its node.
      across: for each part, bytes that a node's link carries each way.
    """

    latency: float
    inside: Tuple[float, ...]
    across: Tuple[float, ...]


class Group:
    """Devices that communicate with each other, prepared so that each size is priced in microseconds.

    Attributes:
      hardware: the cluster they are part of.
      places: the devices, node by node.
      parts: their nodes, by what they have in common.
      size: how many devices.
      nodes: how many nodes.
    """

    def __init__(self, hardware: Hardware, places: Iterable[Place]):
        """Sorts the devices once. Raises ClusterError for a device that is not there, or twice, and for no device."""
        self.hardware = hardware
        self.places = sorted(places)
        slots: Dict[int, List[int]] = {}
        for node, slot in self.places:
            slots.setdefault(node, []).append(slot)
        if not slots:
            raise ClusterError("a group of devices is empty; give it at least one")
        for node, members in slots.items():
            known = len(hardware.nodes[node].devices) if 0 <= node < len(hardware.nodes) else 0
            if not 0 <= members[0] <= members[-1] < known:
                wrong = next(slot for slot in members if not 0 <= slot < known)
                raise ClusterError("a group has device %d of node %d, but that node has %d devices" % (wrong, node, known))
            if len(set(members)) < len(members):
                raise ClusterError("a group has a device of node %d twice; give each device once" % node)
        self.size = len(self.places)
        self.nodes = len(slots)
        alike: Dict[Tuple[int, Link, Link], List[int]] = {}
        for node, members in slots.items():
            alike.setdefault((len(members), hardware.nodes[node].intra, hardware.nodes[node].inter), []).append(node)
        self.parts: Tuple[Part, ...] = tuple(Part(count, intra, inter, tuple(nodes)) for (count, intra, inter), nodes in alike.items())
        # Where the ring goes from node to node, the slower side of a link has its way.
        ring = [hardware.nodes[node].inter.latency for node in slots]
        hops = [max(a, b) for a, b in zip(ring, ring[1:] + ring[:1])] if self.nodes > 1 else []
        inside = [part.intra.latency for part in self.parts if part.members > 1]
        self._node_ring = sum(hops) - min(hops) if hops else 0.0
        """Latency of n - 1 steps of a ring of the n nodes."""
        steps = sum(len(part.nodes) * (part.members - 1) * part.intra.latency for part in self.parts)
        if self.nodes > 1:
            self._ring = steps + sum(hops) - min(hops + inside)
        else:
            self._ring = steps
        """Latency of n - 1 steps of a ring of all n devices."""
        self._farthest = max(hops, default=0.0)
        self._smallest_share = min(part.members for part in self.parts) / self.size

    def loads(self, inside: Callable[[int], float], across: Callable[[int], float]) -> Tuple[Tuple[float, ...], Tuple[float, ...]]:
        """Bytes of a phase, by functions of the number of members in a node."""
        return (
            tuple(inside(part.members) if part.members > 1 else 0.0 for part in self.parts),
            tuple(across(part.members) if self.nodes > 1 else 0.0 for part in self.parts),
        )

    def longest_inside(self, steps: Callable[[int], int]) -> float:
        """The largest latency of so many steps inside a node."""
        return max(steps(part.members) * part.intra.latency for part in self.parts)

    @property
    def is_nested(self) -> bool:
        """Whether it spans nodes and has several devices in one of them: then there is a hierarchy to use."""
        return self.nodes > 1 and self.nodes < self.size


def _nothing(_: int) -> float:
    return 0.0


def _ring_pass(group: Group, size: float, passes: int = 1) -> Phase:
    """`passes` times n - 1 steps in a ring of all devices; each sends all but a part of the tensor."""
    moved = passes * size * (group.size - 1) / group.size
    return Phase(passes * group._ring, *group.loads(lambda count: moved, lambda count: moved))


def _inside_pass(group: Group, size: float) -> Phase:
    """The same within each node."""
    return Phase(group.longest_inside(lambda count: count - 1), *group.loads(lambda count: size * (count - 1) / count, _nothing))


def _across_pass(group: Group, moved: float, passes: int = 1) -> Phase:
    """The same among nodes, each of which moves so many bytes in each pass."""
    return Phase(passes * group._node_ring, *group.loads(_nothing, lambda count: passes * moved))


def _all_reduce(group: Group, size: float) -> Dict[str, List[Phase]]:
    found = {"ring": [_ring_pass(group, size, 2)]}
    inside = [_inside_pass(group, size)] if group.is_nested else []
    if group.is_nested:
        found["hierarchical ring"] = inside + [_across_pass(group, size * (group.nodes - 1) / group.nodes, 2)] + inside
    if group.nodes > 1:
        # A node sends its share up, as a leaf of one tree and within the other, and twice a half down.
        depth = math.ceil(math.log2(group.nodes))
        trees = Phase(2 * depth * group._farthest, *group.loads(_nothing, lambda count: 2 * size))
        found["two trees"] = inside + [trees] + inside
    return found


def _scatter_or_gather(group: Group, size: float) -> Dict[str, List[Phase]]:
    """A reduce-scatter, and backwards in time an all-gather: every member ends, or begins, with its n-th part."""
    found = {"ring": [_ring_pass(group, size)]}
    if group.is_nested:
        found["hierarchical ring"] = [_inside_pass(group, size), _across_pass(group, size * (1 - group._smallest_share))]
    return found


def _broadcast(group: Group, size: float) -> Dict[str, List[Phase]]:
    found = {"chain": [Phase(group._ring, *group.loads(lambda count: size, lambda count: size))]}
    rounds = math.ceil(math.log2(group.nodes))
    across = Phase(rounds * group._farthest, *group.loads(_nothing, lambda count: rounds * size))
    inside = Phase(group.longest_inside(_rounds), *group.loads(lambda count: _rounds(count) * size, _nothing))
    found["binomial tree"] = [across, inside] if group.is_nested else [across if group.nodes > 1 else inside]
    return found


def _rounds(count: int) -> int:
    """Rounds until all have what one had, when the number of those who have it doubles."""
    return math.ceil(math.log2(count))


def _all_to_all(group: Group, size: float) -> Dict[str, List[Phase]]:
    n = group.size

    def leaving(count: int) -> float:
        return size * count * (n - count) / n

    steps = max((part.members - 1) * part.intra.latency + (n - part.members) * group._farthest for part in group.parts)
    found = {"pairwise": [Phase(steps, *group.loads(lambda count: size * (count - 1) / n, leaving))]}
    if group.is_nested:
        across = Phase((group.nodes - 1) * group._farthest, *group.loads(_nothing, leaving))
        found["hierarchical"] = [_inside_pass(group, size), across]
    return found


KINDS: Mapping[str, Callable[[Group, float], Dict[str, List[Phase]]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _scatter_or_gather,
    "all_gather": _scatter_or_gather,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
}


class Price(NamedTuple):
    """The cheapest way to do a collective."""

    seconds: float
    algorithm: str
    phases: Tuple[Phase, ...]


def phase_seconds(group: Group, phase: Phase) -> float:
    """Of one phase when nothing else uses its links."""
    inside = max(moved / part.intra.rate for moved, part in zip(phase.inside, group.parts))
    across = max(moved / part.inter.rate for moved, part in zip(phase.across, group.parts))
    return phase.latency + max(inside, across)


def prices(kind: str, group: Group, size: float) -> List[Price]:
    """All ways to do a collective of `size` bytes, the cheapest one first. Nothing to do takes no time.

    Raises ClusterError for an unknown kind or a size that is no number of bytes.
    """
    if kind not in KINDS:
        raise ClusterError("there is no collective %r; there are: %s" % (kind, ", ".join(KINDS)))
    if not 0 <= size < math.inf:
        raise ClusterError("a collective of %r bytes is not possible; expected a number of at least 0" % (size,))
    if group.size == 1 or size == 0:
        return [Price(0.0, "none", ())]
    found = KINDS[kind](group, size).items()
    return sorted((Price(sum(phase_seconds(group, phase) for phase in phases), name, tuple(phases)) for name, phases in found), key=lambda p: p[0])


def cheapest(kind: str, group: Group, size: float) -> Price:
    """The first of `prices`."""
    return prices(kind, group, size)[0]


def all_reduce(group: Group, size: float) -> float:
    """Seconds until every member has the sum of the members' tensors of `size` bytes."""
    return cheapest("all_reduce", group, size).seconds


def reduce_scatter(group: Group, size: float) -> float:
    """Seconds until every member has its n-th part of the sum of the members' tensors of `size` bytes."""
    return cheapest("reduce_scatter", group, size).seconds


def all_gather(group: Group, size: float) -> float:
    """Seconds until every member has the tensor of `size` bytes of which each had an n-th part."""
    return cheapest("all_gather", group, size).seconds


def broadcast(group: Group, size: float) -> float:
    """Seconds until every member has the tensor of `size` bytes that one had."""
    return cheapest("broadcast", group, size).seconds


def all_to_all(group: Group, size: float) -> float:
    """Seconds until every member has sent an n-th part of its `size` bytes to each other member."""
    return cheapest("all_to_all", group, size).seconds


def point_to_point(hardware: Hardware, source: Place, target: Place, size: float) -> float:
    """Seconds until `size` bytes are on another device; none where it is the same one, or there are none."""
    return 0.0 if source == target or size == 0 else hardware.link(source, target).seconds(size)
