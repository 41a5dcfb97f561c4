"""Where the instances of a node are."""

from typing import Set

from epl.ir import op_table
from epl.ir.conds import state_of, states_of
from epl.ir.program import Node, Program
from epl.planner.plan import Task

HOST = "host"
"""In the info of a node that is in host memory."""


class Places:
    """The devices of one process for a classified program.

    Attributes:
      on_host: nodes that must be where the shared resources are.
    """

    def __init__(self, program: Program, task: Task):
        self._program = program
        self._task = task
        self.on_host = self._host_nodes()

    def device(self, node: Node, replica: int) -> str:
        """The runtime name of a device; `replica` is a local index."""
        task = self._task
        if node.name in self.on_host or node.info.get(HOST) or task.plan.offload and self._is_offloaded(node):
            return task.host
        if not task.stages:
            return task.devices[replica]
        # Neither a handle nor a reference can leave the device of its state, not even into a loop of another stage.
        state = state_of(self._program, node.name)
        return task.device_of(replica, self._program.taskgraph_of(state or node.name))

    def _host_nodes(self) -> Set[str]:
        """Shared resources, what is given a handle of one, and what no other device has kernels for."""
        shared = self._program.facts.shared
        found = set(shared)
        on_cpus = all("CPU" in device for device in self._task.devices)
        for node in self._program.nodes.values():
            if node.op in op_table.PYTHON or not on_cpus and op_table.has_strings(self._program, node):
                found.add(node.name)
            elif node.name not in found and any(s in shared for s, _ in node.inputs):
                found.add(node.name)
        return found

    def _is_offloaded(self, node: Node) -> bool:
        """True for a variable, and for what is given its reference or handle: reading, updating, saving."""
        if node.op in op_table.VARIABLES:
            return True
        return any(self._program.nodes[state].op in op_table.VARIABLES for state in states_of(self._program, node))
