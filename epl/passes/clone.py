"""Clone: one instance of each node per local replica and micro-batch, as classified.

The result has two pseudo-ops that later passes lower:

* `EplAggregate`: all local parts of one gradient tensor in, the aggregated tensor for
  local replica r out at index r. One per aggregation point.
* `EplMerge`: all local instances of one tensor in, one value out. `info["across"]` says
  whether the other ranks' values are merged too.
"""

from typing import Dict, List, Optional, Sequence, Tuple

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.program import APPLY, Node, Program, Ref
from epl.ir.tags import partners
from epl.passes.base import Pass
from epl.passes.boundary import Boundary
from epl.passes.cut import process_groups
from epl.passes.fed import FedBatches
from epl.passes.instances import derived_seed, instance_name, tensor_label
from epl.passes.merge_rules import merge_rule
from epl.passes.places import Places
from epl.planner.plan import Task

AGGREGATE = "EplAggregate"
MERGE = "EplMerge"


class Clone(Pass):
    """Make the local instances of all nodes and connect them."""

    name = "clone"

    def run(self, program: Program, task: Task) -> Program:
        return Cloner(program, task).run()


class Cloner:
    """One run of the clone pass."""

    def __init__(self, program: Program, task: Task):
        if program.facts is None:
            raise ProgramError("The clone pass needs a classified program")
        self.program = program
        self.task = task
        self.facts = program.facts
        self.replicas = task.local_replicas
        self.batches = task.micro_batches
        self.nodes: Dict[str, Node] = {}
        self.extra: Dict[str, Node] = {}
        self.places = Places(program, task)
        self.partners = partners(self.facts.gradients)
        self.pairs = {ref: tuple(c[k] for k in ("values", "indices")) for c in self.partners.values() for ref in c.values()}
        self.instances = [(r, m) for r in range(self.replicas) for m in range(self.batches)]
        self.boundary = Boundary(self) if task.spread else None
        self.first = self.boundary.first if self.boundary else 0
        self.fed = FedBatches(self)
        self.batch_reads, self.batch_writes = self._batch_accesses()

    def run(self) -> Program:
        program = self.program
        batches = {f.node: f for f in program.feeds if f.is_batch}
        for node in program.nodes.values():
            if node.name in batches:
                self.fed.divide(node, batches[node.name].mode)
            elif node.name in self.facts.batch:
                for replica, micro_batch in self.instances_of(node.taskgraph):
                    if self.exists(node.name, replica) and self._is_needed(node, replica):
                        self._emit(node, replica, micro_batch)
            elif self.is_once(node):
                self._emit(node, self.first, None)
                if self.boundary is not None:
                    self.boundary.join(node)
            else:
                for replica in self.task.holding(node.taskgraph):
                    if self.exists(node.name, replica) and self._is_needed(node, replica):
                        self._emit(node, replica, None)
        targets: List[str] = []
        for target in program.targets:
            targets.extend(self.all_of(target))
        targets.extend(self._effects())
        fetches = [self._fetch(ref) for ref in program.fetches]
        feeds = [f._replace(node=self.fed.placeholder(f.node)) for f in program.feeds]
        nodes = dict(self.nodes)
        nodes.update(self.extra)
        if self.boundary is not None:
            targets.extend(self.boundary.close(nodes))
            groups = process_groups(program, self.task.plan, self.task.parallel)
            program = program.replace(groups=tuple(dict.fromkeys(program.groups + groups)))
        return program.replace(nodes=nodes, targets=list(dict.fromkeys(targets)), fetches=fetches, feeds=feeds)

    def _is_needed(self, node: Node, replica: int) -> bool:
        return self.boundary is None or self.boundary.needs(node.name, replica)

    def _effects(self) -> List[str]:
        """What changes state although nothing here needs it: a fetched tensor comes from one replica and one process, its effects are on all."""
        facts = self.facts
        brings = self.task.parallel and any(a in facts.writes for a in self.program.ancestors([source for source, _ in self.program.fetches]))
        if not brings and not self.task.spread and self.task.plan.lanes == 1:
            return []
        return [instance for name in facts.writes for end in facts.endings.done(name) for instance in self.all_of(end)]

    # Instances and places.

    def _is_feed(self, node: Node) -> bool:
        """True for a fed value that is the same for all."""
        return any(f.node == node.name and not f.is_batch for f in self.program.feeds) if node.op == "Placeholder" else False

    def is_once(self, node: Node) -> bool:
        """True for what exists once in this process whatever the number of replicas."""
        return node.name in self.facts.shared or node.name in self.facts.outputs or self._is_feed(node) or node.name in self.facts.once

    def exists(self, name: str, replica: int) -> bool:
        """Whether a local replica has a node: what is drawn for a group is drawn by its first lane."""
        return name not in self.facts.first or self.task.draws(replica)

    def instances_of(self, taskgraph: Optional[int]) -> List[Tuple[int, int]]:
        """The instances of a batch node that this process holds."""
        return [(r, m) for r in self.task.holding(taskgraph) for m in range(self.batches)]

    def stage_of(self, name: str) -> Optional[int]:
        return self.program.nodes[name].taskgraph

    def _name(self, name: str, replica: int, micro_batch: Optional[int]) -> str:
        """The instance of a node that instance (replica, micro_batch) of another one sees."""
        if name in self.facts.batch:
            return instance_name(name, replica, micro_batch)
        if self.is_once(self.program.nodes[name]):
            return name
        return instance_name(name, replica, None)

    def all_of(self, name: str) -> List[str]:
        """All instances of a node that this process holds."""
        if name in self.facts.batch:
            return [instance_name(name, r, m) for r, m in self.instances_of(self.stage_of(name)) if self.exists(name, r)]
        if self._name(name, 1, None) == name:
            return [name]
        return [instance_name(name, r, None) for r in self.task.holding(self.stage_of(name)) if self.exists(name, r)]

    def _emit(self, node: Node, replica: int, micro_batch: Optional[int]) -> None:
        attrs = dict(node.attrs)
        name = self._name(node.name, replica, micro_batch)
        self._own_state(node, name, attrs)
        own = op_table.OWN_NAMES.get(node.op)
        if own is not None and name != node.name:
            attrs[own] = A.of_str(name[: len(name) - len(node.name)] + (node.str_attr(own) or node.name))
        if micro_batch is not None and node.op in op_table.RANDOM:
            index = self.task.global_index(replica, micro_batch)
            seeds = node.int_attr("seed") or 0, node.int_attr("seed2") or 0
            if index and any(seeds):
                attrs["seed2"] = A.AttrValue(i=derived_seed(seeds[1], index) or 1)
        given = [ref for ref in node.inputs if self.exists(ref[0], replica)]
        inputs = [self._input(node, ref, replica, micro_batch) for ref in given]
        controls = self._controls(node, replica, micro_batch)
        self.nodes[name] = node.replace(
            name=name,
            inputs=inputs,
            controls=controls,
            attrs=attrs,
            device=self.places.device(node, replica),
            origin=node.name,
            replica=replica,
            micro_batch=micro_batch,
        )

    def _own_state(self, node: Node, name: str, attrs: Dict[str, object]) -> None:
        """A variable or resource is found by a name of its own in every program of the session."""
        if node.op in op_table.UNNAMED_HANDLES:
            return
        if node.op in op_table.VARIABLES or node.op in op_table.SHARED_HANDLES:
            prefix = name[: len(name) - len(node.name)]
            attrs["shared_name"] = A.of_str(prefix + (node.str_attr("shared_name") or node.name))

    # Edges.

    def _input(self, node: Node, ref: Ref, replica: int, micro_batch: Optional[int]) -> Ref:
        form = self.form(node, ref, micro_batch)
        if self.boundary is None or self.stage_of(ref[0]) is None:
            return self.here(ref, form, replica, micro_batch)
        return self.boundary.input(node, ref, form, replica, micro_batch)

    def form(self, node: Node, ref: Ref, micro_batch: Optional[int]) -> str:
        """In which form a node is given a tensor (`epl.passes.cut.Value`)."""
        if node.phase == APPLY and ref in self.facts.gradients:
            return "gradient"
        if micro_batch is None and ref[0] in self.facts.batch:
            collection = self._collection_for(node, ref)
            return "merged." + collection if collection else "merged"
        return ""

    def here(self, ref: Ref, form: str, replica: int, micro_batch: Optional[int]) -> Ref:
        """A tensor in one form, of a stage that this process holds."""
        if form == "gradient":
            return self._aggregate(ref), replica
        if form:
            return self._merge(ref, replica, across=True, collection=form.partition(".")[2])
        return self._name(ref[0], replica, micro_batch), ref[1]

    def _collection_for(self, node: Node, ref: Ref) -> str:
        """A summary of a collected tensor shows the merged value that its collection asks for."""
        collection = self.program.collections.get(ref, "") if node.name in self.facts.outputs else ""
        return collection if collection.startswith("global") else ""

    def _controls(self, node: Node, replica: int, micro_batch: Optional[int]) -> List[str]:
        controls: List[str] = []
        for source in node.controls:
            controls.extend(self.met(source, replica, micro_batch))
        if micro_batch is not None:
            controls.extend(self._earlier(node, replica, micro_batch))
        return list(dict.fromkeys(controls))

    def met(self, name: str, replica: int, micro_batch: Optional[int]) -> List[str]:
        """The instances of a node that instance (replica, micro_batch) of another one meets."""
        if not self.exists(name, replica):
            return []
        if micro_batch is None and name in self.facts.batch:
            return [instance_name(name, replica, m) for m in range(self.batches)]
        return [self._name(name, replica, micro_batch)]

    def _earlier(self, node: Node, replica: int, micro_batch: int) -> List[str]:
        """Instances that must come first: draws of one input, and state written per micro-batch."""
        facts = self.facts
        if node.name in facts.frames and (node.op not in op_table.ENTERS or self._frame_of_inputs(node)):
            return []  # a loop waits as a whole, where it is entered
        if op_table.draws(self.program, node) and node.name not in facts.frames:
            instances = [(r, m) for r, m in self.instances_of(node.taskgraph) if self.exists(node.name, r)]
            position = instances.index((replica, micro_batch))
            return [instance_name(e, *instances[position - 1]) for e in self._done(node.name)] if position else []
        if not micro_batch:
            return []
        found: Dict[str, None] = {}
        for variable in facts.variables_of.get(node.name, ()):
            found.update((instance_name(e, replica, micro_batch - 1), None) for e in self.batch_writes.get(variable, ()))
        for variable in facts.writes.get(node.name, ()):
            found.update((instance_name(e, replica, micro_batch - 1), None) for e in self.batch_reads.get(variable, ()))
        return list(found)

    def _frame_of_inputs(self, node: Node) -> bool:
        """True for an Enter of a loop inside another loop."""
        return any(s in self.facts.frames and self.program.nodes[s].op not in op_table.EXITS for s, _ in node.inputs)

    def _done(self, name: str) -> List[str]:
        return [e for e in self.facts.endings.done(name) if e in self.facts.batch]

    def _batch_accesses(self) -> Tuple[Dict[str, Dict[str, None]], Dict[str, Dict[str, None]]]:
        """For each variable written per micro-batch: after which nodes its reads, and its writes, are done."""
        facts = self.facts
        reads: Dict[str, Dict[str, None]] = {}
        writes: Dict[str, Dict[str, None]] = {}
        for name, variables in facts.writes.items():
            if name in facts.batch:
                for variable in variables:
                    writes.setdefault(variable, {}).update(dict.fromkeys(self._done(name)))
        for name, variables in facts.variables_of.items():
            for variable in writes.keys() & variables if name in facts.batch else ():
                ends = [e for e in facts.endings.released(name) if e in facts.batch]
                reads.setdefault(variable, {}).update(dict.fromkeys(ends))
        return reads, writes

    # Pseudo-ops.

    def _aggregate(self, ref: Ref) -> str:
        name = "epl_gradient/" + tensor_label(ref)
        if name not in self.extra:
            tag = self.facts.gradients[ref]
            # The values and indices of a sparse gradient come in the same instances, also when one of them is always the same.
            # Ranks may hold different constants (samples read in Python): over ranks every gradient is reduced.
            batch = len(self.task.group(self.stage_of(ref[0]))) > 1 or any(s in self.facts.batch for s, _ in self.pairs.get(ref, (ref,)))
            instances, nothing = self._given(ref[0]) if batch and ref not in self.facts.summed else (self._existing(ref[0]), False)
            info = {"ref": ref, "tag": tag, "batch": batch, "indices": None, "values": None, "summed": ref in self.facts.summed}
            info.update(instances=instances, nothing=nothing)
            if ref in self.partners:
                info["indices"] = self.partners[ref]["indices"]
            elif tag.component == "indices" and ref in self.pairs:
                info["values"] = self.pairs[ref][0]
            stage = self.stage_of(ref[0])
            if not batch:
                instances = [(r, 0) for r in self.task.holding(stage)]
            parts = [(self._name(ref[0], r, m), ref[1]) for r, m in instances]
            self.extra[name] = Node(name, AGGREGATE, parts, origin=ref[0], phase=APPLY, info=info, taskgraph=stage)
        return name

    def _existing(self, source: str) -> List[Tuple[int, int]]:
        return [(r, m) for r, m in self.instances_of(self.stage_of(source)) if self.exists(source, r)]

    def _given(self, source: str) -> Tuple[List[Tuple[int, int]], bool]:
        """The instances of a batch node whose values count; true when none here does, and one stands for the type and shape."""
        instances = self._existing(source)
        counting = [(r, m) for r, m in instances if self.task.draws(r)]
        return (counting, False) if counting else (instances[:1], True)

    def _merge(self, ref: Ref, replica: int, across: bool, collection: str = "") -> Ref:
        """One value out of the instances of a tensor: of all replicas, or of one replica's micro-batches."""
        source, index = ref
        rule = merge_rule(self.program, ref, collection)
        stage = self.stage_of(source)
        instances, nothing = self._given(source) if across else ([(replica, m) for m in range(self.batches)], False)
        if across and not collection and self._is_noise(source):
            rule, instances = "first", instances[:1]
        if len(instances) == 1 and not (across and len(self.task.group(stage)) > 1):
            return instance_name(source, *instances[0]), index
        if rule == "last":
            return self._whole(ref, replica) if across else (instance_name(source, *instances[-1]), index)
        name = "epl_merge/" + tensor_label(ref) + ("" if across else "/of_%d" % replica) + ("/" + collection if collection else "")
        if name not in self.extra:
            parts = [(instance_name(source, r, m), index) for r, m in instances]
            self._add_merge(name, ref, parts, rule, across, instances, nothing)
        return name, 0

    def _is_noise(self, name: str) -> bool:
        """True for a value of random numbers alone: an update that uses it needs one draw, not the mean of many."""
        for other in self.program.ancestors([name]):
            node = self.program.nodes[other]
            if other not in self.facts.batch:
                continue
            if node.op == "Placeholder" or node.op in op_table.PYTHON or op_table.draws(self.program, node):
                return False
            if any(v in self.batch_writes for v in self.facts.variables_of.get(other, ())):
                return False
        return True

    def _add_merge(
        self, name: str, ref: Ref, parts: Sequence[Ref], rule: str, across: bool, instances: Sequence[Tuple[int, int]], nothing: bool
    ) -> None:
        info = {"rule": rule, "across": across, "ref": ref, "instances": tuple(instances), "nothing": nothing}
        stage = self.stage_of(ref[0])
        self.extra[name] = Node(name, MERGE, parts, origin=ref[0], device=self.task.home(stage), info=info, taskgraph=stage)

    def true(self) -> Ref:
        """A constant."""
        name = "epl_true"
        if name not in self.extra:
            self.extra[name] = Node(name, "Const", attrs={"dtype": A.of_type(10), "value": A.of_tensor(True, 10)}, device=self.task.host)
        return name, 0

    def _whole(self, ref: Ref, replica: int) -> Ref:
        """A value with no merge rule (a flag, a count), computed anew from merged inputs."""
        source, index = ref
        node = self.program.nodes[source]
        if op_table.is_source(self.program, node) or source in self.facts.frames or node.op == "Placeholder":
            raise ProgramError(
                "Node '%s' of type '%s' depends on the batch and steers the update, but its values of several replicas or "
                "micro-batches have no common value. Compute it from a mean over the batch, or outside the update" % (source, node.op)
            )
        name = instance_name("epl_whole/" + source, replica, None)
        if name not in self.extra:
            self.extra[name] = node  # guards against a cycle; replaced below
            inputs = [self._input(node, r, replica, None) for r in node.inputs]
            controls, device = self._controls(node, replica, None), self.places.device(node, replica)
            self.extra[name] = node.replace(name=name, inputs=inputs, controls=controls, device=device, replica=replica, phase=APPLY)
        return name, index

    def _fetch(self, ref: Ref) -> Ref:
        source, index = ref
        feed = next((f for f in self.program.feeds if f.node == source), None)
        if feed is not None:
            return self.fed.value(feed)
        if self.boundary is None or self.stage_of(source) is None:
            return self.fetched(ref, self.first)
        return self.boundary.fetch(ref)

    def merges_fetch(self, ref: Ref) -> bool:
        """Whether a fetch has a value of all replicas."""
        return self.task.parallel and (ref in self.facts.gradients or self.program.collections.get(ref, "").startswith("global"))

    def fetched(self, ref: Ref, replica: int) -> Ref:
        """The value that a fetch returns, of a stage that this process holds."""
        source, index = ref
        if ref in self.facts.gradients and self.task.parallel:
            return self._aggregate(ref), replica
        if not self.task.parallel:
            return self._name(source, replica, None), index
        collection = self.program.collections.get(ref, "")
        across = collection.startswith("global")
        if source in self.facts.batch:
            return self._merge(ref, replica, across, collection)
        if collection:
            return self._merge_collected(ref, across, collection)
        return self._name(source, replica, None), index

    def _merge_collected(self, ref: Ref, across: bool, collection: str) -> Ref:
        """A collected tensor that is the same in all micro-batches (for example of weights alone)."""
        source, index = ref
        instances, nothing = self._given(source) if across else ([(self.first, m) for m in range(self.batches)], False)
        name = "epl_merge/%s/%s" % (tensor_label(ref), collection)
        parts = [(self._name(source, r, None), index) for r, _ in instances]
        self._add_merge(name, ref, parts, merge_rule(self.program, ref, collection), across, instances, nothing)
        return name, 0
