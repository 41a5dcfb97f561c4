"""Groups of fused communication under the original's name; see `epl.planner.partition`."""

from epl.planner.partition import estimate_split_num_for_comm

__all__ = ["estimate_split_num_for_comm"]
