"""The dynamic loss scale, without a session."""

import logging

import numpy as np
import pytest

from epl.cluster import Cluster
from epl.config import Config
from epl.env import Env
from epl.runtime import loss_scale
from epl.runtime.loss_scale import PERIOD, LossScale


@pytest.fixture(autouse=True)
def env(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    env = Env.get()
    env.clear()
    env.cluster = Cluster(worker_hosts=["a:1"], worker_index=0)
    yield env
    env.clear()


def test_it_halves_and_doubles():
    scale = LossScale()
    assert scale.value == 2.0**15 and scale.value.dtype == np.float32
    scale.update(False)
    scale.update(False)
    assert scale.state.tolist() == [2.0**13, 0]
    for _ in range(PERIOD - 1):
        scale.update(True)
    assert scale.state.tolist() == [2.0**13, PERIOD - 1]
    scale.update(True)
    assert scale.state.tolist() == [2.0**14, 0]
    scale.update(True)
    scale.update(False)
    assert scale.state.tolist() == [2.0**13, 0]


def test_it_stays_a_float_that_has_an_inverse():
    scale = LossScale()
    for _ in range(20):
        scale.update(False)
    assert scale.value == 1.0
    for _ in range(130 * PERIOD):
        scale.update(True)
    assert scale.value == 2.0**126 and np.float32(1) / scale.value > 0


def test_it_says_what_it_does(env, caplog):
    caplog.set_level(logging.INFO, "absl")
    LossScale().update(False)
    assert not caplog.records
    env.config = Config({"amp.debug_log": True})
    scale = LossScale()
    for finite in [False] + [True] * PERIOD:
        scale.update(finite)
    assert [record.getMessage() for record in caplog.records] == [
        "Gradients were not finite: the step was skipped, the loss scale is 16384",
        "After 2000 good steps the loss scale is 32768",
    ]


@pytest.mark.parametrize("options, dynamic", [({}, False), ({"amp.level": "o1"}, True), ({"amp.level": "O1", "amp.loss_scale": 8}, False)])
def test_when_it_is_dynamic(env, options, dynamic):
    env.config = Config(options)
    assert loss_scale.is_dynamic() == dynamic
