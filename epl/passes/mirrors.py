"""Mirrors: small variables of an optimizer that every process keeps and updates for itself.

The powers of Adam's betas belong to the taskgraph of the variable that they are first
used for. Stages in other processes would ask for them in every step. As nothing but
constants goes into them, each process can as well have its own.
"""

from typing import Dict, List, Set

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.frames import outer_frames
from epl.ir.program import Node, Program
from epl.passes.assign import NONE, OWN, UPDATE, Assigned


def with_mirrors(program: Program) -> Program:
    """The program with such variables, and what is computed from them alone, in no taskgraph: so they are in every process.

    Args:
      program: the whole graph of the user, with its assignment.
    """
    assignment = program.assignment
    if assignment is None:
        return program
    order = program.topological()
    frames = outer_frames(program, order)
    mirrored = {n.name for n in order if n.op in op_table.VARIABLES and assignment[n.name].rule == UPDATE and _is_scalar(n)}
    while mirrored:
        free = _free(program, order, mirrored, set(frames))
        # Any other update would make the copies differ.
        tied = {v for v in mirrored if not _writes_are_free(program, v, free)}
        if not tied:
            found: Dict[str, Assigned] = dict(assignment)
            found.update((name, Assigned(None, NONE)) for name in free)
            return program.replace(assignment=found)
        mirrored -= tied
    return program


def _is_scalar(variable: Node) -> bool:
    shape = variable.attr("shape")
    return shape is not None and not shape.shape.unknown_rank and not shape.shape.dim


def _free(program: Program, order: List[Node], mirrored: Set[str], inside: Set[str]) -> Set[str]:
    """What is computed from the mirrored variables and from what is everywhere, and from nothing else."""
    assert program.assignment is not None
    free = set(mirrored)
    for node in order:
        if node.name in free or node.name in inside or not node.inputs or program.assignment[node.name].rule == OWN:
            continue
        sources = {s for s, _ in node.inputs}
        if sources & free and all(s in free or program.assignment[s].taskgraph is None for s in sources) and node.attr(A.BACKWARD) is None:
            free.add(node.name)
    return free


def _writes_are_free(program: Program, variable: str, free: Set[str]) -> bool:
    seen = {variable}
    stack = [variable]
    while stack:
        for consumer, index in program.consumers.get(stack.pop(), ()):
            node = program.nodes[consumer]
            if index < 0 or consumer in seen:
                continue
            seen.add(consumer)
            if consumer not in free and (op_table.takes_references(node.op) or any(_hands_on(program, s, i) for s, i in node.inputs if s in seen)):
                return False
            if node.op in op_table.PASS_THROUGH and _hands_on(program, node.name, 0):
                stack.append(consumer)
    return True


def _hands_on(program: Program, name: str, index: int) -> bool:
    """Whether an output is the handle of a variable."""
    return op_table.is_handle(program.nodes[name], index, program) and program.nodes[name].op not in op_table.REF_VARIABLES
