"""What the simulator asks a network: how long transfers and collectives take, alone and together."""

from typing import List, Protocol, Sequence, Tuple

from epl.cluster.hardware.spec import Place

TRANSFER, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "transfer", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"

Message = Tuple[str, Tuple[Place, ...], float]
"""A kind, its devices and its bytes. A transfer has two devices: from the first to the second."""


class Network(Protocol):
    """Seconds of communication, in a form that any model of a cluster can have.

    `bytes` is the size of the whole tensor in all kinds: what all_reduce sums, what
    all_gather leaves on each device, what each device gives to reduce_scatter, and
    what each device holds before and after all_to_all. A group of one device takes no time.
    """

    def transfer(self, __a: Place, __b: Place, __bytes: float) -> float:
        """From one device to another."""

    def all_reduce(self, __group: Sequence[Place], __bytes: float) -> float:
        """All devices have the sum."""

    def all_gather(self, __group: Sequence[Place], __bytes: float) -> float:
        """All devices have all parts, of which each had one."""

    def reduce_scatter(self, __group: Sequence[Place], __bytes: float) -> float:
        """Each device has its part of the sum."""

    def all_to_all(self, __group: Sequence[Place], __bytes: float) -> float:
        """Each device has given each other one a part."""

    def together(self, __messages: Sequence[Message]) -> List[float]:
        """The seconds after which each message has arrived, when all start at once; what has arrived makes room for the others."""


def spans_nodes(group: Sequence[Place]) -> bool:
    """Whether some of the devices are on different nodes."""
    return any(place.node != group[0].node for place in group)
