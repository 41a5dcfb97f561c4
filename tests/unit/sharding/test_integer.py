"""Programs of choices: nearly as cheap as the cheapest, and None where there is no solution."""

import itertools

import numpy as np
import pytest

from epl.planner.sharding.improve import Block, Problem, improve
from epl.planner.sharding.integer import rounded


def chain(length, ways, seed):
    """Choices in a row; neighbours that take different ways pay for a conversion, which is a variable of its own."""
    draw = np.random.RandomState(seed)
    costs = list(draw.uniform(0, 20, length * ways))
    rows, blocks = [], []
    for number in range(length - 1):
        variable, first = len(costs), len(rows)
        for way in range(ways):
            # One that takes this way needs it of the choice before, or converted.
            costs.append(draw.uniform(2, 12))
            rows.append({(number + 1) * ways + way: 1.0, number * ways + way: -1.0, len(costs) - 1: -1.0})
        blocks.append(Block((number, number + 1), range(first, len(rows)), range(variable, len(costs))))
    choices = [range(number * ways, (number + 1) * ways) for number in range(length)]
    return Problem(np.array(costs), rows, [0.0] * len(rows), choices, blocks)


def cost(problem, taken):
    """Of the ways and of the conversions that follow from them."""
    total = sum(problem.costs[ways[way]] for ways, way in zip(problem.choices, taken))
    for number, block in enumerate(problem.blocks):
        if taken[number] != taken[number + 1]:
            total += problem.costs[block.variables[taken[number + 1]]]
    return total


def cheapest(problem):
    """The least cost, along the chain."""
    ways = range(len(problem.choices[0]))
    least = [problem.costs[problem.choices[0][way]] for way in ways]
    for number, block in enumerate(problem.blocks, 1):
        converted = [problem.costs[variable] for variable in block.variables]
        before = [min(least[b] + (b != way) * converted[way] for b in ways) for way in ways]
        least = [problem.costs[problem.choices[number][way]] + before[way] for way in ways]
    return min(least)


def chosen(problem, values):
    assert values is not None
    for ways in problem.choices:
        assert sorted(np.round(values[ways.start : ways.stop], 6)) == [0.0] * (len(ways) - 1) + [1.0]
    return [int(np.argmax(values[ways.start : ways.stop])) for ways in problem.choices]


def test_the_least_cost_of_a_chain():
    problem = chain(5, 3, 2)
    assert cheapest(problem) == pytest.approx(min(cost(problem, taken) for taken in itertools.product(range(3), repeat=5)))


@pytest.mark.parametrize("length, ways", [(5, 3), (60, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_rounding_and_improving_are_nearly_exact(length, ways, seed):
    problem = chain(length, ways, seed)
    decisive = [number % 5 == 0 for number in range(length)]
    found = chosen(problem, improve(problem, rounded(problem, decisive)))
    assert cost(problem, found) <= 1.03 * cheapest(problem)


def test_ways_that_exclude_each_other():
    """The relaxed program takes half of each way; whoever is fixed first decides."""
    rows = [{0: 1.0, 2: 1.0}, {2: 1.0, 4: 1.0}, {0: 1.0, 4: 1.0}]
    problem = Problem(np.array([0.0, 9.0, 0.0, 5.0, 0.0, 7.0]), rows, [1.0] * 3, [range(2), range(2, 4), range(4, 6)], [])
    found = chosen(problem, rounded(problem, [False] * 3))
    assert sum(way == 0 for way in found) == 1
    assert chosen(problem, rounded(problem, [True] * 3)) == [0, 1, 1], "exactly: the dearest one has its way"


def test_what_can_not_be_met():
    problem = Problem(np.ones(4), [{0: 1.0, 1: 1.0}], [0.0], [range(2), range(2, 4)], [])
    assert rounded(problem, [False, False]) is None


def test_what_only_rounding_can_not_meet():
    """Each way alone is possible by halves, but no whole ways are: an odd ring of neighbours that must differ."""
    rows = [{2 * a + way: 1.0, 2 * b + way: 1.0} for a, b in ((0, 1), (1, 2), (2, 0)) for way in (0, 1)]
    problem = Problem(np.ones(6), rows, [1.0] * 6, [range(2), range(2, 4), range(4, 6)], [])
    assert rounded(problem, [False] * 3) is None
