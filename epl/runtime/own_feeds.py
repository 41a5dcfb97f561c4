"""What EPL feeds itself, beside what the user feeds."""

from typing import Any

import numpy as np

from epl.passes.amp import SCALE, STATE
from epl.passes.communicate import ANCHOR
from epl.runtime import loss_scale

ANCHORED, _SCALE, _STATE = -1, -2, -3
OWN = {ANCHOR + ":0": ANCHORED, SCALE + ":0": _SCALE, STATE + ":0": _STATE}
"""Fed tensor -> its place in the order of a program's feeds; the user's feeds have places from 0 on."""
_ZERO = np.zeros((), np.int32)


def own_value(place: int) -> Any:
    """The value for a place of `OWN`."""
    if place == ANCHORED:
        return _ZERO
    scale = loss_scale.current()
    return scale.value if place == _SCALE else scale.state
