"""One side of the comparison with MultiWorkerMirroredStrategy: prints milliseconds per step.

    python benchmarks/mirrored.py            # both sides in turn, 2 ranks each, several rounds; prints the ratios

The script starts itself: a side is two processes, each with one thread. Both sides read
the same constant batch from a dataset through an Estimator, so that only the
distribution differs.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

SIZES = {"mlp": {"batch": 64}, "cnn": {"batch": 16}, "transformer": {"batch": 8}}


def one_side(side, model, steps):
    """Train and print the median time of a step after the first tenth."""
    import numpy as np
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    tf.logging.set_verbosity(tf.logging.ERROR)
    from benchmarks.models import MODELS

    with tf.Graph().as_default():
        feeds, _ = MODELS[model](**SIZES[model])
        arrays = {t.op.name: v for t, v in feeds.items()}
        types = {t.op.name: t.dtype for t in feeds}

    if side == "epl":
        import epl

        epl.init()
        epl.set_default_strategy(epl.replicate(1))

    def input_fn():
        # The dtypes are the placeholders'; the static batch is left out, as in the other benchmark.
        data = {k: v.astype(types[k].as_numpy_dtype) for k, v in arrays.items()}
        return tf.data.Dataset.from_tensors(data).repeat()

    def model_fn(features, mode):
        with _Fed(tf, features):
            _, loss = MODELS[model](**SIZES[model])
        train = tf.train.AdamOptimizer(1e-3).minimize(loss, global_step=tf.train.get_or_create_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)

    class Clock(tf.train.SessionRunHook):
        def __init__(self):
            self.times = []

        def before_run(self, run_context):
            self.start = time.perf_counter()

        def after_run(self, run_context, run_values):
            self.times.append(time.perf_counter() - self.start)

    config = tf.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    options = {
        "session_config": config,
        "model_dir": tempfile.mkdtemp(),
        "save_checkpoints_steps": None,
        "save_checkpoints_secs": None,
        "save_summary_steps": None,
        "log_step_count_steps": None,
    }
    if side == "mirrored":
        options["train_distribute"] = tf.distribute.experimental.MultiWorkerMirroredStrategy()
    estimator = tf.estimator.Estimator(model_fn, config=tf.estimator.RunConfig(**options))
    clock = Clock()
    if side == "mirrored":
        spec = tf.estimator.TrainSpec(input_fn, max_steps=steps, hooks=[clock])
        tf.estimator.train_and_evaluate(estimator, spec, tf.estimator.EvalSpec(input_fn, steps=1))
    else:
        estimator.train(input_fn, max_steps=steps, hooks=[clock])
    print("MS %.3f" % (1e3 * float(np.median(clock.times[steps // 10 + 1 :]))), flush=True)


class _Fed:
    """Makes `tf.placeholder` return the features of that name while a model is built."""

    def __init__(self, tf, features):
        self.tf, self.features = tf, features

    def __enter__(self):
        self.original = self.tf.placeholder
        self.tf.placeholder = lambda dtype, shape=None, name=None: self.features[name]

    def __exit__(self, *_):
        self.tf.placeholder = self.original


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def start_side(side, model, steps):
    """Milliseconds per step of the slower process of one side."""
    me = [sys.executable, os.path.abspath(__file__), "--side", side, "--model", model, "--steps", str(steps)]
    env = dict(os.environ, OMP_NUM_THREADS="1", PATH="%s:%s" % (os.path.dirname(sys.executable), os.environ["PATH"]))
    if side == "epl":
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-np", "2"] + me
        texts = [subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout]
    else:
        hosts = ["127.0.0.1:%d" % p for p in free_ports(2)]
        started = []
        for index in range(2):
            env_of = dict(env, TF_CONFIG=json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}))
            started.append(subprocess.Popen(me, env=env_of, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        texts = [p.communicate()[0] for p in started]
    found = [float(value) for text in texts for value in re.findall(r"MS (\d+\.\d{3})", text)]  # mpirun may join lines
    if len(found) != 2:
        raise SystemExit("the %s side of %s failed; run it with --side to see why" % (side, model))
    return max(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=["epl", "mirrored"])
    parser.add_argument("--model")
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "transformer"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.side:
        one_side(arguments.side, arguments.model, arguments.steps)
        return
    for model in arguments.models:
        rows = [(start_side("mirrored", model, arguments.steps), start_side("epl", model, arguments.steps)) for _ in range(arguments.rounds)]
        ratios = sorted(b / a for a, b in rows)
        a, b = sorted(r[0] for r in rows)[len(rows) // 2], sorted(r[1] for r in rows)[len(rows) // 2]
        print(
            "%-12s MultiWorkerMirrored %.2f ms  EPL %.2f ms  ratio %.3f (median of %d rounds of %d steps)"
            % (model, a, b, ratios[len(ratios) // 2], len(rows), arguments.steps),
            flush=True,
        )


if __name__ == "__main__":
    main()
