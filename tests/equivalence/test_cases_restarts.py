"""Beginning with what an earlier run has left: rows 36, 38.

As a script it is a rank of a job that is killed and then started again: it forks both, so that TensorFlow is loaded once.
"""

import json
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, scalar
from tests.equivalence.test_cases_checkpoints import together_at
from tests.harness.context import Run, variables
from tests.harness.layouts import Layout
from tests.harness.parametrize import together
from tests.harness.pool import ROOT, environment, request
from tests.harness.results import decode, encode


def save_five(run):
    with tf.Graph().as_default(), tf.Session() as session:
        tf.get_variable("w", [], initializer=tf.constant_initializer(5.0), use_resource=True)
        session.run(tf.global_variables_initializer())
        return tf.train.Saver().save(session, run.path("five"))


def warm_start(run, path, late):
    """`init_from_checkpoint` before or after the training op is built; the first loss, over all replicas, uses the value of the checkpoint."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        w = scalar("w", 0)
        loss = run.merge(tf.reduce_mean(tf.square(w * x - 3.0 * x)))
        own = run.merge(tf.reshape(loss + 0.0, [1]), "GLOBAL_CONCAT_OBJECTS")
        if not late:
            tf.train.init_from_checkpoint(path, {"w": "w"})
        train = tf.train.AdamOptimizer(0.1).minimize(loss)
        if late:
            tf.train.init_from_checkpoint(path, {"w": "w"})
        with run.session() as session:
            seen = session.run(w)
            value, each, _ = session.run([loss, own, train], {x: run.local(X)})
            return {"w": float(seen), "loss": float(value), "each": each.tolist()}


@pytest.mark.parametrize("outcome", [
    pytest.param(request(warm_start, layout, late=late, inputs={"path": request(save_five, "1x1", plain=True)}), id="%s-%s" % (layout, late))
    for layout in ("2x1", "1x2") for late in (False, True)
], indirect=True)  # fmt: skip
def test_row_36_init_from_checkpoint(outcome):
    squares = [np.mean(np.square(part)) for part in np.split(X, 2)]
    for rank in outcome.ranks:
        assert rank["w"] == 5.0
        assert rank["loss"] == pytest.approx(4 * 7.5, rel=1e-5)
        assert rank["each"] == pytest.approx([4 * square for square in squares], rel=1e-5)


def train_until(run, last, killed_after=None):
    """Steps from what the folder has to `last`, with a checkpoint after each fourth: number of the first one, losses, all variables.

    killed_after: the process dies after this step, once all ranks have made it.
    """
    losses = []
    with run.program():
        x = tf.placeholder(tf.float32, [None, 3])
        h = tf.layers.dense(x, 3, tf.tanh, kernel_initializer=tf.glorot_uniform_initializer(seed=1), name="hidden")
        loss = run.merge(tf.reduce_mean(tf.square(h - 0.5)))
        step = tf.train.get_or_create_global_step()
        train = tf.train.AdamOptimizer(0.05).minimize(loss, global_step=step)
        with tf.train.MonitoredTrainingSession(checkpoint_dir=run.path("run"), save_checkpoint_steps=4, log_step_count_steps=None) as session:
            first = int(session.run(step))
            for number in range(first, last):
                losses += run.train(session, loss, train, [{x: np.random.RandomState(number).randn(4, 3).astype(np.float32)}])
                if number + 1 == killed_after:
                    write(run, "killed", {"first": first, "losses": losses})
                    together_at(run, "made its last step")
                    os.kill(os.getpid(), signal.SIGKILL)
            values = variables(session)
    return {"first": first, "losses": losses, "values": {name: value for name, value in values.items() if "accum" not in name}}


def restart(run, interrupted):
    """Eight steps in one session, or four and then four from the checkpoint of a second one."""
    parts = [train_until(run, last) for last in ((4, 8) if interrupted else (8,))]
    assert [part["first"] for part in parts] == [0, 4][: len(parts)]
    return dict(parts[-1]["values"], losses=[loss for part in parts for loss in part["losses"]])


WHOLE = request(restart, "1x1", plain=True, interrupted=False)


@together(whole=WHOLE, **{layout: request(restart, layout, interrupted=True) for layout in ("2x1", "1x2", "1x1-m2run", "1x1-m2")})
def test_row_38_a_restarted_run_equals_an_uninterrupted_one(outcomes):
    expected = outcomes["whole"].ranks[0]
    for layout, outcome in outcomes.items():
        for rank in outcome.ranks:
            for name, value in expected.items():
                np.testing.assert_allclose(rank[name], value, rtol=1e-5, atol=1e-6, err_msg="%s in %s" % (name, layout))


# --- killed -------------------------------------------------------------------------------

RANKS = 2


def write(run, name, found):
    with open(run.path("%s %d" % (name, run.rank)), "w") as file:
        file.write(encode(found))


def fork(work):
    """Run a function in a child; how the child has ended, as `os.waitpid` says it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def killed_and_started_again(folder, rank):
    """One rank: a training that is killed after six steps of eight, then the same script again."""
    import epl

    def resume():
        write(run, "resumed", train_until(run, 8))
        epl.shutdown()

    run = Run(Layout.parse("%dx1" % RANKS), rank, False, folder)
    ended = fork(lambda: train_until(run, 8, killed_after=6))
    if not os.WIFSIGNALED(ended) or os.WTERMSIG(ended) != signal.SIGKILL:
        sys.exit("the first run has ended with %d" % ended)
    sys.exit(fork(resume))


def free_hosts(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    hosts = ["127.0.0.1:%d" % one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return hosts


@pytest.mark.ranks
@together(whole=WHOLE)
def test_row_38_a_killed_run_resumes(outcomes, tmp_path):
    hosts, jobs = free_hosts(RANKS), []
    for rank in range(RANKS):
        config = json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}})
        command = [sys.executable, "-m", "tests.equivalence.test_cases_restarts", str(tmp_path), str(rank)]
        env = dict(environment(), TF_CONFIG=config)
        with open(str(tmp_path / ("log %d" % rank)), "w") as log:
            jobs.append(subprocess.Popen(command, cwd=str(ROOT), env=env, stdout=log, stderr=log, start_new_session=True))
    try:
        codes = [job.wait(timeout=240) for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    logs = "\n".join((tmp_path / ("log %d" % rank)).read_text()[-3000:] for rank in range(RANKS))
    assert codes == [0] * RANKS, logs
    (whole,) = outcomes["whole"].ranks
    for rank in range(RANKS):
        killed, resumed = (decode((tmp_path / ("%s %d" % (name, rank))).read_text()) for name in ("killed", "resumed"))
        assert [killed["first"], resumed["first"]] == [0, 4], "it goes on from the newest checkpoint"
        assert killed["losses"] == pytest.approx(whole["losses"][:6], rel=1e-5)
        assert resumed["losses"] == pytest.approx(whole["losses"][4:], rel=1e-5)
        assert set(resumed["values"]) == set(whole) - {"losses"}
        for name, value in resumed["values"].items():
            np.testing.assert_allclose(value, whole[name], rtol=1e-5, atol=1e-6, err_msg=name)


if __name__ == "__main__":
    killed_and_started_again(sys.argv[1], int(sys.argv[2]))
