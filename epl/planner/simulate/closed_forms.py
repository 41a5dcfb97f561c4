"""Formulas of the literature, for equal stages and free communication: what the simulation must give there.

In the formulas p is the number of devices, m that of micro-batches, v the stages on each device,
i a device, counted from 0. tF, tB and tW are the times that a micro-batch takes on one device for
the forward pass, the gradients of inputs and the gradients of weights. A bubble is the
time in which a device idles between its first start and its last end, as in `Timeline.bubble`.
"""

from typing import Sequence

from epl.errors import PlanError


def gpipe_bubble(devices: int, forward: float, backward: float, weights: float) -> float:
    """(p - 1)(tF + tB + tW). Source: Huang et al., GPipe, NeurIPS 2019, section 2.3; Narayanan et al., SC 2021, section 2.2.1."""
    return (devices - 1) * (forward + backward + weights)


def one_f_one_b_bubble(devices: int, forward: float, backward: float, weights: float) -> float:
    """That of GPipe. Source: Narayanan et al., SC 2021, section 2.2.1; Qi et al., ICLR 2024, table 2."""
    return gpipe_bubble(devices, forward, backward, weights)


def interleaved_bubble(devices: int, micro_batches: int, chunks: int, forward: float, backward: float, weights: float) -> float:
    """(p - 1)(tF + tB + tW) / v for m >= p; with fewer micro-batches (p - m)(v - 1) stages' times more.

    Source: Narayanan et al., SC 2021, section 2.2.2, for multiples of p; the rest is
    `epl.planner.schedules.classic.interleaved`.
    """
    few = max(0, devices - micro_batches) * (chunks - 1)
    return (devices - 1 + few) * (forward + backward + weights) / chunks


def zb_h1_bubble(devices: int, micro_batches: int, forward: float, backward: float, weights: float) -> float:
    """(p - 1)(tF + tB - min(tF, tW)) for m >= p.

    Source: Qi et al., ICLR 2024, section 2.3 and table 2, which has tW for the minimum: a W longer than an F hides no more.
    """
    _need(micro_batches, devices, "ZB-H1")
    return (devices - 1) * (forward + backward - min(forward, weights))


def zb_h2_bubble(devices: int, micro_batches: int, forward: float, backward: float, weights: float) -> float:
    """max(0, (p - 1)(tF + tB - 2 min(tF, tW))) for m >= 2p - 1. Source: Qi et al., ICLR 2024, section 2.3 and table 2."""
    _need(micro_batches, 2 * devices - 1, "ZB-H2")
    return max(0, (devices - 1) * (forward + backward - 2 * min(forward, weights)))


def zb_v_bubble(devices: int, micro_batches: int, stage: float = 1) -> float:
    """max(0, 2p - 1 - m, 4(p - m) - 1) for tF = tB = tW = 1 of one of the two stages of a device: 0 for m >= 2p - 1.

    Source: Qi et al., arXiv 2401.10241, section 6; few micro-batches: `epl.planner.schedules.zero_bubble.zero_bubble_v`.
    """
    return max(0, 2 * devices - 1 - micro_batches, 4 * (devices - micro_batches) - 1) * stage


def _need(micro_batches: int, least: int, name: str) -> None:
    if micro_batches < least:
        raise PlanError("the formula of %s holds for %d micro-batches or more, not for %d; simulate it" % (name, least, micro_batches))


def bubble_rate(bubble: float, micro_batches: int, step: float) -> float:
    """The bubble's part of the whole time, with a step tF + tB + tW; (p - 1) / (m + p - 1) for 1F1B."""
    return bubble / (bubble + micro_batches * step)


def gpipe_in_flight(micro_batches: int) -> int:
    """Activations that each device holds at most: m. Source: Huang et al., GPipe, NeurIPS 2019, section 2.3."""
    return micro_batches


def one_f_one_b_in_flight(devices: int, micro_batches: int, device: int) -> int:
    """min(m, p - i). Source: Qi et al., ICLR 2024, table 2; Jia et al., Whale, ATC 2022, section 3.3.2 (N - i)."""
    return min(micro_batches, devices - device)


def interleaved_in_flight(devices: int, micro_batches: int, chunks: int, device: int) -> int:
    """min(v m, 2(p - i - 1) + (v - 1) g + 1) activations of one stage, where g is the size of the first group; p for multiples of p.

    Source: the warm-up of Narayanan et al., SC 2021, section 2.2.2.
    """
    if chunks == 1:
        return one_f_one_b_in_flight(devices, micro_batches, device)
    group = -(-micro_batches // max(1, micro_batches // devices))
    return min(chunks * micro_batches, 2 * (devices - device - 1) + (chunks - 1) * group + 1)


def zb_h1_in_flight(devices: int, micro_batches: int) -> int:
    """min(m, p) on the fullest device, when an activation counts until its W has ended.

    Source: Qi et al., ICLR 2024, table 2: (p - i) M_B + i M_W, at most p M_B, when B frees what W does not need.
    """
    return min(micro_batches, devices)


def zb_h2_in_flight(devices: int, micro_batches: int) -> int:
    """min(m, 2p - 1) on the fullest device. Source: Qi et al., ICLR 2024, table 2: (2p - 2i - 1) M_B + 2i M_W."""
    return min(micro_batches, 2 * devices - 1)


def zb_v_in_flight(devices: int, micro_batches: int) -> int:
    """min(2m, 2p) on each device, each of half the size. Source: Qi et al., arXiv 2401.10241, section 6 (p M_B)."""
    return min(2 * micro_batches, 2 * devices)


def slowest_stage_seconds(stages: Sequence[float], micro_batches: int, transfers: Sequence[float] = ()) -> float:
    """T = sum_i t_i + (m - 1) max_j t_j + sum_i e_i: the estimate of planners for unequal stages.

    Exact for GPipe when it is taken for the forward and for the backward passes apart, and for 1F1B
    with equal stages; for 1F1B with unequal ones it may be too long or too short: simulate.
    Source: Zheng et al., Alpa, OSDI 2022, section 5 (without transfers); Li et al., AMP, NeurIPS 2022, section 3.

    Args:
      stages: seconds of a micro-batch, forward and backward.
      transfers: seconds of a micro-batch over each boundary.
    """
    return sum(stages) + (micro_batches - 1) * max(stages) + sum(transfers)


def zero_bytes(parameters: float, level: int, copies: int, weights: float = 2, gradients: float = 2, state: float = 12) -> float:
    """Bytes of weights, gradients and optimizer state on each device.

    Level 0: 16 per parameter for mixed-precision Adam. Level 1 (P_os): 4 + 12 / N. Level 2
    (P_os+g): 2 + 14 / N. Level 3 (P_os+g+p): 16 / N. Source: Rajbhandari et al., ZeRO, SC 2020, section 5, figure 1.

    Args:
      copies: N, the data-parallel degree.
      weights, gradients, state: bytes of one parameter.
    """
    if level not in (0, 1, 2, 3):
        raise PlanError("there is no zero level %r; it is 0, 1, 2 or 3" % (level,))
    sizes = ((weights, 3), (gradients, 2), (state, 1))
    return parameters * sum(size / (copies if level >= from_level else 1) for size, from_level in sizes)


def transformer_flops(sequence: int, hidden: int) -> Sequence[float]:
    """FLOPs of one sample in one layer: forward, gradients of inputs, gradients of weights.

    s h (24 h + 4 s), s h (24 h + 8 s) and 24 s h^2. Source: Qi et al., ICLR 2024, table 1.
    """
    return (sequence * hidden * (24 * hidden + 4 * sequence), sequence * hidden * (24 * hidden + 8 * sequence), 24 * sequence * hidden**2)


def transformer_activation(sequence: int, hidden: int, heads: int, split: int = 1) -> float:
    """Bytes of one sample that one layer keeps in 16 bits: s h (10 + 24 / t + 5 a s / (h t)) with tensor parallelism of degree t.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023, section 4.
    """
    return sequence * hidden * (10 + 24 / split + 5 * heads * sequence / (hidden * split))
