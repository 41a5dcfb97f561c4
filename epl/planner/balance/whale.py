"""How Whale balances unequal devices, as published: what the better balancers are compared with.

Source: Jia et al., Whale: Efficient Giant Model Training over Heterogeneous GPUs, USENIX
ATC 2022, sections 3.3.1 (formula 1, algorithm 1) and 3.3.2. In the formulas, DF is the
FP32 FLOP/s of a device, DM its memory, TG_flop the work of a taskgraph, TG_mem its peak
memory, and L the part of the work that a device takes.

All of it is computed in fractions, so that no result depends on rounding.
"""

import bisect
import dataclasses
from fractions import Fraction
from typing import List, NamedTuple, Optional, Sequence, Tuple, Union

from epl.cluster.hardware.spec import Device
from epl.errors import PlanError
from epl.planner.cost.model import Model, distinct_parameters


class Shift(NamedTuple):
    """One step of algorithm 1: how much load went from which device to which."""

    peak: int
    valley: int
    amount: float


@dataclasses.dataclass(frozen=True)
class Loads:
    """What algorithm 1 ends with.

    Attributes:
      loads: of each device: whole units, or parts of 1.
      memory_use: mem_util of each device: above 1, it is out of memory.
      flop_use: flop_util of each device: seconds at its peak rate.
      shifts: the steps.
    """

    loads: Tuple[float, ...]
    memory_use: Tuple[float, ...]
    flop_use: Tuple[float, ...]
    shifts: Tuple[Shift, ...]

    @property
    def fits(self) -> bool:
        """Whether no device is out of memory. The algorithm may end before that is so."""
        return all(use <= 1 for use in self.memory_use)


def apportion(total: int, weights: Sequence[Union[float, Fraction]]) -> List[int]:
    """Whole shares of a total, as near to the weights as can be: largest remainders, the earlier of equal ones first.

    >>> apportion(10, [2.0, 1.0, 1.0])
    [5, 3, 2]
    """
    exact = [Fraction(weight) for weight in weights]
    parts = [total * weight / sum(exact) for weight in exact]
    shares = [int(part) for part in parts]
    by_rest = sorted(range(len(parts)), key=lambda i: (shares[i] - parts[i], i))
    for i in by_rest[: total - sum(shares)]:
        shares[i] += 1
    return shares


def formula_1(devices: Sequence[Device], memory: float) -> List[float]:
    """Load ratios: min sum |L_i - DF_i / sum DF|, where sum L = 1 and L_i * TG_mem <= DM_i.

    What does not fit a device goes to the others; however it is shared among them, the sum is
    the same. It is shared so that the largest L_i / DF_i is smallest, which the formula leaves open.

    Args:
      memory: TG_mem in bytes.

    Raises:
      PlanError: all devices together have less memory than that.
    """
    rates = _rates(devices)
    limits = [Fraction(device.memory) / Fraction(memory) if memory else Fraction(1) for device in devices]
    if sum(limits) < 1:
        have = float(sum(Fraction(device.memory) for device in devices))
        text = "a taskgraph of %.3g bytes is larger than the memory of its %d devices, %.3g bytes; give it more devices or a smaller batch"
        raise PlanError(text % (memory, len(devices), have))
    loads = [Fraction(0)] * len(devices)
    rest, open_ones = Fraction(1), list(range(len(devices)))
    while open_ones:
        # Those that can't take what their rate asks for take what they can; then the others share again.
        level = rest / sum(rates[i] for i in open_ones)
        full = [i for i in open_ones if limits[i] < rates[i] * level]
        for i in full or open_ones:
            loads[i] = limits[i] if full else rates[i] * level
            rest -= loads[i]
        open_ones = [i for i in open_ones if i not in full] if full else []
    return [float(load) for load in loads]


def algorithm_1(
    devices: Sequence[Device],
    flops: float,
    memory: Union[float, Sequence[float]],
    units: Optional[int] = None,
    only_excess: bool = False,
) -> Loads:
    """Memory-constrained load balancing as the paper prints it.

    Loads begin in proportion to DF. While a device is out of memory and another is not, the
    one with the largest mem_util (the peak) gives load to the one with the smallest
    (flop_util, mem_util) (the valley): as much as the valley can take without running out of
    memory. Then the peak is done. A valley that can take nothing is done.

    The weaknesses are the paper's, and are kept:
      1. TG_mem shrinks with the load as a whole. The weights of a replica don't.
      2. A peak is done after one shift, even if it is still out of memory: see `Loads.fits`.
      3. A shift is as large as the valley allows, not as the peak needs: a peak may be left
         with nothing, and the valley becomes the slowest device.
      4. Communication takes no time.
      5. DF is a peak rate, not a measured one. Whale's own speed-up of BertLarge on V100 and
         P100 (figure 17) is more than these peaks allow.
    `epl.planner.balance.shares` has none of them.

    Args:
      flops: TG_flop. memory: TG_mem in bytes; one number for each device where they differ.
      units: what is shared out is this many samples, or slices of a dimension. The paper does
        not say how ratios become whole numbers; here by largest remainders. None for ratios.
      only_excess: shift no more than the peak has too much. The paper does not say so.
    """
    if not devices:
        raise PlanError("there is no device to balance; give at least one")
    total = Fraction(1 if units is None else units)
    needs = [Fraction(need) for need in memory] if isinstance(memory, Sequence) else [Fraction(memory)] * len(devices)
    rates = _rates(devices)
    capacities = [Fraction(device.memory) for device in devices]
    if units is None:
        loads = [rate / sum(rates) for rate in rates]
    else:
        loads = [Fraction(load) for load in apportion(units, rates)]

    def memory_use(i: int) -> Fraction:
        return loads[i] / total * needs[i] / capacities[i]

    def flop_use(i: int) -> Fraction:
        return loads[i] / total * Fraction(flops) / rates[i]

    def most(i: int) -> Fraction:
        limit = capacities[i] * total / needs[i] if needs[i] else total
        return limit if units is None else Fraction(int(limit))

    out = [i for i in range(len(devices)) if memory_use(i) > 1]
    free = [i for i in range(len(devices)) if i not in out]
    shifts = []
    while out and free:
        peak = max(out, key=lambda i: (memory_use(i), -i))
        valley = min(free, key=lambda i: (flop_use(i), memory_use(i), i))
        amount = min(most(valley) - loads[valley], loads[peak])
        if only_excess:
            amount = min(amount, loads[peak] - most(peak))
        if amount > 0:
            loads[peak] -= amount
            loads[valley] += amount
            shifts.append(Shift(peak, valley, _number(amount, units)))
            out.remove(peak)
        else:
            free.remove(valley)
    count = range(len(devices))
    return Loads(
        tuple(_number(load, units) for load in loads),
        tuple(float(memory_use(i)) for i in count),
        tuple(float(flop_use(i)) for i in count),
        tuple(shifts),
    )


def balance_replicas(devices: Sequence[Device], flops: float, memory: float, batch: int) -> Loads:
    """`replicate`: the local batch sizes of a global batch; flops and memory are those of the whole batch."""
    return algorithm_1(devices, flops, memory, batch)


def balance_split(devices: Sequence[Device], flops: float, memory: float, width: int) -> Loads:
    """`split`: how many slices of the split dimension each device holds; flops and memory are those of the whole taskgraph."""
    return algorithm_1(devices, flops, memory, width)


def order_by_memory(devices: Sequence[Device]) -> Tuple[int, ...]:
    """Which device each taskgraph of a pipeline gets: the largest memory to the earliest, equal ones in their order."""
    return tuple(sorted(range(len(devices)), key=lambda i: (-devices[i].memory, i)))


def in_flight(taskgraphs: int) -> Tuple[int, ...]:
    """The micro-batches whose activations each taskgraph holds in the backward-first schedule: N - i."""
    return tuple(taskgraphs - i for i in range(taskgraphs))


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """What Whale's inter-taskgraph step decides.

    Attributes:
      order: the device of each taskgraph.
      cuts: the first layer of each taskgraph, and the number of layers.
      memory: bytes that each taskgraph needs.
      loads: the ratios that the cuts come near to, in the order of the taskgraphs.
    """

    order: Tuple[int, ...]
    cuts: Tuple[int, ...]
    memory: Tuple[float, ...]
    loads: Loads


def balance_pipeline(model: Model, devices: Sequence[Device], samples: int) -> Pipeline:
    """One taskgraph for each device: sorted by memory, FLOP in proportion to DF under the memory of each.

    The paper has one sentence for the second step: partition in topological order by algorithm
    1. Here the ratios are algorithm 1's for a TG_mem that differs by place (whole weights and
    N - i activations), and each cut is where the sum of FLOPs comes nearest to them. Nothing
    moves a cut once a taskgraph turns out too large: see `memory`.

    Args:
      samples: of one micro-batch.
    """
    order, count, layers = order_by_memory(devices), len(devices), model.layers
    if count > len(layers):
        raise PlanError("%d layers can't be cut into %d taskgraphs; use at most as many devices as layers" % (len(layers), count))
    held = in_flight(count)
    weights = model.parameters * model.bytes_per_parameter
    activations = sum(layer.activation for layer in layers) * samples
    work = [Fraction(layer.forward.flops) + Fraction(layer.backward.flops) for layer in layers]
    needs = [weights + held[i] * activations for i in range(count)]
    loads = algorithm_1([devices[i] for i in order], float(sum(work)) * samples, needs)
    sums = [Fraction(0)]
    for flops in work:
        sums.append(sums[-1] + flops)
    cuts, wanted = [0], Fraction(0)
    for i, load in enumerate(loads.loads[:-1]):
        wanted += Fraction(load) * sums[-1]
        above = bisect.bisect_left(sums, wanted)
        nearest = min(range(max(above - 1, 0), min(above + 1, len(layers)) + 1), key=lambda cut: (abs(sums[cut] - wanted), cut))
        cuts.append(min(max(nearest, cuts[-1] + 1), len(layers) - (count - 1 - i)))
    cuts.append(len(layers))
    memory = []
    for i in range(count):
        part = layers[cuts[i] : cuts[i + 1]]
        own = distinct_parameters(part) * model.bytes_per_parameter
        memory.append(own + held[i] * samples * sum(layer.activation for layer in part))
    return Pipeline(order, tuple(cuts), tuple(memory), loads)


def _rates(devices: Sequence[Device]) -> List[Fraction]:
    """DF of each device: the peak, whatever part of it is reached."""
    return [Fraction(device.flops["float32"]) for device in devices]


def _number(load: Fraction, units: Optional[int]) -> float:
    return float(load) if units is None else int(load)
