"""Fusing dense gradients into few all-reduces."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

from epl.ir import attrs as A
from epl.ir.build import Builder
from epl.ir.program import Ref
from epl.passes.wires import COMPLEX
from epl.planner.plan import Task

DT_HALF = 19
GROUP_BYTES = 32 << 20
"""A fused group aims at this size."""


def groups_of(sizes: Sequence[int], most: int) -> List[List[int]]:
    """Divide tensors, in order, into contiguous groups of about equal bytes.

    Args:
      sizes: bytes of each tensor.
      most: largest number of groups.

    Returns:
      Lists of positions; together all positions in order.
    """
    total = sum(sizes)
    count = max(1, min(most, len(sizes), -(-total // GROUP_BYTES)))
    groups: List[List[int]] = [[]]
    filled = 0
    for position, size in enumerate(sizes):
        left = count - len(groups)
        if groups[-1] and left and filled + size / 2 > total * len(groups) / count:
            groups.append([])
        groups[-1].append(position)
        filled += size
    return groups


def all_reduce(build: Builder, items: Sequence[Any], task: Task, factor: float, controls: Sequence[str], lane: Optional[int] = None) -> List[Ref]:
    """Sum tensors over the ranks that hold their taskgraph, and scale them.

    Args:
      items: objects with `node` (name), `value`, `dtype`, `size` (bytes), `record` and one `taskgraph`.
      factor: multiplied into the sums.
      lane: only the ranks meet that have this place in their groups; None for all.

    Returns:
      The reduced tensors in the order of `items`.
    """
    results: Dict[int, Ref] = {}
    plan, taskgraph = task.plan, items[0].taskgraph
    among = {"taskgraph": taskgraph} if lane is None else {"taskgraph": taskgraph, "ranks": plan.peers(lane, taskgraph)}
    place = ("taskgraph_%d_" % taskgraph if taskgraph is not None else "") + ("lane_%d_" % lane if lane is not None else "")
    # The gradients of a later call may wait for the update of an earlier one: they can't travel together.
    alike: Dict[Tuple[int, int], List[int]] = {}
    # The last gradients of the graph are ready first: they travel first.
    for position in reversed(range(len(items))):
        alike.setdefault((items[position].record, items[position].dtype), []).append(position)
    for (record, dtype), positions in sorted(alike.items()):
        for number, group in enumerate(groups_of([items[p].size for p in positions], plan.max_splits)):
            members = [positions[g] for g in group]
            name = "epl_all_reduce/%s%d_%d_%d" % (place, record, dtype, number)
            values = [items[p].value for p in members]
            if plan.fp16 and dtype != DT_HALF and dtype not in COMPLEX:
                reduced = _compressed(build, name, values, dtype, task, among, factor, controls)
            else:
                build.op("EplAllReduce", name, values, controls, info=dict(among, dtype=dtype, scale=factor))
                reduced = [(name, i) for i in range(len(values))]
            results.update(zip(members, reduced))
    return [results[p] for p in range(len(items))]


def _compressed(
    build: Builder, name: str, values: Sequence[Ref], dtype: int, task: Task, among: Dict[str, Any], factor: float, controls: Sequence[str]
) -> List[Ref]:
    """All-reduce in float16.

    Each tensor travels divided by the largest magnitude any rank has in it, so that
    neither large nor tiny gradients leave the range of float16. `fp16_scale` is the
    magnitude that the largest element gets, shared by the ranks so that sums fit.
    """
    peaks = []
    for i, value in enumerate(values):
        size = build.op("Abs", "%s/abs_%d" % (name, i), [value], T=A.of_type(dtype))
        flat = build.op("Reshape", "%s/flat_%d" % (name, i), [size, build.const(name + "/all", [-1], 3)], T=A.of_type(dtype), Tshape=A.of_type(3))
        axis = build.const(name + "/axis", 0, 3)
        peaks.append(build.op("Max", "%s/peak_%d" % (name, i), [flat, axis], T=A.of_type(dtype), Tidx=A.of_type(3), keep_dims=A.of_bool(False)))
    packed = build.pack(name + "/peaks", peaks, dtype)
    build.op("EplAllReduce", name + "/peak", [packed], controls, info=dict(among, dtype=dtype, scale=1.0, op="max"))
    tiny = build.const(name + "/tiny", 1e-30, dtype)
    limit = build.op("Maximum", name + "/limit", [(name + "/peak", 0), tiny], T=A.of_type(dtype))
    halves, limits = [], []
    target, ranks = float(task.plan.fp16_scale), len(among["ranks"] if "ranks" in among else task.group(among["taskgraph"]))
    for i, value in enumerate(values):
        peak = build.element("%s/limit_%d" % (name, i), limit, i, dtype)
        limits.append(peak)
        unit = build.op("RealDiv", "%s/unit_%d" % (name, i), [value, peak], T=A.of_type(dtype))
        halves.append(build.cast("%s/half_%d" % (name, i), build.scale("%s/scale_%d" % (name, i), unit, target / ranks, dtype), dtype, DT_HALF))
    build.op("EplAllReduce", name, halves, controls, info=dict(among, dtype=DT_HALF, scale=1.0))
    results = []
    for i in range(len(values)):
        wide = build.cast("%s/wide_%d" % (name, i), (name, i), DT_HALF, dtype)
        back = build.mul("%s/back_%d" % (name, i), wide, limits[i], dtype)
        results.append(build.scale("%s/out_%d" % (name, i), back, factor * ranks / target, dtype))
    return results
