"""Partitioning of sequences, compared with brute force, and the count of fusion groups."""

import itertools
import random

import numpy as np
import pytest

from epl.planner.partition import estimate_split_num_for_comm, fusion_groups, partition_buckets, partition_stages

MIB = 1 << 20


@pytest.mark.parametrize(
    "weights, size, n, expected",
    [
        ([1] * 6, 2, 3, [(0, 2), (2, 2), (4, 2)]),
        ([1, 7, 4, 3, 1, 11], 11, 3, [(0, 8), (2, 8), (5, 11)]),
        ([1, 7, 4, 3, 1, 11], 1, 3, None),
        ([1, 7, 4, 3, 1, 11], 5, 3, None),
        ([1] * 6, 2, 2, None),
        ([1] * 6, 6, 3, [(0, 6)]),
        ([0, 0, 3, 0], 3, 1, [(0, 3)]),
        ([4], 3, 3, None),
        ([0.5, 0.25, 0.5], 0.75, 2, [(0, 0.75), (2, 0.5)]),
        ([], 1, 3, []),
        ([1], 1, 0, None),
    ],
)
def test_partition_buckets(weights, size, n, expected):
    assert partition_buckets(weights, size, n) == expected


@pytest.mark.parametrize(
    "weights, n, sizes",
    [
        ([1] * 10, 2, [5, 5]),
        ([1] * 10, 5, [2] * 5),
        ([1] * 46, 2, [23, 23]),
        ([1] * 46, 3, [16, 16, 14]),
        ([1] * 10, 4, [3, 3, 3, 1]),
        ([1, 2, 3], 3, [1, 1, 1]),
        ([1, 2], 4, [1, 1, 0, 0]),
        ([], 2, [0, 0]),
        ([5], 1, [1]),
        ([1024, 1, 2, 3, 4, 5], 4, [1, 3, 1, 1]),
        ([100, 1, 1, 1, 1, 1, 1], 3, [1, 3, 3]),
        ([1] * 9, 7, [1, 1, 1, 1, 2, 2, 1]),
        ([5, 0, 0, 0, 0, 0], 3, [1, 2, 3]),
        ([1, 1, 1, 1, 100], 3, [2, 2, 1]),
        ([0] * 6, 3, [2, 2, 2]),
        ([0.1] * 9, 3, [3, 3, 3]),
    ],
)
def test_partition_stages(weights, n, sizes):
    items = [f"op{i}" for i in range(len(weights))]
    stages = partition_stages(items, weights, n)
    assert [len(stage) for stage in stages] == sizes
    assert list(itertools.chain(*stages)) == items


def best_largest_sum(weights, n):
    """The smallest largest sum over all ways to cut `weights` into `n` non-empty parts."""
    cuts = itertools.combinations(range(1, len(weights)), n - 1)
    return min(max(sum(weights[a:b]) for a, b in zip((0, *cut), (*cut, len(weights)))) for cut in cuts)


@pytest.mark.parametrize("seed", range(300))
def test_largest_stage_is_as_small_as_possible(seed):
    draw = random.Random(seed)
    kind = draw.choice([lambda: draw.randrange(10), lambda: draw.randrange(1, 10**12), draw.random, lambda: draw.choice([0, 1, 50])])
    weights = [kind() for _ in range(draw.randrange(1, 10))]
    for n in range(1, len(weights) + 1):
        stages = partition_stages(range(len(weights)), weights, n)
        assert len(stages) == n and all(stages)
        assert list(itertools.chain(*stages)) == list(range(len(weights)))
        if any(weights):
            assert max(sum(weights[i] for i in stage) for stage in stages) == pytest.approx(best_largest_sum(weights, n), rel=1e-12)


@pytest.mark.parametrize("n", [1, 9, 100, 257, 511, 512, 513, 1000])
def test_many_items(n):
    draw = random.Random(n)
    weights = [draw.randrange(1, 100) for _ in range(512)]
    stages = partition_stages(weights, weights, n)
    assert len(stages) == n
    assert list(itertools.chain(*stages)) == weights
    assert all(stages[: min(n, 512)])


@pytest.mark.parametrize(
    "weights, n, expected",
    [
        ([1, 2], 0, "the number of stages must be at least 1, not 0"),
        ([1], 2, "each item needs a weight: there are 2 items and 1 weights"),
        ([1, -2], 2, "weights must not be negative: -2"),
    ],
)
def test_bad_partition(weights, n, expected):
    with pytest.raises(ValueError) as caught:
        partition_stages("ab", weights, n)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "tensors, keywords, expected",
    [
        ([], {}, 1),
        ([("int32", 0)], {}, 1),
        ([("int32", 32 * MIB)], {}, 1),
        ([("float16", 28 * MIB)], {}, 1),
        ([("float32", 36 * MIB)], {}, 2),
        ([("int32", 32 * MIB), ("float16", 28 * MIB), ("float32", 36 * MIB)], {}, 4),
        ([("float32", 16 * MIB), ("float32", 17 * MIB)], {}, 2),
        ([("float32", 1000 * MIB)], {"max_groups": 5}, 5),
        ([("float32", 1000 * MIB), ("float16", 1), ("int32", 1)], {"max_groups": 2}, 3),
        ([("float32", 10)], {"group_bytes": 3}, 4),
    ],
)
def test_fusion_groups(tensors, keywords, expected):
    assert fusion_groups(tensors, **keywords) == expected


def test_bad_group_size():
    with pytest.raises(ValueError, match="group_bytes must be at least 1, not 0"):
        fusion_groups([], group_bytes=0)


@pytest.mark.parametrize("shapes, expected", [([], 1), ([(3,)], 1), ([(9, MIB), (MIB,)], 2), ([(), (0,)], 1)])
def test_groups_of_tensors(shapes, expected):
    arrays = [np.broadcast_to(np.float32(0), shape) for shape in shapes]
    assert estimate_split_num_for_comm(arrays) == expected
