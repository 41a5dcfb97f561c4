"""How good a plan could be at most: bounds that need no plan."""

from fractions import Fraction
from typing import Sequence

from epl.errors import PlanError


def ideal_seconds(work: float, rates: Sequence[float]) -> float:
    """The time of work that all devices share without loss: work / sum of rates.

    Args:
      work: in any unit (FLOP, samples).
      rates: of each device, in that unit per second.
    """
    total = sum(rates)
    if total <= 0:
        raise PlanError("the rates of the devices add up to %g; give each device the work that it does in a second" % total)
    return work / total


def distance_from_ideal(seconds: float, work: float, rates: Sequence[float]) -> float:
    """How much longer a step takes than the ideal, as a part of the ideal: 0 is as good as can be, 0.1 takes 10 % longer."""
    return seconds / ideal_seconds(work, rates) - 1


def slowdown_bound(devices: int, slowdowns: Sequence[float]) -> float:
    """The best time with slow devices, relative to the time without: T_opt / T_base = N / ((N - n) + sum 1 / x_i).

    Source: Malleus, "theoretic optimum" of its evaluation. It is `ideal_seconds` of N units of work for N
    devices of rate 1, of which n have a rate of 1 / x_i.

    Args:
      devices: N, all of them.
      slowdowns: x_i of each of the n slow ones; 2 takes twice as long, infinity has failed.
    """
    if len(slowdowns) > devices:
        raise PlanError("%d of %d devices can't be slow; name each slow device once" % (len(slowdowns), devices))
    return ideal_seconds(devices, [1.0] * (devices - len(slowdowns)) + [1 / x for x in slowdowns])


def fewest_devices(parameters: float, bytes_per_parameter: float, memory: float) -> int:
    """How many devices of that memory hold the weights, gradients and optimizer state alone.

    Mixed-precision Adam takes 16 bytes per parameter (ZeRO, SC'20, section 3.1): 175e9 parameters
    take 2.8 TB, 35 devices of 80 GB.
    """
    need = Fraction(parameters) * Fraction(bytes_per_parameter) / Fraction(memory)
    return -(-need.numerator // need.denominator)
