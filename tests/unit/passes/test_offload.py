"""Offload: variables and what is given them are in host memory, the rest on the device."""

import pytest

from epl.passes.clone import Clone
from tests.unit.passes.steps import TRAIN, task, training, upto
from tests.unit.passes.test_order import REF

HOST = "/device:CPU:0"


@pytest.mark.parametrize("text, read", [(TRAIN, HOST), (REF, "/device:CPU:1")], ids=["resource", "reference"])
def test_state_is_on_the_host(text, read):
    job = task(devices=2, offload="v0")
    program = upto(Clone, training(text=text), job)
    places = {name: program.nodes["EPL_REPLICA_1/" + name].device for name in ("w", "train", "y", "loss", "read")}
    # The value of a reference is read where it is needed, a resource where it is.
    assert places == {"w": HOST, "train": HOST, "read": read, "y": "/device:CPU:1", "loss": "/device:CPU:1"}


def test_without_it_all_is_on_the_device():
    program = upto(Clone, training(), task(devices=2))
    assert {node.device for name, node in program.nodes.items() if name.startswith("EPL_REPLICA_1/")} == {"/device:CPU:1"}
