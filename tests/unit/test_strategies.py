import contextlib
import inspect
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from epl.cluster import Cluster
from epl.env import Env
from epl.errors import AnnotationError, EplError
from epl.ir.graph import Graph
from epl.strategies import ParallelStrategy, Replicate, Split, StrategyContext, replicate, set_default_strategy, split


class FakeGraph:
    """Records what the strategies tell the annotated graph; makes a taskgraph per strategy."""

    current = None
    refuse = False

    def __init__(self):
        self.calls = []
        self.taskgraphs = []

    @classmethod
    def get(cls, may_create=False):
        assert may_create
        if cls.current is None:
            cls.current = cls()
        return cls.current

    def _record(self, what, strategy):
        self.calls.append((what, strategy))
        if self.refuse:
            raise ValueError("refused")
        if strategy not in self.taskgraphs:
            self.taskgraphs.append(strategy)

    def enter_strategy(self, strategy):
        self._record("enter", strategy)

    def exit_strategy(self, strategy):
        self.calls.append(("exit", strategy))

    def set_default_strategy(self, strategy):
        self._record("default", strategy)


@pytest.fixture(params=["fake", "real"])
def any_graph(request, monkeypatch):
    """The annotated graph, first a fake one and then the real one."""
    if request.param == "fake":
        monkeypatch.setitem(sys.modules, "epl.ir.graph", types.SimpleNamespace(Graph=type("Graph", (FakeGraph,), {})))
    Env.get().clear()
    with tf.Graph().as_default():
        yield
    Env.get().clear()


@pytest.fixture
def graph(monkeypatch):
    """A fake annotated graph."""
    fake = type("Graph", (FakeGraph,), {})
    monkeypatch.setitem(sys.modules, "epl.ir.graph", types.SimpleNamespace(Graph=fake))
    Env.get().clear()
    with tf.Graph().as_default():
        yield fake.get(may_create=True)
    Env.get().clear()


def state():
    context = Env.get().strategy_context
    assert context.state is context._state
    return list(context.state)


def number_of_taskgraphs():
    """Of the fake graph, if a fixture has put it there."""
    return len(sys.modules["epl.ir.graph"].Graph.get(may_create=True).taskgraphs)


def this_line():
    return inspect.currentframe().f_back.f_lineno


def test_the_scope_is_the_state(any_graph):
    assert state() == []
    assert Env.get().strategy_context.default_strategy is None
    with replicate(device_count=1) as first:
        assert state() == [first]
        assert first.index == 0
        assert not first.is_default
    assert state() == []
    with split(device_count=1) as second:
        assert state() == [second]
        assert second.index == 1
    assert state() == []


@pytest.mark.parametrize("outer", [replicate, split])
@pytest.mark.parametrize("inner", [replicate, split])
@pytest.mark.parametrize("outer_count,inner_count", [(None, None), (1, 1), (1, None), (2, 1)])
def test_scopes_do_not_nest(any_graph, outer, inner, outer_count, inner_count):
    second = inner(inner_count, name="inner")
    with outer(outer_count, name="outer") as first:
        where = "%s:%d" % (__file__, this_line() - 1)
        with pytest.raises(RuntimeError) as caught:
            second.__enter__()
        assert state() == [first]
    message = str(caught.value)
    assert isinstance(caught.value, AnnotationError) and isinstance(caught.value, EplError)
    assert repr(first) in message and repr(second) in message
    assert "entered at %s, is still open" % where in message
    assert "can't be entered at %s:" % __file__ in message
    # And the context is usable afterwards, also with the strategy that was refused.
    assert state() == []
    with second:
        assert state() == [second]
        assert second.index == 1
    assert state() == []


def test_nesting_error_that_leaves_all_scopes(graph):
    with pytest.raises(AnnotationError, match="scopes do not nest"), replicate(1), replicate(1):
        pass
    assert state() == []
    assert [what for what, _ in graph.calls] == ["enter", "exit"]


def test_a_strategy_does_not_nest_in_itself(graph):
    first = replicate(1)
    with first:
        with pytest.raises(AnnotationError, match="scopes do not nest"), first:
            pass
        assert state() == [first]
    assert state() == []


def test_an_exception_in_a_scope_closes_it(any_graph):
    with pytest.raises(KeyError), replicate(1):
        raise KeyError("user")
    assert state() == []
    with replicate(1) as after:
        assert after.index == 1


def test_default_strategy_is_replaced(any_graph):
    first, second = replicate(device_count=1), replicate(device_count=1)
    set_default_strategy(first)
    assert state() == [first]
    assert first.is_default and not second.is_default
    assert number_of_taskgraphs() == 1
    set_default_strategy(second)
    assert state() == [second]
    assert second.is_default and not first.is_default
    assert Env.get().strategy_context.default_strategy is second
    assert number_of_taskgraphs() == 2
    for strategy in (first, second):
        with strategy:
            assert state() == [strategy]
        assert state() == [second]
    assert number_of_taskgraphs() == 2
    assert (first.index, second.index) == (0, 1)


def test_scope_over_a_default(any_graph):
    default = Replicate(1)
    set_default_strategy(default)
    assert state()[0].is_default
    assert isinstance(Env.get().strategy_context.default_strategy, Replicate)
    with split() as scope:
        assert state() == [scope]
        assert scope.index == 1
        assert Env.get().strategy_context.default_strategy is default
    assert state() == [default]


def test_default_is_not_set_inside_a_scope(any_graph):
    with replicate(1, name="open"):
        where = "%s:%d" % (__file__, this_line() - 1)
        with pytest.raises(AnnotationError) as caught:
            set_default_strategy(split(2))
    assert "can't be set to split(device_count=2) while replicate(device_count=1, name='open'), entered at %s, is open" % where in str(caught.value)
    assert state() == []


@pytest.mark.parametrize("value", [None, "replicate", 1, Replicate, replicate])
def test_default_must_be_a_strategy(graph, value):
    with pytest.raises(AnnotationError, match="expected a strategy, such as epl.replicate"):
        set_default_strategy(value)
    assert state() == [] and graph.calls == []


def test_a_strategy_entered_again_keeps_its_place(graph):
    first, second = replicate(1), replicate(1)
    for _ in range(2):
        for strategy in (first, second):
            with strategy:
                pass
    assert (first.index, second.index) == (0, 1)
    assert graph.taskgraphs == [first, second]


def test_index_counts_per_graph(graph):
    first, second = replicate(1), replicate(1)
    with first:
        pass
    with tf.Graph().as_default():
        with second:
            assert second.index == 0
        with first:
            assert first.index == 1
    with first:
        assert first.index == 0


def test_init_starts_anew(graph):
    first = replicate(1)
    set_default_strategy(first)
    with split():
        pass
    context = Env.get().strategy_context
    Env.get().clear()
    assert Env.get().strategy_context is not context
    assert state() == [] and not first.is_default
    with split() as scope:
        assert scope.index == 0


def test_scope_open_over_a_new_init(graph):
    with replicate(1):
        Env.get().clear()
        assert state() == []
        with split() as scope:
            assert state() == [scope]
    assert state() == []


def test_what_the_graph_is_told(graph):
    default, scope = replicate(1), split(2)
    set_default_strategy(default)
    with scope:
        pass
    assert graph.calls == [("default", default), ("enter", scope), ("exit", scope)]


def test_a_refusing_graph_leaves_the_context_usable(graph):
    default, scope = replicate(1), split(2)
    set_default_strategy(default)
    type(graph).refuse = True
    with pytest.raises(ValueError, match="refused"), scope:
        pass
    assert state() == [default] and scope.entered_at is None
    with pytest.raises(ValueError, match="refused"):
        set_default_strategy(scope)
    assert state() == [default] and default.is_default
    type(graph).refuse = False
    with scope:
        assert state() == [scope]


def test_leaving_without_entering(graph):
    with pytest.raises(AnnotationError, match=r"split\(\) is left but not open"):
        split().__exit__(None, None, None)


def test_context_refuses_to_close_another(graph):
    context = StrategyContext()
    first, second = replicate(1), replicate(1, name="b")
    with pytest.raises(AnnotationError, match=r"replicate\(device_count=1\) can't be closed: the open scope is None"):
        context.remove(first)
    context.add(first, "a:1")
    with pytest.raises(AnnotationError, match=r"name='b'\) can't be closed: the open scope is replicate\(device_count=1\)"):
        context.remove(second)
    context.remove(first)
    assert context.state == []


def test_place_is_the_users_line_also_in_an_exit_stack(graph):
    with contextlib.ExitStack() as stack:
        scope = stack.enter_context(replicate(1))
        assert scope.entered_at == "%s:%d" % (__file__, this_line() - 1)
    assert scope.entered_at is None


@pytest.mark.parametrize("make", [replicate, split])
@pytest.mark.parametrize("count", [0, -1, True, False, 1.0, 1.5, "1", "", [1], (2,)])
def test_bad_counts(make, count):
    with pytest.raises(AnnotationError) as caught:
        make(count)
    assert str(caught.value) == "%s(device_count=%r): expected a whole number of devices, 1 or more, or None" % (make.__name__, count)


@pytest.mark.parametrize("make", [replicate, split])
@pytest.mark.parametrize("name", ["", 1, ["a"]])
def test_bad_names(make, name):
    with pytest.raises(AnnotationError) as caught:
        make(1, name)
    assert str(caught.value) == "%s(name=%r): expected a string that is not empty, or None" % (make.__name__, name)


@pytest.mark.parametrize("count,kept", [(None, None), (1, 1), (8, 8), (np.int64(2), 2)])
def test_good_counts(count, kept):
    strategy = replicate(device_count=count)
    assert strategy.device_count == kept
    assert kept is None or type(strategy.device_count) is int


def test_what_is_made():
    from epl.strategies.replicate import Replicate as Natural

    assert type(replicate()) is Natural is Replicate
    assert type(split()) is Split
    assert isinstance(split(), ParallelStrategy)
    assert (replicate().is_split, split().is_split) == (False, True)
    assert (replicate(name="a").name, split(2).name, split(2).index) == ("a", None, None)
    assert [repr(item) for item in (replicate(), split(2), replicate(1, "a"))] == [
        "replicate()",
        "split(device_count=2)",
        "replicate(device_count=1, name='a')",
    ]


class TestWithTheRealGraph:
    """The contract's cases that need a cluster and the annotated graph."""

    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        monkeypatch.setattr(Cluster, "available_gpus", lambda self: ["GPU"] * 4)
        Env.get().clear()
        with tf.Graph().as_default():
            yield
        Env.get().clear()

    def slices(self):
        prefix = "/job:worker/replica:0/task:0/device:"
        return [[[name.replace(prefix, "") for name in row] for row in device._slice_devices] for device in Env.get().cluster.virtual_devices]

    def test_scopes_and_defaults_mixed(self):
        Env.get().cluster = Cluster(layout="auto")
        tf.constant(1.0)
        for name in ("replica_0", "replica_1"):
            with replicate(name=name):
                inside = tf.constant(1.0)
        outside = tf.constant(1.0)
        graph = Graph.get()
        assert graph._user_default_taskgraph is None
        assert graph._epl_default_taskgraph.index == 1
        assert inside.op.get_attr("_epl_taskgraph") == 1
        with pytest.raises(ValueError):
            outside.op.get_attr("_epl_taskgraph")
        set_default_strategy(replicate(1))
        tf.constant(1.0)
        with replicate(name="replica_3"):
            tf.constant(1.0)
        assert graph._user_default_taskgraph.index == 2
        assert graph._epl_default_taskgraph.index == 3

    def test_default_in_a_colocated_cluster(self, monkeypatch):
        monkeypatch.setattr(Cluster, "available_gpus", lambda self: ["GPU"] * 2)
        Env.get().config.cluster.colocate_split_and_replicate = True
        Env.get().cluster = Cluster(layout="all")
        set_default_strategy(replicate(1))
        assert Env.get().strategy_context.state[0].is_default
        assert self.slices() == [[["GPU:0"], ["GPU:1"]]]
        assert len(Graph.get().taskgraphs) == 1
        assert Graph.get()._user_default_taskgraph.index == 0

    @pytest.mark.parametrize("stages,local_replicas", [(1, 4), (2, 2), (4, 1)])
    def test_stages_on_four_devices(self, stages, local_replicas):
        Env.get().cluster = Cluster(layout="auto")
        for stage in range(stages):
            with replicate(device_count=1, name="stage_%d" % stage):
                tf.constant(1.0)
        Graph.get().lay_out()
        assert self.slices() == [[["GPU:%d" % (replica * stages + stage)] for replica in range(local_replicas)] for stage in range(stages)]
        assert [taskgraph.local_num_replicas for taskgraph in Graph.get().taskgraphs] == [local_replicas] * stages
