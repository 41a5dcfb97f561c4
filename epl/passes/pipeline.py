"""The passes of a program, in order."""

from typing import List

from epl.passes.agree import Agree
from epl.passes.alarm import Alarm
from epl.passes.amp import Mixed, SaveScale, Skip
from epl.passes.apply_groups import ApplyGroups
from epl.passes.base import Pass
from epl.passes.checkpoint import Checkpoint
from epl.passes.classify import Classify
from epl.passes.clone import Clone
from epl.passes.communicate import Communicate
from epl.passes.effects import Guard, Order, Statistics
from epl.passes.gradients import Gradients
from epl.passes.offload import Offload
from epl.passes.outputs import Outputs
from epl.passes.partial import Partial
from epl.passes.parts import Parts
from epl.passes.rebatch import Rebatch
from epl.passes.recompute import Recompute
from epl.passes.schedule import Scheduling
from epl.passes.shard.exchange import Exchange
from epl.passes.shard.rewrite import Shard
from epl.passes.synchronise import Synchronise
from epl.passes.weigh import Weigh
from epl.planner.plan import Task


def default_passes(task: Task) -> List[Pass]:
    """The list for one task. Passes with nothing to do for it return their input."""
    return [
        Rebatch(),
        Classify(),
        Mixed(),
        SaveScale(),
        Parts(),
        Shard(),
        Recompute(),
        Offload(),
        Clone(),
        Agree(),
        Exchange(),
        Weigh(),
        Synchronise(),
        Partial(),
        Order(),
        Statistics(),
        Gradients(),
        Guard(),
        Outputs(),
        ApplyGroups(),
        Scheduling(),
        Skip(),
        Checkpoint(),
        Communicate(),
        Alarm(),
    ]
