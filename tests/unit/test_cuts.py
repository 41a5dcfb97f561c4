"""Choosing which activations to keep: against all choices on small rows, and by hand on chains."""

import itertools
import random

import pytest

from epl.planner.checkpoints import Activation, choose_cuts, choose_within


def chain(length, size=1.0):
    """Operations that each make one tensor for the next one, which the backward pass needs."""
    return [Activation(i, min(i + 1, length - 1), size, True) for i in range(length)]


def held(activations, length, cuts, in_flight):
    """Bytes of the cuts of all batches in flight and of the largest piece."""
    crossing = sum(a.size for cut in cuts for a in activations if a.made < cut <= a.last)
    edges = [0] + list(cuts) + [length]
    pieces = [sum(a.size for a in activations if a.saved and begin <= a.made < end) for begin, end in zip(edges, edges[1:])]
    return in_flight * crossing + max(pieces)


@pytest.mark.parametrize("seed", range(150))
def test_no_choice_needs_less(seed):
    rng = random.Random(seed)
    length, in_flight = rng.randint(1, 9), rng.choice([1, 1, 2, 4])
    ends = [min(length - 1, i + rng.choice([0, 1, 1, 1, 2, 5])) for i in range(length)]
    activations = [Activation(i, end, rng.randint(1, 9), rng.random() < 0.8) for i, end in enumerate(ends)]
    found = choose_cuts(activations, length, in_flight)
    choices = [cuts for k in range(length) for cuts in itertools.combinations(range(1, length), k)]
    assert found.bytes == min(held(activations, length, cuts, in_flight) for cuts in choices)
    assert found.bytes == held(activations, length, found.cuts, in_flight)


@pytest.mark.parametrize("length, needed", [(4, 3), (9, 5), (16, 7), (100, 19)])
def test_a_chain_needs_about_two_roots_of_its_length(length, needed):
    assert choose_cuts(chain(length), length).bytes == needed


def test_more_batches_in_flight_have_fewer_cuts():
    cuts = [len(choose_cuts(chain(64), 64, n).cuts) for n in (1, 2, 4, 16, 100)]
    assert cuts == sorted(cuts, reverse=True) and cuts[0] > cuts[2] > 0 == cuts[-1]


def test_cuts_are_where_little_crosses():
    # Layers of five tensors of which only the last one leaves the layer, and is small.
    row = []
    for layer in range(12):
        begin = 5 * layer
        row += [Activation(begin + i, begin + 4, 100.0, True) for i in range(4)] + [Activation(begin + 4, begin + 5, 1.0, True)]
    found = choose_cuts(row, 60)
    assert found.cuts == tuple(range(5, 60, 5))
    assert found.bytes == 11 + 401


def test_a_long_row_is_cut_too():
    found = choose_cuts(chain(5000), 5000)
    assert 2 * 70 <= found.bytes <= 2 * 75


def test_an_empty_row():
    assert choose_cuts([], 0) == ((), 0.0, ())


def test_within_a_limit_as_little_as_possible_is_computed_again():
    row = chain(64)
    least = choose_cuts(row, 64).bytes
    again = []
    for limit in (least, 20, 30, 40, 60, 63):
        found = choose_within(row, [1.0] * 64, limit)
        assert found.bytes <= limit
        edges = [0] + list(found.cuts) + [64]
        pieces = [b - a for a, b in zip(edges, edges[1:])]
        again.append(sum(n for i, n in enumerate(pieces) if i not in found.whole))
        kept = len(found.cuts) + sum(pieces[i] for i in found.whole)
        assert kept + max([n for i, n in enumerate(pieces) if i not in found.whole], default=0) == found.bytes
    assert again == sorted(again, reverse=True) and again[-1] <= 16
    assert choose_within(row, [1.0] * 64, 64) == ((), 64.0, (0,))


def test_what_is_dear_is_kept():
    row = chain(64)
    work = [100.0 if 32 <= i < 40 else 1.0 for i in range(64)]
    found = choose_within(row, work, 30)
    edges = [0] + list(found.cuts) + [64]
    whole = [position for i, (a, b) in enumerate(zip(edges, edges[1:])) if i in found.whole for position in range(a, b)]
    assert set(range(32, 40)) <= set(whole)


def test_a_limit_that_cannot_be_kept_gives_the_least():
    row = chain(64)
    assert choose_within(row, [1.0] * 64, 3) == choose_cuts(row, 64)
