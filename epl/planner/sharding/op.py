"""What a rule sees of an op, and what it says about it."""

from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Union

from epl.planner.sharding.spec import Spec

Dims = Optional[Tuple[Optional[int], ...]]


_TRAVELS = frozenset("bfloat16 float16 float32 float64 uint8 int8 int32 int64 bool".split())


class Tensor(NamedTuple):
    """A tensor of the plain graph; a variable's handle counts as its value.

    Attributes:
      shape: None for an unknown rank, None inside for an unknown dimension.
      dtype: its TensorFlow name.
    """

    shape: Dims
    dtype: str = "float32"

    @property
    def rank(self) -> int:
        """Number of dimensions; 0 where it is unknown, so that nothing can be divided."""
        return len(self.shape or ())

    def dim(self, index: int) -> Optional[int]:
        """The length of a dimension that is there; None if unknown."""
        return None if self.shape is None else self.shape[index]

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype or "complex" in self.dtype

    @property
    def can_be_parted(self) -> bool:
        """Whether parts of it can travel, and be added."""
        return self.is_handle or self.dtype in _TRAVELS

    @property
    def is_handle(self) -> bool:
        """Whether it stands for a variable, which stays where it is."""
        return self.dtype == "resource" or self.dtype.endswith("_ref")


class Op(NamedTuple):
    """An op of the plain graph.

    Attributes:
      type: TensorFlow op type.
      inputs, outputs: its tensors, in order.
      attrs: plain values of its attributes.
      constants: values of the inputs that are known, by position.
    """

    type: str
    inputs: Tuple[Tensor, ...]
    outputs: Tuple[Tensor, ...]
    attrs: Mapping[str, Any] = {}
    constants: Mapping[int, Any] = {}


class Axis(NamedTuple):
    """An index over which an op does the same thing for each value, so that it can be divided.

    Attributes:
      inputs, outputs: the dimension of each tensor that it runs over; None for a tensor
        without it: as an input it is needed whole.
      sums: whether outputs without it are sums over it.
      units: for each input and output in turn, how many neighbours in its dimension belong to
        one value of the axis; empty for one each.
      how: what computes the op's part (`epl.passes.shard.lower`); "" for the op itself.
      shapes: inputs that say a shape, of which each device takes that of its own lane: what
        computes the part puts other lengths in it.
    """

    inputs: Tuple[Optional[int], ...]
    outputs: Tuple[Optional[int], ...]
    sums: bool = False
    units: Tuple[int, ...] = ()
    how: str = ""
    shapes: Tuple[int, ...] = ()

    def unit(self, position: int) -> int:
        """The unit of an input, or of an output counted after the inputs."""
        return self.units[position] if self.units else 1


class Linear(NamedTuple):
    """The op of a sum of values at these inputs, the others fixed, is the sum of the op's results."""

    inputs: Tuple[int, ...]


class Special(NamedTuple):
    """A way to compute a divided op that takes more than the op itself on each part.

    Attributes:
      inputs, outputs: how tensors are divided; outputs may be partial.
      how: what computes it (`epl.passes.shard.lower`).
      moved: for each output, how many times its bytes a device sends within.
    """

    inputs: Tuple[Spec, ...]
    outputs: Tuple[Spec, ...]
    how: str
    moved: Tuple[float, ...] = ()


class Described(NamedTuple):
    """The op says only how long the dimensions of its input are, which needs no value of it."""


Saying = Union[Axis, Linear, Special, Described]
Rule = Callable[[Op], Iterable[Saying]]


class Sayings(NamedTuple):
    """All that is known about an op."""

    axes: Tuple[Axis, ...] = ()
    linear: Tuple[Linear, ...] = ()
    specials: Tuple[Special, ...] = ()
    described: bool = False


_RULES: Dict[str, Rule] = {}


def rule(*types: str) -> Callable[[Rule], Rule]:
    """Register what a function says about ops of these types."""

    def register(function: Rule) -> Rule:
        for one in types:
            assert one not in _RULES, one
            _RULES[one] = function
        return function

    return register


def known_types() -> List[str]:
    return sorted(_RULES)


def rule_of(op_type: str) -> str:
    """The name of the rule for a type of op; that of the type where there is none."""
    return _RULES[op_type].__name__ if op_type in _RULES else op_type


def sayings(op: Op) -> Sayings:
    """What the rule of an op says; nothing for an op without one, or whose ranks are unknown.

    Axes are left out that have no tensor to divide, or a tensor with too few elements.
    """
    known = _RULES.get(op.type)
    if known is None:
        return Sayings()
    said = list(dict.fromkeys(known(op)))
    return Sayings(
        tuple(one for one in said if isinstance(one, Axis) and _is_there(op, one)),
        tuple(one for one in said if isinstance(one, Linear)),
        tuple(one for one in said if isinstance(one, Special)),
        any(isinstance(one, Described) for one in said),
    )


def _is_there(op: Op, axis: Axis) -> bool:
    found = False
    for position, (dim, tensor) in enumerate(zip(axis.inputs + axis.outputs, op.inputs + op.outputs)):
        if dim is None:
            continue
        if not 0 <= dim < tensor.rank:
            return False
        length = tensor.dim(dim)
        if length is not None and (length % axis.unit(position) or length // axis.unit(position) < 2):
            return False
        found = True
    return found


def same_dims(op: Op, count: int, *without: int) -> Iterable[Axis]:
    """One axis for each of the first `count` dimensions, which all tensors have in common, but for the inputs `without` it."""
    for dim in range(count):
        yield Axis(tuple(None if i in without else dim for i in range(len(op.inputs))), (dim,) * len(op.outputs))
