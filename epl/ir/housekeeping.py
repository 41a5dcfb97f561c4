"""Which nodes keep a job going and are no part of the model: saving, restoring, asking what is initialised."""

from typing import List, Set

from epl.ir.op_table import VARIABLES
from epl.ir.program import Node, Program

ROOTS = frozenset(
    "Save SaveSlices SaveV2 Restore RestoreSlice RestoreV2 MergeV2Checkpoints IsVariableInitialized VarIsInitializedOp".split()
)


def housekeeping(program: Program, order: List[Node]) -> Set[str]:
    """The nodes that save, restore or check variables, what depends on those, and what only they use.

    A node that gradients need is part of the model whatever it depends on.

    Args:
      program: the whole graph of the user.
      order: its nodes, sources first.
    """
    model = program.ancestors({ref[0] for ref in program.raw_gradients})
    found = {node.name for node in order if node.op in ROOTS and node.name not in model}
    stack = list(found)
    while stack:
        for consumer, _ in program.consumers.get(stack.pop(), ()):
            if consumer not in found and consumer not in model:
                found.add(consumer)
                stack.append(consumer)
    for node in reversed(order):
        used_by = program.consumers.get(node.name)
        if used_by and node.op not in VARIABLES and all(consumer in found for consumer, _ in used_by):
            found.add(node.name)
    return found
