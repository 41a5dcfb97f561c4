"""Recompute: the backward part computes activations again instead of keeping them.

The copies of a segment (`epl.passes.segments`) take the place of its tensors in the
backward part, so that the first ones are free when the forward part is done with them.
They wait for the gradient of what comes after the segment, which also tells TensorFlow's
optimizers that a copy is not the same as the first computation.
"""

import dataclasses
from typing import Dict, FrozenSet, List, Sequence

from absl import logging

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import Builder
from epl.ir.program import BACKWARD, Node, Program, Ref
from epl.passes.base import Pass
from epl.passes.check_gradients import with_checks
from epl.passes.copies import with_copies
from epl.passes.segments import Segment, find_segments
from epl.planner.plan import Task
from epl.utils.constant import GC_COLLECTION, GC_PREFIX

PREFIX = GC_PREFIX + "/"
STOP = "_gc_sg"


class Recompute(Pass):
    """Add the copies."""

    name = "recompute"

    def run(self, program: Program, task: Task) -> Program:
        if not task.plan.recompute or not task.parallel or not program.facts.gradients:
            return program
        result = _Rewriter(program, task).run()
        return with_checks(program, result) if task.plan.check_gradients and result is not program else result


class _Rewriter:
    def __init__(self, program: Program, task: Task):
        self._program = program
        self._task = task
        self._found = find_segments(program, task)
        self._nodes = dict(program.nodes)
        self._copies: Dict[Ref, Ref] = {}
        self._arrived: Dict[Ref, str] = {}
        self._added: List[str] = []

    def run(self) -> Program:
        if not self._found.segments:
            self._warn()
            return self._program
        for segment in self._found.segments:
            self._repeat(segment)
        for name in dict.fromkeys(name for segment in self._found.segments for name in segment.readers):
            node = self._nodes[name]
            self._nodes[name] = node.replace(inputs=[self._copies.get(ref, ref) for ref in node.inputs])
        self._stop_at_the_rest()
        origin = {copy[0]: ref[0] for ref, copy in self._copies.items()}
        program = self._program.replace(nodes=self._nodes)
        return _beside_the_forward_part(self._with_facts(program.pruned(), origin), self._found.small)

    def _warn(self) -> None:
        if self._task.plan.recompute == GC_COLLECTION and not any(ref[0] in self._program.nodes for ref in self._program.checkpoints):
            logging.warning(
                "gradient_checkpoint.type is 'collection', but the collection 'checkpoints' has no tensor of this training program: nothing is "
                "computed again. Add tensors with tf.add_to_collection('checkpoints', tensor), or use the type 'auto'"
            )

    # Segments.

    def _repeat(self, segment: Segment) -> None:
        gates = self._gates(segment)
        if not gates:
            return  # nothing tells when it is due
        inside = set(segment.nodes)
        for name in segment.nodes:
            node = self._program.nodes[name]
            for index in range(len(op_table.output_types(node, self._program))):
                self._copies[name, index] = (PREFIX + name, index)
        for name in segment.nodes:
            node = self._program.nodes[name]
            inputs = [self._copies[ref] if ref[0] in inside else ref for ref in node.inputs]
            waits = () if any(source in inside for source, _ in node.inputs) else gates
            copy = node.replace(name=PREFIX + name, inputs=inputs, controls=waits, origin=PREFIX + name, phase=BACKWARD)
            self._add(copy)

    def _gates(self, segment: Segment) -> List[str]:
        """What a segment waits for: the gradients that its first reader is given."""
        reader = self._program.nodes[segment.readers[0]]
        sources = [ref for ref in reader.inputs if self._is_gradient(ref)]
        arrived = [self._arrival(ref, reader) for ref in sources] or [c for c in reader.controls if self._is_gradient((c, 0))]
        if not segment.ends or not arrived:
            return arrived
        return [self._stop(ref, arrived) for ref in segment.ends]

    def _stop_at_the_rest(self) -> None:
        """Give what reads other checkpoints their stop-gradients, so that each checkpoint on the way of a gradient has one."""
        if self._task.plan.recompute != GC_COLLECTION:
            return
        for checkpoint in self._program.checkpoints:
            name = _stop_name(checkpoint)
            users = [c for c, index in self._program.consumers.get(checkpoint[0], ()) if index == checkpoint[1] and self._is_gradient((c, 0))]
            users = [c for c in dict.fromkeys(users) if c in self._nodes and c not in self._program.facts.frames]
            if name not in self._nodes and users:
                self._stop(checkpoint)
                for user in users:
                    inputs = [(name, 0) if ref == checkpoint else ref for ref in self._nodes[user].inputs]
                    self._nodes[user] = self._nodes[user].replace(inputs=inputs)

    def _stop(self, checkpoint: Ref, waits: Sequence[str] = ()) -> str:
        name = _stop_name(checkpoint)
        producer = self._program.nodes[checkpoint[0]]
        build = Builder({}, producer.device, BACKWARD)
        build.op("StopGradient", name, [checkpoint], waits, T=A.of_type(op_table.dtype_of(self._program, *checkpoint)))
        self._add(build.nodes[name].replace(origin=name, taskgraph=producer.taskgraph))
        return name

    def _is_gradient(self, ref: Ref) -> bool:
        node = self._program.nodes[ref[0]]
        return node.phase == BACKWARD and ref[0] not in self._found.early and ref[0] in self._program.facts.batch

    def _arrival(self, ref: Ref, reader: Node) -> str:
        """A node of the reader's stage that runs when a gradient is there."""
        key = (ref[0], ref[1])
        if key not in self._arrived:
            name = "%sarrived_%d" % (PREFIX, len(self._arrived))
            build = Builder({}, reader.device, BACKWARD)
            build.identity(name, ref, op_table.dtype_of(self._program, *ref))
            self._add(build.nodes[name].replace(origin=name, taskgraph=reader.taskgraph))
            self._arrived[key] = name
        return self._arrived[key]

    def _add(self, node: Node) -> None:
        self._nodes[node.name] = node
        self._added.append(node.name)

    # Facts.

    def _with_facts(self, program: Program, origin: Dict[str, str]) -> Program:
        slots = dict(program.facts.slots)
        added = set(self._added)
        for node in reversed(program.topological()):
            if node.name in added:
                kinds = {slots.get(consumer) for consumer, _ in program.consumers.get(node.name, ())}
                kind = "B" if "B" in kinds else "W" if "W" in kinds else None
                if kind is not None:
                    slots[node.name] = kind
        program = with_copies(program, origin, self._added)
        return program.replace(facts=dataclasses.replace(program.facts, slots=slots))


def _stop_name(checkpoint: Ref) -> str:
    return checkpoint[0] + STOP + ("_%d" % checkpoint[1] if checkpoint[1] else "")


def _beside_the_forward_part(program: Program, names: FrozenSet[str]) -> Program:
    """Let backward nodes that only tell shapes run with the forward part, so that they hold none of its tensors."""
    slots = dict(program.facts.slots)
    for node in program.topological():
        if node.name in names and node.name in slots:
            sources = [program.nodes[s] for s, _ in node.inputs if s in program.facts.batch]
            if all(slots.get(s.name) == "F" and s.taskgraph == node.taskgraph for s in sources):
                slots[node.name] = "F"
    return program.replace(facts=dataclasses.replace(program.facts, slots=slots))
