"""Cost of the default graph, op by op and tensor by tensor."""

from typing import Dict

import tensorflow.compat.v1 as tf

from epl.planner.op_costs import DTYPE_BYTES, TensorSpec, tensor_bytes
from epl.profiler.flops import count_flops
from epl.utils.shape_inference import inferred_shapes


def profile_flops() -> Dict[str, int]:
    """FLOPs of the default graph's ops: op name -> FLOPs, without the ops that do no arithmetic.

    The batch dimension is taken from the dataset (`epl.utils.shape_inference`).

    Raises:
      ProgramError: the shapes set in the script contradict the dataset's.
    """
    return count_flops(tf.get_default_graph())


def profile_memory() -> Dict[str, int]:
    """Size of the default graph's tensors: tensor name -> bytes.

    Tensors of unknown shape and those without a size of their own (resources,
    variants, strings) are left out. Several names may share one buffer, as the output
    of a Reshape and its input do.

    Raises:
      ProgramError: the shapes set in the script contradict the dataset's.
    """
    graph = tf.get_default_graph()
    shapes = inferred_shapes(graph)
    sizes: Dict[str, int] = {}
    for op in graph.get_operations():
        for tensor in op.outputs:
            spec = TensorSpec(shapes[tensor.name], tensor.dtype.base_dtype.name)
            size = tensor_bytes(spec)
            if size is not None and spec.dtype in DTYPE_BYTES:
                sizes[tensor.name] = size
    return sizes
