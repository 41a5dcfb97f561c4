"""Balance unequal devices: shares of a batch or dimension, stages of layers, both together; and Whale's way, to compare.

Pure functions of numbers. `whale` is as published. `shares` and `shards` work within a
taskgraph, `stages` between taskgraphs, `joint` on both. `ideal` says how good any plan could be.
"""

from epl.planner.balance.costs import in_flight
from epl.planner.balance.ideal import distance_from_ideal, fewest_devices, ideal_seconds, slowdown_bound
from epl.planner.balance.joint import balance_groups, balance_jointly, share_layers
from epl.planner.balance.shards import Segment, shard_ratios, shard_seconds, whole_shards
from epl.planner.balance.shares import Linear, Measured, Shares, Worker, divide, even, layers_worker, replica, step_seconds
from epl.planner.balance.stages import Group, Stage, StagePlan, balance_stages, price_stages

__all__ = [
    "Group",
    "Linear",
    "Measured",
    "Segment",
    "Shares",
    "Stage",
    "StagePlan",
    "Worker",
    "balance_groups",
    "balance_jointly",
    "balance_stages",
    "distance_from_ideal",
    "divide",
    "even",
    "fewest_devices",
    "ideal_seconds",
    "in_flight",
    "layers_worker",
    "price_stages",
    "replica",
    "shard_ratios",
    "shard_seconds",
    "share_layers",
    "slowdown_bound",
    "step_seconds",
    "whole_shards",
]
