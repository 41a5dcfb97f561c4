"""Random programs in random layouts train as plain TensorFlow does."""

import pytest
from hypothesis import HealthCheck, example, given, settings

from tests.unit.random_programs import CHUNKED, SCHEDULES, Block, Layout, Spec, cases, compare, pipelines

OPTIONS = dict(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


DEEP = Spec(4, (Block("lookup", 0), Block("dense", 1), Block("loop", 2), Block("attend", 3, 0, 2)), "adam", clip=True, rate=True)


@settings(max_examples=8, **OPTIONS)
@given(cases())
@example((DEEP, Layout(2, 1, 4, "Interleaved", per_device=2)))
@example((DEEP, Layout(1, 2, 3, "ZeroBubbleV", per_device=2)))
def test_some(case):
    compare(*case)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=60, **OPTIONS)
@given(cases())
def test_more(case):
    compare(*case)


@pytest.mark.slow
@pytest.mark.timeout(10800)
def test_many_pipelines():
    """Replicas of several devices, in the layouts of all schedules."""
    seen = []

    @settings(max_examples=320, **OPTIONS)
    @given(pipelines())
    def each(case):
        seen.append(case)
        compare(*case)

    each()
    assert sum(layout.width(spec.stages) > 1 for spec, layout in seen) >= 300
    assert {layout.schedule for _, layout in seen} == {*SCHEDULES, *CHUNKED}
    assert {(layout.schedule, layout.per_device) for _, layout in seen} >= {("Interleaved", 2), ("Interleaved", 3), ("ZeroBubbleV", 2)}


def _line(*blocks, **options):
    """A program of two stages whose blocks are given as (kind, stage, a, b)."""
    return Spec(2, tuple(Block(*block) for block in blocks), **options)


FOUND = {
    "zero-bubble order with gated gradients, and the fence of a call in a later stage": (
        _line(("mix", 1, 0, 7), ("cond", 1, 1, 5), ("norm", 1, 0, 1), optimizer="adam", v2=True, extra=(1,), total=False, clip=True, rate=True),
        Layout(2, 1, 4, "ZeroBubbleH2"),
    ),
    "a fence of a call and whole replicas": (
        Spec(
            3,
            (Block("cond", 0, 0, 4), Block("lookup_again", 2, 0, 4), Block("like", None), Block("gain", 2, 2, 6), Block("cond", 2, 1, 4)),
            "adam",
            resource=False,
            v2=True,
            extra=(1,),
            penalty=True,
            rows=3,
            static=True,
        ),
        Layout(3, 2, 2, "ZeroBubbleH2"),
    ),
    "gates that waited for another rank's later action, by control edges of an inner gradient": (
        Spec(
            3,
            (Block("turned", 0, 1, 2), Block("norm", 1, 0, 2), Block("lookup", 2, 0, 4), Block("mix", 2, 0, 0), Block("mix", 2, 0, 5)),
            v2=True,
            extra=(1,),
            clip=True,
            penalty=True,
            rows=1,
        ),
        Layout(3, 1, 2, near=False),
    ),
    "a long loop, with the counters and stacks of its gradient": (_line(("dense", 0), ("loop", 0), ("dense", 1)), Layout(1, 2, 3)),
    "a long loop over ranks": (_line(("dense", 0), ("loop", 0), ("dense", 1)), Layout(2, 1, 3, "ZeroBubbleH1")),
    "a backward loop whose parts were two actions": (_line(("nested", 1, 0, 3)), Layout(1, 2, 2, "ZeroBubbleH2")),
    "a table outside of scopes that Adam updates": (_line(("lookup", None, 0, 2), optimizer="adam"), Layout(2)),
    "the slots of a table outside of scopes": (
        _line(("lookup", None, 0, 0), ("lookup_again", None), optimizer="adagrad", weight_decay=True, total=False),
        Layout(2),
    ),
    "a conditional that needs a later stage": (_line(("dense", 0), ("dense", 1), ("cond", 0, 1, 0), ("dense", 1)), Layout(2, 1, 3)),
    "a loop that needs a later stage": (_line(("dense", 0), ("dense", 1), ("loop", 0, 1, 0), ("dense", 1)), Layout(2, 1, 3)),
    "a mean over replicas of which a rank sees none that has the stage there": (
        Spec(4, (Block("stopped", 0, 0, 1), Block("norm", 2, 0, 1), Block("lookup", 3, 0, 4)), "adam", extra=(1, 2), total=False, static=True),
        Layout(3, 2, 3, "Interleaved", False, 2),
    ),
    "reference variables and the powers of Adam": (
        Spec(3, (Block("cond", 0, 0, 1), Block("norm", 1, 0, 2), Block("loop", 2, 2, 0)), "adam", resource=False, extra=(0, 1, 2)),
        Layout(3, 1, 1),
    ),
}
"""Programs that once failed, by what was wrong."""


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_found_before(case):
    compare(*case)
