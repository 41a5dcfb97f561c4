"""The scope of a model phase, against a stand-in for the graph."""

import sys
import types

import pytest

from epl.ir.phase import ModelPhase


class FakeGraph:
    current = None

    def __init__(self):
        self.current_model_phase = ModelPhase.FORWARD

    def set_model_phase(self, phase):
        self.current_model_phase = phase

    @classmethod
    def get(cls, may_create=False):
        assert may_create
        return cls.current


@pytest.fixture
def graph(monkeypatch):
    module = types.ModuleType("epl.ir.graph")
    module.Graph = FakeGraph
    monkeypatch.setitem(sys.modules, "epl.ir.graph", module)
    monkeypatch.setattr(FakeGraph, "current", FakeGraph())
    return FakeGraph.current


def test_sets_and_restores(graph):
    graph.set_model_phase(ModelPhase.MICRO_BATCH_CLONE)
    with ModelPhase(ModelPhase.BACKWARD):
        assert graph.current_model_phase == ModelPhase.BACKWARD
        with ModelPhase(ModelPhase.APPLY):
            assert graph.current_model_phase == ModelPhase.APPLY
        assert graph.current_model_phase == ModelPhase.BACKWARD
    assert graph.current_model_phase == ModelPhase.MICRO_BATCH_CLONE


def test_restores_after_an_error(graph):
    with pytest.raises(KeyError), ModelPhase(ModelPhase.APPLY):
        raise KeyError
    assert graph.current_model_phase == ModelPhase.FORWARD


def test_may_be_entered_inside_itself(graph):
    scope = ModelPhase(ModelPhase.BACKWARD)
    with scope:
        graph.set_model_phase(ModelPhase.APPLY)
        with scope:
            assert graph.current_model_phase == ModelPhase.BACKWARD
        assert graph.current_model_phase == ModelPhase.APPLY
    assert graph.current_model_phase == ModelPhase.FORWARD


def test_restores_the_graph_that_was_entered(graph, monkeypatch):
    with ModelPhase(ModelPhase.BACKWARD):
        monkeypatch.setattr(FakeGraph, "current", FakeGraph())
        FakeGraph.current.set_model_phase(ModelPhase.APPLY)
    assert graph.current_model_phase == ModelPhase.FORWARD
    assert FakeGraph.current.current_model_phase == ModelPhase.APPLY


def test_unknown_phase():
    with pytest.raises(ValueError) as caught:
        ModelPhase("SAVE")
    assert str(caught.value) == "the phase must be one of FORWARD, BACKWARD, APPLY, MICRO_BATCH_CLONE, not 'SAVE'"
