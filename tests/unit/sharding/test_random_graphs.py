"""Random programs with split scopes train as plain TensorFlow does, however their ops are divided."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.unit.sharding.random_graphs import Block, Layout, Seen, Spec, cases, compare

OPTIONS = dict(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@settings(max_examples=10, **OPTIONS)
@given(cases())
def test_some(case):
    compare(*case)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many():
    seen = Seen()

    @settings(max_examples=600, **OPTIONS)
    @given(cases())
    def each(case):
        compare(*case, seen)

    each()
    print("%d of %d ways were taken" % (len(seen.taken), len(seen.possible)))
    assert len(seen.taken) > 0.8 * len(seen.possible)


def _of(*blocks, **options):
    """A program whose blocks are given as (kind, scope, a, b, c)."""
    return Spec(tuple(Block(*block) for block in blocks), **options)


SAME_DIMENSION = (("glued", 1, 1, 2, 20), ("repeated", 1, 1, 2, 2), ("tied", 2, 1, 1, 19), ("classify", 2, 0, 3, 5), ("bias", 2, 1, 1, 14))
PAIRS = (("pool", 1, 0, 2, 24), ("unary", 1, 1, 4, 29), ("best", 1, 0, 4, 26), ("pairs", 1, 0, 4, 14))
FOUND = {
    "reference variables were taken for values": (_of(optimizer="adagrad", resource=False), Layout(3, 1, 3)),
    "variables that are read outside of scopes": (_of(), Layout(4, 2, 2)),
    "a unit that other programs knew nothing of": (_of(("convolve", 1, 2, 4, 20)), Layout(1, 2, 2, mood=550709)),
    "units, and a second dimension": (
        _of(("bias", 1, 2, 4, 2), ("convolve", 1, 0, 1, 21), optimizer="momentum"),
        Layout(1, 2, 2, mood=892057),
    ),
    "from one unit to another": (
        _of(*SAME_DIMENSION, ("loop", 1, 0, 1, 4), ("time_first", 2, 1, 0, 20), ("soft", 1, 1, 1, 1)),
        Layout(1, 4, 4, mood=810695),
    ),
    "from one unit to another over ranks": (_of(("hot", 2, 2, 2, 18), ("convolve", 2, 0, 3, 10)), Layout(2, 2, 2, mood=313578)),
    "the best of a part that is shorter": (_of(("top", 2, 1, 4, 29)), Layout(1, 2, 2, mood=954490)),
    "slots with units": (_of(("words_of", 0, 0, 4, 16), clip=True), Layout(1, 2, 2, mood=617394)),
    "a fetch of several micro-batches in another form": (_of(("squeezed", 1, 1, 3, 10)), Layout(3, 2, 2, 2, mood=76977)),
    "the same of a turned tensor": (_of(("transposed", 1, 2, 0, 21), ("joined", 1, 1, 3, 4), clip=True), Layout(1, 2, 2, 2, mood=529738)),
    "rows of a sparse gradient that are as many as a batch's": (_of(("words_of", 1, 0, 2, 26), static=True), Layout(1, 2, 2, mood=811075)),
    "the same at usual costs": (
        _of(("words_of", 1, 0, 2, 7), ("classify", 0, 2, 0, 11), ("repeated", 1, 1, 4, 3), ("norm", 1, 0, 0, 25), static=True),
        Layout(1, 4, 4),
    ),
    "a number of segments that is not known": (
        _of(("best", 2, 0, 5, 29), ("words_of", 1, 0, 2, 26), optimizer="momentum"),
        Layout(1, 2, 2, mood=811075),
    ),
    "sparse updates of a table with fewer rows than devices": (
        _of(*PAIRS, ("lookup", 1, 2, 3, 10), optimizer="adagrad"),
        Layout(2, 2, 2, mood=443079),
    ),
    "Adagrad's rows": (_of(("norm", 1, 0, 1, 26), ("words_of", 1, 2, 2, 9), optimizer="adagrad"), Layout(1, 4, 2, mood=640501)),
    "statistics of each lane": (_of(("moving", 1, 2, 3, 21)), Layout(3, 2, 2, 2, mood=322014)),
}
"""Programs that once failed, by what was wrong."""


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_found_before(case):
    compare(*case)
