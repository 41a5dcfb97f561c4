"""One op that is being lowered, and the registry of lowerings."""

from typing import Callable, Dict, List, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from epl.ir import attrs as A
from epl.ir.program import Node, Ref
from epl.passes.shard.build import LaneBuilder
from epl.planner.sharding.op import Tensor
from epl.planner.sharding.solve import Item
from epl.planner.sharding.spec import P, R, Spec
from epl.planner.sharding.strategy import Lane, Strategy


class Part:
    """One op that is being lowered; `node` has the inputs in their forms."""

    def __init__(self, build: LaneBuilder, node: Node, item: Item, way: Strategy):
        self.build = build
        self.node = node
        self.item = item
        self.op = item.op
        self.way = way
        self.lanes = item.lanes
        self.out_lanes = item.analysis.lanes

    def dtype(self, index: int = 0) -> int:
        """Of an output."""
        return dtype_of(self.op.outputs[index])

    def in_dtype(self, index: int) -> int:
        return dtype_of(self.op.inputs[index])

    def replace(self, inputs: Sequence[Ref], **attrs: object) -> List[Ref]:
        """The op itself with other inputs or attributes."""
        build = self.build
        build.nodes[self.node.name] = build.nodes[self.node.name].replace(inputs=list(inputs), attrs=dict(self.node.attrs, **attrs))
        return [(self.node.name, i) for i in range(len(self.op.outputs))]

    def unfolded(self, lengths: Ref, dtype: int) -> Ref:
        """The shape of an initial value, as if it might be fed: TensorFlow would make a constant of the value and keep it beside the variable."""
        if not self.item.prepares:
            return lengths
        name, shape = self.build.named("unfolded"), A.of_shape([len(self.op.outputs[0].shape or ())])
        return self.build.op("PlaceholderWithDefault", name, [lengths], dtype=A.of_type(dtype), shape=shape)

    def reduced(self, what: str, value: Ref, how: str, tensor: Tensor, lane: Lane) -> Ref:
        """Terms of all lanes combined, on every lane."""
        return self.build.reshard(what, value, P, R, lane, tensor, how)


Lowering = Callable[[Part], List[Ref]]
_LOWERINGS: Dict[str, Lowering] = {}


def lower(build: LaneBuilder, node: Node, item: Item, way: Strategy) -> List[Ref]:
    """Replace an op by what computes its part; returns its outputs."""
    return _LOWERINGS[way.how](Part(build, node, item, way))


def lowering(*names: str) -> Callable[[Lowering], Lowering]:
    def register(function: Lowering) -> Lowering:
        for name in names:
            _LOWERINGS[name] = function
        return function

    return register


def dtype_of(tensor: Tensor) -> int:
    return tf.as_dtype(tensor.dtype).as_datatype_enum


def localised(part: Part, ids: Ref, itype: int, form: Spec, length: int) -> Tuple[Ref, Ref, List[int], List[int]]:
    """Positions in a divided dimension: (those in this lane's part, which of them lie in it, where parts begin, how long they are)."""
    build = part.build
    begins, lengths = build.part(form, length)
    local = build.binary("Sub", "local", ids, build.lanes("begin", [integer(b, itype) for b in begins], itype), itype)
    zero = build.const(build.named("zero_id"), 0, itype)
    above = build.binary("GreaterEqual", "from_begin", local, zero, itype)
    below = build.binary("Less", "before_end", local, build.lanes("length", [integer(n, itype) for n in lengths], itype), itype)
    return local, build.op("LogicalAnd", build.named("inside"), [above, below]), begins, lengths


def integer(value: int, itype: int) -> np.generic:
    return tf.as_dtype(itype).as_numpy_dtype(value)
