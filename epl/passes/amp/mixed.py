"""The pass of mixed precision."""

from epl.ir.program import Program
from epl.passes.amp.casts import Casts, half_of
from epl.passes.amp.scale import Scaling
from epl.passes.base import Pass
from epl.passes.classify import Classify
from epl.planner.plan import LAST, WHOLE, Task


class Mixed(Pass):
    """Compute in half precision what may be, and scale the loss."""

    name = "mixed_precision"
    preserves_numerics = False

    def run(self, program: Program, task: Task) -> Program:
        plan = task.plan
        if not plan.amp or not task.parallel or not program.facts.gradients:
            return program
        casts = Casts(program, half_of(plan.amp))
        changed = casts.run()
        if changed is not program:
            program = Classify()(changed, task)
        return Classify()(Scaling(program, plan.loss_scale or None, task.part in (WHOLE, LAST)).run(), task)
