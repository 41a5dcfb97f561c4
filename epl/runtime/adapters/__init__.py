"""The adapters: where EPL plugs into TensorFlow. All installed by `epl.init`, all removed by `epl.shutdown`."""

from typing import Any, Callable, List, Tuple

_MISSING = object()


class Patches:
    """Replaced attributes of classes and modules, and what they were before."""

    def __init__(self) -> None:
        self._undo: List[Tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set `owner.name` to `make(original)`; the original comes back on `undo`."""
        own = vars(owner).get(name, _MISSING)
        original = getattr(owner, name)
        self._undo.append((owner, name, own))
        setattr(owner, name, make(original))

    def undo(self) -> None:
        """Put everything back, last first."""
        while self._undo:
            owner, name, own = self._undo.pop()
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


class Adapters:
    """The installed set; one exists at a time, in `Env`."""

    def __init__(self) -> None:
        self.patches = Patches()

    def install(self) -> None:
        from epl.runtime.adapters import checkpoints, estimators, gradients, graphs, hooks, inputs, normalization, sessions

        try:
            for module in (graphs, inputs, gradients, normalization, sessions, checkpoints, hooks, estimators):
                module.install(self.patches)
        except BaseException:
            self.patches.undo()
            raise

    def remove(self) -> None:
        self.patches.undo()
