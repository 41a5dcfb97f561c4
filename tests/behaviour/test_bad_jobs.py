"""What goes wrong between ranks, and what the job says: every one ends all ranks, none hangs."""

import os
import re
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.ranks

SCRIPT = """
import os, sys, time
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
tf.enable_resource_variables()
import epl
case = sys.argv[1]
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
config = {"cluster.stall_timeout": 8}
if case == "other_config" and rank:
    config["communication.max_splits"] = 3
if case == "other_micro_batches" and rank:
    config["pipeline.num_micro_batch"] = 2
if case == "other_devices" and rank:
    config["cluster.devices_per_worker"] = 2
epl.init(epl.Config(config))
epl.set_default_strategy(epl.replicate(1))
x = tf.placeholder(tf.float32, [None, 4], "x")
h = x
if case == "other_graph" and rank:
    h = tf.tanh(h, name="only_here")
w = tf.get_variable("w", [4, 1], initializer=tf.ones_initializer())
if case == "other_variable" and rank:
    w = tf.get_variable("v", [4, 1], initializer=tf.ones_initializer())
loss = tf.reduce_mean(tf.square(tf.matmul(h, w)), name="loss")
if case == "unused_weight" and rank:
    b = tf.get_variable("b", [4, 1], initializer=tf.ones_initializer())
    loss = loss + tf.reduce_sum(b)
rate = 0.2 if case == "other_rate" and rank else 0.1
train = tf.train.GradientDescentOptimizer(rate).minimize(loss, name="train")
norm = tf.norm(w, name="norm")
epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
session = tf.Session()
session.run(tf.global_variables_initializer())
feed = {x: np.ones((2, 4))}
for step in range(3):
    fetches = [loss, train]
    if case == "other_fetch" and rank and step == 1:
        fetches = [tf.get_default_graph().get_tensor_by_name("gradients/MatMul_grad/MatMul_1:0"), train]
    if case == "skipped_step" and rank and step == 1:
        session.run(loss, feed)
        continue
    if case == "raises" and rank and step == 1:
        raise ValueError("the reader of rank 1 broke")
    if case == "exits" and rank and step == 1:
        sys.exit(0)
    session.run(fetches, feed)
print("finished", flush=True)
"""

# What the job says, as patterns.
CASES = {
    "other_graph": "the first difference is node",
    "other_variable": r"Rank (\d) does not run the program that rank (?!\1)\d runs: the first difference is node '(\w)' \(VarHandleOp\) here "
    r"and node '(?!\2)[wv]' \(VarHandleOp\) there. Every rank must build the same graph and make the same run calls",
    "other_rate": r"\(Const\) here and node",
    "unused_weight": "Every rank must build the same graph and make the same run calls",
    "other_config": "differ in config 'communication.max_splits'",
    "other_micro_batches": "differ in config 'pipeline.num_micro_batch'",
    "other_devices": "differ in plan 'devices_per_rank'",
    "other_fetch": "the ranks do not run the same thing",
    "skipped_step": r"the ranks do not run the same thing: rank 1 waits for agreement 'program' \(number 1\), "
    r"but rank 0 is in program '\w+', step 2 without having taken part",
    "raises": "the reader of rank 1 broke",
    "exits": r"rank 1 \(.*\) ended in good order after 2 parallel programs, but rank 0 needs it in program '\w+', step 2",
}


def run_job(tmp_path, case, hide_horovod=False):
    """(exit code, output, seconds) of the script on 2 ranks."""
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    bin_dir = os.path.dirname(sys.executable)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env = dict(os.environ, PATH="%s:%s" % (bin_dir, os.environ["PATH"]), TF_CPP_MIN_LOG_LEVEL="2", PYTHONPATH=root)
    if hide_horovod:
        (tmp_path / "horovod").mkdir()
        (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('no horovod here')\n")
        env["PYTHONPATH"] = "%s:%s" % (tmp_path, root)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-np", "2", sys.executable, str(path), case]
    start = time.time()
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    return done.returncode, done.stdout, time.time() - start


SLOW = ("other_rate", "unused_weight", "other_devices", "other_micro_batches", "other_variable")
"""Much like others."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES])
def test_job_ends_with_a_reason(tmp_path, case):
    code, output, seconds = run_job(tmp_path, case)
    assert code != 0, output[-2000:]
    assert re.search(CASES[case], output), output[-3000:]
    assert seconds < 60


def test_row_107_without_horovod_it_refuses(tmp_path):
    code, output, _ = run_job(tmp_path, "plain", hide_horovod=True)
    assert code != 0
    assert "BackendError" in output and "horovod" in output.lower(), output[-3000:]
    assert "finished" not in output


def test_a_right_job_finishes(tmp_path):
    code, output, _ = run_job(tmp_path, "right")
    assert code == 0, output[-3000:]
    assert output.count("finished") == 2
