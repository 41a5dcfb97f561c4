"""When collectives run that become ready at different times and share the network."""

import dataclasses
from typing import Dict, List, NamedTuple, Sequence, Set, Tuple

from epl.cluster.hardware.spec import Place
from epl.planner.simulate.costs import bundle_seconds
from epl.planner.simulate.network import Message, Network


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives that start together: those of all parts of some weights.

    Attributes:
      stages: whose weights they are.
      ready: when the last device has what it gives.
      messages: all at once.
    """

    stages: Tuple[int, ...]
    ready: float
    messages: Tuple[Message, ...]

    @property
    def members(self) -> Set[Place]:
        return {place for _, group, _ in self.messages for place in group}


class Period(NamedTuple):
    """When an exchange ran."""

    start: float
    end: float


def run(exchanges: Sequence[Exchange], network: Network) -> List[Period]:
    """Run exchanges, each as early as its devices are ready and free.

    A device takes part in one exchange at a time, in the order in which they become
    ready. Those of different devices run at the same time and share the network. When
    one starts, the others have what is left of their bytes: each has sent evenly until then.
    """
    members = [exchange.members for exchange in exchanges]
    latencies = _arrivals(network, exchanges, {at: 0.0 for at in range(len(exchanges))})
    waiting = sorted(range(len(exchanges)), key=lambda at: (exchanges[at].ready, at))
    left: Dict[int, float] = {}
    finish: Dict[int, float] = {}
    starts: Dict[int, float] = {}
    ends: Dict[int, float] = {}
    now = 0.0
    while waiting or left:
        taken = {place for at in left for place in members[at]}
        new = []
        for at in list(waiting):
            if exchanges[at].ready > now:
                break
            if taken.isdisjoint(members[at]):
                waiting.remove(at)
                new.append(at)
            taken |= members[at]
        if new:
            left.update(dict.fromkeys(new, 1.0))
            starts.update(dict.fromkeys(new, now))
            for at, seconds in _arrivals(network, exchanges, left).items():
                # What has started has its latency behind it.
                finish[at] = now + (seconds if at in new else max(0.0, seconds - latencies[at]))
        later = [exchanges[at].ready for at in waiting if exchanges[at].ready > now]
        then = min([finish[at] for at in left] + later[:1])
        for at in list(left):
            if finish[at] <= then:
                ends[at] = then
                del left[at]
            else:
                left[at] *= (finish[at] - then) / (finish[at] - now)
        now = then
    return [Period(starts[at], ends[at]) for at in range(len(exchanges))]


def _arrivals(network: Network, exchanges: Sequence[Exchange], left: Dict[int, float]) -> Dict[int, float]:
    """The seconds until each exchange has ended, from the part of its bytes that is left."""
    if not left:
        return {}
    bundles = [[(kind, group, size * part) for kind, group, size in exchanges[at].messages] for at, part in left.items()]
    return dict(zip(left, bundle_seconds(network, bundles)))
