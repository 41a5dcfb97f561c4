"""Communicate: lower collectives to Horovod's ops.

Horovod's ops are pure in TensorFlow's eyes: with constant inputs they are folded (run
once, then never again), equal ones are merged. So an input that could be folded is
tied to a fed anchor, and each op carries an attribute of its own. Names contain the
program's key and never depend on what else was compiled before, so that all ranks
agree on them.
"""

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import DT_INT32, Builder
from epl.ir.program import APPLY, Feed, Node, Program, Ref
from epl.passes.base import Pass
from epl.passes.cut import PREFIXES, RECEIVE, SEND, SHARE, TRANSFERS
from epl.passes.rewire import rewire
from epl.passes.wires import Wire, moved, summed
from epl.planner.plan import Task

ANCHOR = "epl_anchor"
"""Placeholder (int32 scalar) that is fed 0 in every run of a program with collectives."""

COLLECTIVES = ("EplAllReduce", "EplAllGather", "EplBroadcast", "EplAllToAll")
RANKS = "_epl_ranks"
"""Attribute of a Horovod op: the ranks that take part; left out for all of them."""
_SUM, _MAX = 1, 4
_OF_SHAPES = frozenset(("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs"))
"""Ops whose results TensorFlow knows without their inputs' values, when the shapes are static."""
_BFLOAT16, _FLOAT, _BOOL = 14, 1, 10


def collective_name(key: str, label: str, scope: str = "epl_comm") -> str:
    """Node name of a collective. Ranks meet by the part after the last slash.

    The label is the collective's number within its program, or within what its program
    does for one stage, or the label of a transfer: names of the user's nodes may differ
    between ranks that build the same thing in another surrounding.
    """
    return "%s/%s.%s" % (scope, key, label)


def ended_program(key: str, program: Program) -> Program:
    """What a rank runs whose input has ended: it tells the others, which wait at the gate of a program."""
    agreement = program.agreement
    nodes: Dict[str, Node] = {}
    build = Builder(nodes, "/device:CPU:0", APPLY)
    build.op("Placeholder", ANCHOR, dtype=A.of_type(DT_INT32), shape=A.of_shape(()))
    zero = build.cast("epl_ended/zero", (ANCHOR, 0), DT_INT32, _FLOAT)
    said = build.pack("epl_ended/said", [zero] * agreement.length, _FLOAT)
    name = collective_name(key, agreement.label, "epl_ended")
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
    return Program(nodes, [(name, 0)], feeds=[Feed((ANCHOR, 0), ANCHOR)], versions=program.versions)


class Communicate(Pass):
    """Lower the pseudo-ops of `COLLECTIVES`."""

    name = "communicate"

    def run(self, program: Program, task: Task) -> Program:
        found = [n for n in program.nodes.values() if n.op in COLLECTIVES or n.op in TRANSFERS]
        if not found:
            return program
        nodes = dict(program.nodes)
        foldable = _foldable(program)
        build = Builder(nodes, task.host, APPLY)
        build.op("Placeholder", ANCHOR, dtype=A.of_type(DT_INT32), shape=A.of_shape(()))
        mapping: Dict[Ref, Ref] = {}
        for node in found:
            del nodes[node.name]
        numbers: Dict[Tuple[Optional[int], Tuple[int, ...]], int] = {}
        told: List[str] = []
        for node in found:
            taskgraph = node.info.get("taskgraph") if task.spread else None
            ranks = tuple(node.info["ranks"]) if "ranks" in node.info else task.group(taskgraph)
            label = node.info.get("name") or _transfer_label(node)
            if not label:
                # Counted by stage and by group: not every rank has the collectives of all of them.
                number = numbers[taskgraph, ranks] = numbers.get((taskgraph, ranks), 0) + 1
                among = "%s." % "-".join(map(str, ranks)) if "ranks" in node.info and len(ranks) < task.plan.ranks else ""
                label = among + ("%03d" % (number - 1) if taskgraph is None else "%d_%03d" % (taskgraph, number - 1))
            lower = _Lower(build.at(node.device or task.devices[0]), node, collective_name(task.key, label), foldable, ranks, task)
            for index, ref in enumerate(lower.run()):
                mapping[node.name, index] = ref
            told.extend(lower.told)
        feeds = program.feeds + (Feed((ANCHOR, 0), ANCHOR),)
        targets = [mapping[name, 0][0] if (name, 0) in mapping else name for name in program.targets] + told
        return rewire(program.replace(feeds=feeds, targets=targets), nodes, mapping)


def _transfer_label(node: Node) -> str:
    """The part of a transfer's name that both sides have in common, "" for a collective that all count alike."""
    return node.name.partition("/")[2] if node.op in TRANSFERS and node.name.startswith(PREFIXES) else ""


def _foldable(program: Program) -> Set[str]:
    """Nodes that TensorFlow may compute once and for all."""
    found: Set[str] = set()
    for node in program.topological():
        if node.op.startswith(op_table.PSEUDO) or node.op == "Placeholder" or op_table.is_stateful(node, program):
            continue
        if node.op in _OF_SHAPES or all(s in found for s, _ in node.inputs):
            found.add(node.name)
    return found


class _Lower:
    def __init__(self, build: Builder, node: Node, name: str, foldable: Set[str], ranks: Sequence[int], task: Task):
        self.build = build
        self.ranks = tuple(ranks)
        self.rank = task.rank
        self.everybody = len(self.ranks) == task.plan.ranks
        self.node = node
        self.dtype = node.info["dtype"]
        self.foldable = foldable
        self.name = name
        self.told: List[str] = []
        """What other ranks wait for and nobody uses here."""

    def run(self) -> List[Ref]:
        method = {
            "EplAllReduce": self._all_reduce,
            "EplAllGather": self._all_gather,
            "EplBroadcast": self._broadcast,
            "EplAllToAll": self._all_to_all_of,
            SEND: self._send,
            RECEIVE: self._receive,
            SHARE: self._share,
        }
        return method[self.node.op]()

    def _hvd(self, op: str, name: str, inputs: List[Ref], **attrs: Any) -> Ref:
        if not self.everybody:
            attrs[RANKS] = A.of_ints(self.ranks)
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

    def _anchored(self, ref: Ref, label: str, dtype: int, foldable: Optional[bool] = None) -> Ref:
        if not (ref[0] in self.foldable if foldable is None else foldable):
            return ref
        name = "%s/anchored_%s" % (self.name, label)
        zero = self.build.cast(name + "/zero", (ANCHOR, 0), DT_INT32, dtype)
        if dtype == _BOOL:
            return self.build.op("LogicalOr", name, [ref, zero])
        return self.build.op("AddV2", name, [ref, zero], T=A.of_type(dtype))

    def _all_reduce(self) -> List[Ref]:
        wide = _FLOAT if self.dtype == _BFLOAT16 else self.dtype
        wire, largest = summed(wide), self.node.info.get("op") == "max"
        if wire is None or largest and wire.parts > 1:
            raise ProgramError("A tensor of type %s can't be reduced over ranks (%s)" % (tf.as_dtype(self.dtype).name, self.node.name))
        inputs = []
        for i, ref in enumerate(self.node.inputs):
            value = self.build.cast("%s/cast_%d" % (self.name, i), self._anchored(ref, str(i), self.dtype), self.dtype, wide)
            inputs.append(self._bits("%s/bits_%d" % (self.name, i), value, wide, wire.dtype))
        factors = {
            "reduce_op": A.of_int(_MAX if largest else _SUM),
            "prescale_factor": A.of_float(1.0),
            "postscale_factor": A.of_float(self.node.info["scale"]),
            "T": A.of_type(wire.dtype),
        }
        if len(inputs) == 1:
            outputs = [self._hvd("HorovodAllreduce", self.name, inputs, **factors)]
        else:
            self._hvd("HorovodGroupedAllreduce", self.name, inputs, num_tensors=A.of_int(len(inputs)), **factors)
            outputs = [(self.name, i) for i in range(len(inputs))]
        outputs = [self._bits("%s/value_%d" % (self.name, i), ref, wire.dtype, wide) for i, ref in enumerate(outputs)]
        return [self.build.cast("%s/back_%d" % (self.name, i), ref, wide, self.dtype) for i, ref in enumerate(outputs)]

    def _bits(self, name: str, value: Ref, source: int, target: int) -> Ref:
        """The same bits as another type; elements of half the size make a last dimension of two."""
        return value if source == target else self.build.op("Bitcast", name, [value], T=A.of_type(source), type=A.of_type(target))

    def _wire(self) -> Wire:
        wire = moved(self.dtype)
        if wire is None:
            raise ProgramError("A tensor of type %s can't travel between ranks (%s)" % (tf.as_dtype(self.dtype).name, self.node.name))
        return wire

    def _given(self, wire: int) -> Ref:
        """What this rank gives, as it travels."""
        ref = self.node.inputs[0]
        # Not all types can be added to: the bits are tied to the anchor.
        return self._anchored(self._bits(self.name + "/bits", ref, self.dtype, wire), "0", wire, ref[0] in self.foldable)

    def _returned(self, value: Ref, wire: int) -> List[Ref]:
        return [self._bits(self.name + "/back", value, wire, self.dtype)]

    def _all_gather(self) -> List[Ref]:
        wire = self._wire().dtype
        return self._returned(self._hvd("HorovodAllgather", self.name, [self._given(wire)], T=A.of_type(wire)), wire)

    def _all_to_all_of(self) -> List[Ref]:
        """A flat tensor, and how many elements of it go to each rank."""
        wire = self._wire().dtype
        return self._returned(self._hvd("HorovodAlltoall", self.name, [self._given(wire), self.node.inputs[1]], T=A.of_type(wire)), wire)

    def _broadcast(self) -> List[Ref]:
        wire = self._wire().dtype
        root = A.of_int(self.node.info["root"])
        return self._returned(self._hvd("HorovodBroadcast", self.name, [self._given(wire)], T=A.of_type(wire), root_rank=root), wire)

    # Between stages. What travels is flat: the sizes of unknown dimensions need not be told.

    def _send(self) -> List[Ref]:
        wire, to = self._wire().dtype, 1 - self.ranks.index(self.rank)
        value = self._given(wire)
        if self._tells_shape():
            self.told.append(self._all_to_all(self._called("shape"), self._own_shape(value, wire), DT_INT32, to)[0])
        self._all_to_all(self.name, self._flat(value, wire), wire, to)
        return [(self.name, 0)]

    def _receive(self) -> List[Ref]:
        wire = self._wire().dtype
        shape = self._all_to_all(self._called("shape"), self._nothing(DT_INT32), DT_INT32, None) if self._tells_shape() else self._shape()
        flat = self._all_to_all(self.name, self._nothing(wire), wire, None)
        return self._returned(self._reshaped(flat, shape, wire), wire)

    def _share(self) -> List[Ref]:
        """An all-gather to which only the owner gives something."""
        wire = self._wire().dtype
        owner = bool(self.node.inputs)
        value = self._given(wire) if owner else self._nothing(wire)
        shape = self._shape()
        if self._tells_shape():
            own = self._own_shape(value, wire) if owner else self._nothing(DT_INT32)
            shape = self._hvd("HorovodAllgather", self._called("shape"), [own], T=A.of_type(DT_INT32))
        flat = self._hvd("HorovodAllgather", self.name, [self._flat(value, wire) if owner else value], T=A.of_type(wire))
        return self._returned(self._reshaped(flat, shape, wire), wire)

    def _own_shape(self, value: Ref, wire: int) -> Ref:
        """The shape of a tensor, tied to the anchor: of a static shape it would be a constant."""
        shape = self.build.op("Shape", self.name + "/static_shape", [value], T=A.of_type(wire), out_type=A.of_type(DT_INT32))
        return self._of_unknown_length(shape, self.name + "/shape", DT_INT32)

    def _of_unknown_length(self, vector: Ref, name: str, dtype: int) -> Ref:
        """A vector that TensorFlow can't know to be empty: what is known to be so it takes for a constant."""
        end = self.build.const(name + "/end", [-1], DT_INT32)
        return self.build.op("Slice", name, [vector, self._length(), end], T=A.of_type(dtype), Index=A.of_type(DT_INT32))

    def _called(self, what: str) -> str:
        return "%s.%s" % (self.name, what)

    def _tells_shape(self) -> bool:
        """Whether the receiver can't know the shape: more than one dimension is unknown, or their number."""
        shape = self.node.info["shape"]
        return shape is None or sum(d is None for d in shape) > 1 or (0 in shape and None in shape)

    def _shape(self) -> Optional[Ref]:
        """The shape of what travels, before it was made flat."""
        if self._tells_shape():
            return None
        parts = self._wire().parts
        dims = [-1 if d is None else d for d in self.node.info["shape"]] + [parts] * (parts > 1)
        return self.build.const(self.name + "/dims", np.array(dims, np.int32), DT_INT32)

    def _flat(self, value: Ref, wire: int) -> Ref:
        one = self.build.const(self.name + "/one_dimension", [-1], DT_INT32)
        flat = self.build.op("Reshape", self.name + "/flat", [value, one], T=A.of_type(wire), Tshape=A.of_type(DT_INT32))
        shape = self.node.info["shape"]
        return self._of_unknown_length(flat, self.name + "/tied", wire) if shape is None or 0 in shape else flat

    def _reshaped(self, flat: Ref, shape: Optional[Ref], wire: int) -> Ref:
        assert shape is not None
        return self.build.op("Reshape", self.name + "/shaped", [flat, shape], T=A.of_type(wire), Tshape=A.of_type(DT_INT32))

    def _nothing(self, wire: int) -> Ref:
        """An empty vector that TensorFlow can't know to be empty."""
        name = "epl_nothing/%d" % wire
        if name not in self.build.nodes:
            zero = self.build.const(name + "/zero", 0, wire)
            self.build.op("Fill", name, [self._length(), zero], T=A.of_type(wire), index_type=A.of_type(DT_INT32))
        return name, 0

    def _length(self) -> Ref:
        """The vector [0], of a value that TensorFlow can't know."""
        name = "epl_nothing/length"
        if name not in self.build.nodes:
            one = self.build.const("epl_nothing/one", [1], DT_INT32)
            self.build.op("Reshape", name, [(ANCHOR, 0), one], T=A.of_type(DT_INT32), Tshape=A.of_type(DT_INT32))
        return name, 0

    def _all_to_all(self, name: str, value: Ref, wire: int, to: Optional[int]) -> Ref:
        """All of a flat tensor to one of the two ranks, or nothing to both."""
        if to is None:
            splits = self.build.const("epl_nothing/splits", [0, 0], DT_INT32)
        else:
            size = self.build.op("Size", name + "/size", [value], T=A.of_type(wire), out_type=A.of_type(DT_INT32))
            none = self.build.const(name + "/none", 0, DT_INT32)
            splits = self.build.pack(name + "/splits", [size, none] if to == 0 else [none, size], DT_INT32)
        return self._hvd("HorovodAlltoall", name, [value, splits], T=A.of_type(wire))
