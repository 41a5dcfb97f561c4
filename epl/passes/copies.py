"""What the classify pass has found, for nodes that a pass adds to a classified program."""

import dataclasses
from typing import Callable, Dict, Iterable, Mapping

from epl.ir.endings import Endings
from epl.ir.program import APPLY, Program, Ref, Shape


def with_copies(program: Program, copies: Mapping[str, str], added: Iterable[str]) -> Program:
    """A program whose facts and shapes know nodes that it has more than when it was classified.

    Args:
      program: with the new nodes. copies: new node -> the node that it is a copy of.
      added: new nodes that exist per replica and micro-batch, copies included.
    """
    facts = program.facts
    first = {copy for copy, name in copies.items() if name in facts.first}
    touched = {copy: facts.variables_of[name] for copy, name in copies.items() if name in facts.variables_of}
    divided: Dict[str, Dict[Ref, object]] = {}
    for ref, form in facts.forms.items():
        divided.setdefault(ref[0], {})[ref] = form
    forms = {(copy, index): form for copy, name in copies.items() for (_, index), form in divided.get(name, {}).items()}
    updates = {node.name for node in program.nodes.values() if node.phase == APPLY}
    facts = dataclasses.replace(
        facts,
        batch=facts.batch.union(added),
        first=facts.first | first,
        forms={**facts.forms, **forms},
        variables_of={**facts.variables_of, **touched},
        endings=Endings(program, program.topological(), ignored=updates),
    )
    return program.replace(facts=facts, shape_of=_with_shapes(program.shape_of, dict(copies)))


def _with_shapes(shape_of: Callable[[Ref], Shape], copies: Dict[str, str]) -> Callable[[Ref], Shape]:
    return lambda ref: shape_of((copies.get(ref[0], ref[0]), ref[1]))
