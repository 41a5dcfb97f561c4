"""Which groups may come at which place of a pipeline: states (what has been used up) and the moves between them."""

from typing import Callable, List, NamedTuple, Sequence, Tuple

import numpy as np

_NOTHING = 1e-100
"""Seconds that count as none, and still can be divided by."""


class Moves(NamedTuple):
    """An option at a stage: from which states it leads to which, by their numbers at that stage and at the next."""

    option: int
    source: np.ndarray
    to: np.ndarray


Lattice = List[List[Moves]]
"""For each stage, the moves of each option that is possible there. There is one first and one last state."""


def fixed(order: Sequence[int]) -> Lattice:
    """One order: the option of each stage."""
    zero = np.zeros(1, int)
    return [[Moves(option, zero, zero)] for option in order]


def free(uses: Sequence[Tuple[int, ...]], supply: Sequence[int], stages: int) -> Lattice:
    """All ways to use up a supply in so many stages."""
    code = _Code(uses, supply)
    reached = [np.zeros(1, int)]
    for _ in range(stages):
        codes = [code.after(reached[-1][code.fitting(reached[-1], option)], option) for option in range(len(uses))]
        reached.append(np.unique(np.concatenate(codes)))
    return code.lattice(reached)


def narrow(
    uses: Sequence[Tuple[int, ...]],
    supply: Sequence[int],
    stages: int,
    cost: Callable[[int, int], np.ndarray],
    rests: np.ndarray,
    size: int,
) -> Lattice:
    """At most `size` states after each stage, with all moves between them: a beam search.

    A state is as good as its slowest stage so far, or as what is left of the layers would be if all
    that is left of the supply shared it without loss, whichever is slower, at the best of its cuts.

    Args:
      cost: (stage, option) -> [width, width] seconds, from layers done before to layers done behind, counted from the stage on.
      rests: [kinds, layers + 1]: seconds of all layers from one on, on one of each kind of the supply.
    """
    code = _Code(uses, supply)
    width = cost(0, 0).shape[0]
    reached = [np.zeros(1, int)]
    slowest = np.full((1, width), np.inf)
    slowest[0, 0] = 0.0
    for stage in range(stages):
        codes, values = [], []
        for option in range(len(uses)):
            fits = code.fitting(reached[-1], option)
            if fits.any():
                codes.append(code.after(reached[-1][fits], option))
                values.append(np.maximum(slowest[fits][:, :, None], cost(stage, option)[None]).min(axis=1))
        if not codes:
            return [[] for _ in range(stages)]
        states, place = np.unique(np.concatenate(codes), return_inverse=True)
        slowest = np.full((len(states), width), np.inf)
        np.minimum.at(slowest, place.reshape(-1), np.concatenate(values))
        with np.errstate(divide="ignore"):
            rates = (code.limits - code.used(states)) @ (1.0 / np.maximum(rests[:, stage + 1 : stage + 1 + width], _NOTHING))
            score = np.maximum(slowest, 1.0 / rates).min(axis=1)
        best = np.sort(np.argsort(score, kind="stable")[:size])
        reached.append(states[best])
        slowest = slowest[best]
    return code.lattice(reached)


class _Code:
    """Numbers for what has been used of a supply."""

    def __init__(self, uses: Sequence[Tuple[int, ...]], supply: Sequence[int]):
        self.limits = np.array(supply)
        self._places = np.concatenate([[1], np.cumprod(self.limits + 1)[:-1]])
        self._steps = np.array(uses, int).reshape(len(uses), len(supply))

    def used(self, codes: np.ndarray) -> np.ndarray:
        """[states, kinds]: how many of each kind of the supply."""
        return codes[:, None] // self._places % (self.limits + 1)

    def fitting(self, codes: np.ndarray, option: int) -> np.ndarray:
        """Which states have room for an option."""
        return np.all(self.used(codes) + self._steps[option] <= self.limits, axis=1)

    def after(self, codes: np.ndarray, option: int) -> np.ndarray:
        return codes + int(self._steps[option] @ self._places)

    def lattice(self, reached: Sequence[np.ndarray]) -> Lattice:
        """All moves between some states that lead on to the end."""
        kept = reached[-1][reached[-1] == int(self.limits @ self._places)]
        found = []
        for states in reached[-2::-1]:
            moves = []
            for option in range(len(self._steps)):
                source = states[self.fitting(states, option)]
                source = source[np.isin(self.after(source, option), kept)]
                if len(source):
                    moves.append((option, source, np.searchsorted(kept, self.after(source, option))))
            kept = np.unique(np.concatenate([source for _, source, _ in moves])) if moves else kept[:0]
            found.append([Moves(option, np.searchsorted(kept, source), to) for option, source, to in moves])
        return found[::-1]
