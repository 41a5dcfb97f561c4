"""Cut a sequence into contiguous parts, and count the groups of fused communication.

Pure functions of numbers: they know neither graphs nor devices.
"""

from typing import Any, Dict, Hashable, Iterable, List, Optional, Sequence, Tuple, TypeVar

T = TypeVar("T")

FUSION_BYTES = 32 * 1024 * 1024
"""Size of one fused communication group. Larger messages gain hardly any bandwidth."""


def partition_buckets(weights: Sequence[float], size: float, n: int) -> Optional[List[Tuple[int, float]]]:
    """Fill at most `n` buckets of capacity `size` with `weights`, in order.

    Greedy: a bucket takes weights until the next one does not fit. Returns a list of
    (index of the first weight, sum) for each bucket, or None if the weights don't fit.

    >>> partition_buckets([1, 7, 4, 3, 1, 11], 11, 3)
    [(0, 8), (2, 8), (5, 11)]
    """
    buckets: List[Tuple[int, float]] = []
    for index, weight in enumerate(weights):
        if weight > size:
            return None
        if buckets and buckets[-1][1] + weight <= size:
            first, total = buckets[-1]
            buckets[-1] = (first, total + weight)
        elif len(buckets) == n:
            return None
        else:
            buckets.append((index, weight))
    return buckets


def partition_stages(items: Sequence[T], weights: Sequence[float], n: int) -> List[List[T]]:
    """Cut `items` into `n` contiguous lists whose largest sum of weights is minimal.

    The order is kept. No list is empty, unless there are fewer items than lists: then
    each item is alone and empty lists follow. Earlier lists are filled first. Where a
    heavy item leaves more lists than are needed, the largest others are cut in two.

    >>> partition_stages("abcdef", [1, 1, 1, 1, 9, 1], 4)
    [['a', 'b'], ['c', 'd'], ['e'], ['f']]
    """
    if len(items) != len(weights):
        raise ValueError(f"each item needs a weight: there are {len(items)} items and {len(weights)} weights")
    if n < 1:
        raise ValueError(f"the number of stages must be at least 1, not {n}")
    if any(weight < 0 for weight in weights):
        raise ValueError(f"weights must not be negative: {min(weights)}")
    if not any(weights):
        weights = [1] * len(weights)  # nothing to balance by, so count the items
    if not items:
        return [[] for _ in range(n)]
    starts = [first for first, _ in _smallest_buckets(weights, n)]
    parts = list(zip(starts, starts[1:] + [len(items)]))
    while len(parts) < min(n, len(items)):
        candidates = [i for i, (a, b) in enumerate(parts) if b - a > 1]
        largest = max(candidates, key=lambda i: (sum(weights[slice(*parts[i])]), parts[i][1] - parts[i][0]))
        a, b = parts[largest]
        middle = _middle(weights, a, b)
        parts[largest : largest + 1] = [(a, middle), (middle, b)]
    return [list(items[a:b]) for a, b in parts] + [[] for _ in range(n - len(parts))]


def _middle(weights: Sequence[float], begin: int, end: int) -> int:
    """Where to cut a range into two non-empty ones whose larger sum is smallest."""
    right = sum(weights[begin:end])
    left: float = 0
    places = []
    for index in range(begin, end - 1):
        left, right = left + weights[index], right - weights[index]
        places.append((max(left, right), abs(begin + end - 2 * (index + 1)), index + 1))  # equal ones: by number of items
    return min(places)[2]


def _smallest_buckets(weights: Sequence[float], n: int) -> List[Tuple[int, float]]:
    """The greedy buckets of the smallest size with which at most `n` are enough.

    Bisection over the size. It is exact for floats too, because both bounds only move
    to sums that occur: a success lowers `high` to the largest bucket, and a failure
    raises `low` to the smallest size at which any bucket could take one weight more.
    """
    low, high = max(max(weights), sum(weights) / n), sum(weights)
    best: List[Tuple[int, float]] = [(0, high)]
    while low < high:
        size = (low + high) / 2
        if size >= high:  # neighbouring floats
            size = low
        buckets = partition_buckets(weights, size, len(weights))
        assert buckets is not None  # no weight is above `low`
        if len(buckets) <= n:
            best, high = buckets, max(total for _, total in buckets)
        else:
            low = min(total + weights[following] for (_, total), (following, _) in zip(buckets, buckets[1:]))
    return best


def fusion_groups(dtypes_and_bytes: Iterable[Tuple[Hashable, int]], group_bytes: int = FUSION_BYTES, max_groups: Optional[int] = None) -> int:
    """The number of groups in which tensors travel when they are fused for communication.

    Takes (dtype, bytes) of each tensor. A group holds one dtype, so each dtype has its
    own groups of about `group_bytes`, at least one. `max_groups` limits their number,
    but not below the number of dtypes. No tensors make one (empty) group.

    >>> fusion_groups([("float32", 36 << 20), ("float16", 28 << 20)])
    3
    """
    if group_bytes < 1:
        raise ValueError(f"group_bytes must be at least 1, not {group_bytes}")
    sizes: Dict[Hashable, int] = {}
    for dtype, size in dtypes_and_bytes:
        sizes[dtype] = sizes.get(dtype, 0) + size
    groups = sum(max(1, -(-size // group_bytes)) for size in sizes.values())
    if max_groups is not None:
        groups = max(min(groups, max_groups), len(sizes))
    return max(groups, 1)


def estimate_split_num_for_comm(tensors: Iterable[Any]) -> int:
    """The number of groups in which tensors (of TensorFlow or numpy) travel; unknown dimensions count as 1.

    The original's name for `fusion_groups`.
    """
    sizes = []
    for tensor in tensors:
        count = 1
        for dim in getattr(tensor.shape, "dims", tensor.shape) or ():
            count *= int(getattr(dim, "value", dim) or 1)
        sizes.append((tensor.dtype, count * int(getattr(tensor.dtype, "size", 0) or tensor.dtype.itemsize)))
    return fusion_groups(sizes)
