"""Shapes of tensors that may be sharded over a group of devices."""

import enum
import numbers
from dataclasses import dataclass, field
from typing import Any, List, Optional, Sequence, Tuple


class ValueReduceType(enum.Enum):
    """How the partial values of a tensor make the full one."""

    SUM = "sum"
    MEAN = "mean"


@dataclass(frozen=True)
class Dimension:
    """One dimension of a tensor and how it is sharded.

    `value` is the size before sharding. `sharding_num` is the number of shards and
    `sharding_index` this shard's number; 0 shards mean that it is not sharded.
    """

    value: int
    sharding_num: int = 0
    sharding_index: int = 0

    def __post_init__(self) -> None:
        _check_integers(self, ("value", "sharding_num", "sharding_index"))
        _check_sharding(self.sharding_num, self.sharding_index)
        if self.sharding_num > self.value:
            raise ValueError(f"a dimension of {self.value} can't have {self.sharding_num} shards: each needs at least one element")


@dataclass(frozen=True)
class ValueDimension:
    """A sharding in which each device holds a partial value of the whole tensor.

    It has no size of its own: `value` is always 0.
    """

    sharding_num: int = 0
    sharding_index: int = 0
    reduce_op: ValueReduceType = ValueReduceType.SUM
    value: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_integers(self, ("sharding_num", "sharding_index"))
        _check_sharding(self.sharding_num, self.sharding_index)
        if not isinstance(self.reduce_op, ValueReduceType):
            raise ValueError(f"reduce_op must be one of {', '.join(map(str, ValueReduceType))}, not {self.reduce_op!r}")


@dataclass(frozen=True)
class Shape:
    """The dimensions of a tensor; `value_dim` tells that its values are partial."""

    dims: Tuple[Dimension, ...]
    value_dim: Optional[ValueDimension] = None

    def __init__(self, dims: Sequence[Dimension], value_dim: Optional[ValueDimension] = None):
        dims = tuple(dims)
        for dim in dims:
            if not isinstance(dim, Dimension):
                raise ValueError(f"a shape consists of Dimension objects, not {dim!r}")
        if value_dim is not None and not isinstance(value_dim, ValueDimension):
            raise ValueError(f"value_dim must be a ValueDimension or None, not {value_dim!r}")
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "value_dim", value_dim)

    @property
    def rank(self) -> int:
        return len(self.dims)

    def as_list(self) -> List[int]:
        """The sizes before sharding."""
        return [dim.value for dim in self.dims]


def _check_integers(owner: Any, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
            raise ValueError(f"{name} must be an integer of at least 0, not {value!r}")


def _check_sharding(num: int, index: int) -> None:
    if index >= max(num, 1):
        raise ValueError(f"sharding_index {index} is out of range: {num} shards are numbered from 0")
