"""`kill -9` while checkpoints are written: the newest published one always loads.

One process imports TensorFlow and EPL; each round forks a child that trains in a monitored
session on two local devices, with a checkpoint after each step, in the folder of the round
before. The child is killed at a random moment.
"""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

SIZE = 1 << 20
"""Elements of the variable: saving it takes longer than a step."""


def train(folder, pipe):
    """A child: steps that add 1 to all elements of w, each followed by a checkpoint. Tells when it has begun."""
    import tensorflow.compat.v1 as tf

    import epl

    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    epl.init(epl.Config({"cluster.devices_per_worker": 2}))
    epl.set_default_strategy(epl.replicate(1))
    w = tf.get_variable("w", [SIZE], initializer=tf.zeros_initializer())
    x = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(np.ones([1], np.float32)).repeat()).get_next()
    loss = tf.reduce_mean(-x * tf.reduce_sum(w))
    step = tf.train.get_or_create_global_step()
    update = tf.train.GradientDescentOptimizer(1.0).minimize(loss, global_step=step)
    with tf.train.MonitoredTrainingSession(
        checkpoint_dir=folder, save_checkpoint_steps=1, save_summaries_steps=None, log_step_count_steps=None
    ) as session:
        for number in range(100000):
            session.run(update)
            if number == 1:
                os.write(pipe, b"!")


def rounds(folder, times, seed):
    """Kill so many children in the middle; prints the step of the newest checkpoint after each."""
    import tensorflow.compat.v1 as tf

    import epl  # noqa: F401  loaded once, before the forks

    chance = random.Random(seed)
    for _ in range(times):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                train(folder, theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        began = os.read(ours, 1)  # nothing when the child has failed
        os.close(ours)
        time.sleep(chance.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if not began:
            sys.exit("the child has failed")
        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
        step, w = int(reader.get_tensor("global_step")), reader.get_tensor("w")
        if w.shape != (SIZE,) or not np.all(w == step):
            sys.exit("step %d, but w is between %g and %g" % (step, w.min(), w.max()))
        print("step", step, flush=True)


@pytest.mark.parametrize("times", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_the_newest_checkpoint_loads(times, tmp_path):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_", "HOROVOD_", "EPL_", "TF_CONFIG"))}
    clean.update(PYTHONPATH=root, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    command = [sys.executable, os.path.abspath(__file__), str(tmp_path), str(times)]
    done = subprocess.run(command, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
    steps = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == times and steps == sorted(set(steps)), done.stdout
    if times > 10:
        assert any(name.endswith("_temp") for name in os.listdir(tmp_path)), "no child was killed in the middle of a save"


if __name__ == "__main__":
    rounds(sys.argv[1], int(sys.argv[2]), seed=20240229)
