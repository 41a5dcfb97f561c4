"""Solutions of small programs of choices that can't be bettered by one choice alone."""

import numpy as np

from epl.planner.sharding.improve import Block, Problem, improve

COST = 10.0


def chain(length, ends=(0, 0)):
    """Choices of two each, all in a row, where neighbours that differ cost; `ends` says what the first and the last one must be."""
    costs, rows, limits, blocks = [0.0] * (2 * length), [], [], []
    for number in range(length - 1):
        variable, first = len(costs), len(rows)
        costs.append(COST)
        for way in (0, 1):
            rows.append({2 * number + way: 1.0, 2 * number + 2 + way: -1.0, variable: -1.0})
            limits.append(0.0)
        blocks.append(Block((number, number + 1), range(first, len(rows)), range(variable, variable + 1)))
    choices = [range(2 * number, 2 * number + 2) for number in range(length)]
    for number, end in zip((0, length - 1), ends):
        costs[2 * number + 1 - end] = 1000.0
    return Problem(np.array(costs), rows, limits, choices, blocks)


def solution(problem, ways):
    values = np.zeros(len(problem.costs))
    for choice, way in zip(problem.choices, ways):
        values[choice[way]] = 1
    for block in problem.blocks:
        values[block.variables.start] = float(ways[block.choices[0]] != ways[block.choices[1]])
    return values


def chosen(problem, values):
    return [int(np.argmax(values[choice.start : choice.stop])) for choice in problem.choices]


def test_neighbours_change_together():
    problem = chain(12)
    start = solution(problem, [0] * 4 + [1] * 4 + [0] * 4)
    assert problem.costs @ start == 2 * COST
    found = improve(problem, start)
    assert chosen(problem, found) == [0] * 12 and problem.costs @ found == 0
    assert problem.costs @ start == 2 * COST, "the input stays as it was"


def test_each_place_is_bettered():
    problem = chain(60)
    found = improve(problem, solution(problem, [0] * 10 + [1] * 7 + [0] * 20 + [1] * 5 + [0] * 18))
    assert chosen(problem, found) == [0] * 60 and problem.costs @ found == 0


def test_what_can_not_be_bettered_stays():
    problem = chain(9, ends=(0, 1))
    start = solution(problem, [0] * 5 + [1] * 4)
    np.testing.assert_array_equal(improve(problem, start), start)


def test_nearly_whole_values_are_rounded():
    problem = chain(3)
    found = improve(problem, solution(problem, [0, 0, 0]) * (1 - 1e-7))
    assert set(found) == {0.0, 1.0}
