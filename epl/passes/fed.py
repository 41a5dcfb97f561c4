"""Fed: how a fed batch comes to the instances of its placeholder."""

from typing import Dict

from epl.ir import attrs as A
from epl.ir.build import DT_INT32, Builder
from epl.ir.program import DIVIDE, FORWARD, Feed, Node, Ref
from epl.passes.instances import instance_name

FED = "/epl_fed"
"""Suffix of the placeholder whose value is divided."""


class FedBatches:
    """Belongs to one run of the clone pass; adds to the cloner's nodes."""

    def __init__(self, cloner: "Cloner"):  # type: ignore[name-defined]  # noqa: F821
        self._cloner = cloner
        self._names: Dict[str, str] = {}

    def placeholder(self, name: str) -> str:
        """The node that takes what the user feeds to a node."""
        return self._names.get(name, name)

    def divide(self, node: Node, mode: str) -> None:
        """Divide a fed batch evenly, in order, over the instances of its placeholder here, or give it to each."""
        cloner, task = self._cloner, self._cloner.task
        if cloner.instances == [(0, 0)]:
            cloner.nodes[node.name] = node.replace(device=task.host)
            return
        whole = self._names[node.name] = node.name + FED
        cloner.nodes[whole] = node.replace(name=whole, device=task.host)
        instances = [(r, m) for r, m in cloner.instances_of(node.taskgraph) if cloner.exists(node.name, r)]
        divided = mode == DIVIDE and len(instances) > 1
        split = node.name + "/epl_split"
        if divided:
            build = Builder(cloner.nodes, task.host, FORWARD)
            axis = build.const(node.name + "/epl_axis", 0, DT_INT32)
            build.op("Split", split, [axis, (whole, 0)], T=node.attr("dtype"), num_split=A.of_int(len(instances)))
        for position, (replica, micro_batch) in enumerate(instances):
            name = instance_name(node.name, replica, micro_batch)
            cloner.nodes[name] = Node(
                name,
                "Identity",
                [(split, position) if divided else (whole, 0)],
                attrs={"T": node.attr("dtype")},
                device=task.host if node.name in cloner.places.on_host else task.device_of(replica, node.taskgraph),
                origin=node.name,
                replica=replica,
                micro_batch=micro_batch,
                taskgraph=node.taskgraph,
            )

    def value(self, feed: Feed) -> Ref:
        """What is fed, as a tensor of its own: a callable may not fetch a tensor that it feeds."""
        cloner = self._cloner
        name = "epl_fed/" + feed.node
        attrs = {"T": cloner.program.nodes[feed.node].attr("dtype")}
        cloner.extra[name] = Node(name, "Identity", [(self.placeholder(feed.node), 0)], attrs=attrs, device=cloner.task.host)
        return name, 0
