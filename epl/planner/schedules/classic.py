"""Schedules with whole backward passes: GPipe, 1F1B, its optimizer variant, interleaved 1F1B.

In the formulas p is the number of devices, m that of micro-batches, i a device, counted
from 0, and tF and tB the times that a micro-batch takes forward and backward on a device.
All stages take the same time there.
"""

from typing import List, Tuple

from epl.planner.schedules.base import Action, Schedule


def alternate(chunk: int, micro_batches: int, lead: int) -> Tuple[Action, ...]:
    """The order of one stage: `lead` forwards, then a backward and a forward in turn, then what is left."""
    lead = min(lead, micro_batches)
    actions = [Action("F", micro_batch, chunk) for micro_batch in range(lead)]
    for micro_batch in range(micro_batches):
        actions.append(Action("B", micro_batch, chunk))
        if lead + micro_batch < micro_batches:
            actions.append(Action("F", lead + micro_batch, chunk))
    return tuple(actions)


def prefer_forward(stages: int, micro_batches: int) -> Schedule:
    """GPipe: all forwards, then all backwards.

    Bubble: (p - 1)(tF + tB). Activations: m on each device. The backwards run in the order
    of the micro-batches, so all schedules add gradients in the same order.

    Source: Huang et al., GPipe, NeurIPS 2019, section 2.3 and figure 2.
    """
    devices = tuple(alternate(stage, micro_batches, micro_batches) for stage in range(stages))
    return Schedule("PreferForward", stages, micro_batches, devices)


def prefer_backward(stages: int, micro_batches: int) -> Schedule:
    """1F1B: a backward as early as can be, and no forward that has to wait for the last stage anyway.

    Bubble: (p - 1)(tF + tB), as for GPipe. Activations: min(m, p - i).

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021,
    section 3.2 (PipeDream-Flush); Fan et al., DAPPLE, PPoPP 2021 (early backward).
    """
    devices = tuple(alternate(stage, micro_batches, stages - stage) for stage in range(stages))
    return Schedule("PreferBackward", stages, micro_batches, devices)


def _optimizer_lead(stage: int, stages: int) -> int:
    """How many forwards a stage may start before its first backward has ended."""
    return 1 if stage == stages - 1 else stages - stage + 1


def prefer_backward_optimizer(stages: int, micro_batches: int) -> Schedule:
    """1F1B in which all stages but the last run one forward further ahead.

    Bubble as for 1F1B. The additional forward hides a transfer, for the price of one
    activation: min(m, p - i + 1), and 1 on the last stage.

    Source: the rule of the original EPL; see `optimizer_edges`.
    """
    devices = tuple(alternate(stage, micro_batches, _optimizer_lead(stage, stages)) for stage in range(stages))
    return Schedule("PreferBackwardOptimizer", stages, micro_batches, devices)


def optimizer_edges(stages: int, micro_batches: int) -> List[Tuple[Action, Action]]:
    """The control edges (earlier, later) of `PreferBackwardOptimizer`: what each forward waits for.

    The first micro-batch waits for nothing. A forward waits for the forward before it
    until the lead of the stage is used up, and from then on for the backward that many
    micro-batches before.
    """
    edges = []
    for stage in range(stages):
        lead = _optimizer_lead(stage, stages)
        for micro_batch in range(1, micro_batches):
            earlier = Action("F", micro_batch - 1, stage) if micro_batch < lead else Action("B", micro_batch - lead, stage)
            edges.append((earlier, Action("F", micro_batch, stage)))
    return edges


def interleaved(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """Interleaved 1F1B: each device holds `chunks` stages, v below; stage c is on device c % p.

    Bubble: (p - 1)(tF + tB) / v. Activations, in units of one stage:
    min(v m, 2(p - i - 1) + (v - 1) g + 1), where g is the size of the first group.

    The micro-batches go through the model in groups. The paper's groups have p members,
    so m must be a multiple of p. Any group of at least p members keeps the devices as
    busy, and smaller ones make them wait. So here m // p groups share the micro-batches as
    evenly as they can, the larger ones first, and any m >= p has the bubble above. If
    m < p, there is one group, and (p - m)(v - 1)(tF + tB) / v is added to the bubble.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM, SC 2021, section 2.2.2.
    """
    stages = devices * chunks
    if chunks == 1:
        return Schedule("Interleaved", stages, micro_batches, prefer_backward(stages, micro_batches).devices)
    groups = max(1, micro_batches // devices)
    size, larger = divmod(micro_batches, groups)
    forwards: List[Tuple[int, int]] = []
    backwards: List[Tuple[int, int]] = []
    for group in range(groups):
        begin = group * size + min(group, larger)
        members = range(begin, begin + size + (group < larger))
        forwards += [(micro_batch, turn) for turn in range(chunks) for micro_batch in members]
        backwards += [(micro_batch, turn) for turn in reversed(range(chunks)) for micro_batch in members]
    first = size + (larger > 0)
    lists = []
    for device in range(devices):
        lead = min(len(forwards), 2 * (devices - device - 1) + (chunks - 1) * first)
        actions = [Action("F", micro_batch, turn * devices + device) for micro_batch, turn in forwards[:lead]]
        for at, (micro_batch, turn) in enumerate(backwards):
            if lead + at < len(forwards):
                next_micro_batch, next_turn = forwards[lead + at]
                actions.append(Action("F", next_micro_batch, next_turn * devices + device))
            actions.append(Action("B", micro_batch, turn * devices + device))
        lists.append(tuple(actions))
    return Schedule("Interleaved", stages, micro_batches, tuple(lists))
