"""What the lowerings of divided ops build with."""

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import DT_INT32, Builder
from epl.ir.program import APPLY, Node, Program, Ref, Shape
from epl.planner.sharding.op import Tensor
from epl.planner.sharding.spec import Group, R, Spec
from epl.planner.sharding.strategy import BATCH, Lane

RESHARD = "EplReshard"
"""Inputs: a tensor in one form and, where rows go back to their lanes, the samples of each lane. Output: the tensor in another form."""
LANE = "EplLane"
"""A constant of which each lane has its own value: `info["values"]`."""
LANE_SHAPES = "lane_shapes"
"""In a variable's info: the shape that it has on each lane."""
WHOLE_SHAPE = "whole_shape"
"""In the same: the shape of all parts together."""

DT_BOOL, DT_INT64 = 10, 9


class LaneBuilder(Builder):
    """Adds nodes for one op of the user's program: instances, phase and taskgraph follow it.

    Args:
      nodes: where they are added. batch: names of nodes that exist per micro-batch.
      group: the devices that share the work. node: the op, whose name is a prefix of all names.
    """

    def __init__(self, program: Program, nodes: Dict[str, Node], batch: Set[str], group: Group, node: Node):
        super().__init__(nodes, node.device, node.phase)
        self.program = program
        self.batch = batch
        self.group = group
        self.node = node
        self.base = node.name + "/epl_shard"

    def op(  # noqa: D102
        self, op: str, name: str, inputs: Sequence[Ref] = (), controls: Sequence[str] = (), info: Optional[Dict[str, Any]] = None, **attrs: Any
    ) -> Ref:
        ref = super().op(op, name, inputs, controls, info, **attrs)
        # What updates read of a gradient is aggregated, and there once.
        if self.phase != APPLY and any(source in self.batch for source, _ in inputs):
            self.batch.add(name)
        self.nodes[name] = self.nodes[name].replace(taskgraph=self.node.taskgraph)
        return ref

    def named(self, what: str) -> str:
        return "%s/%s" % (self.base, what)

    def lanes(self, what: str, values: Sequence[Any], dtype: int) -> Ref:
        """A constant that differs between lanes."""
        name = self.named(what)
        if name in self.nodes:
            return name, 0
        if all(np.array_equal(value, values[0]) for value in values):
            return self.const(name, values[0], dtype)
        return self.op(LANE, name, info={"values": [np.asarray(v) for v in values], "dtype": dtype})

    def unary(self, op: str, what: str, value: Ref, dtype: int) -> Ref:
        return self.op(op, self.named(what), [value], T=A.of_type(dtype))

    def binary(self, op: str, what: str, left: Ref, right: Ref, dtype: int) -> Ref:
        return self.op(op, self.named(what), [left, right], T=A.of_type(dtype))

    def reduce(self, op: str, what: str, value: Ref, axis: int, dtype: int, keep: bool = False) -> Ref:
        at = self.const(self.named(what + "/axis"), [axis], DT_INT32)
        return self.op(op, self.named(what), [value, at], T=A.of_type(dtype), Tidx=A.of_type(DT_INT32), keep_dims=A.of_bool(keep))

    def expand(self, what: str, value: Ref, axis: int, dtype: int) -> Ref:
        at = self.const(self.named(what + "/at"), axis, DT_INT32)
        return self.op("ExpandDims", self.named(what), [value, at], T=A.of_type(dtype), Tdim=A.of_type(DT_INT32))

    def select(self, what: str, condition: Ref, yes: Ref, no: Ref, dtype: int) -> Ref:
        return self.op("SelectV2", self.named(what), [condition, yes, no], T=A.of_type(dtype))

    def gather(self, what: str, params: Ref, indices: Ref, axis: int, dtype: int, itype: int, batch_dims: int = 0) -> Ref:
        at = self.const(self.named(what + "/at"), axis, DT_INT32)
        types = {"Tparams": A.of_type(dtype), "Tindices": A.of_type(itype), "Taxis": A.of_type(DT_INT32)}
        return self.op("GatherV2", self.named(what), [params, indices, at], batch_dims=A.of_int(batch_dims), **types)

    def shape_element(self, what: str, value: Ref, dim: int, dtype: int) -> Ref:
        """The length of a dimension as it is when it runs (int32 scalar)."""
        shape = self.op("Shape", self.named(what + "/shape"), [value], T=A.of_type(dtype), out_type=A.of_type(DT_INT32))
        return self.element(self.named(what), shape, dim, DT_INT32)

    def reshard(self, what: str, value: Ref, source: Spec, target: Spec, lane: Lane, tensor: Tensor, reduce: str = "sum") -> Ref:
        """A tensor in another form; `reduce` is how terms are combined, "sum" or "max"."""
        return reshard(self, self.named(what), value, source, target, lane, tensor, reduce)

    def lane_rows(self, lane: Lane) -> Ref:
        """The samples of this lane (int32 scalar)."""
        return _own_rows(self, lane)

    def part(self, spec: Spec, length: int) -> Tuple[List[int], List[int]]:
        """(where the part of each lane begins, how long it is) of a divided dimension."""
        bounds = self.group.bounds(length, spec.unit)
        return list(bounds[:-1]), list(self.group.lengths(length, spec.unit))


def reshard(build: LaneBuilder, name: str, value: Ref, source: Spec, target: Spec, lane: Lane, tensor: Tensor, reduce: str = "sum") -> Ref:
    """Add the node that brings a tensor into another form."""
    if name in build.nodes:
        return name, 0
    inputs = [value]
    if lane.kind == BATCH and target.kind == "L":
        inputs.append(lane_sizes(build, lane))
    shape: Shape = tensor.shape
    info = {
        "source": source,
        "target": target,
        "lane": lane,
        "shape": shape,
        "dtype": tf.as_dtype(tensor.dtype).as_datatype_enum,
        "reduce": reduce,
        "types": [tf.as_dtype(tensor.dtype).as_datatype_enum],
    }
    return build.op(RESHARD, name, inputs, info=info)


def _origin(build: LaneBuilder, lane: Lane) -> Tuple[Ref, Shape]:
    assert lane.origin is not None
    return lane.origin, build.program.shape_of(lane.origin)


def _own_rows(build: LaneBuilder, lane: Lane) -> Ref:
    ref, shape = _origin(build, lane)
    name = "epl_lane/%s_%d" % ref
    fed = any(f.node == ref[0] and f.is_batch for f in build.program.feeds)
    if shape and shape[0] is not None and not fed:
        return build.const(name + "/rows", shape[0], DT_INT32)
    if name in build.nodes:
        return name, 0
    return build.dim0(name, ref, op_table.dtype_of(build.program, *ref))


def lane_sizes(build: LaneBuilder, lane: Lane) -> Ref:
    """The samples of all lanes: an int32 vector."""
    ref, _ = _origin(build, lane)
    name = "epl_lane/%s_%d/all" % ref
    if name in build.nodes:
        return name, 0
    one = build.const("epl_lane/one", [1], DT_INT32)
    own = build.op("Reshape", name + "/own", [_own_rows(build, lane), one], T=A.of_type(DT_INT32), Tshape=A.of_type(DT_INT32))
    tensor = Tensor((1,), "int32")
    return reshard(build, name, own, Spec("L"), R, Lane(BATCH, 0, 1, lane.origin), tensor)
