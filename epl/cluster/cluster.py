"""Cluster: the workers of the job and their devices, as this process sees them."""

import contextlib
import os
from typing import Any, List, Optional, Sequence, Tuple

from epl.cluster import layouts
from epl.cluster.default_device import default_device
from epl.cluster.devices import LocalDevice, choose_devices, physical_gpus, share_of_machine
from epl.cluster.hosts import Hosts, Membership, check_ranks, from_arguments, from_ranks
from epl.cluster.layouts import Layout
from epl.cluster.tf_config import parse_tf_config
from epl.cluster.virtual_device import VirtualDevice, build_virtual_devices
from epl.env import Env

# The module, not its names: it imports parts of this package itself.
from epl.runtime import ranks


class Cluster:
    """The workers of the job and their devices.

    The workers come from the arguments if `worker_hosts` is given, else from TF_CONFIG,
    else from the launcher's ranks (mpirun, horovodrun), else there is one. A launcher's
    ranks must agree with the hosts that arguments or TF_CONFIG name.
    Every worker has as many devices as this one. They are called GPUs when
    `available_gpus()` is not empty, else CPUs.

    As a context manager it is the environment's cluster meanwhile, and the worker's first
    accelerator, if there is any, is the default device of the default tf.Graph.
    """

    def __init__(self, worker_hosts: Hosts = None, ps_hosts: Hosts = None, job_name: str = "worker", worker_index: int = 0, layout: Layout = "all"):
        """Find the workers and the devices of this process, and lay them out.

        Args:
          worker_hosts: addresses, "h1:8000,h2:8000" or a list.
          ps_hosts: further addresses, which are workers too, after the others.
          job_name: "worker" or "ps": which list `worker_index` counts in.
          worker_index: this process.
          layout: "all": one virtual device over all devices. "auto": none until
            `generate_virtual_devices`. {"specific": [[[device, ...], ...], ...]}: virtual
            devices, slices and devices as given. {"aware_row": n}: workers regrouped
            by machine, n consecutive ones to a virtual device.

        Raises ClusterError for anything that can't be, or does not fit.
        """
        layout_name, layout_value = layouts.parse_layout(layout)
        member = _find_members(worker_hosts, ps_hosts, job_name, worker_index)
        order = layouts.group_by_machine(member.hosts) if layout_name == "aware_row" else list(range(len(member.hosts)))
        self.hosts: Tuple[str, ...] = tuple(member.hosts[rank] for rank in order)
        """The address of each worker."""
        self.ranks: Tuple[int, ...] = tuple(order)
        """The rank of each worker; other than its index only where workers were regrouped."""
        self.worker_index: int = order.index(member.index)
        self.is_evaluator: bool = member.is_evaluator

        settings = Env.get().config.cluster
        gpus = list(self.available_gpus())
        self._real_gpus = physical_gpus() if gpus else []
        self._local_devices, chosen = choose_devices(
            self.worker_index, gpus, self._real_gpus, settings.run_visible_devices, settings.devices_per_worker
        )
        self._chosen_gpus = [gpu for gpu in chosen if gpu in self._real_gpus]
        self._workers = layouts.worker_devices(self.worker_num, self._local_devices[0].kind, len(self._local_devices))
        self.virtual_devices: List[VirtualDevice] = build_virtual_devices(self._lay_out(layout_name, layout_value), self.worker_index)
        """One per taskgraph; a single one while the layout is still "all"."""
        self._entered: List[contextlib.ExitStack] = []

    def available_gpus(self) -> List[str]:
        """The GPUs this process may use, before `cluster.run_visible_devices`.

        Asked anew by each cluster. Processes that a launcher started on one machine, and
        that nothing else keeps apart, share its GPUs out among them; ClusterError when
        they can't.
        """
        gpus = physical_gpus()
        launched = ranks.launched_ranks()
        kept_apart = os.environ.get("CUDA_VISIBLE_DEVICES") or Env.get().config.cluster.run_visible_devices
        if not gpus or launched is None or kept_apart:
            return gpus
        return share_of_machine(gpus, launched.local_rank, launched.local_size)

    @property
    def worker_num(self) -> int:
        return len(self.hosts)

    @property
    def gpu_num_per_worker(self) -> int:
        """The devices of one worker, of whatever kind."""
        return len(self._local_devices)

    @property
    def total_gpu_num(self) -> int:
        """The devices of all workers, of whatever kind."""
        return self.worker_num * self.gpu_num_per_worker

    @property
    def available_devices(self) -> List[str]:
        """The device names of this worker."""
        return [device.name for device in self._local_devices]

    @property
    def all_devices(self) -> List[str]:
        """The device names of all workers, worker by worker."""
        return [device for devices in self._workers for device in devices]

    @property
    def visible_device_list(self) -> str:
        """`gpu_options.visible_device_list` for sessions of this process; "" when it may use all GPUs."""
        if self._chosen_gpus in ([], self._real_gpus):
            return ""
        return ",".join(gpu.rpartition(":")[2] for gpu in self._chosen_gpus)

    @property
    def _cluster_spec(self) -> Any:
        """The hosts as a tf.train.ClusterSpec with the one job "worker"."""
        import tensorflow as tf

        return tf.train.ClusterSpec({"worker": list(self.hosts)})

    def local_devices(self) -> List[LocalDevice]:
        """The devices of this process, with the names that TensorFlow runs them by."""
        return list(self._local_devices)

    def generate_virtual_devices(
        self,
        device_counts: Sequence[Optional[int]],
        colocate: bool = False,
        prefer_intra_node: bool = True,
        is_split: Sequence[bool] = (),
        chunks: Sequence[int] = (),
    ) -> List[VirtualDevice]:
        """Lay the taskgraphs out on all devices; sets and returns `virtual_devices`, one per taskgraph.

        Args:
          device_counts: the devices of each taskgraph in one replica of the model. None
            means 1, and for a split taskgraph all devices of the cluster.
          colocate: the taskgraphs share the devices of a replica.
          prefer_intra_node: a replica takes neighbouring devices; else each stage does
            (see `layouts.place_taskgraphs`).
          is_split: which taskgraphs are split; none by default.
          chunks: the device of a replica that each taskgraph is on, when devices hold
            several of one device each.

        The devices divided by those of a replica (sum of the counts, or the largest with
        `colocate`) make the number of replicas; ClusterError when that does not divide.
        """
        counts = layouts.resolve_counts(device_counts, is_split, self.total_gpu_num)
        if chunks:
            placed = layouts.place_taskgraphs(self.all_devices, [1] * (max(chunks) + 1), False, prefer_intra_node)
            slices = [placed[device] for device in chunks]
        else:
            slices = layouts.place_taskgraphs(self.all_devices, counts, colocate, prefer_intra_node)
        self.virtual_devices = build_virtual_devices(slices, self.worker_index)
        return self.virtual_devices

    def _lay_out(self, name: str, value: Any) -> List[layouts.Slices]:
        if name == "all":
            return layouts.all_devices(self._workers)
        if name == "specific":
            return layouts.specific(value, self.worker_num)
        if name == "aware_row":
            return layouts.aware_row(self._workers, value)
        return []

    def __enter__(self) -> "Cluster":
        stack = contextlib.ExitStack()
        name = default_device(self)
        if name is not None:
            import tensorflow as tf

            stack.enter_context(tf.compat.v1.get_default_graph().device(name))
        stack.callback(_restore_cluster, self, Env.get().cluster)
        Env.get().cluster = self
        self._entered.append(stack)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.pop().close()

    def __repr__(self) -> str:
        return "Cluster(worker %d of %d, %d devices each)" % (self.worker_index, self.worker_num, self.gpu_num_per_worker)


def _restore_cluster(left: Cluster, previous: Optional[Cluster]) -> None:
    """Make the environment's cluster what it was, unless someone else (`epl.init`) has set it meanwhile."""
    if Env.get().cluster is left:
        Env.get().cluster = previous


def _find_members(worker_hosts: Hosts, ps_hosts: Hosts, job_name: str, worker_index: int) -> Membership:
    """The workers of the job. Raises ClusterError when two sources disagree."""
    launched = ranks.launched_ranks()
    described_by = "worker_hosts"
    member = from_arguments(worker_hosts, ps_hosts, job_name, worker_index)
    if member is None:
        described_by = "TF_CONFIG"
        member = parse_tf_config(os.environ.get("TF_CONFIG"))
    if member is None:
        return from_ranks(launched.rank, launched.size) if launched else from_ranks(0, 1)
    if launched is not None:
        check_ranks(member, launched.rank, launched.size, described_by)
    return member
