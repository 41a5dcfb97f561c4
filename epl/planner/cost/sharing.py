"""Collectives that run at the same time and share links.

A link has two ends that are limited by themselves: what leaves and what arrives. Where
several transfers use one end they share it fairly: max-min fairness by progressive
filling, in which the bandwidth of all transfers grows at one pace until a link of theirs
is full (Bertsekas and Gallager, Data Networks, 2nd edition, section 6.5.2). A transfer is
as fast as its slowest link lets it be, and what it leaves of the others is for the rest.
Latencies pass without using bandwidth.
"""

from typing import Dict, List, NamedTuple, Sequence, Tuple, Union

import numpy as np

from epl.cluster.hardware.spec import Hardware, Place
from epl.errors import ClusterError
from epl.planner.cost.network import Group, Phase, cheapest

CLOSE = 1e-9
"""Relative difference below which times and bandwidths count as equal: rounding must not split what ends together."""


class Collective(NamedTuple):
    """A collective of `size` bytes; `kind` is one of `network.KINDS`."""

    kind: str
    group: Group
    size: float


class Send(NamedTuple):
    """A message of `size` bytes from one device to another."""

    source: Place
    target: Place
    size: float


Transfer = Union[Collective, Send]


class _Load(NamedTuple):
    """A phase of a transfer, by the ends of links that it uses."""

    latency: float
    ends: np.ndarray
    bytes: np.ndarray


class _Ends:
    """All ends of a cluster's links by number: for each device, then for each node, what leaves and what arrives."""

    def __init__(self, hardware: Hardware):
        sizes = [len(node.devices) for node in hardware.nodes]
        self.first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.devices = int(self.first[-1])
        inside = np.repeat([node.intra.rate for node in hardware.nodes], sizes)
        across = np.array([node.inter.rate for node in hardware.nodes])
        self.half = self.devices + len(across)
        self.rates = np.tile(np.concatenate([inside, across]), 2)

    def device(self, place: Place) -> int:
        return int(self.first[place.node]) + place.slot

    def load(self, group: Group, members: Dict[int, np.ndarray], phase: Phase) -> _Load:
        """Of a phase of a collective, in which what leaves and what arrives are the same."""
        ends: List[np.ndarray] = []
        moved: List[np.ndarray] = []
        for part, inside, across in zip(group.parts, phase.inside, phase.across):
            if inside:
                ends.append(np.concatenate([members[node] for node in part.nodes]))
                moved.append(np.full(len(ends[-1]), inside))
            if across:
                ends.append(self.devices + np.array(part.nodes))
                moved.append(np.full(len(part.nodes), across))
        if not ends:
            return _Load(phase.latency, np.empty(0, np.int64), np.empty(0))
        one = np.concatenate(ends)
        return _Load(phase.latency, np.concatenate([one, one + self.half]), np.tile(np.concatenate(moved), 2))

    def phases(self, hardware: Hardware, transfer: Transfer) -> List[_Load]:
        if isinstance(transfer, Send):
            return self._message(hardware, transfer)
        if transfer.group.hardware is not hardware:
            raise ClusterError("a collective's group is of another cluster; make the group of the cluster whose links are shared")
        members: Dict[int, List[int]] = {}
        for place in transfer.group.places:
            members.setdefault(place.node, []).append(self.device(place))
        numbers = {node: np.array(found, np.int64) for node, found in members.items()}
        return [self.load(transfer.group, numbers, phase) for phase in cheapest(transfer.kind, transfer.group, transfer.size).phases]

    def _message(self, hardware: Hardware, send: Send) -> List[_Load]:
        Group(hardware, {send.source, send.target})  # checks that both exist
        if send.source == send.target or send.size == 0:
            return []
        if send.source.node == send.target.node:
            ends = [self.device(send.source), self.device(send.target)]
        else:
            ends = [self.devices + send.source.node, self.devices + send.target.node]
        both = np.array([ends[0], ends[1] + self.half])
        return [_Load(hardware.link(send.source, send.target).latency, both, np.full(2, float(send.size)))]


def concurrent(hardware: Hardware, transfers: Sequence[Transfer]) -> Tuple[float, ...]:
    """The seconds after which each of several transfers that start together is done.

    A collective uses the algorithm that is the cheapest one alone. One transfer by itself
    takes as long as `network` says. Raises ClusterError for what `network` refuses, and
    for groups of another cluster.
    """
    ends = _Ends(hardware)
    waiting = [ends.phases(hardware, transfer) for transfer in transfers]
    done = [0.0] * len(waiting)
    at = [0] * len(waiting)
    latency = [phases[0].latency if phases else 0.0 for phases in waiting]
    left = [1.0] * len(waiting)
    now = 0.0
    running = [index for index, phases in enumerate(waiting) if phases]
    while running:
        moving = [index for index in running if latency[index] == 0]
        speeds = _fair_speeds([waiting[index][at[index]] for index in moving], ends.rates)
        paces = dict(zip(moving, speeds))
        due = {index: left[index] / paces[index] if index in paces else latency[index] for index in running}
        step = min(due.values())
        now += step
        for index in running:
            if due[index] > step * (1 + CLOSE):
                if index in paces:
                    left[index] -= step * paces[index]
                else:
                    latency[index] -= step
            elif index not in paces:
                latency[index] = 0.0
            else:
                at[index] += 1
                left[index] = 1.0
                done[index] = now
                latency[index] = waiting[index][at[index]].latency if at[index] < len(waiting[index]) else 0.0
        running = [index for index in running if at[index] < len(waiting[index])]
    return tuple(done)


def _fair_speeds(loads: Sequence[_Load], rates: np.ndarray) -> List[float]:
    """For each load, the part of it that is moved in a second."""
    if not loads:
        return []
    most = np.array([load.bytes.max() if len(load.bytes) else 0.0 for load in loads])
    owner = np.repeat(np.arange(len(loads)), [len(load.ends) for load in loads])
    ends, numbered = np.unique(np.concatenate([load.ends for load in loads]), return_inverse=True)
    # Bandwidth is that of a transfer's busiest link; its others are used in proportion.
    weights = np.concatenate([load.bytes for load in loads]) / most[owner]
    room = rates[ends].copy()
    bandwidth = np.zeros(len(loads))
    grows = most > 0
    while grows.any():
        used = np.bincount(numbered, weights * grows[owner], minlength=len(ends))
        with np.errstate(divide="ignore", invalid="ignore"):
            until = np.where(used > 0, room / used, np.inf)
        step = until.min()
        bandwidth[grows] += step
        room = np.maximum(room - step * used, 0.0)
        full = until <= step * (1 + CLOSE) + 1e-300
        grows[np.unique(owner[full[numbered] & grows[owner]])] = False
    return [float(b / m) if m > 0 else float("inf") for b, m in zip(bandwidth, most)]
