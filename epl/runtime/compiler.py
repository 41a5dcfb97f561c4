"""From a run signature to a program that this rank can run."""

import dataclasses
import os
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Sequence, Tuple

from epl.env import Env
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.digest import Line, fingerprints, program_digest
from epl.ir.program import APPLY, SAME, Program
from epl.passes.amp import FINITE
from epl.passes.assign import check_cuttable
from epl.passes.base import Instrument, check_program, run_passes
from epl.passes.classify import Classify
from epl.passes.communicate import RANKS
from epl.passes.dump import dump_instrument
from epl.passes.extract import extract
from epl.passes.pipeline import default_passes
from epl.planner.plan import WHOLE, Plan, Task
from epl.utils.collector import without_collection
from epl.version import VERSION


class Signature(NamedTuple):
    """What a `run` call names: fetches ("name:0" or "name"), fed tensors and their use."""

    fetches: Tuple[str, ...]
    feeds: Tuple[str, ...]
    modes: Tuple[str, ...]


class Traits(NamedTuple):
    """What a signature does, found before it is compiled.

    trains: it contains what depends on raw gradients of variables.
    parallel: it runs on all replicas.
    records: the gradient calls whose steps it counts.
    """

    trains: bool
    parallel: bool
    records: Tuple[int, ...]


LOCAL = Traits(False, False, ())
"""Of a program that runs on the first local replica and needs no other rank."""


class Executable(NamedTuple):
    """A compiled program.

    written: variables that a run initialises or assigns outside training.
    variables: the user's variables in it.
    collective: it talks to other ranks. draws: it takes elements of inputs.
    restores: it reads a checkpoint.
    decides: its last fetch says whether a step was done or, with a dynamic loss scale, skipped.
    """

    program: Program
    task: Task
    lines: List[Line]
    written: Tuple[str, ...]
    variables: FrozenSet[str]
    collective: bool
    draws: bool
    restores: bool
    decides: bool


@without_collection
def traits_of(whole: Program, signature: Signature) -> Traits:
    """Find out what a signature does, from its closure alone."""
    closure = extract(whole, signature.fetches, signature.feeds, [SAME] * len(signature.feeds))
    classified = Classify()(closure, Task(Plan(), parallel=False))
    trains = any(n.phase == APPLY for n in classified.nodes.values())
    records = {t.record for t in classified.facts.gradients.values()} if trains else set()
    merged = any(ref in whole.collections and whole.collections[ref].startswith("global") for ref in closure.fetches)
    updates = any(op_table.is_apply(n.op) for n in closure.nodes.values())
    return Traits(trains, trains or merged or updates, tuple(sorted(records)))


@without_collection
def compile_program(
    whole: Program,
    signature: Signature,
    traits: Traits,
    plan: Plan,
    task: Task,
    instruments: Sequence[Instrument] = (),
    numbered: Callable[[str], str] = lambda key: key,
) -> Executable:
    """Run the passes.

    Args:
      whole: the user's graph.
      signature, traits: what to run.
      plan: the plan of the graph.
      task: this rank and its devices, the part of a step; its plan, `parallel` and key are set here.
      numbered: makes the key of one of several programs of the same shape its own.
    """
    modes = signature.modes if traits.parallel or plan.is_shared else [SAME] * len(signature.feeds)
    closure = extract(whole, signature.fetches, signature.feeds, modes)
    if not traits.trains:
        plan = dataclasses.replace(plan, micro_batches=1)
    lines = fingerprints(closure)
    digest = program_digest(closure, lines)
    part = task.part if traits.trains else WHOLE
    named = traits.parallel or plan.is_shared
    key = numbered("%s%s%s" % (digest[:12], plan.digest()[:4], part[0])) if named else "local"
    task = dataclasses.replace(task, plan=plan, part=part, key=key)
    if not traits.parallel:
        task = task.alone()
    folder = os.environ.get("EPL_DUMP_PASSES")
    tools = list(instruments) + ([dump_instrument(folder, task)] if folder else [])
    if task.spread:
        check_cuttable(closure, closure.assignment or {})
    program = run_passes(closure, task, default_passes(task), tools)
    check_program(program)
    written: Tuple[str, ...] = ()
    if not traits.parallel:
        facts = program.facts
        present = {n.origin for n in program.nodes.values()}
        names = [v for v in facts.written(closure) if v in present or v in whole.nodes]
        written = tuple(v for v in names if v in whole.nodes)
    kinds = {n.op for n in program.nodes.values()}
    # A process of a later stage draws nothing, but ends with the others.
    draws = any(op_table.draws(program, n) for n in program.nodes.values() if n.origin) or bool(program.groups and program.facts.draws)
    collective = any(k.startswith("Horovod") for k in kinds) or bool(program.groups)
    # Of a program with stages elsewhere, those of all processes: what they have written is compared.
    known = closure.nodes if task.spread else program.nodes
    variables = frozenset(n.origin for n in known.values() if n.op in op_table.VARIABLES and n.origin)
    decides = any(n.origin == FINITE for n in program.nodes.values())
    return Executable(program, task, lines, written, variables, collective, draws, "RestoreV2" in kinds, decides)


def bind(program: Program, sets: Mapping[Tuple[int, ...], int]) -> Program:
    """Give the collectives of a compiled program their process sets.

    Args:
      sets: Horovod's id of each group of the program.
    """
    if not program.groups:
        return program
    nodes = dict(program.nodes)
    for name, node in program.nodes.items():
        ranks = node.attr(RANKS) if node.op.startswith("Horovod") else None
        if ranks is not None:
            attrs = {key: value for key, value in node.attrs.items() if key != RANKS}
            nodes[name] = node.replace(attrs=dict(attrs, process_set_id=A.of_int(sets[tuple(ranks.list.i)])))
    return program.replace(nodes=nodes)


def plan_summary(plan: Plan) -> Dict[str, Any]:
    """What ranks compare before they start: the plan and the options."""
    config = Env.get().config
    return {"plan": plan.to_json(), "config": config.to_dict(per_rank=False), "version": {"epl": VERSION}}
