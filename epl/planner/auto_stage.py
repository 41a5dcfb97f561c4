"""Cut an unannotated model into pipeline stages."""

import collections
from typing import Any, Counter, Dict, List, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

from epl import compat
from epl.env import Env
from epl.errors import ConfigError
from epl.ir import attrs as A
from epl.planner.partition import partition_stages
from epl.utils import constant

POLICIES = (constant.AUTO_STAGE_POLICY_BALANCE_OP_NUM, constant.AUTO_STAGE_POLICY_REPEATED_LAYERS)

_WINDOW = 8
"""Op types that are compared at once to find repeated layers."""

_MOST_PERIODS = 64


class AutoStageGenerator:
    """Finds stages in the forward part of a graph: all its ops, as long as there are no gradients."""

    def __init__(self, policy: str = constant.AUTO_STAGE_POLICY_BALANCE_OP_NUM, num_stages: int = 1):
        """Choose how to cut.

        Args:
          policy: of `epl.utils.constant`. AUTO_STAGE_POLICY_BALANCE_OP_NUM: equal numbers of ops, in order of creation.
            AUTO_STAGE_POLICY_REPEATED_LAYERS: equal numbers of the layers that the model repeats most; the same as
            the other one when their number can't be divided.
          num_stages: number of stages, from 1.

        Raises ConfigError for anything else.
        """
        if policy not in POLICIES:
            raise ConfigError("policy = %r; expected %s" % (policy, " or ".join(map(repr, POLICIES))))
        if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
            raise ConfigError("num_stages = %r; expected a number of stages, 1 or more" % (num_stages,))
        self.policy = policy
        self.num_stages = num_stages

    def search(self, graph: Optional[tf.Graph] = None) -> List[List[tf.Operation]]:
        """The ops of each stage, of the default graph or another one."""
        ops = [op for op in (graph or tf.get_default_graph()).get_operations() if _is_forward(op)]
        if self.policy == constant.AUTO_STAGE_POLICY_REPEATED_LAYERS:
            cuts = layer_cuts([op.type for op in ops], self.num_stages)
            if cuts is not None:
                return [ops[begin:end] for begin, end in zip([0] + cuts, cuts + [len(ops)])]
        return partition_stages(ops, [1] * len(ops), self.num_stages)


def layer_cuts(types: Sequence[str], num_stages: int) -> Optional[List[int]]:
    """Where to cut a sequence of ops so that each stage has the same number of repeated layers.

    Layers are found by structure, whatever their names: a row of equal sequences of op
    types, one after the other. The row with the most ops counts. What comes before it
    belongs to the first stage, what comes after it to the last.

    Returns the positions at which stages but the first begin; None when no row makes up
    most of the model, or when the number of its layers can't be divided.

    >>> layer_cuts("x wy wy wy wy z".replace(" ", ""), 2)
    [5]
    """
    start, period, layers = 0, 0, 0
    for candidate in _periods(types):
        begin, length = _longest_row(types, candidate)
        if length // candidate * candidate > period * layers:
            start, period, layers = begin, candidate, length // candidate
    if period * layers * 2 <= len(types) or layers % num_stages:
        return None
    return [start + period * (layers // num_stages) * stage for stage in range(1, num_stages)]


def _periods(types: Sequence[str]) -> List[int]:
    """Likely lengths of repeated layers, short ones first: common distances between equal short sequences."""
    distances: Counter = collections.Counter()
    for window in (1, _WINDOW):
        last: Dict[Tuple[str, ...], int] = {}
        for position in range(len(types) - window + 1):
            seen = tuple(types[position : position + window])
            if seen in last:
                distances[position - last[seen]] += 1
            last[seen] = position
    return sorted(distance for distance, _ in distances.most_common(_MOST_PERIODS))


def _longest_row(types: Sequence[str], period: int) -> Tuple[int, int]:
    """The longest part of a sequence that repeats itself after `period`: where it begins, and its length."""
    best, begin = (0, 0), 0
    for position in range(period, len(types) + 1):
        if position == len(types) or types[position] != types[position - period]:
            if position - begin > best[1] and position - begin >= 2 * period:
                best = (begin, position - begin)
            begin = position - period + 1
    return best


def annotate(graph: Any) -> None:
    """Cut an annotated graph (`epl.ir.graph.Graph`) without annotations as `auto.auto_parallel` asks for.

    Each stage becomes a taskgraph as if its ops had been built in a scope of
    `epl.replicate(1)`. A while loop is not cut: it belongs to the stage of its first op.

    Raises:
      ConfigError: `pipeline.num_stages` is not set.
    """
    from epl.strategies import replicate

    count = Env.get().config.pipeline.num_stages
    if count < 1:
        raise ConfigError("auto.auto_parallel = True, but pipeline.num_stages is not set; set it to the number of stages to cut the model into")
    loops: Dict[Any, int] = {}
    generator = AutoStageGenerator(constant.AUTO_STAGE_POLICY_REPEATED_LAYERS, count)
    for number, ops in enumerate(generator.search(graph.tf_graph)):
        index = graph.taskgraph_for(replicate(1, name="stage%d" % number)).index
        for op in ops:
            loop = _outermost_context(op)
            stage = index if loop is None else loops.setdefault(loop, index)
            compat.set_op_attr(op, A.TASKGRAPH, A.of_int(stage))


def _is_forward(op: tf.Operation) -> bool:
    # Asked only for attributes that EPL sets: `get_attr` of an absent one costs an exception.
    names = op.node_def.attr
    return A.BACKWARD not in names and A.UPDATE not in names


def _outermost_context(op: tf.Operation) -> Any:
    """The outermost v1 while or cond context of an op, or None."""
    context = compat.control_flow_context(op)
    while context is not None and context.outer_context is not None:
        context = context.outer_context
    return None if context is None else context.name
