"""A taskgraph: what one strategy scope holds, seen by the user."""

from typing import Any, List, Optional


class Taskgraph:
    """One taskgraph of an annotated graph. Everything but the strategy is derived."""

    def __init__(self, graph: Any, index: int, strategy: Any):
        self._graph = graph
        self.index = index
        self.strategy = strategy

    @property
    def device_count(self) -> Optional[int]:
        """Devices of one replica, as given by the user; None where the cluster decides."""
        return None if self.strategy is None else self.strategy.device_count

    @property
    def is_split(self) -> bool:
        return self.strategy is not None and self.strategy.is_split

    @property
    def virtual_device(self) -> Any:
        """Where the replicas of this taskgraph are (`epl.cluster.VirtualDevice`)."""
        return self._graph.virtual_device(self.index)

    @property
    def num_replicas(self) -> int:
        return self.virtual_device.num_replicas

    @property
    def local_num_replicas(self) -> int:
        """Replicas of this taskgraph in this process."""
        return len(self.virtual_device.local_replicas)

    @property
    def gradients(self) -> List[Any]:
        """The gradients of this taskgraph as given to the optimizer, in the order of the variables."""
        return self._graph.views().gradients_of(self.index)

    @property
    def operations(self) -> Any:
        """Forward, backward and apply operations by replica and micro-batch."""
        return self._graph.views().operations_of(self.index)

    def get_variables(self, replica: int) -> List[Any]:
        """The variables of one replica of this taskgraph, with `.name`."""
        return self._graph.views().variables_of(self.index, replica)

    def backward_exit_ops(self, replica: int, micro_batch: int) -> List[Any]:
        """The operations whose outputs are aggregated, of one replica and micro-batch."""
        return self._graph.views().exits_of(self.index, replica, micro_batch)

    def __repr__(self) -> str:
        return "Taskgraph(index=%d, strategy=%r)" % (self.index, self.strategy)
