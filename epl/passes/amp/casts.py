"""Half precision: sums of products, and what lies between them, compute in it; variables stay in float32."""

import functools
from typing import Any, Dict, FrozenSet, List, Optional, Set, Tuple

from tensorflow.core.framework import types_pb2

from epl import compat
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.program import APPLY, Node, Program, Ref
from epl.passes.amp.lists import ALLOW, INFER

FLOAT = types_pb2.DT_FLOAT
PREFIX = "EPL_AMP/"


class Casts:
    """Gives nodes of a classified program another precision.

    Attributes:
      half: the nodes that compute in half precision.
    """

    def __init__(self, program: Program, dtype: int):
        self._program = program
        self._facts = program.facts
        self._dtype = dtype
        self._order = program.topological()
        self._nodes: Dict[str, Node] = {}
        self._made: Dict[Tuple[Ref, int], Ref] = {}
        self.half = self._half()

    def run(self) -> Program:
        """The program with casts; raw gradients, fetches and whatever else is not half are given float32."""
        program = self._program
        if not self.half:
            return program
        for node in program.nodes.values():
            types = self._halved(node) if node.name in self.half else frozenset()
            inputs = [self._input(node, ref, position, types) for position, ref in enumerate(node.inputs)]
            attrs = dict(node.attrs, **{name: A.of_type(self._dtype) for name in types})
            self._nodes[node.name] = node.replace(inputs=inputs, attrs=attrs)
        raw = {self._whole(ref): tag for ref, tag in program.raw_gradients.items() if ref[0] in program.nodes}
        given = {self._whole(ref): tag for ref, tag in program.apply_gradients.items() if ref[0] in program.nodes}
        collections = {self._whole(ref): key for ref, key in program.collections.items() if ref[0] in program.nodes}
        fetches = [self._whole(ref) for ref in program.fetches]
        names = {made[0]: ref for (ref, _), made in self._made.items()}
        shape_of = program.shape_of
        return program.replace(
            nodes=self._nodes,
            fetches=fetches,
            raw_gradients=raw,
            apply_gradients=given,
            collections=collections,
            shape_of=lambda ref: shape_of(names.get(ref[0], ref)),
        )

    # Which nodes.

    def _half(self) -> Set[str]:
        found: Set[str] = set()
        for node in self._order:
            if not self._may_be_half(node):
                continue
            if node.op in ALLOW or node.op in INFER and self._follows(node, found):
                found.add(node.name)
        return found

    def _may_be_half(self, node: Node) -> bool:
        facts = self._facts
        if node.phase == APPLY or node.name not in facts.batch or node.name in facts.frames or facts.endings.in_branch(node.name):
            return False
        if node.op not in ALLOW and node.op not in INFER or node.attr(A.SEED) is not None:
            return False
        return bool(self._halved(node)) and not op_table.takes_references(node.op)

    def _follows(self, node: Node, found: Set[str]) -> bool:
        """Whether all float32 that an op is given is half, or follows from variables and constants alone."""
        given = [ref for ref, name in zip(node.inputs, self._argument_types(node)) if name is not None]
        floats = [ref for ref in given if op_table.dtype_of(self._program, *ref) == FLOAT]
        halves = [ref for ref in floats if ref[0] in found]
        rest = [ref for ref in floats if ref[0] not in found]
        return bool(halves) and all(ref[0] not in self._facts.batch for ref in rest)

    def _halved(self, node: Node) -> FrozenSet[str]:
        """The type attributes of a node that are float32 and may be another type."""
        return frozenset(name for name in _type_attributes(node.op, self._dtype) if _is_float(node, name))

    def _argument_types(self, node: Node) -> List[Optional[str]]:
        """For each data input the type attribute that says its type, None for one of a fixed type."""
        definition = compat.op_def(node.op)
        found: List[Optional[str]] = []
        for arg in definition.input_arg if definition is not None else ():
            found += [arg.type_attr or None] * _count(node, arg)
        return found + [None] * (len(node.inputs) - len(found))

    # Tensors.

    def _input(self, node: Node, ref: Ref, position: int, types: FrozenSet[str]) -> Ref:
        wanted = self._argument_types(node)[position] if types else None
        if wanted in types:
            return self._cast(ref, self._dtype)
        return self._whole(ref)

    def _whole(self, ref: Ref) -> Ref:
        return self._cast(ref, FLOAT) if self._is_half(ref) else ref

    def _is_half(self, ref: Ref) -> bool:
        node = self._program.nodes[ref[0]]
        if node.name not in self.half:
            return False
        definition = compat.op_def(node.op)
        types = self._halved(node)
        position = 0
        for arg in definition.output_arg if definition is not None else ():
            position += _count(node, arg)
            if ref[1] < position:
                return arg.type_attr in types
        return False

    def _cast(self, ref: Ref, dtype: int) -> Ref:
        have = self._dtype if self._is_half(ref) else FLOAT
        if have == dtype:
            return ref
        key = (ref, dtype)
        if key not in self._made:
            source = self._program.nodes[ref[0]]
            name = "%s%s_%d/%s" % (PREFIX, ref[0], ref[1], "half" if dtype == self._dtype else "whole")
            attrs = {"SrcT": A.of_type(have), "DstT": A.of_type(dtype)}
            backward = source.attr(A.BACKWARD)
            if backward is not None:
                attrs[A.BACKWARD] = backward
            self._nodes[name] = Node(name, "Cast", [ref], attrs=attrs, origin=source.origin, phase=source.phase, taskgraph=source.taskgraph)
            self._made[key] = (name, 0)
        return self._made[key]


def _count(node: Node, arg: Any) -> int:
    """How many tensors an argument of an op stands for."""
    return node.int_attr(arg.number_attr) or 0 if arg.number_attr else 1


def _is_float(node: Node, name: str) -> bool:
    value = node.attr(name)
    return value is not None and value.type == FLOAT


@functools.lru_cache(maxsize=None)
def _type_attributes(op: str, dtype: int) -> FrozenSet[str]:
    """The type attributes of an op that allow a type."""
    definition = compat.op_def(op)
    found = []
    for attribute in definition.attr if definition is not None else ():
        allowed = attribute.allowed_values.list.type
        if attribute.type == "type" and (not allowed or dtype in allowed):
            found.append(attribute.name)
    return frozenset(found)


def half_of(name: str) -> int:
    """The DataType of a configured name, "float16" or "bfloat16"."""
    return int({"float16": types_pb2.DT_HALF, "bfloat16": types_pb2.DT_BFLOAT16}[name])


def summary(program: Program, dtype: int) -> Dict[str, Tuple[int, int]]:
    """For each op type that may compute in half precision: how many nodes do, and how many do not."""
    counts: Dict[str, Tuple[int, int]] = {}
    for node in program.nodes.values():
        if node.op not in ALLOW and node.op not in INFER or not node.origin:
            continue
        types = [node.attr(name) for name in _type_attributes(node.op, dtype)]
        found = {value.type for value in types if value is not None}
        half, whole = counts.get(node.op, (0, 0))
        if found & {dtype, FLOAT}:
            counts[node.op] = (half + 1, whole) if dtype in found else (half, whole + 1)
    return counts
