"""Which ZeRO level the configuration asks for."""

from epl.env import Env


def zero_v0() -> bool:
    """True when optimizer states are sharded (`zero.level` is "v0", in any case)."""
    return _level() == "v0"


def zero_v1() -> bool:
    """True when optimizer states and gradients are sharded (`zero.level` is "v1", in any case)."""
    return _level() == "v1"


def _level() -> str:
    return str(Env.get().config.zero.level or "").lower()
