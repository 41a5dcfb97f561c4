"""Annotations: the scopes that say how the ops created inside are distributed."""

from epl.strategies.base import ParallelStrategy
from epl.strategies.context import StrategyContext, set_default_strategy
from epl.strategies.replicate import Replicate, replicate
from epl.strategies.split import Split, split

__all__ = ["ParallelStrategy", "Replicate", "Split", "StrategyContext", "replicate", "set_default_strategy", "split"]
