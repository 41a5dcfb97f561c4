"""Ops that are computed in one way, because of what they are for: drawing, saving, restoring."""

from typing import Dict, Mapping, Optional, Sequence

from epl.ir.program import Node, Program, Ref
from epl.planner.sharding.op import Op
from epl.planner.sharding.spec import P, R, Spec
from epl.planner.sharding.strategy import Strategy

TERM = "term"
"""In the info of a node without inputs: each lane has a term of a sum."""
WHOLE = "whole"
"""In the info of a node that is given all of its inputs: what waits for it waits for all lanes."""
LANE = "lane"
"""In the info of a `SaveV2`: the one lane that runs it, with its parts of the tensors."""

_READS = ("Identity", "ReadVariableOp", "Read")
ASSIGNS = ("Assign", "AssignVariableOp")


def prescribed(program: Program, node: Node, op: Op, held: Optional[Mapping[str, Spec]]) -> Optional[Strategy]:
    """The one way of a node, if there is one.

    Args:
      held: how the variables are divided; None while that is being decided.
    """
    if TERM in node.info:
        return Strategy((), (P,))
    if WHOLE in node.info:
        return Strategy((R,) * len(op.inputs), (R,) * len(op.outputs))
    if LANE in node.info:
        forms = [held_form(program, ref, held) or R for ref in node.inputs[3:]]
        return Strategy((R, R, R) + tuple(forms), ())
    if node.op == "RestoreV2" and held:
        restored = restored_forms(program, node, held)
        if restored:
            outputs = tuple(restored.get(i, R) for i in range(len(op.outputs)))
            return Strategy((R, R, R), outputs, "restore", 0.0)
    return None


def held_form(program: Program, ref: Ref, held: Optional[Mapping[str, Spec]]) -> Optional[Spec]:
    """The form of the divided variable that a tensor is the value of; None for anything else."""
    form = (held or {}).get(variable_behind(program, ref))
    return form if form is not None and form.is_sharded else None


def variable_behind(program: Program, ref: Ref) -> str:
    """The node that a chain of reads starts from."""
    name = ref[0]
    while program.nodes[name].op in _READS and program.nodes[name].inputs:
        name = program.nodes[name].inputs[0][0]
    return name


def restored_forms(program: Program, node: Node, held: Mapping[str, Spec]) -> Dict[int, Spec]:
    """The outputs of a `RestoreV2` that are assigned to divided variables, and how these are divided."""
    found: Dict[int, Spec] = {}
    for index in range(len(node.attr("dtypes").list.type)):  # type: ignore[union-attr]
        variables = assigned_variables(program, (node.name, index))
        forms = {held[v] for v in variables if v in held and held[v].is_sharded}
        if len(forms) == 1:
            found[index] = forms.pop()
    return found


def assigned_variables(program: Program, ref: Ref) -> Sequence[str]:
    """The variables that are assigned a tensor as it is."""
    found: Dict[str, None] = {}
    stack = [ref]
    while stack:
        current = stack.pop()
        for consumer, index in program.consumers.get(current[0], ()):
            reader = program.nodes[consumer]
            if index != current[1]:
                continue
            if reader.op == "Identity":
                stack.append((consumer, 0))
            elif reader.op in ASSIGNS and reader.inputs[1] == current:
                found[reader.inputs[0][0]] = None
    return list(found)
