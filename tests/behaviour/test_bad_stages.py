"""What goes wrong with stages in several processes, and what the job says: every one ends all ranks, none trains something else."""

import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.harness.parametrize import cases

pytestmark = pytest.mark.ranks

SCRIPT = """
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
config = {"cluster.stall_timeout": 8, "pipeline.num_micro_batch": 2}
epl.init(epl.Config(config))
x = tf.placeholder(tf.float32, [None, 4], "x")
with epl.replicate(1):
    w = tf.get_variable("w", [4, 4], initializer=tf.ones_initializer())
    h = tf.matmul(x, w)
with epl.replicate(1):
    if case == "other_graph" and rank == 1:
        h = tf.layers.dense(h, 4, name="surplus")
    v = tf.get_variable("v", [4, 1], initializer=tf.ones_initializer())
    loss = tf.reduce_mean(tf.square(tf.matmul(h, v)), name="loss")
train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
saver = tf.train.Saver()
session = tf.Session()
feed = {x: np.ones((4, 4))}
if case != "initialised_on_one" or not rank:
    session.run(tf.global_variables_initializer())
session.run([loss, train], feed)
if case == "restored_on_one":
    path = saver.save(session, folder + "/model")
    if not rank:
        saver.restore(session, path)
if case == "evaluated_on_one" and not rank:
    session.run(loss, feed)
session.run([loss, train], feed)
if case == "raises_on_%d" % rank:
    raise ValueError("the data of rank %d is bad" % rank)
session.run([loss, train], feed)
print("finished", flush=True)
"""

CASES = {
    "other_graph": "node 'surplus/kernel' (VarHandleOp)",
    "raises_on_0": "ValueError: the data of rank 0 is bad",
    "raises_on_1": "ValueError: the data of rank 1 is bad",
    "initialised_on_one": "Variable 'v' was initialised, restored or assigned on rank 0, but not on rank 1",
    "restored_on_one": "rank 0 waits for agreement 'synchronize'",
    "evaluated_on_one": "rank 0 waits for agreement 'program'",
}

REFUSED = {
    "strings": "Tensor 'text' of type string is made in taskgraph 0 and used by node 'number' in taskgraph 1, in another process: strings do not",
    "fetched_string": "Tensor 'text' of type string is made in taskgraph 0 and fetched, which gives it to every process of the replica: strings",
    "cond": "Read the variable outside of tf.cond, and use the value inside",
    "loop": "Read the variable outside of tf.while_loop, and use the value inside",
    "three_stages": "one replica of the model needs 3 devices",
    "odd_schedule": "schedule ZeroBubbleV can't divide 3 stages",
    "per_device": "pipeline.stages_per_device = 2 needs the schedule Interleaved or ZeroBubbleV",
    "dealt_files": "io.slicing has dealt the input files to all 2 workers",
}
OPTIONS = {"odd_schedule": {"pipeline.strategy": "ZeroBubbleV"}, "per_device": {"pipeline.stages_per_device": 2}, "dealt_files": {"io.slicing": True}}


def refused(run):
    """The errors of programs that can't be laid out or cut, one after the other in one job."""
    import epl

    found = {}
    for case in REFUSED:
        with run.program(dict({"pipeline.num_micro_batch": 2}, **OPTIONS.get(case, {})), annotate="none"):
            try:
                _build_and_run(epl, case)
            except epl.errors.EplError as error:
                found[case] = str(error)
    return found


def _build_and_run(epl, case):
    x = tf.placeholder(tf.float32, [None, 4], "x")
    if case == "dealt_files":
        tf.data.TFRecordDataset(["one", "two"])
    with epl.replicate(1):
        w = tf.get_variable("w", [4, 4], initializer=tf.ones_initializer())
        h = tf.matmul(x, w)
        text = tf.as_string(h, name="text")
    if case in ("three_stages", "odd_schedule"):
        with epl.replicate(1):
            h = tf.tanh(h)
    with epl.replicate(1):
        if case == "strings":
            h = h + tf.strings.to_number(text, name="number")
        if case == "cond":
            h = tf.cond(tf.reduce_sum(h) > 0, lambda: tf.matmul(h, w), lambda: h)
        if case == "loop":
            h = tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, tf.matmul(v, w)), [tf.constant(0), h])[1]
        loss = tf.reduce_mean(tf.square(h))
    train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
    with tf.Session() as session:
        session.run([train, text] if case == "fetched_string" else train, {x: np.ones((4, 4))})


@cases(refused, "2x1")
def test_what_cant_be_cut_is_refused_on_all_ranks(outcome):
    for rank in outcome.ranks:
        for case, text in REFUSED.items():
            assert text in rank.get(case, "it was not refused"), case


def run_job(tmp_path, case, limit=120, script=SCRIPT, ranks=2):
    """(exit code or None, what each rank wrote, seconds) of a script."""
    path = tmp_path / "job.py"
    path.write_text(script)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env = dict(os.environ, PATH="%s:%s" % (os.path.dirname(sys.executable), os.environ["PATH"]), TF_CPP_MIN_LOG_LEVEL="2", PYTHONPATH=root)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-np", str(ranks)]
    start = time.time()
    job = subprocess.Popen(command + [sys.executable, str(path), case, str(tmp_path)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        code = job.wait(limit)
    except subprocess.TimeoutExpired:
        job.terminate()  # mpirun ends its ranks
        job.wait()
        code = None
    return code, [(tmp_path / ("rank%d.log" % rank)).read_text() for rank in range(ranks)], time.time() - start


SLOW = ("raises_on_0", "restored_on_one")
"""Much like others."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES])
def test_job_ends_with_a_reason(tmp_path, case):
    code, outputs, seconds = run_job(tmp_path, case)
    output = "\n".join(outputs)
    assert code and "finished" not in output, output[-2000:]
    assert CASES[case] in output, output[-3000:]
    assert seconds < 60
    if case.startswith("raises"):
        failed, other = outputs[:: -1 if case.endswith("1") else 1]
        assert "\n" + CASES[case] in failed, "the rank that failed tells why"
        assert re.search(r"epl: rank \d: rank %s \(.*\) failed" % case[-1], other), "the other one says which rank it was"
        # It learns of it within a run, whose echo would only hide the cause, or before its next run, by an error that tells the cause.
        own = other.partition("\nTraceback")[2]
        assert not own or "RankFailedError: rank %s (" % case[-1] in own, "its own echo does not hide the cause"


def test_a_right_job_finishes(tmp_path):
    code, outputs, _ = run_job(tmp_path, "right")
    assert code == 0, outputs[0][-3000:]
    assert all(output.count("finished") == 1 for output in outputs)
