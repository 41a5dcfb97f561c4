"""An op that fails at run time while its step waits for other ranks: the job ends, and all ranks say which op of which rank."""

import re

import pytest

from tests.behaviour.test_bad_stages import run_job

pytestmark = pytest.mark.ranks

START = """
import os, sys
case, folder = sys.argv[1:]
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
log = os.open(folder + "/rank%d.log" % rank, os.O_WRONLY | os.O_CREAT)  # mpirun would mix the lines of the ranks
os.dup2(log, 1), os.dup2(log, 2)
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
tf.enable_resource_variables()
import epl
"""

TWO = START + """
epl.init(epl.Config({"pipeline.num_micro_batch": 2}))
x = tf.placeholder(tf.float32, [None, 4], "x")
with epl.replicate(1):
    w = tf.get_variable("w", [4, 4], initializer=tf.ones_initializer())
    h = tf.matmul(x, w) + tf.gather(w, tf.cast(x[:, 0], tf.int32), name="rows")
with epl.replicate(1):
    v = tf.get_variable("v", [4, 1], initializer=tf.ones_initializer())
    loss = tf.reduce_mean(tf.square(tf.matmul(h, v)), name="loss")
train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
session = tf.Session()
session.run(tf.global_variables_initializer())
good, bad = ({x: np.full((4, 4), value)} for value in (1, 9))
session.run([loss, train], good)
session.run(loss, good)
try:
    session.run(loss if case == "evaluation" else train, bad)
except tf.errors.InvalidArgumentError:
    if case != "caught":
        raise
    print("caught", flush=True)
session.run([loss, train], good)
print("finished", flush=True)
"""

FOUR = START + """
epl.init(epl.Config({"pipeline.num_micro_batch": 2, "pipeline.strategy": "Interleaved", "pipeline.stages_per_device": 2}))
x = h = tf.placeholder(tf.float32, [None, 4], "x")
for stage in range(4):
    with epl.replicate(1):
        h = tf.layers.dense(h, 4, kernel_initializer=tf.ones_initializer(), name="layer_%d" % stage)
        if stage == 1:
            h = tf.check_numerics(h, "too big", name="guard")
        h = tf.tanh(h)
loss = tf.reduce_mean(tf.square(h))
train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
session = tf.Session()
session.run(tf.global_variables_initializer())
session.run([loss, train], {x: np.ones((4, 4))})
session.run([loss, train], {x: np.full((4, 4), float("nan") if rank == 2 else 1)})
print("finished", flush=True)
"""


def check(code, outputs, failed, texts):
    """The rank that failed tells the error of its op, all others tell its number and that error."""
    assert code and not any("finished" in output for output in outputs), outputs[failed][-3000:]
    for rank, output in enumerate(outputs):
        assert all(text in output for text in texts), output[-3000:]
        if rank != failed:
            assert re.search(r"epl: rank %d: rank %d \(.*\) failed in program '\w+', step \d" % (rank, failed), output), output[-3000:]


@pytest.mark.parametrize("case", ["training", pytest.param("evaluation", marks=pytest.mark.slow)])
def test_the_first_stage(tmp_path, case):
    code, outputs, seconds = run_job(tmp_path, case, script=TWO)
    check(code, outputs, 0, ["InvalidArgumentError", "indices[0] = 9 is not in [0, 4)", "rows"])
    assert "ended with RankFailedError (%s, line" % (tmp_path / "job.py") in outputs[1]
    assert seconds < 60


@pytest.mark.slow
def test_a_script_that_goes_on_can_not(tmp_path):
    code, outputs, _ = run_job(tmp_path, "caught", script=TWO)
    assert "caught" in outputs[0]
    check(code, outputs, 0, ["indices[0] = 9 is not in [0, 4)"])
    assert "RankFailedError" in outputs[0] and "was about to enter program" in outputs[0]


@pytest.mark.slow
def test_a_stage_in_the_middle_of_one_of_two_replicas(tmp_path):
    code, outputs, seconds = run_job(tmp_path, "four", script=FOUR, ranks=4)
    check(code, outputs, 3, ["InvalidArgumentError", "too big", "guard"])
    assert seconds < 100
