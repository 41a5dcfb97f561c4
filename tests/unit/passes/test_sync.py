"""Sync: all replicas become equal to the first one of the job."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.errors import ProgramError
from epl.passes.instances import instance_name
from epl.passes.sync import sync_program
from tests.unit.graph_text import expect, fingerprint, parse
from tests.unit.machine import Machine, user_graph
from tests.unit.passes.steps import task

VARIABLES = """
    w = VarHandleOp() {shape: [2], shared_name: mine}
    r = VariableV2() {shape: [2]}
    s = VarHandleOp() {shape: [], dtype: string}
    late = VarHandleOp() {shape: ?}
"""


def sync(names, job):
    whole = parse(VARIABLES)
    before = fingerprint(whole)
    program = sync_program(whole, names, job)
    assert fingerprint(whole) == before
    return program


def test_local_replicas_copy_the_first_one():
    expect(
        sync(["w"], task(devices=3)),
        """
        w = VarHandleOp() {shared_name: mine} @/device:CPU:0
        EPL_REPLICA_1/w = VarHandleOp() {shared_name: EPL_REPLICA_1/mine} @/device:CPU:1
        EPL_REPLICA_2/w = VarHandleOp() {shared_name: EPL_REPLICA_2/mine} @/device:CPU:2
        epl_sync/w/read = ReadVariableOp(w) @/device:CPU:0
        epl_sync/w/assign_1 = AssignVariableOp(EPL_REPLICA_1/w, epl_sync/w/read) @/device:CPU:1
        epl_sync/w/assign_2 = AssignVariableOp(EPL_REPLICA_2/w, epl_sync/w/read) @/device:CPU:2
        targets: epl_sync/w/assign_1, epl_sync/w/assign_2
        """,
        "shared_name",
        devices=True,
    )


def test_the_chief_sends_its_values():
    program = sync(["w"], task(ranks=2, key="k"))
    node = program.nodes["epl_comm/k.000"]
    assert (node.op, node.inputs, program.targets) == ("HorovodBroadcast", (("epl_sync/w/read", 0),), ("epl_comm/k.000",))


def test_variables_in_host_memory_are_copied_there():
    """A node with another device would be another variable of the session."""
    program = sync(["w"], task(devices=2, offload="v0"))
    assert [program.nodes[name].device for name in ("w", "EPL_REPLICA_1/w")] == ["/device:CPU:0"] * 2


def test_other_ranks_need_no_values_of_their_own():
    program = sync(["w"], task(ranks=2, rank=1, key="k"))
    assert "epl_sync/w/read" not in program.nodes and program.targets == ("epl_sync/w/assign_0",)
    assert program.nodes["epl_sync/w/none"].attr("value").tensor.tensor_shape.dim[0].size == 2


def test_a_shape_that_is_not_known_must_be_read():
    assert "epl_sync/late/read" in sync(["late"], task(ranks=2, rank=1)).nodes


def test_strings_stay_where_they_are():
    assert not sync(["s"], task(devices=2)).nodes and not sync([], task(devices=2)).targets


def test_all_variables_travel_in_the_order_given():
    for rank in range(2):
        program = sync(["r", "w"], task(ranks=2, rank=rank, key="k"))
        sources = [n.inputs[0][0] for n in program.nodes.values() if n.op == "HorovodBroadcast"]
        assert [("r" in s.split("/") or "epl_sync/r" in s) for s in sources if "anchored" not in s] in ([True, False], [])
        assert len(sources) == 2


@pytest.mark.parametrize("layout", [dict(devices=3), dict(ranks=3), dict(ranks=2, devices=2)], ids=str)
@pytest.mark.parametrize("resource", [True, False])
def test_after_initialisation_all_replicas_are_equal(layout, resource):
    """Values drawn without a seed differ between replicas; variables of all types are copied."""
    with user_graph(resource=resource) as index:
        x = tf.placeholder(tf.float32, [None], "x")
        w = tf.get_variable("w", [3], initializer=tf.random_uniform_initializer())
        random = tf.random_uniform([2], maxval=100.0)
        types = tf.int64, tf.float64, tf.half, tf.bfloat16, tf.uint8, tf.complex128
        others = [tf.get_variable(t.name, initializer=tf.cast(random, t), trainable=False) for t in types]
        others.append(tf.get_variable("bool", initializer=random > 50.0, trainable=False))
        words = tf.get_variable("words", initializer=tf.constant("a word"), trainable=False)
        loss = tf.reduce_mean(x) * tf.reduce_sum(w) * tf.add_n([tf.reduce_sum(tf.cast(v, tf.float32)) for v in others])
        tf.train.GradientDescentOptimizer(0.0).minimize(loss, name="train")
        tf.identity(words, name="word")
        tf.global_variables_initializer()
        whole = index()
    machine = Machine(whole, **layout)
    machine.run("init")
    machine.run("train", {"x:0": np.zeros(12, np.float32)})
    for name in ["w", "int64", "float64", "float16", "bfloat16", "uint8", "complex128", "bool"]:
        names = [instance_name(name, d, None) for d in range(machine.plan.devices_per_rank)]
        values = [machine.value(instance, rank) for rank in range(machine.plan.ranks) for instance in names]
        assert all(np.array_equal(v, values[0]) for v in values), name
    assert machine.run("word:0") == [[b"a word"]] * machine.plan.ranks


def test_a_type_that_can_not_travel_is_an_error():
    whole = parse("c = VarHandleOp() {shape: [2], dtype: float8_e5m2}")
    with pytest.raises(ProgramError, match="A tensor of type float8_e5m2 can't travel between ranks"):
        sync_program(whole, ["c"], task(ranks=2))
    sync_program(whole, ["c"], task(devices=2))
