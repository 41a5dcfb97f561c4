"""The devices of one taskgraph."""

from typing import List, Optional, Sequence, Tuple

from epl.cluster.devices import worker_of
from epl.errors import ClusterError

Position = Tuple[int, int]
"""(replica, place in its slice)"""


class VirtualDevice:
    """The devices that one taskgraph runs on: a slice of them for each of its replicas.

    `local_devices` is the part of this worker. The first virtual device's is what lies on
    the worker. That of a later one are the devices at the same positions, wherever
    they lie: those that go with the first one's in a replica of the model.
    """

    def __init__(self, slice_devices: Sequence[Sequence[str]], worker_index: int = 0, index: int = 0, first: "Optional[VirtualDevice]" = None):
        """Take the slices as they are and find those of this worker.

        Args:
          slice_devices: the devices of each replica.
          worker_index: this worker.
          index: the taskgraph it is for.
          first: the first virtual device of the cluster; None if this is the first.

        Raises ClusterError when there is no slice, or a slice without a device.
        """
        if not slice_devices or not all(slice_devices):
            raise ClusterError("virtual device %d has the slices %r; expected at least one, and devices in each" % (index, slice_devices))
        self.index = index
        self._slice_devices: List[List[str]] = [list(devices) for devices in slice_devices]
        self._local_positions = self._own(worker_index) if first is None else self._beside(first, worker_index)
        self.local_devices: Tuple[str, ...] = tuple(self._slice_devices[replica][place] for replica, place in self._local_positions)

    def _own(self, worker: int) -> List[Position]:
        """The positions of the devices of a worker."""
        return [
            (replica, place)
            for replica, devices in enumerate(self._slice_devices)
            for place, device in enumerate(devices)
            if worker_of(device) == worker
        ]

    def _beside(self, first: "VirtualDevice", worker: int) -> List[Position]:
        """The positions that `first` has on this worker.

        A slice of another length than that of `first` has no same positions: it goes
        as a whole with the first device of that one. Another number of replicas
        has no same slices either: there the worker's own devices count.
        """
        if first.num_replicas != self.num_replicas:
            return self._own(worker)
        positions: List[Position] = []
        for replica, devices in enumerate(self._slice_devices):
            theirs = [place for row, place in first._local_positions if row == replica]
            if len(devices) == len(first._slice_devices[replica]):
                positions += [(replica, place) for place in theirs]
            elif 0 in theirs:
                positions += [(replica, place) for place in range(len(devices))]
        return positions

    @property
    def num_replicas(self) -> int:
        return len(self._slice_devices)

    @property
    def local_replicas(self) -> List[int]:
        """The replicas that have local devices, ascending."""
        return sorted({replica for replica, _ in self._local_positions})

    @property
    def all_devices(self) -> List[str]:
        """The devices of all replicas, in their order."""
        return [device for devices in self._slice_devices for device in devices]

    def num_devices(self, replica: int = 0) -> int:
        """The devices of a replica. Raises ClusterError when there is no such replica."""
        return len(self._slice(replica))

    def get_device(self, replica: int, index: int = 0) -> str:
        """Device `index` of a replica. Raises ClusterError when there is none."""
        devices = self._slice(replica)
        if not 0 <= index < len(devices):
            raise ClusterError("replica %d of taskgraph %d has %d devices; there is no device %d" % (replica, self.index, len(devices), index))
        return devices[index]

    def _slice(self, replica: int) -> List[str]:
        if not 0 <= replica < self.num_replicas:
            raise ClusterError("taskgraph %d has %d replicas; there is no replica %d" % (self.index, self.num_replicas, replica))
        return self._slice_devices[replica]

    def __repr__(self) -> str:
        return "VirtualDevice(%d, %r)" % (self.index, self._slice_devices)


def build_virtual_devices(slices: Sequence[Sequence[Sequence[str]]], worker_index: int) -> List[VirtualDevice]:
    """One virtual device for each list of slices."""
    built: List[VirtualDevice] = []
    for index, slice_devices in enumerate(slices):
        built.append(VirtualDevice(slice_devices, worker_index, index, built[0] if built else None))
    return built
