"""Names of the node attributes that carry the strategy in the GraphDef itself."""

from typing import Any, Iterable, List

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.framework import tensor_pb2, types_pb2
from tensorflow.core.framework.attr_value_pb2 import AttrValue

TASKGRAPH = "_epl_taskgraph"
"""Index of the taskgraph whose scope the node was built in (int)."""

BACKWARD = "_epl_backward"
"""Number of the gradient call that built the node (int)."""

RAW_GRADIENT = "_epl_raw_gradient"
"""What raw gradients the node's outputs are: strings made by `GradientTag.text`."""

APPLY_GRADIENT = "_epl_apply_gradient"
"""What the node's outputs are that was passed to `apply_gradients`; same form."""

SEED = "_epl_gradient_seed"
"""Marks the ones that a gradient call starts from (bool)."""

SYNC = "_epl_sync"
"""Marks an identity whose value is the "mean" or "sum" of the replicas' values."""

DEFAULT = "_epl_default"
"""Index of the taskgraph of the default strategy under which a node outside scopes was built (int)."""

FORWARD_OP = "_epl_forward"
"""Name of the forward op whose gradient a node is part of (string); where that op is in no scope itself."""

SUMMED = "_epl_summed"
"""Name of the forward op of whose output a node sums the partial gradients (string)."""

UPDATE = "_epl_update"
"""Number of the `apply_gradients` call that built the node (int)."""

COLLECTION = "_epl_collection"
"""In which merge collections the node's outputs are: strings `<output index>:<collection key>`."""

PRIVATE = (TASKGRAPH, BACKWARD, RAW_GRADIENT, APPLY_GRADIENT, SEED, SYNC, COLLECTION, "_class", "_gradient_op_type", "_output_shapes")
"""Attributes that mean nothing to the executor and are left out of rewritten nodes."""


def of_int(value: int) -> AttrValue:
    return AttrValue(i=value)


def of_ints(values: Iterable[int]) -> AttrValue:
    return AttrValue(list=AttrValue.ListValue(i=list(values)))


def of_bool(value: bool) -> AttrValue:
    return AttrValue(b=value)


def of_float(value: float) -> AttrValue:
    return AttrValue(f=value)


def of_type(dtype: int) -> AttrValue:
    return AttrValue(type=dtype)


def of_types(dtypes: List[int]) -> AttrValue:
    return AttrValue(list=AttrValue.ListValue(type=dtypes))


def of_str(value: str) -> AttrValue:
    return AttrValue(s=value.encode())


def of_strs(values: List[str]) -> AttrValue:
    return AttrValue(list=AttrValue.ListValue(s=[v.encode() for v in values]))


def of_shape(dims: Any) -> AttrValue:
    """A shape attribute; None for an unknown rank, None inside for an unknown dimension."""
    return AttrValue(shape=tf.TensorShape(dims).as_proto())


def of_tensor(value: Any, dtype: int) -> AttrValue:
    """A constant tensor attribute."""
    if dtype == types_pb2.DT_STRING:
        proto = tf.make_tensor_proto(np.asarray(value, dtype=object), dtype=tf.string)
    else:
        proto = tf.make_tensor_proto(np.asarray(value).astype(tf.as_dtype(dtype).as_numpy_dtype), dtype=dtype)
    return AttrValue(tensor=tensor_pb2.TensorProto.FromString(proto.SerializeToString()))
