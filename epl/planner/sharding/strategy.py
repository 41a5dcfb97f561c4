"""All ways to compute one op on a group of devices.

The devices of a group are also its lanes: each draws a batch of its own, as in data
parallelism, and the plain graph is what one lane does with its batch. A tensor is the
same on all lanes (a variable, the sum of all gradients), or each lane has its own. Of
the second kind, those with a batch dimension can be gathered: all lanes' batches after
each other. A gathered tensor can be divided along another dimension. So an op costs
each device the same whether it computes all columns for its own batch, or its own
columns for all batches; what differs is which part of a variable it needs.

Source: the sharding patterns of Whale (Jia et al., USENIX ATC 2022, section 3.2.2),
extended to every dimension and to the backward part.
"""

from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from epl.ir.program import Ref
from epl.planner.sharding.op import Axis, Op, Sayings, Special, Tensor, sayings
from epl.planner.sharding.spec import F, Group, P, R, S, Spec, canonical

L = Spec("L")
"""Each device has the tensor of its own lane."""

INVARIANT, BATCH, VARYING = "invariant", "batch", "varying"


class Lane(NamedTuple):
    """How a tensor of the plain graph differs between lanes.

    Attributes:
      kind: INVARIANT, the same for all; BATCH, one dimension is that of the samples;
        VARYING, each lane has its own and there is no such dimension. What is divided or
        whole of a VARYING tensor is the sum over all lanes: the gradient of a weight.
      dim: the batch dimension. unit: neighbours in it that belong to one sample; 0 if that is not known.
      origin: the input (name, output) whose dimension 0 counts the samples.
    """

    kind: str
    dim: int = -1
    unit: int = 1
    origin: Optional[Ref] = None


SAME = Lane(INVARIANT)
OWN = Lane(VARYING)


class Strategy(NamedTuple):
    """One way to compute an op.

    Attributes:
      inputs, outputs: the form of each tensor.
      how: what computes it (`Axis.how`).
      work: work of the busiest device, in units of what the op is for one lane.
      moved: for each output, how many times its bytes a device sends within.
      axis: what is divided, if anything.
    """

    inputs: Tuple[Spec, ...]
    outputs: Tuple[Spec, ...]
    how: str = ""
    work: float = 1.0
    moved: Tuple[float, ...] = ()

    def __str__(self) -> str:
        return "%s -> %s%s" % (", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs)), " by " + self.how if self.how else "")


class Analysis(NamedTuple):
    """What is known of an op in its place: the lanes of its outputs, and the axis of the samples if there is one."""

    said: Sayings
    lanes: Tuple[Lane, ...]
    batch: Optional[Axis]


def analyse(op: Op, lanes: Sequence[Lane], source: str = "") -> Analysis:
    """Find out how an op's outputs differ between lanes.

    Any dimension would do as the batch of a tensor that differs between lanes: gathered, the
    lanes' tensors lie one after the other in it. What counts is that tensors that meet agree.
    So where nothing says which it is, it is the unknown one, or the first.

    Args:
      lanes: of its inputs.
      source: name of a node that draws or is fed, "" for any other: each lane has its own.
    """
    said = sayings(op)
    if not source and all(lane.kind == INVARIANT for lane in lanes):
        return Analysis(said, (SAME,) * len(op.outputs), None)
    batch = None if source else next((axis for axis in said.axes if _runs_over_samples(axis, lanes)), None)
    if batch is None and not source and _of_sums(op, lanes):
        return Analysis(said, (OWN,) * len(op.outputs), None)
    if batch is None:
        return Analysis(said, tuple(_guessed(t, (source, i)) for i, t in enumerate(op.outputs)), None)
    ratio, origin = _samples(batch, lanes)
    out = [OWN if dim is None else Lane(BATCH, dim, batch.unit(i) * ratio, origin) for i, dim in enumerate(batch.outputs, len(batch.inputs))]
    apart = any(lane.kind == VARYING and i not in batch.shapes for i, lane in enumerate(lanes))
    # The mean of each lane's samples is not a sum over all lanes' samples; and a new shape needs to be told how many there are.
    return Analysis(said, tuple(out), None if apart or batch.how == "mean" or batch.how and not ratio else batch)


def _of_sums(op: Op, lanes: Sequence[Lane]) -> bool:
    """Whether an op sees no batch, nor a shape that could have one in it: gradients of weights, say."""
    integers = [lane for tensor, lane in zip(op.inputs, lanes) if tensor.rank == 1 and not tensor.is_float and not tensor.is_handle]
    shapes = any(lane.kind == VARYING for lane in integers)
    return not shapes and all(lane.kind != BATCH for lane in lanes)


def _guessed(tensor: Tensor, source: Ref) -> Lane:
    if tensor.rank == 0 or not source[0] and tensor.rank == 1 and not tensor.is_float and tensor.dim(0) is not None:
        return OWN  # a number, or a shape
    if source[0]:
        return Lane(BATCH, 0, 1, source)
    return Lane(BATCH, tensor.shape.index(None) if tensor.shape is not None and None in tensor.shape else 0, 0)


def _runs_over_samples(axis: Axis, lanes: Sequence[Lane]) -> bool:
    """Whether an axis is the samples' in every input that has them, and in no other."""
    ratios = set()
    for position, (dim, lane) in enumerate(zip(axis.inputs, lanes)):
        if (dim is not None) != (lane.kind == BATCH) or dim is not None and dim != lane.dim:
            return False
        if dim is not None and lane.unit:
            if lane.unit % axis.unit(position):
                return False
            ratios.add(lane.unit // axis.unit(position))
    return len(ratios) <= 1 and any(dim is not None for dim in axis.inputs)


def _samples(axis: Axis, lanes: Sequence[Lane]) -> Tuple[int, Optional[Ref]]:
    """Values of the axis for each sample, 0 if that is not known, and whose samples."""
    return next(((lane.unit // axis.unit(i), lane.origin) for i, lane in enumerate(lanes) if lane.kind == BATCH and lane.unit), (0, None))


def strategies(op: Op, lanes: Sequence[Lane], analysis: Analysis, group: Group, units: Mapping[int, Tuple[int, ...]]) -> List[Strategy]:
    """All ways to compute an op, the one that needs no other device first.

    Args:
      lanes: of its inputs.
      units: length of a dimension -> the units in which it may be divided beside 1.
    """
    k = group.size
    invariant = all(lane.kind == INVARIANT for lane in tuple(lanes) + analysis.lanes)
    base = alone(lanes, analysis.lanes)
    found: Dict[Strategy, None] = {base: None}
    if k == 1 or not all(t.can_be_parted for t in op.inputs + op.outputs):
        return list(found)
    gathered = analysis.batch is not None
    whole = k if gathered else 1
    if analysis.batch is not None:
        found[_gathered(analysis.batch, lanes, base, k)] = None
    if gathered or invariant:
        for axis in analysis.said.axes:
            if axis is analysis.batch or any(lane.kind == VARYING and i not in axis.shapes for i, lane in enumerate(lanes)):
                continue
            for unit in _units(op, axis, units):
                one = _divided(op, axis, lanes, unit, group, whole)
                if one is not None:
                    found[one] = None
        for special in analysis.said.specials:
            if _can_be_parts(special, op, lanes, analysis.lanes, group):
                found[Strategy(special.inputs, special.outputs, special.how, whole * group.largest, special.moved)] = None
    if analysis.said.described:
        for form in _forms(op.inputs[0], lanes[0], group, units):
            found[Strategy((form,), base.outputs, "shape", 0.0)] = None
    for linear in analysis.said.linear:
        if not _may_be_terms(linear.inputs, lanes, gathered, invariant):
            continue
        how = analysis.batch.how if analysis.batch is not None else ""
        ins = tuple(P if i in linear.inputs else _with_shapes(analysis.batch, i, lane) for i, lane in enumerate(lanes))
        found[Strategy(ins, (P,) * len(op.outputs), how, float(whole))] = None
        if not gathered and not invariant:
            found.update((one, None) for one in _divided_sums(op, analysis, lanes, group, units))
    return [one for one in found if _is_possible(one, op)]


def _forms(tensor: Tensor, lane: Lane, group: Group, units: Mapping[int, Tuple[int, ...]]) -> Iterator[Spec]:
    """All forms of a tensor that whoever only describes it may meet."""
    if lane.kind == BATCH and lane.unit == 0 or lane.kind == VARYING:
        return
    yield R
    yield P
    for dim in range(tensor.rank):
        if lane.kind != BATCH or dim != lane.dim:
            for unit in (1,) + tuple(units.get(tensor.dim(dim) or 0, ())):
                form = _part(tensor, dim, unit, group, R)
                if form is not None:
                    yield form


def alone(lanes: Sequence[Lane], outputs: Sequence[Lane]) -> Strategy:
    """How each lane computes an op for itself."""
    return Strategy(tuple(map(_alone, lanes)), tuple(map(_alone, outputs)))


def _alone(lane: Lane) -> Spec:
    """The form of a tensor when each lane computes for itself."""
    return R if lane.kind == INVARIANT else L


def _with_shapes(axis: Optional[Axis], position: int, lane: Lane) -> Spec:
    """The form of an input that is not divided: whole, or this lane's own shape."""
    return L if axis is not None and position in axis.shapes and lane.kind == VARYING else R


def _gathered(batch: Axis, lanes: Sequence[Lane], base: Strategy, k: int) -> Strategy:
    """Every device computes the op for all lanes."""
    return Strategy(tuple(_with_shapes(batch, i, lane) for i, lane in enumerate(lanes)), (R,) * len(base.outputs), batch.how, float(k))


def _units(op: Op, axis: Axis, units: Mapping[int, Tuple[int, ...]]) -> List[int]:
    """The units in which an axis may be divided: those that its tensors' lengths suggest."""
    found = {1: None}
    for position, (dim, tensor) in enumerate(zip(axis.inputs + axis.outputs, op.inputs + op.outputs)):
        length = None if dim is None else tensor.dim(dim)
        for unit in units.get(length or 0, ()):
            if unit % axis.unit(position) == 0:
                found[unit // axis.unit(position)] = None
    return list(found)


def _divided(op: Op, axis: Axis, lanes: Sequence[Lane], unit: int, group: Group, whole: int) -> Optional[Strategy]:
    ins = tuple(_part(t, d, unit * axis.unit(i), group, _with_shapes(axis, i, lanes[i])) for i, (t, d) in enumerate(zip(op.inputs, axis.inputs)))
    without = P if axis.sums else R
    outs = tuple(
        _part(t, d, unit * axis.unit(i), group, without) for i, (t, d) in enumerate(zip(op.outputs, axis.outputs), len(op.inputs))
    )
    if any(one is None for one in ins + outs):
        return None
    return Strategy(ins, outs, axis.how, whole * group.largest)  # type: ignore[arg-type]


def _part(tensor: Tensor, dim: Optional[int], unit: int, group: Group, without: Spec) -> Optional[Spec]:
    if dim is None:
        return without
    length = tensor.dim(dim) if dim < tensor.rank else None
    if length is None or length % unit or length // unit < group.size:
        return None
    return canonical(S(dim, unit), tensor.shape, group)


def _can_be_parts(special: Special, op: Op, lanes: Sequence[Lane], outputs: Sequence[Lane], group: Group) -> bool:
    """Whether what is divided has a known length that gives each device a part, and is not the samples."""
    for spec, tensor, lane in zip(special.inputs + special.outputs, op.inputs + op.outputs, tuple(lanes) + tuple(outputs)):
        if spec.is_sharded and (_part(tensor, spec.dim, spec.unit, group, spec) is None or lane.kind == BATCH and spec.dim == lane.dim):
            return False
    return True


def _may_be_terms(positions: Sequence[int], lanes: Sequence[Lane], gathered: bool, invariant: bool) -> bool:
    """Whether the inputs of a linear op may all be terms of sums, and nothing else differs between lanes."""
    if gathered:
        return all(lanes[i].kind == BATCH for i in positions)
    if invariant:
        return True
    return all((lane.kind == VARYING) == (i in positions) and lane.kind != BATCH for i, lane in enumerate(lanes))


def _divided_sums(op: Op, analysis: Analysis, lanes: Sequence[Lane], group: Group, units: Mapping[int, Tuple[int, ...]]) -> List[Strategy]:
    """What is linear in sums over the lanes can be computed after they are summed, on a part each."""
    found = []
    for axis in analysis.said.axes:
        for unit in _units(op, axis, units):
            one = _divided(op, axis, lanes, unit, group, 1)
            if one is not None:
                found.append(one)
    return found + [Strategy((R,) * len(op.inputs), (R,) * len(op.outputs))]


def _is_possible(strategy: Strategy, op: Op) -> bool:
    return all(not spec.is_sharded or spec.dim < t.rank for spec, t in zip(strategy.inputs + strategy.outputs, op.inputs + op.outputs))


def moved_bytes(lane: Lane, size: float, source: Spec, target: Spec, group: Group) -> Optional[float]:
    """Bytes that each device sends to bring a tensor into another form, ring algorithms; None where that can't be.

    Args:
      size: bytes of the tensor of one lane.
    """
    k = group.size
    if source == target or k == 1:
        return 0.0
    if target == F:
        return 0.0 if source == R else None
    if source == F:
        return size if target == R else None
    total = size * k if lane.kind == BATCH else size
    if target == L and lane.kind == BATCH and lane.unit == 0:
        return None  # nobody knows how many of the rows are whose
    if target == P or target == L and lane.kind == INVARIANT:
        return None
    part = (k - 1) / k
    if lane.kind == VARYING:
        if source == L:  # terms of the sum
            return 2 * part * total if target == R else part * total
        if target == L:
            return None  # what each lane had is lost in the sum
    elif source == L:
        return part * total if target == R else part * size
    elif target == L:
        return {"R": 0.0, "S": part * size, "P": part * total}[source.kind]
    if source == R:
        return 0.0
    if source == P:
        return 2 * part * total if target == R else part * total
    return part * total if target == R else part * total / k
