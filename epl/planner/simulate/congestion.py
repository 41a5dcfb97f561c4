"""What a network does to a job beyond bandwidth: hash collisions of ECMP, and failed links.

Switches spread flows over equal paths by a hash (equal-cost multi-path, RFC 2992). Training
has few, large flows that start together, so a path often carries several flows while another
is empty, and the collective ends with the fullest path. Balanced by a scheduler, the slowdown is 1.
"""

import dataclasses
import math
from typing import List, Sequence

import numpy as np

from epl.cluster.hardware.spec import Place
from epl.errors import PlanError
from epl.planner.simulate.network import Message, Network, spans_nodes

_TAIL = 1e-14
_DAY = 86400.0


def fullest_path(flows: int, paths: int) -> np.ndarray:
    """The probabilities that the fullest path has 0, 1, ..., `flows` flows, when each flow takes any path alike.

    Exact, by dynamic programming over the paths. Independent Poisson numbers of flows with mean
    n / k on each of k paths, given that their sum is n, are multinomial. So the probability that
    no path has more than c is the k-fold convolution of a Poisson law cut off above c, at n,
    divided by the Poisson probability of n. All terms are positive: nothing cancels.

    Returns: shape [flows + 1]; it sums to 1.
    """
    if flows < 1 or paths < 1:
        raise PlanError("%d flows on %d paths have no fullest path; give at least one of each" % (flows, paths))
    mean = flows / paths
    law = np.array([math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) for count in range(flows + 1)])
    whole = math.exp(flows * math.log(flows) - flows - math.lgamma(flows + 1))
    at_most = np.ones(flows + 1)
    # Some path has at least the mean.
    least = -(-flows // paths)
    at_most[:least] = 0.0
    for cap in range(least, flows):
        cut = np.where(np.arange(flows + 1) <= cap, law, 0.0)
        at_most[cap] = min(1.0, _power(cut, paths)[flows] / whole)
        if 1 - at_most[cap] < _TAIL:
            break
    return np.diff(np.maximum.accumulate(at_most), prepend=0.0)


def _power(law: np.ndarray, times: int) -> np.ndarray:
    """A law convolved with itself, as far as it was given."""
    # Of no flow for certain.
    result = np.zeros_like(law)
    result[0] = 1.0
    while True:
        if times & 1:
            result = np.convolve(result, law)[: len(law)]
        times >>= 1
        if not times:
            return result
        law = np.convolve(law, law)[: len(law)]


def expected_fullest(flows: int, paths: int) -> float:
    """E[flows on the fullest path]."""
    return float(np.arange(flows + 1) @ fullest_path(flows, paths))


def perfectly_even(flows: int, paths: int) -> float:
    """The probability that all paths carry equally many flows: n! / ((n / k)!^k k^n), or 0 where k does not divide n."""
    if flows % paths:
        return 0.0
    return math.exp(math.lgamma(flows + 1) - paths * math.lgamma(flows // paths + 1) - flows * math.log(paths))


def ecmp_slowdown(flows: int, paths: int) -> float:
    """How much longer the slowest of equal flows takes, in the mean, than if they were spread evenly: E[max] / (n / k).

    With fewer flows than paths, each flow can have a path of its own: E[max].
    """
    return expected_fullest(flows, paths) / max(1.0, flows / paths)


def completion(moved: float, rate: float, flows: int, paths: int, certainty: float = 0.0) -> float:
    """Seconds until a collective has ended, that is its slowest flow; all flows start together and share their path.

    The hash of a flow does not change, so all steps of a ring have the same slowest path:
    chance does not average out within a collective.

    Args:
      moved: bytes of each flow.
      rate: bytes/s of each path.
      certainty: 0 for the mean; 0.99 for the time that is kept with that probability.
    """
    if certainty:
        load = float(np.searchsorted(np.cumsum(fullest_path(flows, paths)), certainty - 1e-12))
    else:
        load = expected_fullest(flows, paths)
    return load * moved / rate


class Stretched:
    """A network on which everything that leaves a node takes longer by a factor: hash collisions, or a shared network."""

    def __init__(self, network: Network, slowdown: float) -> None:
        if slowdown < 1:
            raise PlanError("a slowdown of %g would make the network faster; use 1 for perfect balance, or more" % slowdown)
        self._network, self._slowdown = network, slowdown

    def _stretch(self, group: Sequence[Place], seconds: float) -> float:
        return seconds * self._slowdown if spans_nodes(group) else seconds

    def transfer(self, a: Place, b: Place, moved: float) -> float:
        return self._stretch((a, b), self._network.transfer(a, b, moved))

    def all_reduce(self, group: Sequence[Place], moved: float) -> float:
        return self._stretch(group, self._network.all_reduce(group, moved))

    def all_gather(self, group: Sequence[Place], moved: float) -> float:
        return self._stretch(group, self._network.all_gather(group, moved))

    def reduce_scatter(self, group: Sequence[Place], moved: float) -> float:
        return self._stretch(group, self._network.reduce_scatter(group, moved))

    def all_to_all(self, group: Sequence[Place], moved: float) -> float:
        return self._stretch(group, self._network.all_to_all(group, moved))

    def together(self, messages: Sequence[Message]) -> List[float]:
        return [self._stretch(group, seconds) for (_, group, _), seconds in zip(messages, self._network.together(messages))]


@dataclasses.dataclass(frozen=True)
class LinkFailures:
    """Links that fail at random (a Poisson process) and stop the whole job until traffic has a new path.

    Attributes:
      links: that the job uses; one failed link stops an all-reduce, and so all devices.
      per_day: failures of one link in a day.
      shortest, longest: seconds of a recovery, uniform between the two. Control plane (a routing
        protocol converges): 0.1 to several seconds. Data plane (switches detour on their own,
        Huawei DPFR): below 0.001.
      patience: seconds after which collectives give up; the job then starts again from its last checkpoint.
      restart: seconds from giving up until the lost work is done again.
    """

    links: int
    per_day: float
    shortest: float
    longest: float
    patience: float = float("inf")
    restart: float = 0.0

    def __post_init__(self) -> None:
        if self.links < 0 or self.per_day < 0 or not 0 <= self.shortest <= self.longest or self.restart < 0:
            raise PlanError("%r is no description of failures; numbers must be 0 or more, and the shortest recovery the shorter one" % (self,))

    @property
    def outage(self) -> float:
        """The mean seconds that one failure stops the job."""
        low, high, limit = self.shortest, self.longest, self.patience
        if limit >= high:
            return (low + high) / 2
        if limit <= low:
            return limit + self.restart
        waited = (limit - low) / (high - low)
        return waited * (low + limit) / 2 + (1 - waited) * (limit + self.restart)

    @property
    def stalled_share(self) -> float:
        """The part of the time in which at least one failure has the job stopped.

        Outages that overlap count once: 1 - exp(-rate * E[outage]), as for the idle time of
        a queue with infinitely many servers (M/G/infinity). Source: Takacs, Introduction to
        the Theory of Queues, 1962.
        """
        return -math.expm1(-self.links * self.per_day / _DAY * self.outage)

    @property
    def stall_per_day(self) -> float:
        """Expected seconds of a day in which the job stands still."""
        return _DAY * self.stalled_share

    def throughput(self, undisturbed: float) -> float:
        """What is left of a throughput."""
        return undisturbed * (1 - self.stalled_share)
