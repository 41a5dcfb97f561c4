"""How the values of one tensor from several instances become one value."""

from typing import Set

from epl.ir import op_table
from epl.ir.program import DIVIDE, Program, Ref


def batch_sizes(program: Program) -> Set[int]:
    """The static sizes of dimension 0 of what the program consumes per batch."""
    sizes: Set[int] = set()
    refs = [f.ref for f in program.feeds if f.mode == DIVIDE]
    for node in program.nodes.values():
        if node.op in op_table.DRAWS and node.op.startswith(("Iterator", "Queue")):
            refs.extend((node.name, i) for i in range(len(op_table.output_types(node, program))))
    for ref in refs:
        shape = program.shape_of(ref)
        if shape and shape[0] is not None:
            sizes.add(shape[0])
    return sizes


def has_batch_dimension(program: Program, ref: Ref) -> bool:
    """True when dimension 0 of a tensor is the batch: unknown, or of a batch's static size."""
    shape = program.shape_of(ref)
    if not shape:
        return False
    return shape[0] is None or shape[0] in batch_sizes(program)


def merge_rule(program: Program, ref: Ref, collection: str = "") -> str:
    """"mean", "sum", "concat" or "last" for one tensor.

    A merge collection decides. Without one a tensor whose dimension 0 is the batch is
    concatenated, another float tensor is averaged, and of anything else the last
    micro-batch's value is taken.
    """
    if collection:
        return collection.split("_")[1]  # "global_mean_objects" -> "mean"
    if has_batch_dimension(program, ref):
        return "concat"
    dtype = op_table.dtype_of(program, *ref)
    return "mean" if dtype in op_table.FLOATS else "last"
