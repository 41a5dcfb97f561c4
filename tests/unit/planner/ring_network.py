"""A simple network for tests: rings over the slowest link, evenly shared network cards."""

from collections import Counter

from epl.planner.simulate.network import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, TRANSFER, spans_nodes

ROUNDS = {ALL_REDUCE: 2, ALL_GATHER: 1, REDUCE_SCATTER: 1, ALL_TO_ALL: 1}


class Ring:
    """All-reduce: 2 (n - 1) messages of 1 / n of the bytes over the slowest link; the others half as many.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69(2), 2009.
    """

    def __init__(self, hardware, shared=()):
        self.hardware = hardware
        self.shared = shared  # nodes whose devices share one bus

    def transfer(self, a, b, moved):
        return self.hardware.link(a, b).seconds(moved)

    def collective(self, kind, group, moved):
        count = len(group)
        if count == 1:
            return 0.0
        ring = list(dict.fromkeys(group))
        links = [self.hardware.link(a, b) for a, b in zip(ring, ring[1:] + ring[:1])]
        return ROUNDS[kind] * (count - 1) * max(link.seconds(moved / count) for link in links)

    def all_reduce(self, group, moved):
        return self.collective(ALL_REDUCE, group, moved)

    def all_gather(self, group, moved):
        return self.collective(ALL_GATHER, group, moved)

    def reduce_scatter(self, group, moved):
        return self.collective(REDUCE_SCATTER, group, moved)

    def all_to_all(self, group, moved):
        return self.collective(ALL_TO_ALL, group, moved)

    def ends_of(self, kind, group):
        """What a message shares with others: ways into and out of nodes, the bus of its node, nothing."""
        if kind == TRANSFER and spans_nodes(group):
            return [(group[0].node, "out"), (group[1].node, "in")]
        if spans_nodes(group):
            return [(node, way) for node in sorted({place.node for place in group}) for way in ("in", "out")]
        return [(group[0].node, "bus")] if group[0].node in self.shared and len(group) > 1 else []

    def together(self, messages):
        """Messages that leave a node share its network card evenly; those within a node have links of their own, or share its bus."""
        ends = [self.ends_of(kind, group) for kind, group, _ in messages]
        left = [self.transfer(*group, moved) if kind == TRANSFER else self.collective(kind, group, moved) for kind, group, moved in messages]
        seconds, now, running = [0.0] * len(messages), 0.0, set(range(len(messages)))
        while running:
            users = Counter(end for at in running for end in ends[at])
            slower = {at: max((users[end] for end in ends[at]), default=1) for at in running}
            step = min(left[at] * slower[at] for at in running)
            now += step
            for at in list(running):
                if left[at] * slower[at] <= step * (1 + 1e-12):
                    seconds[at] = now
                    running.discard(at)
                else:
                    left[at] -= step / slower[at]
        return seconds


class Hierarchical(Ring):
    """Collectives of whole nodes: within each node, then between the nodes with all cards of a node sharing its network link, then back."""

    def collective(self, kind, group, moved):
        nodes = sorted({place.node for place in group})
        inner = max(sum(place.node == node for place in group) for node in nodes)
        first = self.hardware.nodes[nodes[0]]
        within = ROUNDS[kind] * (inner - 1) * first.intra.seconds(moved / inner) if inner > 1 else 0.0
        between = ROUNDS[kind] * (len(nodes) - 1) * first.inter.seconds(moved / len(nodes)) if len(nodes) > 1 else 0.0
        return within + between
