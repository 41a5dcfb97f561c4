"""The devices of this process, and the names of all devices of the job."""

from dataclasses import dataclass
from typing import Collection, List, Sequence, Tuple

from epl.errors import ClusterError
from epl.utils.common import get_device_string, get_task_index_from_device_str

GPU = "GPU"
CPU = "CPU"


@dataclass(frozen=True)
class LocalDevice:
    """A device of this process.

    `index` counts them from 0. `name` is the name in plans and on the user's ops,
    `/job:worker/replica:0/task:0/device:GPU:1`. `runtime_name` is the device that
    TensorFlow really runs on: "/device:GPU:k" if it has that GPU, else "/device:CPU:k".
    `kind` is "GPU", real or pretended, or "CPU".
    """

    index: int
    name: str
    runtime_name: str
    kind: str


def device_name(worker: int, kind: str, index: int) -> str:
    """The name of device `index` of a worker."""
    return get_device_string(task=worker, device_type=kind, device_index=index)


def worker_of(device: str) -> int:
    """The worker of a device name. Raises ClusterError when the name tells none."""
    try:
        return get_task_index_from_device_str(device)
    except ValueError as error:
        raise ClusterError(str(error)) from None


def physical_gpus() -> List[str]:
    """TensorFlow's names of the GPUs it sees: "/physical_device:GPU:0", ..."""
    # Imported here, so that laying out a cluster from plain data needs no TensorFlow.
    import tensorflow as tf

    return [device.name for device in tf.config.experimental.list_physical_devices(GPU)]


def share_of_machine(gpus: Sequence[str], local_rank: int, local_size: int) -> List[str]:
    """The GPUs of one of `local_size` processes that see the same GPUs of one machine: equal, neighbouring shares.

    Raises ClusterError when they can't be shared out evenly.
    """
    if len(gpus) % local_size:
        raise ClusterError(
            "%d processes of this machine see the same %d GPUs, which can't be shared out evenly; start as many processes as GPUs, or give each "
            "process its own by CUDA_VISIBLE_DEVICES or cluster.run_visible_devices" % (local_size, len(gpus))
        )
    share = len(gpus) // local_size
    return list(gpus[local_rank * share : (local_rank + 1) * share])


def select_visible(count: int, selection: str) -> List[int]:
    """The positions, among `count` GPUs, that `cluster.run_visible_devices` ("", or "0,2") selects.

    Raises ClusterError for a selection that is no list of numbers or names a GPU that is not there.
    """
    text = str(selection).strip()
    if not text:
        return list(range(count))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts) or len({int(part) for part in parts if part.isdigit()}) != len(parts):
        raise ClusterError("cluster.run_visible_devices = %r; expected different GPU numbers such as '0,2'" % selection)
    ids = [int(part) for part in parts]
    if max(ids) < count:
        return ids
    if len(ids) == count:
        # The same selection was made below us already, by CUDA_VISIBLE_DEVICES for example: these are the ones.
        return list(range(count))
    raise ClusterError(
        "cluster.run_visible_devices = %r names GPU %d, but this worker sees %d GPUs; expected numbers below %d, or ''"
        % (selection, max(ids), count, count)
    )


def choose_devices(worker: int, gpus: Sequence[str], real: Collection[str], selection: str, limit: int) -> Tuple[List[LocalDevice], List[str]]:
    """The devices of this process, and which of `gpus` they are.

    Args:
      worker: the index of this worker.
      gpus: the GPUs this process may use, real or pretended.
      real: TensorFlow's names of real GPUs; those of `gpus` among them are real.
      selection: `cluster.run_visible_devices`.
      limit: `cluster.devices_per_worker`; 0 takes all GPUs, or one CPU without any.

    Raises ClusterError when selection or limit ask for more than there is.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ClusterError("cluster.devices_per_worker = %r; expected 0 (all GPUs, else one CPU) or a number of devices" % (limit,))
    chosen = [gpus[position] for position in select_visible(len(gpus), selection)]
    if not chosen:
        return [LocalDevice(k, device_name(worker, CPU, k), "/device:CPU:%d" % k, CPU) for k in range(limit or 1)], []
    if limit > len(chosen):
        raise ClusterError(
            "cluster.devices_per_worker = %d, but worker %d has %d GPUs%s; set it to at most %d, or to 0 for all of them"
            % (limit, worker, len(chosen), " by cluster.run_visible_devices = %r" % selection if selection else "", len(chosen))
        )
    chosen = chosen[: limit or len(chosen)]
    devices = []
    num_real = 0
    for index, gpu in enumerate(chosen):
        # Real GPUs are renumbered: the session shows TensorFlow only the chosen ones.
        runtime_name = "/device:GPU:%d" % num_real if gpu in real else "/device:CPU:%d" % index
        num_real += gpu in real
        devices.append(LocalDevice(index, device_name(worker, GPU, index), runtime_name, GPU))
    return devices, chosen
