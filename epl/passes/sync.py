"""Sync: the program that makes all replicas equal to the first one of the job."""

from typing import Dict, List, Optional, Sequence

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
        if dtype in op_table.OPAQUE or variable in (whole.held or {}):
            continue
        taskgraph = _taskgraph(whole, variable)
        group, root = task.group(taskgraph), task.first_holder(taskgraph)
        copies = []
        for replica in task.holding(taskgraph):
            name = instance_name(variable, replica, None)
            prefix = name[: len(name) - len(variable)]
            shared = A.of_str(prefix + (source.str_attr("shared_name") or variable))
            device = task.device_of(replica, taskgraph)
            nodes[name] = source.replace(name=name, attrs={"shared_name": shared}, device=device, replica=replica, controls=())
            copies.append(nodes[name])
        if not copies:
            continue
        base = "epl_sync/" + variable
        build = Builder(nodes, task.home(taskgraph), FORWARD)
        shape = source.attr("shape")
        dims = [d.size for d in shape.shape.dim] if shape is not None and not shape.shape.unknown_rank else [-1]
        first = task.rank == root
        if first or min(dims, default=0) < 0:
            value = read_variable(build, base + "/read", copies[0], [])
        else:
            # Not read here: a rank may leave initialisation and restoring to the first one.
            value = build.const(base + "/none", np.zeros(dims), dtype)
        if len(group) > 1:
            value = build.op("EplBroadcast", base + "/first", [value], info={"dtype": dtype, "root": root, "taskgraph": taskgraph})
        for place, copy in enumerate(copies):
            if place or not first:
                targets.append(assign_variable(build, "%s/assign_%d" % (base, place), copy, value, []))
        if not targets or targets[-1].rpartition("/")[0] != base:
            targets.append(value[0])
    groups = [g for g in dict.fromkeys(task.group(t) for t in range(len(task.plan.places[0]))) if len(g) > 1] if task.spread else []
    program = Program(nodes, (), targets, versions=whole.versions, groups=groups)
    return Communicate()(program, task) if targets else program
