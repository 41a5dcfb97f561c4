"""Hold: how the variables of a graph are divided, decided on its training program.

All programs of a session must find a variable in the same form, also those that are run
before: the one that initialises it. So the whole graph decides, once; when it grows,
what was decided stays.
"""

from typing import Dict, List, Mapping, Optional

from epl.ir.program import APPLY, FORWARD, Program
from epl.passes.classify import Classify
from epl.passes.extract import extract
from epl.planner.plan import Plan, Task
from epl.planner.sharding.graph import Sharding, plan_sharding
from epl.planner.sharding.spec import R, Spec


def with_held(whole: Program, plan: Plan, known: Optional[Mapping[str, Spec]] = None) -> Program:
    """Give the whole graph its `held` and `sharding`.

    Args:
      known: what was decided for a smaller graph.
    """
    held: Dict[str, Spec] = dict(known or {})
    sharding = training_sharding(whole, plan, known)
    held.update(sharding.held())
    return whole.replace(held={name: form for name, form in held.items() if form != R}, sharding=sharding)


def training_sharding(whole: Program, plan: Plan, known: Optional[Mapping[str, Spec]] = None) -> Sharding:
    """How a training run of the whole graph is computed; of what the scopes hold when nothing is trained."""
    classified = Classify()(whole, Task(plan))
    roots = _after(classified)
    if not roots:
        # Nothing is trained: what the scopes hold decides.
        roots = [n.name for n in classified.nodes.values() if n.taskgraph in plan.split and n.phase == FORWARD]
    # Initialisation and saving decide nothing: they are done once.
    program = Classify()(extract(whole, roots, [], []), Task(plan))
    return plan_sharding(program, plan, True, None, decided=dict(known or {}))


def _after(program: Program) -> List[str]:
    """What is computed from gradients."""
    found: Dict[str, None] = {}
    stack = [c for name, index in program.facts.gradients for c, i in program.consumers.get(name, ()) if i == index]
    stack = [name for name in stack if program.nodes[name].phase == APPLY]
    while stack:
        name = stack.pop()
        if name not in found:
            found[name] = None
            stack.extend(c for c, _ in program.consumers.get(name, ()))
    return list(found)
