"""What the inputs of a graph are: which drawn tensors are batches of varying size."""

from typing import Dict, List, Set

from epl.ir import op_table
from epl.ir.program import Program, Ref

BATCHERS = frozenset(
    "BatchDataset BatchDatasetV2 PaddedBatchDataset PaddedBatchDatasetV2 MapAndBatchDataset ExperimentalMapAndBatchDataset "
    "ParallelBatchDataset DenseToSparseBatchDataset".split()
)
UP_TO = frozenset(("QueueDequeueUpTo", "QueueDequeueUpToV2"))


def ragged_components(program: Program) -> List[Ref]:
    """For each input that makes batches, one drawn tensor whose dimension 0 is the batch.

    Only inputs count whose last batch may be smaller: dimension 0 is statically unknown
    and a batching dataset (or a dequeue-up-to) is behind it. An input of single samples
    of varying size has no batch dimension.
    """
    found: List[Ref] = []
    batched: Dict[str, bool] = {}
    for node in program.nodes.values():
        if node.op not in op_table.DRAWS or not node.inputs:
            continue
        handle = node.inputs[0][0]
        if node.op not in UP_TO:
            if handle not in batched:
                batched[handle] = _is_batched(program, handle)
            if not batched[handle]:
                continue
        for index, _ in enumerate(op_table.output_types(node, program)):
            shape = program.shape_of((node.name, index))
            if shape and shape[0] is None:
                found.append((node.name, index))
                break
    return found


def _is_batched(program: Program, handle: str) -> bool:
    node = program.nodes[handle]
    if any(op_table.function_contains(program, f, BATCHERS) for f in op_table.called_functions(program, node)):
        return True
    for consumer, _ in program.consumers.get(handle, ()):
        maker = program.nodes[consumer]
        if maker.op == "MakeIterator" and _dataset_batches(program, maker.inputs[0][0]):
            return True
    return False


def _dataset_batches(program: Program, name: str) -> bool:
    seen: Set[str] = set()
    stack = [name]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        node = program.nodes[current]
        if node.op in BATCHERS:
            return True
        if any(op_table.function_contains(program, f, BATCHERS) for f in op_table.called_functions(program, node)):
            return True
        if node.op.endswith(("Dataset", "DatasetV2", "DatasetV3", "DatasetV4")):
            stack.extend(s for s, _ in node.inputs)
    return False
