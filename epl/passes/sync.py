"""Sync: the program that makes all replicas equal to the first one of the job."""

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import Builder
from epl.ir.program import FORWARD, Node, Program
from epl.passes.communicate import Communicate
from epl.passes.effects import assign_variable, read_variable, variable_dtype
from epl.passes.instances import instance_name
from epl.planner.plan import Task


def _taskgraph(whole: Program, variable: str) -> Optional[int]:
    return None if whole.assignment is None else whole.assignment[variable].taskgraph


class _Copies(NamedTuple):
    """What is copied together: one variable, or one lane's part of it.

    label: a name for it. replicas: the local ones that hold it. home: the device where they meet.
    group: the processes that hold it; root: the one whose value counts. shape: unknown lengths are -1.
    """

    label: str
    replicas: Sequence[int]
    home: str
    group: Sequence[int]
    root: int
    shape: Sequence[int]
    taskgraph: Optional[int]


def sync_program(whole: Program, variables: Sequence[str], task: Task) -> Program:
    """Copy variables from the first replica of the job to all others, each among the ranks that hold it.

    Args:
      whole: the user's graph, for the variables' nodes.
      variables: names of initialised variable nodes, the same on all ranks, in one order.
      task: the local devices and the key for collective names.

    Returns:
      A program without fetches; its targets are the assignments. Variables of types that
      don't travel (strings, resources) are left out.
    """
    nodes: Dict[str, Node] = {}
    targets: List[str] = []
    for variable in variables:
        source = whole.nodes[variable]
        dtype = variable_dtype(source)
        if dtype in op_table.OPAQUE:
            continue
        for copies in _copies_of(whole, source, task):
            if copies.replicas:
                targets.extend(_copied(nodes, source, dtype, copies, task))
    program = Program(nodes, (), targets, versions=whole.versions, groups=_groups(whole, task))
    return Communicate()(program, task) if targets else program


def _groups(whole: Program, task: Task) -> List[Tuple[int, ...]]:
    """The groups of processes that may talk, in the same order on all ranks."""
    found: List[Tuple[int, ...]] = []
    if task.spread:
        found += [task.group(t) for t in range(len(task.plan.places[0]))]
    for variable in whole.held or ():
        found += [task.plan.peers(lane, _taskgraph(whole, variable)) for lane in range(task.plan.lanes)]
    return [group for group in dict.fromkeys(found) if len(group) > 1]


def _copies_of(whole: Program, source: Node, task: Task) -> List[_Copies]:
    shape = source.attr("shape")
    dims = [d.size for d in shape.shape.dim] if shape is not None and not shape.shape.unknown_rank else [-1]
    form, taskgraph = (whole.held or {}).get(source.name), _taskgraph(whole, source.name)
    if form is None:
        return [_Copies("", task.holding(taskgraph), task.home(taskgraph), task.group(taskgraph), task.first_holder(taskgraph), dims, taskgraph)]
    found = []
    lengths = task.plan.group.lengths(dims[form.dim], form.unit) if form.is_sharded else (None,)  # the first lane alone has it
    for lane, length in enumerate(lengths):
        # Each lane has a part of its own, and meets the same lane of the other groups.
        replicas = task.lanes_here(taskgraph, lane)
        group, own = task.plan.peers(lane, taskgraph), dims if length is None else dims[: form.dim] + [length] + dims[form.dim + 1 :]
        if replicas and (len(group) > 1 or len(replicas) > 1):
            home = task.device_of(replicas[0], taskgraph)
            found.append(_Copies("/lane_%d" % lane, replicas, home, group, task.plan.process(lane, taskgraph), own, taskgraph))
    return found


def _copied(nodes: Dict[str, Node], source: Node, dtype: int, copies: _Copies, task: Task) -> List[str]:
    """Add what makes the local copies equal to the first one of the job; what must run for it."""
    variable, handles, targets = source.name, [], []
    for replica in copies.replicas:
        name = instance_name(variable, replica, None)
        prefix = name[: len(name) - len(variable)]
        attrs = {"shared_name": A.of_str(prefix + (source.str_attr("shared_name") or variable))}
        if copies.label:
            attrs["shape"] = A.of_shape(copies.shape)
        nodes[name] = source.replace(name=name, attrs=attrs, device=task.state_device(replica, copies.taskgraph), replica=replica, controls=())
        handles.append(nodes[name])
    base = "epl_sync/" + variable + copies.label
    build = Builder(nodes, copies.home, FORWARD)
    first = task.rank == copies.root
    if first or min(copies.shape, default=0) < 0:
        value = read_variable(build, base + "/read", handles[0], [])
    else:
        # Not read here: a rank may leave initialisation and restoring to the first one.
        value = build.const(base + "/none", np.zeros(copies.shape), dtype)
    if len(copies.group) > 1:
        info = {"dtype": dtype, "root": copies.root, "taskgraph": copies.taskgraph}
        value = build.op("EplBroadcast", base + "/first", [value], info=dict(info, ranks=copies.group) if copies.label else info)
    for place, handle in enumerate(handles):
        if place or not first:
            targets.append(assign_variable(build, "%s/assign_%d" % (base, place), handle, value, []))
    return targets or [value[0]]
