"""Which activations to keep: where to cut a forward pass whose pieces are computed again.

A forward pass is a row of operations. A cut between two of them keeps what is made before
it and used after it. Everything else is dropped and computed again, one piece at a time,
when its gradients are due, so that the memory needed is that of all cuts for each batch in
flight and of the largest piece (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", 2016, section 4). The cuts are the best ones for that sum.
"""

from collections import deque
from typing import Deque, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

_PLACES = 1000


class Activation(NamedTuple):
    """A tensor of the forward pass.

    made: position of the operation that makes it. last: that of the last one that uses it.
    size: in bytes. saved: the backward pass needs it.
    """

    made: int
    last: int
    size: float
    saved: bool


class Choice(NamedTuple):
    """What is kept.

    cuts: positions before which the row is cut. bytes: what is held at most.
    whole: the pieces, counted from 0, that are not computed again.
    """

    cuts: Tuple[int, ...]
    bytes: float
    whole: Tuple[int, ...] = ()


def choose_cuts(activations: Sequence[Activation], length: int, in_flight: int = 1) -> Choice:
    """The cuts for which the least memory is held at any time.

    Exact for a chain of up to 1000 operations: the number of bytes is `in_flight` times the
    cuts plus the largest piece. Without a cut all of it is one piece, computed again from the
    inputs. A tensor that crosses several cuts is held once, but counts at each of them.

    Args:
      activations: the tensors. length: number of operations.
      in_flight: batches whose cuts are held at the same time.
    """
    live, before = _profile(activations, length)
    found = _frontier(live, before, length, in_flight)
    return min(found, key=lambda choice: choice.bytes)


def choose_within(activations: Sequence[Activation], work: Sequence[float], limit: float, in_flight: int = 1) -> Choice:
    """The cuts with which little is computed again and no more than `limit` bytes are held; if there are none, those that need the least.

    Of the pieces of each good row of cuts, those are kept whole that save the most work for their bytes.

    Args:
      work: what each operation costs. limit: in bytes. The rest as in `choose_cuts`.
    """
    length = len(work)
    live, before = _profile(activations, length)
    if in_flight * before[length] <= limit:
        return Choice((), in_flight * before[length], (0,))
    least, best = None, None
    for choice in _frontier(live, before, length, in_flight):
        least = choice if least is None or choice.bytes < least.bytes else least
        if choice.bytes <= limit:
            again, filled = _filled(choice, before, work, limit, in_flight)
            if best is None or again < best[0]:
                best = again, filled
    assert least is not None
    return best[1] if best is not None else least


def _filled(choice: Choice, before: Sequence[float], work: Sequence[float], limit: float, in_flight: int) -> Tuple[float, Choice]:
    """(Work that is done again, the choice with as many pieces kept whole as fit)."""
    edges = [0] + list(choice.cuts) + [len(work)]
    saved = [before[b] - before[a] for a, b in zip(edges, edges[1:])]
    costs = [sum(work[a:b]) for a, b in zip(edges, edges[1:])]
    cuts = choice.bytes - max(saved)
    whole: Set[int] = set()

    def held(kept: Set[int]) -> float:
        return cuts + in_flight * sum(saved[i] for i in kept) + max((s for i, s in enumerate(saved) if i not in kept), default=0.0)

    for piece in sorted(range(len(saved)), key=lambda i: (-costs[i] / (saved[i] or 1e-9), i)):
        if held(whole | {piece}) <= limit:
            whole.add(piece)
    return sum(cost for i, cost in enumerate(costs) if i not in whole), Choice(choice.cuts, held(whole), tuple(sorted(whole)))


def _frontier(live: Sequence[float], before: Sequence[float], length: int, in_flight: int) -> Iterator[Choice]:
    """Cuts for ever smaller pieces, from none on, as long as they may need less than the best so far."""
    places = _places(live, length)
    best = float("inf")
    limit: Optional[float] = None
    while True:
        cuts = _cheapest(places, live, before, length, limit)
        if cuts is None:
            return
        kept = in_flight * sum(live[c] for c in cuts)
        largest = _largest(cuts, before, length)
        yield Choice(cuts, kept + largest)
        best = min(best, kept + largest)
        # With a smaller limit the cuts can only cost more.
        if kept >= best or largest <= 0:
            return
        limit = largest


def _profile(activations: Sequence[Activation], length: int) -> Tuple[List[float], List[float]]:
    """(bytes that cross each position, bytes that the backward pass needs of what is made before it)."""
    change = [0.0] * (length + 2)
    saved = [0.0] * (length + 1)
    for item in activations:
        if item.last > item.made:
            change[item.made + 1] += item.size
            change[item.last + 1] -= item.size
        if item.saved:
            saved[item.made] += item.size
    live, before = [0.0] * (length + 1), [0.0] * (length + 1)
    for position in range(1, length + 1):
        live[position] = live[position - 1] + change[position]
        before[position] = before[position - 1] + saved[position - 1]
    return live, before


def _places(live: Sequence[float], length: int) -> List[int]:
    """Where a cut may be: everywhere, or in a very long row the best place of each of many parts."""
    step = max(1, -(-length // _PLACES))
    return [min(range(begin, min(begin + step, length)), key=lambda p: (live[p], p)) for begin in range(1, length, step)]


def _largest(cuts: Sequence[int], before: Sequence[float], length: int) -> float:
    edges = [0] + list(cuts) + [length]
    return max(before[b] - before[a] for a, b in zip(edges, edges[1:]))


def _cheapest(
    places: Sequence[int], live: Sequence[float], before: Sequence[float], length: int, limit: Optional[float]
) -> Optional[Tuple[int, ...]]:
    """The cuts with the fewest bytes such that every piece has less than `limit` (None: any); None where there are none.

    The cheapest way to each place comes from the cheapest of those within reach: a window
    that only moves on, so that its minimum is found in linear time.
    """
    points = [0] + list(places) + [length]
    cost = [0.0] + [float("inf")] * (len(points) - 1)
    origin = [-1] * len(points)
    window: Deque[int] = deque([0])
    first = 0
    for number in range(1, len(points)):
        while first < number and limit is not None and before[points[number]] - before[points[first]] >= limit:
            if window and window[0] == first:
                window.popleft()
            first += 1
        if window:
            own = live[points[number]] if number < len(points) - 1 else 0.0
            cost[number], origin[number] = cost[window[0]] + own, window[0]
        while window and cost[window[-1]] > cost[number]:
            window.pop()
        window.append(number)
    if cost[-1] == float("inf"):
        return None
    cuts: List[int] = []
    number = origin[-1]
    while number > 0:
        cuts.append(points[number])
        number = origin[number]
    return tuple(reversed(cuts))
