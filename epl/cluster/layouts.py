"""Which devices form a virtual device, computed from plain data.

A slice is the list of devices that one replica of a taskgraph uses. A virtual device
is a list of slices, one per replica; there is one virtual device per taskgraph.
Workers are "worker-major" lists: all devices of worker 0, then those of worker 1, ...
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from epl.cluster.devices import device_name, worker_of
from epl.cluster.hosts import machine_of
from epl.errors import ClusterError

Slices = List[List[str]]
Layout = Union[str, Dict[str, Any]]

_EXPECTED = "expected 'all', 'auto', {'specific': [[[device, ...], ...], ...]} or {'aware_row': workers of a virtual device}"


def parse_layout(layout: Layout) -> Tuple[str, Any]:
    """(name, value) of a layout argument; the value of "all" and "auto" is None.

    Raises ClusterError for an unknown layout, or a missing or superfluous value.
    """
    if isinstance(layout, str):
        name, value = layout, None
    elif isinstance(layout, dict) and len(layout) == 1:
        name, value = next(iter(layout.items()))
    else:
        raise ClusterError("layout = %r; %s" % (layout, _EXPECTED))
    if name not in ("all", "auto", "specific", "aware_row"):
        raise ClusterError("unknown layout %r; %s" % (name, _EXPECTED))
    if (name in ("specific", "aware_row")) != (value is not None):
        raise ClusterError("layout %r %s value; %s" % (name, "needs a" if value is None else "takes no", _EXPECTED))
    return name, value


def worker_devices(num_workers: int, kind: str, num_devices: int) -> List[List[str]]:
    """The device names of every worker."""
    return [[device_name(worker, kind, index) for index in range(num_devices)] for worker in range(num_workers)]


def all_devices(workers: Sequence[Sequence[str]]) -> List[Slices]:
    """Layout "all": one virtual device with a slice for each device, worker-major."""
    return [[[device] for devices in workers for device in devices]]


def specific(value: Any, num_workers: int) -> List[Slices]:
    """Layout "specific": the given slices of each virtual device, as they are.

    Raises ClusterError for another nesting, or a device of a worker that does not exist.
    """
    if not _nested(value, 3):
        raise ClusterError("layout {'specific': %r}; expected virtual devices as lists of slices, slices as lists of device names" % (value,))
    for slices in value:
        for devices in slices:
            for device in devices:
                if worker_of(device) >= num_workers:
                    raise ClusterError("layout 'specific' names %r, but there are %d workers, 0 to %d" % (device, num_workers, num_workers - 1))
    return [[list(devices) for devices in slices] for slices in value]


def _nested(value: Any, depth: int) -> bool:
    """Whether value is `depth` levels of non-empty lists around strings."""
    if depth == 0:
        return isinstance(value, str)
    return isinstance(value, (list, tuple)) and bool(value) and all(_nested(item, depth - 1) for item in value)


def group_by_machine(hosts: Sequence[str]) -> List[int]:
    """The order of workers in which those of one machine are neighbours.

    Machines come in order of their first worker, so worker 0 stays the first.
    Entry w is the old index of the new worker w.
    """
    machines: Dict[str, List[int]] = {}
    for index, host in enumerate(hosts):
        machines.setdefault(machine_of(host), []).append(index)
    return [index for members in machines.values() for index in members]


def aware_row(workers: Sequence[Sequence[str]], per_device: int) -> List[Slices]:
    """Layout "aware_row": a virtual device for each `per_device` consecutive workers, with a slice for each of their devices.

    Raises ClusterError when the workers can't be divided so.
    """
    if isinstance(per_device, bool) or not isinstance(per_device, int) or per_device < 1:
        raise ClusterError("layout {'aware_row': %r}; expected the number of workers of a virtual device, from 1" % (per_device,))
    if len(workers) % per_device:
        raise ClusterError(
            "layout {'aware_row': %d} can't divide %d workers into virtual devices of %d; choose a divisor of %d"
            % (per_device, len(workers), per_device, len(workers))
        )
    starts = range(0, len(workers), per_device)
    return [[[device] for devices in workers[start : start + per_device] for device in devices] for start in starts]


def resolve_counts(device_counts: Sequence[Optional[int]], is_split: Sequence[bool], total: int) -> List[int]:
    """The devices per model replica of each taskgraph.

    A count of None means 1 for a replicate taskgraph (or one without a strategy) and
    all `total` devices for a split one. Raises ClusterError for a count below 1.
    """
    if not device_counts:
        raise ClusterError("there is no taskgraph to lay out; expected at least one device count")
    splits = list(is_split) or [False] * len(device_counts)
    if len(splits) != len(device_counts):
        raise ClusterError("%d device counts, but %d marks of split taskgraphs; expected as many" % (len(device_counts), len(splits)))
    counts = [(total if split else 1) if count is None else count for count, split in zip(device_counts, splits)]
    for index, count in enumerate(counts):
        if count < 1:
            raise ClusterError("taskgraph %d asks for %d devices; expected at least 1" % (index, count))
    return counts


def place_taskgraphs(devices: Sequence[str], counts: Sequence[int], colocate: bool = False, prefer_intra_node: bool = True) -> List[Slices]:
    """The slices of each taskgraph on the worker-major list of all devices.

    Taskgraph t uses counts[t] devices per replica of the model. A replica of the model
    uses the sum of the counts, or the largest count with `colocate`, where the
    taskgraphs share the replica's devices from its first one on.

    `prefer_intra_node`: a replica of the model occupies neighbouring devices, so that it
    stays within a node wherever it fits. Else stages come first: taskgraph 0 takes the
    first devices for all its replicas, then taskgraph 1, so that the replicas of one stage
    are neighbours and the stages lie across the nodes. Colocated taskgraphs are one
    block, where both orders are the same.

    Raises ClusterError when the devices don't suffice or can't be divided.
    """
    per_replica = max(counts) if colocate else sum(counts)
    replicas = _num_replicas(len(devices), counts, per_replica, colocate)
    placed: List[Slices] = []
    offset = 0
    for count in counts:
        if colocate or prefer_intra_node:
            starts = [replica * per_replica + offset for replica in range(replicas)]
        else:
            starts = [replicas * offset + replica * count for replica in range(replicas)]
        placed.append([list(devices[start : start + count]) for start in starts])
        offset += 0 if colocate else count
    return placed


def _num_replicas(total: int, counts: Sequence[int], per_replica: int, colocate: bool) -> int:
    """How many replicas of the model `total` devices hold. Raises ClusterError."""
    if total >= per_replica and total % per_replica == 0:
        return total // per_replica
    how = "max" if colocate else "sum"
    need = "one replica of the model needs %d devices (%s of the taskgraphs' device counts %s)" % (per_replica, how, list(counts))
    if total < per_replica:
        hint = "add devices or lower the device_count of a scope"
        if not colocate and max(counts) <= total:
            hint += ", or set cluster.colocate_split_and_replicate = True to let the taskgraphs share devices"
        raise ClusterError("%s, but the cluster has only %d; %s" % (need, total, hint))
    below, above = total - total % per_replica, total + per_replica - total % per_replica
    raise ClusterError(
        "%s, and the cluster's %d devices are no multiple of it; use %d or %d devices, or other device_counts" % (need, total, below, above)
    )
