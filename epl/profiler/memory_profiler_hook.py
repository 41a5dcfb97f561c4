"""Live memory over a training step, from TensorFlow's allocation records."""

import contextlib
import os
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import tensorflow.compat.v1 as tf
from absl import logging

from epl.errors import ConfigError


class Allocation(NamedTuple):
    """One buffer: who allocated it, when (microseconds of the step), and how large it is."""

    op: str
    begin: int
    end: Optional[int]
    """When it was freed; None if it outlived the step, as fetched tensors do."""
    bytes: int


class DeviceMemory(NamedTuple):
    """Memory of one device during one step."""

    persistent: int
    """Bytes of variables and constants that the step read; they live before and after it.

    TensorFlow records no address for a resource variable that is only updated, so
    that an optimizer's slots on resource variables are missing.
    """
    times: List[int]
    """When the live memory changed, in microseconds from the beginning of the step."""
    live: List[int]
    """Live bytes from each of `times` on, without the persistent ones."""
    allocations: List[Allocation]

    @property
    def peak(self) -> int:
        """Most bytes alive at once, with the persistent ones."""
        return self.persistent + max(self.live, default=0)

    @property
    def peak_time(self) -> int:
        """When the peak was first reached, in microseconds from the beginning of the step."""
        return self.times[self.live.index(max(self.live))] if self.live else 0

    def at_peak(self, number: int = 10) -> List[Allocation]:
        """The largest buffers that are alive at the peak, the largest first."""
        now = self.peak_time
        alive = [a for a in self.allocations if a.begin <= now and (a.end is None or a.end > now)]
        return sorted(alive, key=lambda a: (-a.bytes, a.begin, a.op))[:number]


def profile_memory(run_metadata: Any) -> Dict[str, DeviceMemory]:
    """Live memory of every device of a traced run: device name -> its memory.

    Args:
      run_metadata: a `tf.RunMetadata` of a run with `trace_level=FULL_TRACE`.
    """
    devices = {}
    stats = [d for d in run_metadata.step_stats.dev_stats if d.node_stats]
    origin = min((n.all_start_micros for d in stats for n in d.node_stats), default=0)
    for device in stats:
        memory = _device_memory(device.node_stats, origin)
        if memory.allocations or memory.persistent:
            devices[device.device] = memory
    return devices


def _device_memory(node_stats: Any, origin: int) -> DeviceMemory:
    allocations: List[Allocation] = []
    persistent: Dict[Any, int] = {}
    for node in node_stats:
        for memory in node.memory:
            allocations.extend(_allocations(node.node_name, memory.allocation_records, origin))
        # Several nodes may name one buffer, as a variable and its reads do: count by address.
        if node.memory_stats.persistent_memory_size:
            buffers = [o.tensor_description.allocation_description.ptr for o in node.output]
            persistent[buffers[0] if buffers else node.node_name] = node.memory_stats.persistent_memory_size
        elif " = ReadVariableOp(" in node.timeline_label:
            for output in node.output:
                buffer = output.tensor_description.allocation_description
                persistent[buffer.ptr] = buffer.requested_bytes
    changes: Dict[int, int] = {}
    for allocation in allocations:
        changes[allocation.begin] = changes.get(allocation.begin, 0) + allocation.bytes
        if allocation.end is not None:
            changes[allocation.end] = changes.get(allocation.end, 0) - allocation.bytes
    times = sorted(changes)
    live: List[int] = []
    for time in times:
        live.append((live[-1] if live else 0) + changes[time])
    return DeviceMemory(sum(persistent.values()), times, live, allocations)


def _allocations(op: str, records: Any, origin: int) -> List[Allocation]:
    """Pair allocations with the first later release of the same size."""
    opened: List[Tuple[int, int]] = []
    found: List[Allocation] = []
    for record in sorted(records, key=lambda r: r.alloc_micros):
        time, size = record.alloc_micros - origin, record.alloc_bytes
        if size > 0:
            opened.append((time, size))
            continue
        for i, (begin, bytes_) in enumerate(opened):
            if bytes_ == -size:
                found.append(Allocation(op, begin, time, bytes_))
                del opened[i]
                break
    return found + [Allocation(op, begin, None, bytes_) for begin, bytes_ in opened]


class MemoryProfilerHook(tf.train.SessionRunHook):
    """Records the memory of every `save_steps`-th run of a monitored session.

    Files of run number k (counted from 1): `run_metadata_<k>.bin`, the serialised
    `tf.RunMetadata`, and `memory_<k>.png`, live memory over the step.

    Args:
      save_steps: distance between two recorded runs. A traced run is slower.
      max_steps: last run that may be recorded; None for no limit.
      output_dir: folder of the files; created when missing.
      dump_metadata: write the metadata.
      visualize: draw the picture.

    Raises:
      ValueError: a number of steps below 1.
    """

    def __init__(
        self,
        save_steps: int = 100,
        max_steps: Optional[int] = None,
        output_dir: str = ".",
        dump_metadata: bool = False,
        visualize: bool = True,
    ):
        for name, value in (("save_steps", save_steps), ("max_steps", max_steps)):
            if value is not None and value < 1:
                raise ConfigError("%s=%r: expected a number of runs, 1 or more" % (name, value))
        self._save_steps = save_steps
        self._max_steps = max_steps
        self._output_dir = output_dir
        self._dump_metadata = dump_metadata
        self._visualize = visualize
        self._runs = 0
        self.peaks: Dict[int, Dict[str, int]] = {}
        """Run number -> device name -> peak bytes of the recorded runs."""

    def before_run(self, run_context: Any) -> Optional[Any]:
        self._runs += 1
        if not self._is_recorded():
            return None
        return tf.train.SessionRunArgs(None, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE))

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if not self._is_recorded():
            return
        metadata = run_values.run_metadata
        devices = profile_memory(metadata)
        self.peaks[self._runs] = {device: memory.peak for device, memory in devices.items()}
        for device, memory in sorted(devices.items()):
            largest = ", ".join("%s %s" % (a.op, format_bytes(a.bytes)) for a in memory.at_peak(3))
            logging.info("Memory in run %d on %s: peak %s, largest: %s", self._runs, device, format_bytes(memory.peak), largest or "none")
        os.makedirs(self._output_dir, exist_ok=True)
        if self._dump_metadata:
            path = os.path.join(self._output_dir, "run_metadata_%d.bin" % self._runs)
            with _new_file(path) as partial, open(partial, "wb") as out:
                out.write(metadata.SerializeToString())
        if self._visualize:
            draw_memory(devices, os.path.join(self._output_dir, "memory_%d.png" % self._runs), "Run %d" % self._runs)

    def _is_recorded(self) -> bool:
        return self._runs % self._save_steps == 0 and (self._max_steps is None or self._runs <= self._max_steps)


def format_bytes(number: float) -> str:
    """A number of bytes with a binary unit, for example "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024.0
    return "%.4g %s" % (number, unit) if unit != "B" else "%d B" % number


def draw_memory(devices: Dict[str, DeviceMemory], path: str, title: str) -> None:
    """Draw live memory over the step, one panel per device, into a PNG file."""
    # Without pyplot: it would pick a display and keep every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1 + 3 * max(1, len(devices))))
    FigureCanvasAgg(figure)
    panels = figure.subplots(max(1, len(devices)), 1, squeeze=False)[:, 0]
    figure.suptitle(title)
    for panel, (device, memory) in zip(panels, sorted(devices.items())):
        unit, factor = ("MiB", 2.0**20) if memory.peak >= 2**20 else ("KiB", 2.0**10)
        base = memory.persistent / factor
        milliseconds = [t / 1000.0 for t in memory.times]
        values = [base + v / factor for v in memory.live]
        panel.fill_between(milliseconds, values, base, step="post", label="of the step")
        panel.axhspan(0, base, color="0.8", label="variables and constants")
        panel.plot([memory.peak_time / 1000.0], [memory.peak / factor], "rv", label="peak %s" % format_bytes(memory.peak))
        panel.set_title(device, fontsize=9)
        panel.set_xlabel("ms")
        panel.set_ylabel(unit)
        panel.set_ylim(0, 1.1 * memory.peak / factor + 1e-9)
        panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.tight_layout()
    with _new_file(path) as partial:
        figure.savefig(partial, format="png")


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[str]:
    """A name to write to, which then becomes `path`: a reader sees the old file or all of the new one."""
    partial = "%s.%d.tmp" % (path, os.getpid())
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
