"""From the annotated graph and the cluster to a plan."""

from typing import Any, List, Tuple

from epl.cluster.devices import LocalDevice
from epl.env import Env
from epl.errors import ProgramError
from epl.planner.plan import Plan


def make_plan(graph: Any) -> Plan:
    """The plan of an annotated graph (`epl.ir.graph.Graph`) on the environment's cluster.

    Raises:
      ProgramError: the annotations ask for what this version can't run.
      ConfigError: options that don't exist.
    """
    env = Env.get()
    config, cluster = env.config, env.cluster
    config.check_program_options()
    taskgraphs = list(graph.taskgraphs)
    counts = [t.device_count or 1 for t in taskgraphs]
    _refuse_unsupported(taskgraphs, config, cluster)
    stages = len(taskgraphs) if len(taskgraphs) > 1 and not config.cluster.colocate_split_and_replicate else 1
    per_replica = sum(counts) if stages > 1 else 1
    return Plan(
        ranks=cluster.worker_num,
        devices_per_rank=cluster.gpu_num_per_worker // per_replica,
        micro_batches=config.pipeline.num_micro_batch,
        accumulate_in_run=config.pipeline.accumulate_in_run or stages > 1,
        reduce_method=config.communication.gradients_reduce_method,
        aggregate_at="raw" if config.communication.clip_after_allreduce else config.communication.aggregate_at,
        statistics_reduce=config.communication.statistics_reduce,
        sparse_as_dense=config.communication.sparse_as_dense,
        max_splits=config.communication.max_splits,
        fp16=config.communication.fp16,
        fp16_scale=config.communication.fp16_scale,
    )


def _refuse_unsupported(taskgraphs: List[Any], config: Any, cluster: Any) -> None:
    several = len(taskgraphs) > 1 and not config.cluster.colocate_split_and_replicate
    for taskgraph in taskgraphs:
        if taskgraph.is_split and cluster.total_gpu_num > 1:
            raise ProgramError(
                "Taskgraph %d is annotated with %r; this version does not shard a taskgraph over %d devices. "
                "Use epl.replicate, or run on one device" % (taskgraph.index, taskgraph.strategy, cluster.total_gpu_num)
            )
    if several and any((t.device_count or 1) > 1 for t in taskgraphs):
        raise ProgramError("Stages with device_count > 1 are not run by this version; give each stage of the pipeline one device")
    if several and cluster.worker_num > 1 and cluster.gpu_num_per_worker % len(taskgraphs):
        raise ProgramError(
            "The program has %d stages, and each process has %d device(s); this version runs all stages of a replica in one process. "
            "Give each process a multiple of %d devices" % (len(taskgraphs), cluster.gpu_num_per_worker, len(taskgraphs))
        )


def local_devices(graph: Any, plan: Plan) -> Tuple[Tuple[str, ...], Tuple[Tuple[str, ...], ...]]:
    """Runtime names of the local devices: (first device of each local replica, all stages of each)."""
    cluster = Env.get().cluster
    names = {d.name: d.runtime_name for d in cluster.local_devices()}
    devices: List[LocalDevice] = cluster.local_devices()
    taskgraphs = graph.taskgraphs
    if plan.devices_per_rank == len(devices):
        return tuple(d.runtime_name for d in devices), ()
    rows = []
    for replica in taskgraphs[0].virtual_device.local_replicas:
        rows.append(tuple(names[t.virtual_device.get_device(replica, 0)] for t in taskgraphs))
    return tuple(row[0] for row in rows), tuple(rows)
