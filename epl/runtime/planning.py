"""From the annotated graph and the cluster to a plan."""

import functools
import math
from typing import Any, Dict, List, Tuple

from epl.cluster.devices import worker_of
from epl.env import Env
from epl.errors import ConfigError, ProgramError
from epl.planner.plan import WHOLE, Plan, Task
from epl.planner.schedules import make_schedule


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
    _refuse_unsupported(taskgraphs, config)
    lanes, copies = _lanes(taskgraphs, config, cluster)
    # A graph that trains nothing is not shared: each process runs it for itself.
    trains = graph.need_parallel and graph.trains
    zero = config.zero.level if trains else ""
    stages = len(taskgraphs) if len(taskgraphs) > 1 and not config.cluster.colocate_split_and_replicate else 1
    rows = _rows(taskgraphs) if stages > 1 and not env.whole_models else ()
    per_replica = len({t.virtual_device.get_device(0, 0) for t in taskgraphs}) if rows else 0
    whole = [sum(set(row) == {rank} for row in rows) for rank in range(cluster.worker_num)]
    spread = bool(rows) and (sum(whole) < len(rows) or len(set(whole)) > 1)
    if spread and env.deals_files:
        raise ProgramError(
            "io.slicing has dealt the input files to all %d workers, but only the workers of a first stage read: with the stages of a replica in "
            "several processes some files would never be read. Switch io.slicing off and choose the files of each first stage in the script, or "
            "put all stages of a replica into one process" % cluster.worker_num
        )
    if copies > cluster.gpu_num_per_worker and env.deals_files:
        raise ProgramError(
            "io.slicing has dealt the input files to all %d workers, but only the worker of the first device of each group of %d reads. Switch "
            "io.slicing off and choose the files of each group in the script" % (cluster.worker_num, copies)
        )
    if zero:
        _refuse_with_zero(lanes, config)
        lanes = len(rows) or cluster.total_gpu_num
        zero = zero if lanes > 1 else ""
    streams = (len(rows) or cluster.total_gpu_num) // copies
    if rows:
        make_schedule(config.pipeline.strategy, stages, config.pipeline.num_micro_batch, per_replica)
    return Plan(
        ranks=cluster.worker_num,
        devices_per_rank=0 if spread else whole[0] if rows else cluster.gpu_num_per_worker,
        micro_batches=config.pipeline.num_micro_batch,
        accumulate_in_run=config.pipeline.accumulate_in_run or stages > 1 or lanes > 1 and not zero,
        reduce_method=config.communication.gradients_reduce_method,
        aggregate_at="raw" if config.communication.clip_after_allreduce else config.communication.aggregate_at,
        statistics_reduce=config.communication.statistics_reduce,
        sparse_as_dense=config.communication.sparse_as_dense,
        max_splits=config.communication.max_splits,
        fp16=config.communication.fp16,
        fp16_scale=config.communication.fp16_scale,
        apply_groups=config.optimizer.num_apply_group,
        schedule=config.pipeline.strategy,
        places=rows if spread else (),
        pipeline_devices=per_replica if per_replica < stages and rows else 0,
        lanes=lanes,
        split=tuple(t.index for t in taskgraphs if t.is_split) if lanes > 1 else (),
        copies=copies,
        narrow=tuple(t.index for t in taskgraphs if t.virtual_device.num_devices(0) == 1) if lanes > 1 and stages > 1 and not zero else (),
        shares=_shares(config.cluster.split_shares, lanes),
        batch_shares=_batch_shares(config.cluster.batch_shares, lanes > 1 and not zero, streams) if trains else (),
        amp=config.amp.dtype if config.amp.level else "",
        loss_scale=0.0 if config.amp.loss_scale == "dynamic" else float(config.amp.loss_scale),
        offload=config.offload.level,
        zero=zero,
        recompute=config.gradient_checkpoint.type,
        recompute_last=config.gradient_checkpoint.end_taskgraph,
        recompute_limit=config.gradient_checkpoint.memory_limit,
        check_gradients=config.gradient_checkpoint.check_gradients and bool(config.gradient_checkpoint.type),
    )


def _lanes(taskgraphs: List[Any], config: Any, cluster: Any) -> Tuple[int, int]:
    """(Devices that share the taskgraphs of `split` scopes, lanes that compute one batch together); 1 where there is nothing to share.

    Raises ProgramError for layouts that this version does not divide.
    """
    divided = [t for t in taskgraphs if t.is_split]
    whole = [t for t in taskgraphs if not t.is_split]
    total = cluster.total_gpu_num
    counts = {t.virtual_device.num_devices(0) for t in divided}
    if not divided or counts == {1} or total == 1:
        return 1, 1
    lanes = max(counts)
    if len(counts) > 1 or config.cluster.colocate_split_and_replicate and total % lanes:
        raise ProgramError(
            "Taskgraphs are split over %s devices of %d: expected one number for all of them that divides the devices of the job. "
            "Give all epl.split scopes the same device_count" % (sorted(counts), total)
        )
    replicated = {t.virtual_device.num_devices(0) for t in whole}
    if len(replicated) > 1 or not replicated <= {1, lanes}:
        raise ProgramError(
            "Taskgraphs are split over %d devices, others replicated over %s: expected one number for these, either %d, where each device has "
            "batches of its own, or 1, where the %d devices compute one batch together" % (lanes, sorted(replicated), lanes, lanes)
        )
    return lanes, 1 if replicated == {lanes} else lanes


def _refuse_with_zero(lanes: int, config: Any) -> None:
    """Raises ConfigError for options that do not go with ZeRO."""
    if lanes > 1:
        raise ConfigError(
            "zero.level divides the state of the optimizer over the replicas, and epl.split divides variables over %d devices: both together "
            "are not supported. Set zero.level to '' or take the split scopes away" % lanes
        )
    if config.cluster.split_shares:
        raise ConfigError("zero.level does not use cluster.split_shares, which is %r. Leave one of them out" % config.cluster.split_shares)


def _shares(text: str, lanes: int) -> Tuple[int, ...]:
    """The weights of the lanes; none for equal parts. Raises ConfigError for another number of them."""
    if not text or lanes == 1:
        return ()
    shares = tuple(map(int, text.split(",")))
    if len(shares) != lanes:
        raise ConfigError(
            "cluster.split_shares is %r, %d weights, but taskgraphs are split over %d devices. Give one weight a device" % (text, len(shares), lanes)
        )
    return shares if len(set(shares)) > 1 else ()


def _batch_shares(text: str, splits: bool, streams: int) -> Tuple[int, ...]:
    """The weights of the streams in lowest terms; none for equal parts. Raises ConfigError for another number of them."""
    if not text:
        return ()
    if splits:
        raise ConfigError(
            "cluster.batch_shares is %r, but there are epl.split scopes, whose devices exchange equal batches. Leave the shares out, or use "
            "cluster.split_shares for what is split" % text
        )
    shares = tuple(map(int, text.split(",")))
    if len(shares) != streams:
        raise ConfigError(
            "cluster.batch_shares is %r, %d weights, but %d replicas take batches in this job. Give one weight a replica"
            % (text, len(shares), streams)
        )
    divisor = functools.reduce(math.gcd, shares)
    return tuple(share // divisor for share in shares) if len(set(shares)) > 1 else ()


def _rows(taskgraphs: List[Any]) -> Tuple[Tuple[int, ...], ...]:
    """The worker of each stage of each replica, and of each of its devices where stages have several."""
    return tuple(tuple(worker_of(device) for device in row) for row in _device_rows(taskgraphs))


def _device_rows(taskgraphs: List[Any]) -> List[List[str]]:
    """The device of each stage of each replica; where stages have several, those of the same place belong together."""
    devices = [t.virtual_device for t in taskgraphs]
    width = max(device.num_devices(0) for device in devices)
    places = [(replica, place) for replica in range(devices[0].num_replicas) for place in range(width)]
    return [[device.get_device(replica, place if device.num_devices(replica) > 1 else 0) for device in devices] for replica, place in places]


def _refuse_unsupported(taskgraphs: List[Any], config: Any) -> None:
    several = len(taskgraphs) > 1 and not config.cluster.colocate_split_and_replicate and not any(t.is_split for t in taskgraphs)
    counts = {t.device_count or 1 for t in taskgraphs}
    if several and len(counts) > 1:
        raise ProgramError(
            "The stages of the pipeline have %s devices: between stages of different numbers of devices a batch would have to be divided anew, "
            "which this version does not do. Give all stages the same device_count" % sorted(counts)
        )


def make_task(graph: Any, plan: Plan, part: str = WHOLE) -> Task:
    """What this process compiles of programs of an annotated graph."""
    cluster = Env.get().cluster
    rank = cluster.worker_index
    names = {d.name: d.runtime_name for d in cluster.local_devices()}
    if not plan.places:
        devices, stages = _whole_replicas(graph, plan, names)
        return Task(plan=plan, rank=rank, devices=devices, stages=stages, part=part)
    held = plan.held(rank)
    if not held:
        raise ProgramError("Rank %d holds no stage of any replica; start fewer processes" % rank)
    of_replica = _device_rows(list(graph.taskgraphs))
    stages = tuple(tuple(names[device] if holder == rank else "" for device, holder in zip(of_replica[g], plan.places[g])) for g in held)
    return Task(plan=plan, rank=rank, devices=tuple(next(d for d in row if d) for row in stages), stages=stages, replicas=held, part=part)


def _whole_replicas(graph: Any, plan: Plan, names: Dict[str, str]) -> Tuple[Tuple[str, ...], Tuple[Tuple[str, ...], ...]]:
    """Runtime names of the local devices: (first device of each local replica, all stages of each)."""
    if plan.devices_per_rank == len(names) and not plan.pipeline_devices:
        return tuple(names.values()), ()
    here = Env.get().cluster.worker_index
    rows = [tuple(names[device] for device in row) for row in _device_rows(list(graph.taskgraphs)) if worker_of(row[0]) == here]
    return tuple(row[0] for row in rows), tuple(rows)
