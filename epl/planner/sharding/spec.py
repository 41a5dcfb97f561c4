"""How the devices of a `split` taskgraph hold one tensor together."""

from typing import NamedTuple, Optional, Sequence, Tuple

REPLICATED, SHARDED, PARTIAL, FIRST = "R", "S", "P", "F"


class Spec(NamedTuple):
    """Where the elements of a tensor are, over the shards 0 to k - 1 of a group.

    Attributes:
      kind: REPLICATED, each device has all of it; SHARDED, each has consecutive parts of one
        dimension; PARTIAL, each has a term of the shape of the whole, and their sum is meant;
        FIRST, the first device alone has it.
      dim: the dimension that is divided, from 0; -1 unless sharded.
      unit: the dimension is divided in multiples of so many elements: a head of an
        attention layer, for instance, is never cut.
    """

    kind: str
    dim: int = -1
    unit: int = 1

    @property
    def is_sharded(self) -> bool:
        return self.kind == SHARDED

    def __str__(self) -> str:
        if self.kind != SHARDED:
            return self.kind
        return "S(%d)" % self.dim if self.unit == 1 else "S(%d, by %d)" % (self.dim, self.unit)


R = Spec(REPLICATED)
P = Spec(PARTIAL)
F = Spec(FIRST)


def S(dim: int, unit: int = 1) -> Spec:  # noqa: N802
    """A tensor divided along a dimension."""
    return Spec(SHARDED, dim, unit)


class Group(NamedTuple):
    """The devices that share a taskgraph.

    Attributes:
      shares: weight of each device, whole numbers from 1: a device of weight 2 gets twice
        as much as one of weight 1.
    """

    shares: Tuple[int, ...]

    @classmethod
    def of(cls, size: int) -> "Group":
        """Equal devices."""
        return cls((1,) * size)

    @property
    def size(self) -> int:
        return len(self.shares)

    @property
    def total(self) -> int:
        return sum(self.shares)

    @property
    def largest(self) -> float:
        """The part of the work of the device that has the most."""
        return max(self.shares) / self.total

    def before(self, shard: int) -> int:
        """The weights of the devices before one."""
        return sum(self.shares[:shard])

    def bounds(self, length: int, unit: int = 1) -> Tuple[int, ...]:
        """Where the parts of a dimension begin, and its end: k + 1 positions.

        A dimension of `n` units goes to a device of weight w after weights v as the units
        v n // total to (v + w) n // total. All integers: each device finds the same.

        Raises ValueError for a length that is no multiple of the unit.
        """
        if length % unit:
            raise ValueError("a dimension of %d can't be divided in units of %d" % (length, unit))
        units = length // unit
        return tuple(unit * (units * self.before(shard) // self.total) for shard in range(self.size + 1))

    def lengths(self, length: int, unit: int = 1) -> Tuple[int, ...]:
        """How long the parts of a dimension are; 0 for a device that gets nothing."""
        found = self.bounds(length, unit)
        return tuple(end - begin for begin, end in zip(found, found[1:]))


def canonical(spec: Spec, shape: Optional[Sequence[Optional[int]]], group: Group) -> Spec:
    """The same division with the smallest unit: where units make no difference, specs are equal.

    Args:
      shape: of the whole tensor; None for an unknown rank.
    """
    if spec.kind != SHARDED or spec.unit == 1 or shape is None:
        return spec
    length = shape[spec.dim]
    if length is None or length % spec.unit or group.bounds(length, spec.unit) != group.bounds(length):
        return spec
    return spec._replace(unit=1)
