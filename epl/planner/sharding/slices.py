"""Slices of saved tensors, as TensorFlow describes them."""

from typing import List

from epl.ir.program import Program
from epl.planner.sharding.spec import Group, Spec


def slice_text(given: str, shape: List[int], dim: int, begin: int, length: int) -> str:
    """TensorFlow's description of a slice: "4 10 0,4:5,5" are columns 5 to 9 of a matrix of 4 times 10.

    Args:
      given: the description of the tensor, "" for a whole one; a part of it is described.
      shape: of that tensor.
      dim, begin, length: the part.
    """
    whole, ranges = list(shape), [(0, n) for n in shape]
    if given:
        *lengths, spans = given.split(" ")
        whole = [int(n) for n in lengths]
        ranges = [(0, n) if span == "-" else (int(span.split(",")[0]), int(span.split(",")[1])) for n, span in zip(whole, spans.split(":"))]
    ranges[dim] = (ranges[dim][0] + begin, length)
    spans = ":".join("-" if span == (0, n) else "%d,%d" % span for n, span in zip(whole, ranges))
    return " ".join([str(n) for n in whole] + [spans])


def lane_slices(program: Program, variable: str, form: Spec, given: str, group: Group) -> List[str]:
    """The description of each lane's part of a divided variable."""
    proto = program.nodes[variable].attr("shape")
    assert proto is not None
    shape = [d.size for d in proto.shape.dim]
    bounds = group.bounds(shape[form.dim], form.unit)
    return [slice_text(given, shape, form.dim, begin, end - begin) for begin, end in zip(bounds, bounds[1:])]
