"""What training sessions write to the log."""

import logging

import numpy as np
import pytest

from epl.cluster import Cluster
from epl.config import Config
from epl.env import Env
from epl.ir.program import DIVIDE, SAME
from epl.planner.plan import Plan
from epl.runtime.notes import Notes, data_policy, end_of_input, global_batch
from tests.unit.graph_text import parse


@pytest.fixture(autouse=True)
def env(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    env = Env.get()
    env.clear()
    env.cluster = Cluster(worker_hosts=["a:1", "b:1"], worker_index=0)
    yield env
    env.clear()


@pytest.fixture
def lines(caplog):
    """The lines at level info, as a function."""
    caplog.set_level(logging.INFO, "absl")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


def test_the_global_batch_of_fed_rows():
    text = global_batch(Plan(ranks=2, devices_per_rank=2, micro_batches=3), 8)
    assert text.startswith(
        "The global batch of a training step is 96 samples: 4 replicas x 3 micro-batches x 8 rows, if all processes are fed alike. "
    )
    assert "learning rate and number of steps are not scaled" in text
    assert "alike" not in global_batch(Plan(devices_per_rank=2), 8)


def test_the_global_batch_of_datasets():
    text = global_batch(Plan(ranks=4, micro_batches=2))
    assert "is the batches of 8 x the script's batch size: 4 replicas x 2 micro-batches." in text


def test_the_global_batch_of_a_pipeline():
    assert "is 24 samples: 2 replicas x 4 micro-batches x 3 rows" in global_batch(Plan(ranks=4, micro_batches=4, places=((0, 1), (2, 3))), 3)


def test_one_process_divides_nothing():
    assert data_policy(Plan(devices_per_rank=3)) == (
        "Each of 3 replicas draws its own batches from the input of its process. There is one process, so the data needs no division"
    )


def test_the_script_divides_the_data():
    text = data_policy(Plan(ranks=2))
    assert "io.slicing is off: the 2 processes read the same data unless the script divides it" in text
    assert "dataset.shard(cluster.worker_num, cluster.worker_index)" in text and "first stages" not in text
    assert "only the processes of first stages read" in data_policy(Plan(ranks=2, places=((0, 1),)))


def test_slicing_divides_the_data(env):
    env.config = Config({"io.slicing": True})
    assert "io.slicing is on, but has met no input files: the 2 processes read the same data" in data_policy(Plan(ranks=2))
    env.deals_files = True
    assert "io.slicing has dealt the input files to the 2 processes: the script must not divide these files again" in data_policy(Plan(ranks=2))


def test_whose_input_has_ended():
    assert end_of_input(1, 2, own=True).startswith("The input of rank 1 has ended, and with it the epoch of all 2 ranks;")
    assert end_of_input(0, 1, own=True) == "The input of rank 0 has ended; nothing of this step is applied"
    assert end_of_input(0, 2, own=False).startswith("Not rank 0, but another rank has come to the end of its input,")


def test_each_note_is_written_once_for_a_session(lines):
    notes, plan = Notes(), Plan(ranks=2)
    for _ in range(2):
        notes.training(plan, True, [], [], 1)
        notes.ended(own=True)
    notes.ended(own=False)
    assert [line.split(" has")[0].split(" is")[0] for line in lines()] == [
        "The global batch of a training step",
        "Each of 2 replicas draws its own batches from the input of its process. io.slicing",
        "The input of rank 0",
    ]
    Notes().ended(own=False)
    assert lines()[3:] == [end_of_input(0, 2, own=False)]


def test_fed_rows_are_those_of_one_micro_batch(lines):
    batch, labels, rate = np.zeros([12, 5]), np.zeros([12]), np.zeros([])
    plan = Plan(ranks=2, devices_per_rank=2, micro_batches=3, accumulate_in_run=True)
    Notes().training(plan, False, [batch, rate, labels], [DIVIDE, SAME, DIVIDE], 6)
    assert lines() == [global_batch(plan, 2)]


@pytest.mark.parametrize("plan, draws, sizes", [
    (Plan(ranks=2), True, [12]),
    (Plan(ranks=2), False, [12, 7]),
    (Plan(ranks=2), False, []),
    (Plan(ranks=2, places=((1, 0),)), False, [12]),
])  # fmt: skip
def test_rows_that_are_not_surely_a_batch_are_not_counted(plan, draws, sizes, lines):
    Notes().training(plan, draws, [np.zeros([size]) for size in sizes], [DIVIDE] * len(sizes), 1)
    assert lines()[0] == global_batch(plan)


def test_one_replica_has_no_data_policy_and_other_ranks_are_silent(env, lines):
    Notes().training(Plan(), True, [], [], 1)
    assert lines() == [global_batch(Plan())]
    env.cluster = Cluster(worker_hosts=["a:1", "b:1"], worker_index=1)
    notes = Notes()
    notes.training(Plan(ranks=2), True, [], [], 1)
    assert len(lines()) == 1
    notes.ended(own=True)
    assert lines()[1:] == [end_of_input(1, 2, own=True)]


def test_mixed_precision(env, lines):
    program = parse("x = Placeholder() {shape: [2, 2]}\nh = Cast(x) {DstT: half}\nm = MatMul(h, h)\nn = MatMul(x, x)\nt = Tanh(n)")
    program = program.replace(nodes={name: node.replace(origin=name) for name, node in program.nodes.items()})
    notes, plan = Notes(), Plan(amp="float16")
    notes.precision(program, plan)
    assert lines() == []
    env.config = Config({"amp.debug_log": True})
    notes.precision(program, Plan())
    notes.precision(program, plan)
    notes.precision(program, plan)
    assert lines() == [
        "Mixed precision, loss scale dynamic. Operations of this process:\nMatMul: 1 in float16, 1 in float32\nTanh: 0 in float16, 1 in float32"
    ]
    env.cluster = Cluster(worker_hosts=["a:1", "b:1"], worker_index=1)
    Notes().precision(program, plan)
    assert len(lines()) == 1
