"""What Horovod is told by its environment variables when EPL starts it."""

import os
import types
from unittest import mock

import pytest

from epl.config import Config
from epl.runtime import backend
from epl.runtime.ranks import RankInfo

RANKS = RankInfo(0, 2, 0, 2, "mpi")


@pytest.fixture
def seen(monkeypatch):
    """A Horovod that notes its variables when it starts."""
    found = {}
    fake = types.SimpleNamespace(init=lambda: found.update(os.environ), rank=lambda: 0, size=lambda: 2, is_initialized=lambda: False)
    monkeypatch.setattr(backend, "_import_horovod", lambda ranks: fake)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield found


@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_number_of_communicators(number, seen):
    backend.Backend.connect(RANKS, Config({"communication.num_communicators": number}))
    assert seen["HOROVOD_NUM_NCCL_STREAMS"] == str(number)


def test_communicators_that_the_user_has_chosen_stay(seen):
    os.environ["HOROVOD_NUM_NCCL_STREAMS"] = "7"
    backend.Backend.connect(RANKS, Config({"communication.num_communicators": 3}))
    assert seen["HOROVOD_NUM_NCCL_STREAMS"] == "7"


def test_the_default_is_that_of_the_configuration(seen):
    backend.Backend.connect(RANKS, Config())
    assert seen["HOROVOD_NUM_NCCL_STREAMS"] == str(Config().communication.num_communicators)
    assert seen["HOROVOD_DYNAMIC_PROCESS_SETS"] == "1", "EPL can't do without"
