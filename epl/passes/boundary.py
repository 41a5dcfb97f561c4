"""Boundary: what a cloned program gives to other processes and takes from them.

Works for the clone pass when the stages of a replica lie in several processes: edges
between stages become transfers, control edges keep the order that they mean within each
process.
"""

from typing import Dict, List, Optional, Set, Tuple

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.program import APPLY, Node, Ref, ref_text
from epl.passes.cut import FETCHED, INSPECTIONS, Crossings, Value
from epl.passes.instances import tensor_label
from epl.passes.merge_rules import merge_rule
from epl.passes.needs import Needs


class Boundary:
    """Belongs to one run of the clone pass.

    Attributes:
      first: the local replica whose values this process sees.
    """

    def __init__(self, cloner: "Cloner"):  # type: ignore[name-defined]  # noqa: F821
        self._cloner = cloner
        self._task = cloner.task
        self._program = cloner.program
        self._cut = Crossings(cloner.program, cloner.task, cloner.extra)
        task = cloner.task
        ids = [task.replica_id(r) for r in range(task.local_replicas)]
        self.first = 0  # the order of Plan.held
        # Replicas of which another process sees the values: this one takes part in sharing them.
        self._watched = [
            r for r, g in enumerate(ids) if r != self.first and any(task.plan.first_replica(q) == g for q in task.members(r) if q != task.rank)
        ]
        self._unseen = [r for r, g in enumerate(ids) if not task.plan.is_seen(g)]
        self._needs = Needs(cloner) if self._unseen else None
        self._kept: Dict[str, None] = {}
        self._supplied: Set[Tuple[Ref, int]] = set()
        self._before: Dict[Tuple[str, int], Tuple[str, ...]] = {}

    def needs(self, name: str, replica: int) -> bool:
        """Whether a node is needed in a local replica, by whatever process that holds a part of it."""
        return self._needs is None or replica not in self._unseen or name in self._needs.nodes

    # Inputs and fetches of this process's nodes.

    def input(self, node: Node, ref: Ref, form: str, replica: int, micro_batch: Optional[int]) -> Ref:
        """What an instance is given for an input that a stage makes."""
        stage = self._cloner.stage_of(ref[0])
        here = self._task.has(replica, stage)
        if node.taskgraph is None and len(self._task.members(replica)) > 1:
            return self._share(node, ref, form, replica, here)
        if here:
            return self._cloner.here(ref, form, replica, micro_batch)
        device = self._task.device_of(replica, node.taskgraph)
        return self._cut.receive(self._value(ref, form, replica, micro_batch), device, node.name)

    def fetch(self, ref: Ref) -> Ref:
        """What a fetch returns of a tensor that a stage makes."""
        found: Dict[int, Ref] = {}
        for replica in [self.first] + self._watched:
            here = self._task.has(replica, self._cloner.stage_of(ref[0]))
            local = self._cloner.fetched(ref, replica) if here else None
            if len(self._task.members(replica)) == 1:
                assert local is not None
                found[replica] = local
            else:
                found[replica] = self._cut.share(Value(ref, FETCHED, replica, None), local, "fetch " + ref_text(ref))
        stage = self._cloner.stage_of(ref[0])
        for replica in self._unseen if self._cloner.merges_fetch(ref) else ():
            if self._task.has(replica, stage):
                self._keep(self._cloner.fetched(ref, replica), ref)
        return found[self.first]

    def join(self, node: Node) -> None:
        """Take part in what other processes share, or merge over replicas, for a node that exists once in each of them."""
        for replica in self._watched:
            for ref in node.inputs:
                stage = self._cloner.stage_of(ref[0])
                if stage is not None:
                    self._share(node, ref, self._cloner.form(node, ref, None), replica, self._task.has(replica, stage))

        for replica in self._unseen:
            for ref in node.inputs:
                stage, form = self._cloner.stage_of(ref[0]), self._cloner.form(node, ref, None)
                if stage is None or not form:
                    continue
                if self._task.has(replica, stage):
                    self._keep(self._cloner.here(ref, form, replica, None), ref)
                else:
                    self._supply_whole(ref, form, replica)

    def _keep(self, local: Ref, ref: Ref) -> None:
        """Take part in a merge of all replicas although nobody here is shown its value.

        Args:
          local: the merged value. ref: what it is a value of.
        """
        name = "epl_part/" + tensor_label(local)
        if name not in self._kept:
            self._kept[name] = None
            source = self._cloner.program.nodes[ref[0]]
            attrs = {"T": A.of_type(op_table.dtype_of(self._program, *ref))}
            self._cloner.extra[name] = Node(name, "Identity", [local], attrs=attrs, device=self._task.home(source.taskgraph), phase=APPLY)

    def _share(self, node: Node, ref: Ref, form: str, replica: int, here: bool) -> Ref:
        if self._program.nodes[ref[0]].op in INSPECTIONS and not form:
            # Each process answers for its own variables.
            return self._cloner.here(ref, form, replica, None) if here else self._cloner.true()
        local = self._cloner.here(ref, form, replica, None) if here else None
        if not here:
            self._supply_whole(ref, form, replica)
        return self._cut.share(self._value(ref, form, replica, None), local, node.name)

    def _value(self, ref: Ref, form: str, replica: int, micro_batch: Optional[int]) -> Value:
        batch = ref[0] in self._cloner.facts.batch and not form
        return Value(ref, form, replica, micro_batch if batch else None)

    # What others need of this process.

    def close(self, nodes: Dict[str, Node]) -> List[str]:
        """Add what other processes need; returns the targets that keep it alive.

        Control edges to nodes of other processes are replaced by edges to what is here and
        comes before them; what such a node was to wait for becomes a target.

        Args:
          nodes: the nodes of the program so far, changed in place.
        """
        for node in self._program.nodes.values():
            if node.taskgraph is None:
                continue
            for replica in range(self._task.local_replicas):
                if not self.needs(node.name, replica) or not self._cloner.exists(node.name, replica):
                    continue
                owner = self._task.owner(replica, node.taskgraph)
                for micro_batch in self._micro_batches(node):
                    for ref in node.inputs:
                        self._supply(node, ref, replica, micro_batch, owner)
        nodes.update(self._cloner.extra)
        return self._keep_order(nodes) + self._cut.targets + list(self._kept) + self._meetings(nodes)

    def _meetings(self, nodes: Dict[str, Node]) -> List[str]:
        """What takes part in values of all replicas, in those whose own values nobody is shown."""
        met = [n for name in (self._needs.meeting if self._needs else ()) for r in self._unseen for n in self._cloner.met(name, r, None)]
        return [name for name in met if name in nodes]

    def _micro_batches(self, node: Node) -> List[Optional[int]]:
        return list(range(self._cloner.batches)) if node.name in self._cloner.facts.batch else [None]

    def _supply(self, node: Node, ref: Ref, replica: int, micro_batch: Optional[int], to: int) -> None:
        stage = self._cloner.stage_of(ref[0])
        if stage is None or not self._cloner.exists(ref[0], replica):
            return
        form = self._cloner.form(node, ref, micro_batch)
        if not self._task.has(replica, stage):
            self._supply_whole(ref, form, replica)
        elif to != self._task.rank:
            local = self._cloner.here(ref, form, replica, micro_batch)
            self._cut.send(self._value(ref, form, replica, micro_batch), local, to, node.name)

    def _supply_whole(self, ref: Ref, form: str, replica: int) -> None:
        """A value without a merge rule is computed anew by its owner, from merged inputs that may be here."""
        if not form.startswith("merged") or merge_rule(self._program, ref, form.partition(".")[2]) != "last" or (ref, replica) in self._supplied:
            return
        self._supplied.add((ref, replica))
        node = self._program.nodes[ref[0]]
        if node.taskgraph is not None:
            for source in node.inputs:
                self._supply(node, source, replica, None, self._task.owner(replica, node.taskgraph))

    # Order.

    def _keep_order(self, nodes: Dict[str, Node]) -> List[str]:
        targets: Dict[str, None] = {}
        for name, node in list(nodes.items()):
            if all(c in nodes for c in node.controls):
                continue
            origin = self._program.nodes.get(node.origin)
            kept = dict.fromkeys(c for c in node.controls if c in nodes)
            for source in origin.controls if origin is not None else ():
                for earlier in self._here_before(source, node.replica):
                    kept.update((c, None) for c in self._cloner.met(earlier, node.replica, node.micro_batch) if c in nodes and c != name)
            nodes[name] = node.replace(controls=tuple(kept))
        for node in self._program.nodes.values():
            for source in node.controls:
                if self._leaves(source, node):
                    targets.update((n, None) for n in self._cloner.all_of(source) if n in nodes)
        return list(targets)

    def _leaves(self, source: str, node: Node) -> bool:
        """Whether a control edge goes from this process to another one in some replica."""
        stage = self._cloner.stage_of(source)
        if stage is None or node.taskgraph is None or stage == node.taskgraph:
            return False
        return any(
            self._task.owner(r, stage) == self._task.rank and self._task.owner(r, node.taskgraph) != self._task.rank
            for r in range(self._task.local_replicas)
        )

    def _here_before(self, name: str, replica: int) -> Tuple[str, ...]:
        """The nearest nodes before a node of the user's program, itself included, that this process holds."""
        key = (name, replica)
        if key not in self._before:
            found: Dict[str, None] = {}
            seen = {name}
            stack = [name]
            while stack:
                current = self._program.nodes[stack.pop()]
                if self._task.has(replica, current.taskgraph):
                    found[current.name] = None
                    continue
                for source in [s for s, _ in current.inputs] + list(current.controls):
                    if source not in seen:
                        seen.add(source)
                        stack.append(source)
            self._before[key] = tuple(found)
        return self._before[key]
