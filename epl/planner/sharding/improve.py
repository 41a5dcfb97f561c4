"""Improve a choice: what lies around an expensive tensor is chosen anew, exactly, while all the rest stays.

Rounding a relaxed program gets stuck where a tensor, its slots, its gradient and the ops on
the way between them would have to change together. Around one tensor there are so few ops
that the whole program is solved in a moment.

Source: large neighbourhood search (Shaw, CP 1998).
"""

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

_WINDOW = 16
"""Open choices that are made together."""
_ROUNDS = 4
_NODES = 50
_GAP = 0.02
_LEAST = 2.0
"""Tensors that cost less, in units of the costs, begin no window."""
_GAIN = 1e-3


class Block(NamedTuple):
    """One tensor.

    Attributes:
      choices: that decide what it costs. rows: the conditions on them. variables: those of the conditions that belong to no choice.
    """

    choices: Tuple[int, ...]
    rows: range
    variables: range


class Problem(NamedTuple):
    """A linear program of choices.

    Attributes:
      costs: of each variable. rows: factors by variable; the sum of each is at most its limit.
      choices: consecutive variables of which one is 1 and the others 0.
      blocks: all rows and all variables that are no choice's, by tensor.
    """

    costs: np.ndarray
    rows: Sequence[Dict[int, float]]
    limits: Sequence[float]
    choices: Sequence[range]
    blocks: Sequence[Block]


def improve(problem: Problem, values: np.ndarray) -> np.ndarray:
    """A solution that costs no more.

    Args:
      values: of all variables, a solution in which choices are 0 or 1.
    """
    return _Improvement(problem, values).run()


class _Improvement:
    def __init__(self, problem: Problem, values: np.ndarray):
        self._problem = problem
        self._values = np.array(values)
        for choice in problem.choices:
            self._set(choice, np.eye(len(choice))[int(np.argmax(values[choice.start : choice.stop]))])
        self._of: Dict[int, List[int]] = {}
        for number, block in enumerate(problem.blocks):
            for choice_number in dict.fromkeys(block.choices):
                self._of.setdefault(choice_number, []).append(number)

    def run(self) -> np.ndarray:
        for _ in range(_ROUNDS):
            found = [(self._cost(block.variables), number) for number, block in enumerate(self._problem.blocks)]
            tried: Dict[Tuple[int, ...], None] = {}
            better = False
            for cost, number in sorted(found, key=lambda entry: (-entry[0], entry[1])):
                if cost <= _LEAST:
                    break
                window = self._around(number)
                key = tuple(sorted(window))
                if window and key not in tried:
                    tried[key] = None
                    better = self._choose(window) or better
            if not better:
                break
        return self._values

    def _set(self, variables: range, values: np.ndarray) -> None:
        self._values[variables.start : variables.stop] = values

    def _cost(self, variables: range) -> float:
        at = slice(variables.start, variables.stop)
        return float(self._problem.costs[at] @ self._values[at])

    def _around(self, number: int) -> List[int]:
        """The open choices that are nearest to a tensor."""
        blocks = self._problem.blocks
        found: Dict[int, None] = {}
        queue = [number]
        for block in queue:
            for choice in blocks[block].choices:
                if choice not in found and len(self._problem.choices[choice]) > 1:
                    if len(found) == _WINDOW:
                        return list(found)
                    found[choice] = None
                    queue.extend(self._of[choice])
        return list(found)

    def _choose(self, window: List[int]) -> bool:
        """Make the choices of a window anew; whether that is better."""
        problem = self._problem
        blocks = sorted({block for choice in window for block in self._of[choice]})
        free = [v for choice in window for v in problem.choices[choice]]
        decided = len(free)
        free += [v for block in blocks for v in problem.blocks[block].variables]
        found = self._solved(window, blocks, free, decided)
        if found is None or problem.costs[free] @ found > problem.costs[free] @ self._values[free] - _GAIN:
            return False
        self._values[free] = found
        return True

    def _solved(self, window: List[int], blocks: List[int], free: List[int], decided: int) -> Optional[np.ndarray]:
        from scipy import optimize, sparse

        problem = self._problem
        position = {variable: i for i, variable in enumerate(free)}
        numbers = [row for block in blocks for row in problem.blocks[block].rows]
        limits = np.array([problem.limits[row] for row in numbers], np.float64)
        rows, columns, factors = [], [], []
        for i, row in enumerate(numbers):
            for variable, factor in problem.rows[row].items():
                if variable in position:
                    rows.append(i)
                    columns.append(position[variable])
                    factors.append(factor)
                else:
                    limits[i] -= factor * self._values[variable]
        one_each = sparse.csr_matrix(
            (np.ones(decided), ([i for i, choice in enumerate(window) for _ in problem.choices[choice]], range(decided))), (len(window), len(free))
        )
        constraints = [
            optimize.LinearConstraint(sparse.csr_matrix((factors, (rows, columns)), (len(numbers), len(free))), -np.inf, limits),
            optimize.LinearConstraint(one_each, 1.0, 1.0),
        ]
        whole = np.zeros(len(free))
        whole[:decided] = 1
        # A limit in nodes, not in time: every rank must find the same.
        options = {"mip_rel_gap": _GAP, "node_limit": _NODES}
        found = optimize.milp(problem.costs[free], integrality=whole, bounds=optimize.Bounds(0.0, 1.0), constraints=constraints, options=options).x
        if found is not None:
            found[:decided] = np.round(found[:decided])
        return found
