"""Names and seeds of the instances of a node."""

import functools
from typing import List, Optional, Sequence

from epl.ir.program import Node, Program, Ref
from epl.planner.plan import Task
from epl.utils import common

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1


def derived_seed(seed: int, index: int) -> int:
    """The second seed of the instance with the given global index; index 0 keeps the op's own."""
    if index == 0:
        return seed
    mixed = (seed ^ (index * _GOLDEN)) & ((1 << 64) - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (mixed ^ (mixed >> 31)) & _MASK


def instance_name(name: str, replica: int, micro_batch: Optional[int]) -> str:
    """Name of an instance; index 0 has no prefix."""
    return _prefix(replica, micro_batch or 0) + name


@functools.lru_cache(maxsize=None)
def _prefix(replica: int, micro_batch: int) -> str:
    return common.get_replica_prefix(replica) + common.get_micro_batch_prefix(micro_batch)


def instances_at(program: Program, task: Task, node: Node, names: Sequence[str]) -> List[str]:
    """The instances of nodes of the user's program that one instance of another node meets."""
    facts = program.facts
    found: List[str] = []
    for name in names:
        if name not in facts.batch:
            found.append(instance_name(name, 0 if name in facts.shared or name in facts.outputs or name in facts.once else node.replica, None))
        elif node.micro_batch is None:
            found.extend(instance_name(name, node.replica, m) for m in range(task.micro_batches))
        else:
            found.append(instance_name(name, node.replica, node.micro_batch))
    return [name for name in found if name in program.nodes]


def tensor_label(ref: Ref) -> str:
    """A name for a tensor that no other tensor has, in a program without nodes of that name."""
    return ref[0] if ref[1] == 0 else "%s/epl_output_%d" % ref
