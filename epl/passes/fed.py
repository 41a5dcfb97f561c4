"""Fed: how a fed batch comes to the instances of its placeholder."""

from typing import Dict, List, Tuple

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import DT_INT32, Builder
from epl.ir.program import DIVIDE, FORWARD, Feed, Node, Ref
from epl.passes.instances import instance_name

INT32 = A.of_type(DT_INT32)
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
        """Divide a fed batch by shares, in order, over the instances of its placeholder here, or give it to each."""
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
            shares = self._shares(instances)
            count = A.of_int(len(instances))
            if len(set(shares)) == 1:
                build.op("Split", split, [axis, (whole, 0)], T=node.attr("dtype"), num_split=count)
            else:
                # The session has checked that each instance gets a row.
                rows = build.dim0(node.name + "/epl_rows", (whole, 0), op_table.dtype_of(cloner.program, node.name, 0))
                sizes = build.parts(node.name + "/epl_sizes", rows, shares, DT_INT32)
                attrs = {"T": node.attr("dtype"), "Tlen": INT32, "num_split": count}
                build.op("SplitV", split, [(whole, 0), sizes, axis], **attrs)
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

    def _shares(self, instances: List[Tuple[int, int]]) -> List[int]:
        """The weights of the instances."""
        task = self._cloner.task
        known = dict(zip(task.plan.streams_of(task.rank), task.plan.shares_of(task.rank)))
        return [known.get(task.stream(replica), 1) for replica, _ in instances]

    def value(self, feed: Feed) -> Ref:
        """What is fed, as a tensor of its own: a callable may not fetch a tensor that it feeds."""
        cloner = self._cloner
        name = "epl_fed/" + feed.node
        attrs = {"T": cloner.program.nodes[feed.node].attr("dtype")}
        cloner.extra[name] = Node(name, "Identity", [(self.placeholder(feed.node), 0)], attrs=attrs, device=cloner.task.host)
        return name, 0
