"""Which ZeRO level is on."""

import types

import pytest

from epl.runtime import zero


@pytest.mark.parametrize(
    "level, v0, v1",
    [("v0", True, False), ("V0", True, False), ("v1", False, True), ("V1", False, True)]
    + [(level, False, False) for level in ("v123", "v2", "", None)],
)
def test_levels(monkeypatch, level, v0, v1):
    config = types.SimpleNamespace(zero=types.SimpleNamespace(level=level))
    monkeypatch.setattr(zero.Env, "get", classmethod(lambda cls: types.SimpleNamespace(config=config)))
    assert (zero.zero_v0(), zero.zero_v1()) == (v0, v1)
