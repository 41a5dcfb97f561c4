"""Stages: where the nodes go that no scope claims, when a replica has several stages.

The stage of a node is its taskgraph. A node without one exists in every process that
holds a part of the replica: constants, step counters and learning rates are computed
where they are used. That is not enough for what must happen once per replica:

* inputs are drawn where the first stage is, and a fed batch is the one fed there;
* what depends on them, or on random numbers, goes to the stage that alone uses it, else
  to the first stage.
"""

from typing import Container, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.program import APPLY, BACKWARD, Node, Program, Ref
from epl.ir.tags import GradientTag, partners
from epl.planner.plan import Task

_EVERYWHERE = -1


def settle(
    program: Program,
    task: Task,
    order: List[Node],
    assigned: Dict[str, Optional[int]],
    batch: Container[str],
    once: Container[str],
    frames: Container[str],
) -> Dict[str, Optional[int]]:
    """The taskgraph of every node of a program with several stages.

    Args:
      order: the nodes, sources first.
      assigned: what `assign` says.
      batch: what depends on inputs or random numbers.
      once: host resources, what sets them up, and summaries: they are in every process.
      frames: the nodes of while loops, which stay together.
    """
    found = dict(assigned)
    pipeline = program.ancestors([n.name for n in order if n.name in once and n.op not in op_table.SUMMARIES])
    if not any(program.nodes[n].op in op_table.VARIABLES for n in pipeline):
        found.update((name, None) for name in pipeline)
    for node in order:
        if node.name in once:
            found[node.name] = None
    fed = {f.node: f for f in program.feeds}
    fetched = {ref[0] for ref in program.fetches}
    for node in reversed(order):
        if node.name in fed:
            found[node.name] = 0 if fed[node.name].is_batch else None
        elif node.name in once or node.name in pipeline:
            continue
        elif op_table.draws(program, node) and node.name not in frames:
            found[node.name] = 0
        elif found[node.name] is None and node.name in batch and node.op != "NoOp":
            if node.name in frames:
                found[node.name] = 0 if task.parallel else None
            else:
                found[node.name] = _user(program, task, node, found, fetched)
    return found


def _user(program: Program, task: Task, node: Node, found: Dict[str, Optional[int]], fetched: Set[str]) -> Optional[int]:
    """The stage of those that use a node, which come before it in the walk."""
    users: Set[int] = {_EVERYWHERE} if node.name in fetched else set()
    for consumer, index in program.consumers.get(node.name, ()):
        if index >= 0:
            stage = found[consumer]
            users.add(_EVERYWHERE if stage is None else stage)
    if len(users) == 1 and _EVERYWHERE not in users:
        return users.pop()
    # What only initialises, each process may draw for itself: the first one's value is the one that stays.
    return None if users == {_EVERYWHERE} and not task.parallel else 0


def join_sparse(program: Program, gradients: Dict[Ref, GradientTag], batch: Set[str]) -> Tuple[Program, Dict[Ref, GradientTag]]:
    """Bring the indices of each sparse gradient to the stage of its values, so that both are aggregated there.

    Args:
      program: with phases and taskgraphs. gradients: its aggregation points.
      batch: nodes that exist per micro-batch; the new ones are added.

    Returns:
      The program, and the aggregation points with the indices that were moved.
    """
    moved: Dict[Ref, Ref] = {}
    nodes = dict(program.nodes)
    for values, parts in partners(gradients).items():
        indices = parts["indices"]
        stage = nodes[values[0]].taskgraph
        if nodes[indices[0]].taskgraph == stage or indices in moved:
            continue
        name = "epl_indices/%s_%d" % indices
        attrs = {"T": A.of_type(op_table.dtype_of(program, *indices))}
        nodes[name] = Node(name, "Identity", [indices], attrs=attrs, origin=name, phase=BACKWARD, taskgraph=stage)
        moved[indices] = (name, 0)
        if indices[0] in batch:
            batch.add(name)
    if not moved:
        return program, gradients
    for name, node in program.nodes.items():
        if node.phase == APPLY and any(ref in moved for ref in node.inputs):
            nodes[name] = node.replace(inputs=[moved.get(ref, ref) for ref in node.inputs])
    before, shape_of = {new: old for old, new in moved.items()}, program.shape_of
    fetches = [moved.get(ref, ref) for ref in program.fetches]
    changed = program.replace(nodes=nodes, fetches=fetches, shape_of=lambda ref: shape_of(before.get(ref, ref)))
    return changed, {moved.get(ref, ref): tag for ref, tag in gradients.items()}


def check_mirrors(program: Program, writes: Mapping[str, Sequence[str]]) -> None:
    """Refuse a stage that writes a variable which every process has a copy of: the copies would differ.

    Args:
      program: with taskgraphs. writes: node -> the variables that it writes.

    Raises:
      ProgramError: names the node and the variable.
    """
    for name, variables in writes.items():
        node = program.nodes.get(name)
        mirrored = [v for v in variables if v in program.nodes and program.nodes[v].taskgraph is None]
        if node is not None and node.taskgraph is not None and mirrored:
            raise ProgramError(
                "Node '%s' of taskgraph %d writes variable '%s', which belongs to no taskgraph, so that other processes would keep another value. "
                "Create the variable in the scope of a stage" % (name, node.taskgraph, mirrored[0])
            )
