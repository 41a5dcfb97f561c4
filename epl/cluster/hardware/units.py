"""Quantities as text: "16 GB", "50 Gb/s", "10 us", "15.7 TFLOP/s". Read exactly, and written so that reading gives the same number."""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Mapping, NamedTuple

_DECIMAL = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?)\s*(.*?)\s*$")


class Quantity(NamedTuple):
    """What a number measures.

    Attributes:
      name: for messages.
      example: for messages, with a unit.
      units: unit -> what it is in the base unit.
      written: the units that `write` uses, in descending order, and their powers of ten.
    """

    name: str
    example: str
    units: Mapping[str, Fraction]
    written: Mapping[str, int]


def _scaled(*names: str, factor: Fraction = Fraction(1)) -> Mapping[str, Fraction]:
    """All decimal multiples of a unit under each of its names."""
    return {prefix + name: factor * 10**power for prefix, power in _DECIMAL.items() for name in names}


def _binary(*names: str) -> Mapping[str, Fraction]:
    return {prefix + name: Fraction(2**power) for prefix, power in _BINARY.items() for name in names}


def _written(name: str) -> Mapping[str, int]:
    return {prefix + name: power for prefix, power in reversed(list(_DECIMAL.items()))}


_SECONDS = {"s": 0, "ms": -3, "us": -6, "ns": -9}

BYTES = Quantity("bytes", "16 GB", {**_scaled("B"), **_binary("B"), "KB": Fraction(1000)}, _written("B"))
RATE = Quantity(
    "bytes or bits a second",
    "50 Gb/s' or '300 GB/s",
    {**_scaled("B/s"), **_binary("B/s"), **_scaled("b/s", "bit/s", "bps", factor=Fraction(1, 8)), "KB/s": Fraction(1000)},
    _written("B/s"),
)
SECONDS = Quantity("a time", "10 us", {unit: Fraction(10) ** power for unit, power in {**_SECONDS, "\u00b5s": -6, "\u03bcs": -6}.items()}, _SECONDS)
FLOPS = Quantity("floating-point operations a second", "15.7 TFLOP/s", _scaled("FLOP/s", "FLOPS", "FLOPs", "flops", "flop/s"), _written("FLOP/s"))


def read(text: str, quantity: Quantity) -> float:
    """The number that a text means, in the base unit: bytes, bytes/s, seconds or FLOP/s.

    Prefixes are decimal (1 GB = 10^9 bytes) but for KiB to TiB; "b" is a bit and "B" a
    byte. Raises ValueError that says what is wrong.
    """
    match = _NUMBER.match(text)
    if not match:
        raise ValueError("has no number in front")
    number, unit = match.groups()
    if not unit:
        raise ValueError("has no unit")
    if unit not in quantity.units:
        raise ValueError("has the unit %r, which is none of %s" % (unit, quantity.name))
    try:
        return float(Fraction(number) * quantity.units[unit])
    except OverflowError:
        raise ValueError("is too large") from None


def write(value: float, quantity: Quantity) -> str:
    """A text that `read` turns into exactly this number, in the largest unit that is not larger than it."""
    # The shortest decimal that is this number, with its point moved: that loses nothing.
    digits = Decimal(repr(float(value)))
    unit, power = next(((u, p) for u, p in quantity.written.items() if abs(digits) >= Decimal(10) ** p), list(quantity.written.items())[-1])
    return "%s %s" % (format(digits.scaleb(-power).normalize(), "f"), unit)
