"""Communicate: lower collectives to Horovod's ops.

Horovod's ops are pure in TensorFlow's eyes: with constant inputs they are folded (run
once, then never again), equal ones are merged. So an input that could be folded is
tied to a fed anchor, and each op carries an attribute of its own. Names contain the
program's key and never depend on what else was compiled before, so that all ranks
agree on them.
"""

from typing import Any, Dict, List, Set

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import DT_INT32, Builder
from epl.ir.program import APPLY, Feed, Node, Program, Ref
from epl.passes.base import Pass
from epl.passes.rewire import rewire
from epl.planner.plan import Task

ANCHOR = "epl_anchor"
"""Placeholder (int32 scalar) that is fed 0 in every run of a program with collectives."""

COLLECTIVES = ("EplAllReduce", "EplAllGather", "EplBroadcast")
_SUM, _MAX = 1, 4
_BFLOAT16, _UINT16, _FLOAT, _BOOL = 14, 17, 1, 10
_REDUCIBLE = frozenset((4, 6, 3, 9, 19, 1, 2))
_MOVABLE = _REDUCIBLE | {_BOOL, 5, _UINT16}


def collective_name(key: str, label: str, scope: str = "epl_comm") -> str:
    """Node name of a collective. Ranks meet by the part after the last slash.

    The label is the collective's number within its program: names of the user's nodes
    may differ between ranks that build the same thing in another surrounding.
    """
    return "%s/%s.%s" % (scope, key, label)


def ended_program(key: str, label: str, versions: object) -> Program:
    """What a rank runs whose input has ended: it tells the others, which wait at the gate."""
    nodes: Dict[str, Node] = {}
    build = Builder(nodes, "/device:CPU:0", APPLY)
    build.op("Placeholder", ANCHOR, dtype=A.of_type(DT_INT32), shape=A.of_shape(()))
    zero = build.cast("epl_ended/zero", (ANCHOR, 0), DT_INT32, _FLOAT)
    said = build.pack("epl_ended/said", [zero, zero], _FLOAT)
    name = collective_name(key, label, "epl_ended")
    build.op(
        "HorovodAllreduce",
        name,
        [said],
        T=A.of_type(_FLOAT),
        reduce_op=A.of_int(_SUM),
        prescale_factor=A.of_float(1.0),
        postscale_factor=A.of_float(1.0),
        process_set_id=A.of_int(0),
        ignore_name_scope=A.of_bool(True),
        _epl_collective=A.of_str(name),
    )
    return Program(nodes, [(name, 0)], feeds=[Feed((ANCHOR, 0), ANCHOR)], versions=versions)


class Communicate(Pass):
    """Lower the pseudo-ops of `COLLECTIVES`."""

    name = "communicate"

    def run(self, program: Program, task: Task) -> Program:
        found = [n for n in program.nodes.values() if n.op in COLLECTIVES]
        if not found:
            return program
        nodes = dict(program.nodes)
        foldable = _foldable(program)
        build = Builder(nodes, task.host, APPLY)
        build.op("Placeholder", ANCHOR, dtype=A.of_type(DT_INT32), shape=A.of_shape(()))
        mapping: Dict[Ref, Ref] = {}
        for node in found:
            del nodes[node.name]
        for number, node in enumerate(found):
            label = node.info.get("name") or "%03d" % number
            lower = _Lower(build.at(node.device or task.devices[0]), node, collective_name(task.key, label), foldable)
            for index, ref in enumerate(lower.run()):
                mapping[node.name, index] = ref
        feeds = program.feeds + (Feed((ANCHOR, 0), ANCHOR),)
        return rewire(program.replace(feeds=feeds), nodes, mapping)


def _foldable(program: Program) -> Set[str]:
    """Nodes that TensorFlow may compute once and for all."""
    found: Set[str] = set()
    for node in program.topological():
        if node.op.startswith(op_table.PSEUDO) or node.op == "Placeholder" or op_table.is_stateful(node, program):
            continue
        if all(s in found for s, _ in node.inputs):
            found.add(node.name)
    return found


class _Lower:
    def __init__(self, build: Builder, node: Node, name: str, foldable: Set[str]):
        self.build = build
        self.node = node
        self.dtype = node.info["dtype"]
        self.foldable = foldable
        self.name = name

    def run(self) -> List[Ref]:
        method = {"EplAllReduce": self._all_reduce, "EplAllGather": self._all_gather, "EplBroadcast": self._broadcast}
        return method[self.node.op]()

    def _hvd(self, op: str, name: str, inputs: List[Ref], **attrs: Any) -> Ref:
        return self.build.op(
            op,
            name,
            inputs,
            self.node.controls,
            ignore_name_scope=A.of_bool(True),
            process_set_id=A.of_int(0),
            _epl_collective=A.of_str(name),
            **attrs,
        )

    def _anchored(self, ref: Ref, label: str, dtype: int) -> Ref:
        if ref[0] not in self.foldable:
            return ref
        name = "%s/anchored_%s" % (self.name, label)
        zero = self.build.cast(name + "/zero", (ANCHOR, 0), DT_INT32, dtype)
        if dtype == _BOOL:
            return self.build.op("LogicalOr", name, [ref, zero])
        return self.build.op("AddV2", name, [ref, zero], T=A.of_type(dtype))

    def _all_reduce(self) -> List[Ref]:
        wire = _FLOAT if self.dtype == _BFLOAT16 else self.dtype
        if wire not in _REDUCIBLE:
            raise ProgramError("A tensor of dtype number %d can't be reduced over ranks (%s)" % (self.dtype, self.node.name))
        inputs = []
        for i, ref in enumerate(self.node.inputs):
            value = self._anchored(ref, str(i), self.dtype)
            inputs.append(self.build.cast("%s/cast_%d" % (self.name, i), value, self.dtype, wire))
        factors = {
            "reduce_op": A.of_int(_MAX if self.node.info.get("op") == "max" else _SUM),
            "prescale_factor": A.of_float(1.0),
            "postscale_factor": A.of_float(self.node.info["scale"]),
            "T": A.of_type(wire),
        }
        if len(inputs) == 1:
            outputs = [self._hvd("HorovodAllreduce", self.name, inputs, **factors)]
        else:
            self._hvd("HorovodGroupedAllreduce", self.name, inputs, num_tensors=A.of_int(len(inputs)), **factors)
            outputs = [(self.name, i) for i in range(len(inputs))]
        return [self.build.cast("%s/back_%d" % (self.name, i), ref, wire, self.dtype) for i, ref in enumerate(outputs)]

    def _moved(self, value: Ref, wire: int) -> Ref:
        if wire == self.dtype:
            return value
        return self.build.op("Bitcast", self.name + "/bits", [value], T=A.of_type(self.dtype), type=A.of_type(wire))

    def _returned(self, value: Ref, wire: int) -> List[Ref]:
        if wire == self.dtype:
            return [value]
        return [self.build.op("Bitcast", self.name + "/back", [value], T=A.of_type(wire), type=A.of_type(self.dtype))]

    def _wire(self) -> int:
        wire = _UINT16 if self.dtype == _BFLOAT16 else self.dtype
        if wire not in _MOVABLE:
            raise ProgramError("A tensor of dtype number %d can't travel between ranks (%s)" % (self.dtype, self.node.name))
        return wire

    def _all_gather(self) -> List[Ref]:
        wire = self._wire()
        value = self._moved(self._anchored(self.node.inputs[0], "0", self.dtype), wire)
        return self._returned(self._hvd("HorovodAllgather", self.name, [value], T=A.of_type(wire)), wire)

    def _broadcast(self) -> List[Ref]:
        wire = self._wire()
        value = self._moved(self._anchored(self.node.inputs[0], "0", self.dtype), wire)
        root = A.of_int(self.node.info["root"])
        return self._returned(self._hvd("HorovodBroadcast", self.name, [value], T=A.of_type(wire), root_rank=root), wire)
