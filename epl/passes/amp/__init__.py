"""Automatic mixed precision."""

from epl.passes.amp.casts import Casts, half_of, summary
from epl.passes.amp.mixed import Mixed
from epl.passes.amp.scale import FINITE, SCALE, UNSCALE
from epl.passes.amp.skip import Skip
from epl.passes.amp.state import STATE, SaveScale

__all__ = ["FINITE", "SCALE", "STATE", "UNSCALE", "Casts", "Mixed", "SaveScale", "Skip", "half_of", "summary"]
