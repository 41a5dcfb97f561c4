import json

import pytest

import epl
from epl.runtime.zero import zero_v0, zero_v1


@pytest.mark.parametrize(
    "level, v0, v1",
    [("v0", True, False), ("V0", True, False), ("v1", False, True), ("V1", False, True)] + [(level, False, False) for level in ("v123", "", None)],
)
def test_levels(gpus, monkeypatch, level, v0, v1):
    gpus(1)
    hosts = {"cluster": {"worker": ["127.0.0.1:8001", "127.0.0.1:8002"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(hosts))
    epl.init(epl.Config({"zero.level": level}))
    assert epl.Env.get().cluster.worker_num == 2
    assert zero_v0() is v0
    assert zero_v1() is v1
