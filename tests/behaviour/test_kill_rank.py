"""A rank killed at any moment of a training run ends the others, with an error that names it."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.ranks

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TIMEOUT = 10

SCRIPT = (
    """
import json, os, sys, time
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
tf.enable_resource_variables()
import epl
epl.init(epl.Config({"cluster.stall_timeout": %d}))
epl.set_default_strategy(epl.replicate(1))
data = tf.data.Dataset.from_tensor_slices(np.ones([64, 32], np.float32)).repeat().batch(8)
x = tf.data.make_one_shot_iterator(data).get_next()
w = tf.get_variable("w", [32, 32], initializer=tf.zeros_initializer())
loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - 1.0))
train = tf.train.AdamOptimizer(0.01).minimize(loss, global_step=tf.train.get_or_create_global_step())
folder = sys.argv[1] if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0 else None
with tf.train.MonitoredTrainingSession(checkpoint_dir=folder, save_checkpoint_steps=20) as session:
    print("running", flush=True)
    end = time.time() + 60
    while time.time() < end:
        session.run(train)
"""
    % TIMEOUT
)


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


def start_ranks(tmp_path, count):
    """Ranks started by hand, as a cluster manager does: nobody but EPL ends them."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    hosts = ["127.0.0.1:%d" % port for port in free_ports(count)]
    ranks = []
    for index in range(count):
        config = json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}})
        env = dict(os.environ, TF_CONFIG=config, PYTHONPATH=ROOT, TF_CPP_MIN_LOG_LEVEL="2", OMP_NUM_THREADS="1")
        log = open(str(tmp_path / ("rank%d.log" % index)), "w")
        command = [sys.executable, str(path), str(tmp_path / "checkpoints")]
        ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    return ranks


def wait_until(condition, seconds, what):
    end = time.time() + seconds
    while time.time() < end:
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("not within %d s: %s" % (seconds, what))


def kill_one(tmp_path, seed):
    """Seconds until the survivor ended, and its log."""
    chance = random.Random(seed)
    ranks = start_ranks(tmp_path, 2)
    try:
        logs = [tmp_path / ("rank%d.log" % i) for i in range(2)]
        wait_until(lambda: all("running" in log.read_text() for log in logs), 120, "both ranks train")
        time.sleep(chance.random() * 3)
        victim = chance.randrange(2)
        ranks[victim].send_signal(signal.SIGKILL)
        start = time.time()
        survivor = ranks[1 - victim]
        survivor.wait(timeout=TIMEOUT + 30)
        return victim, survivor.returncode, time.time() - start, logs[1 - victim].read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def check_kill(tmp_path, seed):
    victim, code, seconds, text = kill_one(tmp_path, seed)
    assert code != 0
    assert seconds < TIMEOUT + 5, "the survivor needed %.1f s" % seconds
    assert "rank %d" % victim in text, text[-2000:]


def test_killed_rank_ends_the_other(tmp_path):
    check_kill(tmp_path, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_killed_rank_ends_the_other_at_any_moment(tmp_path, seed):
    check_kill(tmp_path, seed)
