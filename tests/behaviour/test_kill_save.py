"""`kill -9` while checkpoints are written: the newest published one always loads in plain TensorFlow.

One process imports TensorFlow and EPL; each round forks the ranks of a job that trains in monitored
sessions, with a checkpoint after each step, in the folder of the round before. One rank is killed at
a random moment, and the others end by themselves.
"""

import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

SIZE = 1 << 20
"""Elements of the variables: saving them takes longer than a step."""

STALL_TIMEOUT = 10
LAYOUTS = ("1x2", "2x1", "2x1-s2")
"""Ranks x devices, and "s2" for two stages."""


def train(folder, pipe, layout):
    """A rank: steps that add 1 to all elements of w and v, each followed by a checkpoint. Tells when it has begun."""
    import tensorflow.compat.v1 as tf

    import epl

    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    epl.init(epl.Config({"cluster.devices_per_worker": 2 if layout == "1x2" else 1, "cluster.stall_timeout": STALL_TIMEOUT}))
    stages = layout == "2x1-s2"
    if not stages:
        epl.set_default_strategy(epl.replicate(1))
    x = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(np.ones([1], np.float32)).repeat()).get_next()
    with epl.replicate(1) if stages else contextlib.nullcontext():
        h = x * tf.reduce_sum(tf.get_variable("w", [SIZE], initializer=tf.zeros_initializer()))
    with epl.replicate(1) if stages else contextlib.nullcontext():
        loss = tf.reduce_mean(-h - tf.reduce_sum(tf.get_variable("v", [SIZE], initializer=tf.zeros_initializer())))
    step = tf.train.get_or_create_global_step()
    update = tf.train.GradientDescentOptimizer(1.0).minimize(loss, global_step=step)
    with tf.train.MonitoredTrainingSession(
        checkpoint_dir=folder, save_checkpoint_steps=1, save_summaries_steps=None, log_step_count_steps=None
    ) as session:
        for number in range(100000):
            session.run(update)
            if number == 1:
                os.write(pipe, b"!")


def start(folder, layout):
    """Fork the ranks of a job: their process ids, and a pipe for each that tells when it has begun."""
    count = int(layout[0])
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    hosts = ["127.0.0.1:%d" % item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    children, pipes = [], []
    for rank in range(count):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            if count > 1:
                os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}})
            try:
                train(folder, theirs, layout)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        os.close(theirs)
        children.append(child)
        pipes.append(ours)
    return children, pipes


def kill_one(children, pipes, chance):
    """When all have begun, kill one at a random moment, and wait for the end of the others: which one it was."""
    left = set(children)
    try:
        for pipe in pipes:
            if not os.read(pipe, 1):  # nothing when the child has failed
                sys.exit("a child has failed")
        victim = chance.randrange(len(children))
        time.sleep(chance.uniform(0, 0.15))
        os.kill(children[victim], signal.SIGKILL)
        end = time.monotonic() + STALL_TIMEOUT + 10
        while left and time.monotonic() < end:
            left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
            time.sleep(0.02)
        if left:
            sys.exit("a rank outlived the killed one")
        return victim
    finally:
        for pipe in pipes:
            os.close(pipe)
        for child in left:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def rounds(folder, layout, times, seed):
    """Kill so many times; prints the step of the newest checkpoint and the killed rank after each."""
    import tensorflow.compat.v1 as tf

    import epl  # noqa: F401  loaded once, before the forks

    if layout != "1x2":
        import horovod.tensorflow  # noqa: F401
    chance = random.Random(seed)
    for _ in range(times):
        victim = kill_one(*start(folder, layout), chance)
        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
        step = int(reader.get_tensor("global_step"))
        if set(reader.get_variable_to_shape_map()) != {"global_step", "w", "v"}:
            sys.exit("the checkpoint has %s" % sorted(reader.get_variable_to_shape_map()))
        for name in ("w", "v"):
            value = reader.get_tensor(name)
            if value.shape != (SIZE,) or not np.all(value == step):
                sys.exit("step %d, but %s is between %g and %g" % (step, name, value.min(), value.max()))
        print("layout %s step %d rank %d" % (layout, step, victim), flush=True)


FEW = {"1x2": 3, "2x1": 2, "2x1-s2": 2}
OFTEN = [pytest.param({layout: 30}, id="%s-often" % layout, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for layout in LAYOUTS]


@pytest.mark.parametrize("kills", [pytest.param(FEW, id="all")] + OFTEN)
def test_the_newest_checkpoint_loads(kills, tmp_path):
    """With stages each rank writes a part of every checkpoint."""
    if importlib.util.find_spec("horovod") is None:
        kills = {layout: times for layout, times in kills.items() if layout == "1x2"} or pytest.skip("horovod is not installed")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_", "HOROVOD_", "EPL_", "TF_CONFIG"))}
    clean.update(PYTHONPATH=root, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    command = [sys.executable, os.path.abspath(__file__), str(tmp_path)] + ["%s=%d" % item for item in kills.items()]
    done = subprocess.run(command, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280 if len(kills) > 1 else 880)
    assert done.returncode == 0, done.stdout
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("layout ")]
    for layout, times in kills.items():
        found = [words for words in lines if words[1] == layout]
        steps = [int(words[3]) for words in found]
        assert len(steps) == times and steps == sorted(set(steps)), done.stdout
        if times > 10:
            assert any(name.endswith(("_temp", "_temp_epl")) for name in os.listdir(tmp_path / layout)), "no save was cut in the middle"
            assert {int(words[5]) for words in found} == set(range(int(layout[0]))), "not every rank was killed"


if __name__ == "__main__":
    for word in sys.argv[2:]:
        name, number = word.split("=")
        rounds(os.path.join(sys.argv[1], name), name, int(number), seed=20240229)
