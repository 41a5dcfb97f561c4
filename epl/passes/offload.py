"""Offload: activations wait in host memory between the forward and the backward part.

What a backward node is given of the forward part is copied to the host as soon as it is
there, and back when the backward node before the one before it runs: one step ahead. So
the device holds what the backward part is about to use. What it uses first stays where it
is, unless several micro-batches are held at a time (Ren et al., "ZeRO-Offload", 2021, for
the schedule of copies; Rhu et al., "vDNN", 2016, for activations).
"""

import dataclasses
from typing import Dict, List, Optional, Set

import numpy as np
import tensorflow.compat.v1 as tf

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.program import BACKWARD, FORWARD, Node, Program, Ref
from epl.passes.base import Pass
from epl.passes.copies import with_copies
from epl.passes.instances import tensor_label
from epl.passes.places import HOST
from epl.passes.segments import late_nodes
from epl.planner.plan import Task

PREFIX = "EPL_OFFLOAD/"
_AHEAD = 2
_LEAST = 1024
"""Bytes of what is worth a copy."""
_UNKNOWN = 16
"""Taken for a length that is not known, such as that of a batch."""


class Offload(Pass):
    """Copy activations to the host and back."""

    name = "offload"

    def run(self, program: Program, task: Task) -> Program:
        if task.plan.offload != "v2" or not task.parallel or not program.facts.gradients:
            return program
        return _Offload(program, task).run()


class _Offload:
    def __init__(self, program: Program, task: Task):
        self._program = program
        self._task = task
        self._facts = program.facts
        self._order = program.topological()
        self._late = late_nodes(program, self._order)
        self._nodes = dict(program.nodes)
        self._added: Dict[str, Ref] = {}
        """New node -> the tensor that it is a copy of."""
        self._slots: Dict[str, str] = {}

    def run(self) -> Program:
        rows: Dict[Optional[int], List[Ref]] = {}
        readers = self._readers()
        for ref in readers:
            rows.setdefault(self._place(ref[0]), []).append(ref)
        for row in rows.values():
            for number, ref in enumerate(row):
                gates = [readers[row[number - _AHEAD]][0]] if number >= _AHEAD else self._arrivals(readers[ref][0])
                if number >= _AHEAD or self._task.micro_batches > 1 and gates:
                    self._move(ref, readers[ref], gates)
        if not self._added:
            return self._program
        moved, shape_of = self._added, self._program.shape_of
        program = with_copies(self._program.replace(nodes=self._nodes), {}, moved)
        facts = dataclasses.replace(
            program.facts,
            slots={**self._facts.slots, **self._slots},
            first=self._facts.first | {name for name, ref in moved.items() if ref[0] in self._facts.first},
            forms={**self._facts.forms, **{(name, 0): self._facts.forms[ref] for name, ref in moved.items() if ref in self._facts.forms}},
        )
        return program.replace(facts=facts, shape_of=lambda ref: shape_of(moved.get(ref[0], ref)))

    def _readers(self) -> Dict[Ref, List[str]]:
        """What is worth moving -> the backward nodes that are given it; in the order of the first of these."""
        found: Dict[Ref, List[str]] = {}
        for node in self._order:
            if node.name not in self._late or self._is_inside(node.name):
                continue
            for ref in dict.fromkeys(node.inputs):
                if self._may_move(ref) and self._place(ref[0]) == self._place(node.name):
                    found.setdefault(ref, []).append(node.name)
        return found

    def _place(self, name: str) -> Optional[int]:
        return self._program.nodes[name].taskgraph if self._task.stages else None

    def _is_inside(self, name: str) -> bool:
        return name in self._facts.frames or self._facts.endings.in_branch(name)

    def _may_move(self, ref: Ref) -> bool:
        node = self._program.nodes[ref[0]]
        if node.phase != FORWARD or node.name not in self._facts.batch or self._is_inside(node.name) or node.name in self._facts.outputs:
            return False
        if any(feed.node == node.name for feed in self._program.feeds) or self._task.stages and node.taskgraph is None:
            return False
        dtype = op_table.dtype_of(self._program, *ref)
        if dtype in op_table.OPAQUE or op_table.is_handle(node, ref[1], self._program):
            return False
        shape = self._program.shape_of(ref)
        lengths = [_UNKNOWN if length is None else length for length in shape or ()]
        return shape is None or tf.as_dtype(dtype).size * float(np.prod(lengths)) >= _LEAST

    def _arrivals(self, reader: str) -> List[str]:
        """The gradients that a backward node is given."""
        node = self._program.nodes[reader]
        sources: Set[str] = {source for source, _ in node.inputs} | set(node.controls)
        return sorted(source for source in sources if source in self._late and not self._is_inside(source))[:1]

    def _move(self, ref: Ref, readers: List[str], gates: List[str]) -> None:
        producer = self._program.nodes[ref[0]]
        attrs = {"T": A.of_type(op_table.dtype_of(self._program, *ref))}
        host, device = _name(ref, "host"), _name(ref, "device")
        # Grappler would take an Identity away, and with it the way through the host, and what it waits for.
        self._add(Node(host, "DeepCopy", [ref], attrs=attrs, taskgraph=producer.taskgraph, info={HOST: True}), ref, producer.name)
        self._add(Node(device, "DeepCopy", [(host, 0)], gates, attrs=attrs, taskgraph=producer.taskgraph, phase=BACKWARD), ref, readers[0])
        for reader in readers:
            node = self._nodes[reader]
            self._nodes[reader] = node.replace(inputs=[(device, 0) if one == ref else one for one in node.inputs])

    def _add(self, node: Node, ref: Ref, like: str) -> None:
        """`like`: the node to whose action of a schedule it belongs."""
        self._nodes[node.name] = node.replace(origin=node.name)
        self._added[node.name] = ref
        if like in self._facts.slots:
            self._slots[node.name] = self._facts.slots[like]


def _name(ref: Ref, where: str) -> str:
    return "%s%s/%s" % (PREFIX, tensor_label(ref), where)
