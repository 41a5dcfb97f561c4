"""The phases of a training step, and the scope that sets the current one."""

from typing import Any, List, Tuple


class ModelPhase:
    """Context manager under which the graph's current phase is `phase`.

    It acts on the graph that is current when it is entered, and restores that one.
    The same object may be entered again inside itself.
    """

    FORWARD = "FORWARD"
    BACKWARD = "BACKWARD"
    APPLY = "APPLY"
    MICRO_BATCH_CLONE = "MICRO_BATCH_CLONE"

    def __init__(self, phase: str):
        known = (self.FORWARD, self.BACKWARD, self.APPLY, self.MICRO_BATCH_CLONE)
        if phase not in known:
            raise ValueError(f"the phase must be one of {', '.join(known)}, not {phase!r}")
        self._phase = phase
        self._entered: List[Tuple[Any, str]] = []

    def __enter__(self) -> "ModelPhase":
        from epl.ir.graph import Graph  # imports this module

        graph = Graph.get(may_create=True)
        assert graph is not None
        self._entered.append((graph, graph.current_model_phase))
        graph.set_model_phase(self._phase)
        return self

    def __exit__(self, *_: object) -> None:
        graph, previous = self._entered.pop()
        graph.set_model_phase(previous)
