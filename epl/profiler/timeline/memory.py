"""What the devices of a rank held in the recorded steps, by TensorFlow's allocator, beside what the program foretells."""

from collections import Counter
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from epl.ir.program import Program, Ref, Shape
from epl.planner.cost.liveness import UNKNOWN, held_bytes
from epl.planner.plan import Task
from epl.profiler.memory_profiler_hook import profile_memory


def memory_of(runs: Iterable[Tuple[Program, Mapping[str, str], Any]], task: Task) -> List[Dict[str, Any]]:
    """For each device with memory of its own what it held: bytes of `variables`, `peak` of other tensors, and its `predicted` value.

    Args:
      runs: of each recorded run the compiled program, for each node its name in TensorFlow's graph, and the run's metadata.
    """
    found: Dict[str, Dict[str, Any]] = {}
    foretold: Dict[int, Any] = {}
    for program, names, metadata in runs:
        if id(program) not in foretold:
            foretold[id(program)] = held_bytes(program, _shapes(program), rows_of(program, names, metadata))
        for device, held in foretold[id(program)].items():
            row = found.setdefault(_short(device), {"variables": 0.0, "peak": 0.0, "predicted": 0.0})
            row["variables"] = max(row["variables"], held.variables)
            row["predicted"] = max(row["predicted"], held.peak)
        for device, memory in profile_memory(metadata).items():
            if _short(device) in found:
                row = found[_short(device)]
                row["peak"] = max(row["peak"], float(max(memory.live, default=0)))
    stages: Dict[str, List[int]] = {}
    for local in task.stages:
        for stage, device in enumerate(local):
            if device:
                stages.setdefault(_short(device), []).append(stage)
    return [dict(row, rank=task.rank, device=device, stages=sorted(set(stages.get(device, [])))) for device, row in sorted(found.items())]


def rows_of(program: Program, names: Mapping[str, str], metadata: Any) -> int:
    """The length of most dimensions that the script leaves open: the samples of a micro-batch."""
    open_lengths = {names[node.name]: node for node in program.nodes.values() if node.name in names and _is_open(program, (node.origin, 0))}
    seen: Dict[int, int] = Counter()
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            if node.node_name in open_lengths and node.output:
                dims = node.output[0].tensor_description.shape.dim
                if dims:
                    seen[dims[0].size] += 1
    return max(seen, key=lambda size: (seen[size], size)) if seen else UNKNOWN


def _is_open(program: Program, ref: Ref) -> bool:
    shape = program.shape_of(ref) if ref[0] else None
    return shape is not None and len(shape) > 1 and shape[0] is None and None not in shape[1:]


def _shapes(program: Program) -> Any:
    def shape_of(ref: Ref) -> Shape:
        origin = program.nodes[ref[0]].origin
        return program.shape_of((origin, ref[1])) if origin else None

    return shape_of


def _short(device: str) -> str:
    """"CPU:0", of a device with its job and task or without."""
    return device.rpartition("/device:")[2] or "CPU:0"


def text(rows: List[Dict[str, Any]]) -> Optional[str]:
    """The table of a report, in MB (10^6 bytes); None where nothing was recorded."""
    if not rows:
        return None
    lines = ["%-24s%-10s%12s%12s%12s" % ("memory in MB", "stages", "variables", "peak", "predicted")]
    for row in rows:
        numbers = tuple(row[key] / 1e6 for key in ("variables", "peak", "predicted"))
        lines.append("%-24s%-10s%12.1f%12.1f%12.1f" % (("rank %d %s" % (row["rank"], row["device"]), ", ".join(map(str, row["stages"]))) + numbers))
    return "\n".join(lines)
