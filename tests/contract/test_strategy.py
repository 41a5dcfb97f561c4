import pytest

import epl
from epl.env import Env
from epl.ir.graph import Graph
from epl.strategies.replicate import Replicate


@pytest.fixture(autouse=True)
def one_gpu(gpus):
    gpus(1)
    epl.init()


@pytest.mark.parametrize(
    "outer, inner",
    [
        (lambda: epl.split(), lambda: epl.split()),
        (lambda: epl.split(1), lambda: epl.split(1)),
        (lambda: epl.replicate(1), lambda: epl.replicate(1)),
        (lambda: epl.replicate(device_count=1, name="a"), lambda: epl.replicate(name="b")),
        (lambda: epl.replicate(1), lambda: epl.split(1)),
    ],
)
def test_scopes_do_not_nest(outer, inner):
    with outer():
        strategy = inner()
        with pytest.raises(RuntimeError):
            with strategy:
                raise AssertionError("never reached")
    with inner():
        assert len(Env.get().strategy_context.state) == 1
    assert Env.get().strategy_context.state == []


def test_state():
    context = Env.get().strategy_context
    assert context._state == [] and context.state is context._state
    with epl.replicate(1) as first:
        assert context._state == [first]
        assert first.index == 0
    assert context._state == []
    with epl.split(1) as second:
        assert context._state == [second]
        assert second.index == 1
    assert context._state == []


def test_default_strategy():
    context = Env.get().strategy_context
    r1, r2 = epl.replicate(1), epl.replicate(1)
    epl.set_default_strategy(r1)
    assert context.state == [r1] and len(Graph.get().taskgraphs) == 1
    epl.set_default_strategy(r2)
    assert context.state == [r2] and len(Graph.get().taskgraphs) == 2
    assert r2.is_default and not r1.is_default
    for strategy in (r1, r2):
        with strategy:
            assert context.state == [strategy]
        assert len(Graph.get().taskgraphs) == 2
    assert context.state == [r2]
    assert isinstance(context.default_strategy, Replicate)
