"""Types on the wire: Horovod moves and sums some types only, so the bits of others travel as one of those."""

from typing import Dict, NamedTuple, Optional, Tuple

from tensorflow.core.framework.types_pb2 import DataType


class Wire(NamedTuple):
    """The type that travels, and how many elements of it make one of the tensor's: if more than one, the last dimension is theirs."""

    dtype: int
    parts: int = 1


def _number(name: str) -> int:
    return DataType.Value("DT_" + name)


_SUMMED = frozenset(map(_number, "FLOAT DOUBLE HALF INT32 INT64 UINT8 INT8".split()))
_MOVED = _SUMMED | frozenset(map(_number, "BOOL INT16 UINT16".split()))


def _table(**names: Tuple[str, int]) -> Dict[int, Wire]:
    return {_number(name): Wire(_number(wire), parts) for name, (wire, parts) in names.items()}


_AS_BITS = _table(
    BFLOAT16=("UINT16", 1), UINT32=("INT32", 1), UINT64=("INT64", 1), COMPLEX64=("INT64", 1), COMPLEX128=("INT64", 2),
    QINT8=("INT8", 1), QUINT8=("UINT8", 1), QINT16=("INT16", 1), QUINT16=("UINT16", 1), QINT32=("INT32", 1),
)  # fmt: skip
_AS_PARTS = _table(COMPLEX64=("FLOAT", 2), COMPLEX128=("DOUBLE", 2))
"""A sum of complex numbers is that of their real and imaginary parts."""

COMPLEX = frozenset(_AS_PARTS)


def moved(dtype: int) -> Optional[Wire]:
    """How values of a type travel; None if they can't."""
    return Wire(dtype) if dtype in _MOVED else _AS_BITS.get(dtype)


def summed(dtype: int) -> Optional[Wire]:
    """How values of a type are summed over ranks; None if they can't."""
    return Wire(dtype) if dtype in _SUMMED else _AS_PARTS.get(dtype)
