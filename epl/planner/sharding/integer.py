"""A solution of a program of choices that costs little: linear programs, and rounding between them."""

from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from epl.planner.sharding.improve import Problem

_NODES = 200
"""How far a search may branch. A limit in nodes, not in time: every rank must find the same."""
_GAP = 0.01


def rounded(problem: Problem, decisive: Sequence[bool]) -> Optional[np.ndarray]:
    """Values of all variables with 0 or 1 for each way of a choice, or None if no choice meets all conditions.

    Linear programs, between which the ways are fixed that came out most clearly. Few rounds are
    needed; an exact search takes minutes for one layer of a transformer. What rounding gives
    away is found again around each tensor (`epl.planner.sharding.improve`).

    Args:
      decisive: choices that are few and decide the most, which are made exactly.
    """
    return _Rounding(problem, decisive).run()


class _Rounding:
    def __init__(self, problem: Problem, decisive: Sequence[bool]):
        self._problem = problem
        self._decisive = decisive
        self._open = [number for number, ways in enumerate(problem.choices) if len(ways) > 1]
        self._constraints = self._conditions()

    def run(self) -> Optional[np.ndarray]:
        choices, count = self._problem.choices, len(self._problem.costs)
        lower, upper = np.zeros(count), np.ones(count)
        whole = np.zeros(count)
        for number in self._open:
            if self._decisive[number]:
                whole[choices[number]] = 1
        values = self._solved(lower, upper, whole)
        share = 1.0
        while values is not None:
            clear, unclear = self._judged(values)
            if not unclear:
                return values
            variables = sum(self._decisive[number] for _, number, _ in unclear)
            fixed = max(1, int(share * (variables or len(unclear)) / 3))
            fixed_lower, fixed_upper = lower.copy(), upper.copy()
            for _, number, best in clear + unclear[:fixed]:
                fixed_upper[choices[number]] = 0.0
                fixed_lower[best] = fixed_upper[best] = 1.0
            found = self._solved(fixed_lower, fixed_upper)
            if found is not None:
                lower, upper, values, share = fixed_lower, fixed_upper, found, 1.0
            elif fixed > 1:
                share /= 4
            else:
                # What comes out best can't be had together with the rest.
                upper[unclear[0][2]] = 0.0
                values = self._solved(lower, upper)
        return None

    def _judged(self, values: np.ndarray) -> Tuple[List[Tuple[float, int, int]], List[Tuple[float, int, int]]]:
        """(value of the best way, choice, that way) of the choices that are made, and of the others in the order in which to make them."""
        clear: List[Tuple[float, int, int]] = []
        unclear: List[Tuple[float, int, int]] = []
        for number in self._open:
            ways = self._problem.choices[number]
            best = ways[int(np.argmax(values[ways.start : ways.stop]))]
            (clear if values[best] > 1 - 1e-6 else unclear).append((float(values[best]), number, best))
        # Variables first: what they are held as decides the most.
        unclear.sort(key=lambda entry: (not self._decisive[entry[1]], -entry[0], entry[1]))
        return clear, unclear

    def _conditions(self) -> List[Any]:
        from scipy import optimize, sparse

        problem, count = self._problem, len(self._problem.costs)
        rows = [number for number, ways in enumerate(problem.choices) for _ in ways]
        columns = [way for ways in problem.choices for way in ways]
        one_each = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), (len(problem.choices), count))
        found = [optimize.LinearConstraint(one_each, 1.0, 1.0)]
        if problem.rows:
            rows = [i for i, row in enumerate(problem.rows) for _ in row]
            columns = [v for row in problem.rows for v in row]
            factors = [f for row in problem.rows for f in row.values()]
            matrix = sparse.csr_matrix((factors, (rows, columns)), (len(problem.rows), count))
            found.append(optimize.LinearConstraint(matrix, -np.inf, np.array(problem.limits)))
        return found

    def _solved(self, lower: np.ndarray, upper: np.ndarray, whole: Optional[np.ndarray] = None) -> Optional[np.ndarray]:
        """The values that cost least; those of `whole` 0 or 1."""
        from scipy import optimize

        options = {"mip_rel_gap": _GAP, "node_limit": _NODES}
        bounds = optimize.Bounds(lower, upper)
        return optimize.milp(self._problem.costs, integrality=whole, bounds=bounds, constraints=self._constraints, options=options).x
