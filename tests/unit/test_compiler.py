"""From a run signature to a program."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.errors import FetchError, ProgramError
from epl.planner.plan import FIRST, LAST, WHOLE, Plan, Task
from epl.runtime.compiler import Signature, compile_program, traits_of
from tests.unit.graph_text import fingerprint
from tests.unit.machine import Machine, user_graph


def model():
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 2], "x")
        words = tf.placeholder(tf.string, [None], "words")
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        seen = tf.get_variable("seen", [], initializer=tf.zeros_initializer(), trainable=False)
        h = tf.multiply(x, w, name="h")
        length = tf.cast(tf.strings.length(words), tf.float32)
        loss = tf.reduce_mean(tf.reduce_sum(h, 1) * length, name="loss")
        total = tf.reduce_sum(h, name="total")
        epl.add_to_collection(total, epl.GraphKeys.GLOBAL_SUM_OBJECTS)
        tf.train.GradientDescentOptimizer(1.0).minimize(loss, name="train")
        tf.train.GradientDescentOptimizer(1.0).minimize(total, name="other")
        seen.assign_add(1.0, name="bump")
        tf.global_variables_initializer()
        return index()


WHOLE_GRAPH = model()


def signature(fetches, feeds=("x:0", "words:0"), modes=("divide", "divide")):
    return Signature(tuple(fetches), tuple(feeds), tuple(modes)[: len(feeds)])


@pytest.mark.parametrize("fetches, trains, parallel, records", [
    (["loss:0"], False, False, ()),
    (["init"], False, False, ()),
    (["bump"], False, False, ()),
    (["total:0"], False, True, ()),
    (["train"], True, True, (1,)),
    (["loss:0", "other"], True, True, (3,)),
    (["train", "other"], True, True, (1, 3)),
    (["gradients/h_grad/tuple/control_dependency_1:0"], False, False, ()),
])  # fmt: skip
def test_traits(fetches, trains, parallel, records):
    assert traits_of(WHOLE_GRAPH, signature(fetches)) == (trains, parallel, records)


def compiled(fetches, plan, part=WHOLE, rank=0, **options):
    found = signature(fetches, **options)
    before = fingerprint(WHOLE_GRAPH)
    task = Task(plan, rank=rank, devices=tuple("/device:CPU:%d" % d for d in range(plan.devices_per_rank)), part=part)
    result = compile_program(WHOLE_GRAPH, found, traits_of(WHOLE_GRAPH, found), plan, task)
    assert fingerprint(WHOLE_GRAPH) == before
    return result


def test_a_local_program():
    result = compiled(["init"], Plan(ranks=2, devices_per_rank=2), rank=1)
    assert (result.task.parallel, result.task.key, result.collective, result.draws) == (False, "local", False, False)
    assert set(result.written) == {"w", "seen"}
    assert compiled(["bump"], Plan(devices_per_rank=2)).written == ("seen",)
    assert compiled(["loss:0"], Plan(devices_per_rank=2)).written == ()


def test_a_training_program():
    plan = Plan(ranks=2, devices_per_rank=2, micro_batches=2, accumulate_in_run=True)
    results = [compiled(["loss:0", "train"], plan, rank=rank) for rank in range(2)]
    assert all(r.collective and r.task.parallel and r.written == () for r in results)
    assert results[0].task.key == results[1].task.key and results[0].lines == results[1].lines


def test_keys_tell_programs_plans_and_parts_apart():
    plan = Plan(ranks=2, micro_batches=2)
    keys = [
        compiled(["train"], plan, FIRST).task.key,
        compiled(["train"], plan, LAST).task.key,
        compiled(["loss:0", "train"], plan, FIRST).task.key,
        compiled(["train"], Plan(ranks=3, micro_batches=2), FIRST).task.key,
        compiled(["train"], plan, FIRST, modes=("each", "divide")).task.key,
    ]
    assert len(set(keys)) == len(keys)


def test_a_program_that_does_not_train_takes_one_batch():
    result = compiled(["total:0"], Plan(devices_per_rank=2, micro_batches=3), FIRST, feeds=("x:0",))
    assert result.task.part == WHOLE and result.task.micro_batches == 1
    assert not [n for n in result.program.nodes if "MICRO_BATCH" in n]


def test_errors_come_through():
    with pytest.raises(FetchError, match="Fetch 'gone:0' is not in the graph"):
        traits_of(WHOLE_GRAPH, signature(["gone:0"]))


def test_passes_can_be_dumped(monkeypatch, tmp_path):
    monkeypatch.setenv("EPL_DUMP_PASSES", str(tmp_path))
    result = compiled(["train"], Plan(devices_per_rank=2))
    assert any(path.name.endswith("_clone.txt") for path in (tmp_path / ("rank0_" + result.task.key)).iterdir())


LAYOUTS = [dict(), dict(devices=2), dict(m=3), dict(ranks=2, m=3), dict(m=3, in_run=False)]
X = np.arange(24, dtype=np.float32).reshape(12, 2)
WORDS = np.array(["a", "bb", "ccc"] * 4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_strings_are_divided_with_their_rows(layout):
    machine = Machine(WHOLE_GRAPH, **layout)
    machine.run("init")
    runs = machine.plan.runs_per_step
    for x, words in zip(np.split(X, runs), np.split(WORDS, runs)):
        machine.run("train", {"x:0": x, "words:0": words})
    lengths = np.array([1, 2, 3] * 4)
    np.testing.assert_allclose(machine.value("w"), 1 - (X * lengths[:, None]).mean(0), rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_fed_intermediate_tensors_and_fetched_feeds(layout):
    machine = Machine(WHOLE_GRAPH, **layout)
    machine.run("init")
    values = machine.run(["h:0", "x:0", "total:0", "train"], {"h:0": X * 2, "x:0": X, "words:0": WORDS})
    parts = np.split(X, machine.plan.ranks)
    for rank, (h, x, total) in enumerate(values):
        np.testing.assert_array_equal(h, parts[rank] * 2)
        np.testing.assert_array_equal(x, parts[rank])
        assert total == X.sum() * 2
    evaluated = machine.run("total:0", {"h:0": X})
    assert [float(v) for (v,) in evaluated] == [X.sum()] * machine.plan.ranks


@pytest.mark.parametrize("rates, same", [((0.1, 0.1), True), ((0.1, 1.0), False)])
def test_two_programs_of_one_shape_have_one_key(rates, same):
    """Names do not count: what tells such programs apart is the session's business. The constants of updates do."""
    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None], "x")
        w = tf.get_variable("w", [], initializer=tf.ones_initializer())
        for name, rate in zip(("slow", "fast"), rates):
            tf.train.GradientDescentOptimizer(rate).minimize(tf.reduce_mean(x * w), name=name)
        whole = index()
    plan = Plan(ranks=2)
    keys = []
    for name in ("slow", "fast"):
        found = Signature((name,), ("x:0",), ("divide",))
        keys.append(compile_program(whole, found, traits_of(whole, found), plan, Task(plan)).task.key)
    assert (keys[0] == keys[1]) == same


def test_a_program_whose_gradients_were_not_seen_is_refused():
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [None], "x")
        w = tf.get_variable("w", [], initializer=tf.ones_initializer())
        tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_mean(x * w), name="train")
        from epl.runtime.graph_index import GraphIndex

        whole = GraphIndex(graph).whole()
    with pytest.raises(ProgramError, match="EPL did not see the gradients it applies being built"):
        Machine(whole, devices=2).run("train", {"x:0": np.zeros(2, np.float32)})
    plain = Machine(whole)
    plain.run("w/Assign")
    plain.run("train", {"x:0": np.full(2, 3, np.float32)})
    assert plain.value("w") == -2
