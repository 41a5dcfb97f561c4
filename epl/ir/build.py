"""Building new nodes: a small vocabulary of TensorFlow ops."""

import itertools
from typing import Any, Dict, Optional, Sequence

from tensorflow.core.framework import types_pb2

from epl.errors import PassError
from epl.ir import attrs as A
from epl.ir.program import APPLY, Node, Ref

DT_INT32 = types_pb2.DT_INT32
DT_FLOAT = types_pb2.DT_FLOAT


class Builder:
    """Adds nodes to a dictionary; every method returns the new tensor's reference.

    Names are given by the caller, unique within the program; adding a name twice is
    an error, except for constants, which are shared by name.
    """

    def __init__(self, nodes: Dict[str, Node], device: str = "", phase: str = APPLY):
        self.nodes = nodes
        self.device = device
        self.phase = phase

    def at(self, device: str) -> "Builder":
        """The same dictionary with another device for new nodes."""
        return Builder(self.nodes, device, self.phase)

    def op(
        self, op: str, name: str, inputs: Sequence[Ref] = (), controls: Sequence[str] = (), info: Optional[Dict[str, Any]] = None, **attrs: Any
    ) -> Ref:
        """Any op; an int attribute value that names a dtype is given as `A.of_type(...)`."""
        if name in self.nodes:
            raise PassError("Node '%s' is added twice" % name)
        self.nodes[name] = Node(name, op, inputs, controls, attrs=attrs, device=self.device, phase=self.phase, info=info)
        return name, 0

    def const(self, name: str, value: Any, dtype: int) -> Ref:
        if name not in self.nodes:
            self.op("Const", name, dtype=A.of_type(dtype), value=A.of_tensor(value, dtype))
        return name, 0

    def add(self, name: str, left: Ref, right: Ref, dtype: int) -> Ref:
        return self.op("AddV2", name, [left, right], T=A.of_type(dtype))

    def add_n(self, name: str, parts: Sequence[Ref], dtype: int) -> Ref:
        """Sum in the given order; one part is returned as it is."""
        if len(parts) == 1:
            return parts[0]
        return self.op("AddN", name, parts, T=A.of_type(dtype), N=A.of_int(len(parts)))

    def chain(self, name: str, parts: Sequence[Ref], dtype: int) -> Ref:
        """Sum one after the other, so that each part is free as soon as it is added."""
        total = parts[0]
        for i, part in enumerate(parts[1:], 1):
            total = self.add("%s/add_%d" % (name, i), total, part, dtype)
        return total

    def mul(self, name: str, left: Ref, right: Ref, dtype: int) -> Ref:
        return self.op("Mul", name, [left, right], T=A.of_type(dtype))

    def scale(self, name: str, value: Ref, factor: float, dtype: int) -> Ref:
        """Multiply by a constant; 1 adds nothing."""
        if factor == 1.0:
            return value
        return self.mul(name, value, self.const(name + "/factor", factor, dtype), dtype)

    def cast(self, name: str, value: Ref, source: int, target: int) -> Ref:
        if source == target:
            return value
        return self.op("Cast", name, [value], SrcT=A.of_type(source), DstT=A.of_type(target))

    def concat(self, name: str, parts: Sequence[Ref], dtype: int) -> Ref:
        """Concatenate on dimension 0."""
        if len(parts) == 1:
            return parts[0]
        axis = self.const(name + "/axis", 0, DT_INT32)
        return self.op("ConcatV2", name, list(parts) + [axis], T=A.of_type(dtype), Tidx=A.of_type(DT_INT32), N=A.of_int(len(parts)))

    def rows(self, name: str, value: Ref, count: int, dtype: int) -> Ref:
        """The first rows of a tensor of any rank but 0."""
        bounds = [self.const("%s/%s" % (name, what), [at], DT_INT32) for what, at in (("begin", 0), ("end", count), ("step", 1))]
        return self.op("StridedSlice", name, [value] + bounds, T=A.of_type(dtype), Index=A.of_type(DT_INT32))

    def dim0(self, name: str, value: Ref, dtype: int) -> Ref:
        """Size of dimension 0 as an int32 scalar."""
        shape = self.op("Shape", name + "/shape", [value], T=A.of_type(dtype), out_type=A.of_type(DT_INT32))
        zero = self.const(name + "/zero", 0, DT_INT32)
        return self.op(
            "GatherV2",
            name,
            [shape, zero, zero],
            Tparams=A.of_type(DT_INT32),
            Tindices=A.of_type(DT_INT32),
            Taxis=A.of_type(DT_INT32),
            batch_dims=A.of_int(0),
        )

    def parts(self, name: str, total: Ref, shares: Sequence[int], dtype: int, chosen: Optional[Sequence[int]] = None) -> Ref:
        """How a whole number is divided by shares: a vector whose sum is the number. Each part ends where its share does, rounded down.

        Args:
          total: an integer scalar. dtype: its type.
          chosen: which parts the vector has; None for all.
        """
        bounds = list(itertools.accumulate([0] + list(shares)))
        positions = range(len(shares)) if chosen is None else chosen
        whole = self.const(name + "/whole", bounds[-1], dtype)
        ends = []
        for what, values in (("begin", [bounds[p] for p in positions]), ("end", [bounds[p + 1] for p in positions])):
            scaled = self.mul("%s/%s/scaled" % (name, what), total, self.const("%s/%s/shares" % (name, what), values, dtype), dtype)
            ends.append(self.op("FloorDiv", "%s/%s" % (name, what), [scaled, whole], T=A.of_type(dtype)))
        return self.op("Sub", name, [ends[1], ends[0]], T=A.of_type(dtype))

    def element(self, name: str, vector: Ref, index: int, dtype: int) -> Ref:
        """One element of a vector as a scalar."""
        at = self.const("%s/at" % name, index, DT_INT32)
        axis = self.const("%s/axis" % name, 0, DT_INT32)
        return self.op(
            "GatherV2",
            name,
            [vector, at, axis],
            Tparams=A.of_type(dtype),
            Tindices=A.of_type(DT_INT32),
            Taxis=A.of_type(DT_INT32),
            batch_dims=A.of_int(0),
        )

    def pack(self, name: str, parts: Sequence[Ref], dtype: int) -> Ref:
        return self.op("Pack", name, parts, N=A.of_int(len(parts)), T=A.of_type(dtype), axis=A.of_int(0))

    def identity(self, name: str, value: Ref, dtype: int, controls: Sequence[str] = ()) -> Ref:
        return self.op("Identity", name, [value], controls, T=A.of_type(dtype))

    def no_op(self, name: str, controls: Sequence[str]) -> str:
        self.op("NoOp", name, (), controls)
        return name

    def variable(self, name: str, dtype: int, shape: Any = None) -> Ref:
        """The handle of a resource variable that EPL owns; its value stays in the session."""
        if name not in self.nodes:
            self.op("VarHandleOp", name, dtype=A.of_type(dtype), shape=A.of_shape(shape), shared_name=A.of_str(name))
        return name, 0

    def read(self, name: str, handle: Ref, dtype: int, controls: Sequence[str] = ()) -> Ref:
        return self.op("ReadVariableOp", name, [handle], controls, dtype=A.of_type(dtype))

    def assign(self, name: str, handle: Ref, value: Ref, dtype: int, controls: Sequence[str] = (), kind: str = "") -> str:
        """Assign ("", "Add" or "Sub") to a resource variable; returns the node's name."""
        self.op("Assign%sVariableOp" % kind, name, [handle, value], controls, dtype=A.of_type(dtype))
        return name
