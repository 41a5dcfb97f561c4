"""The automatic cut into stages under the original's name; see `epl.planner.auto_stage`."""

from epl.planner.auto_stage import AutoStageGenerator

__all__ = ["AutoStageGenerator"]
