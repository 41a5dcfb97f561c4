"""A pipeline of two stages on two ranks, one thread each, against one rank that holds both.

    python benchmarks/pipeline.py speed       # throughput against the ideal 2 M / (M + 1) of one rank
    python benchmarks/pipeline.py schedules   # step time, bubble and memory of the schedules
    python benchmarks/pipeline.py transfer    # bytes per second against raw Horovod all-to-all

The script starts itself. Both sides of a comparison run in turn, several rounds, and the
median of the ratios is printed.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)


def train(arguments):
    """One side of a training comparison: prints milliseconds per step and the peak of the resident memory."""
    import resource

    import numpy as np
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    tf.logging.set_verbosity(tf.logging.ERROR)
    import epl

    config = {
        "pipeline.num_micro_batch": arguments.m,
        "pipeline.accumulate_in_run": True,
        "pipeline.strategy": arguments.schedule,
    }
    epl.init(epl.Config(config))
    x = tf.placeholder(tf.float32, [None, arguments.width], name="x")
    # A variable before the first layer: without it the first stage has one product less in its backward part.
    h = x * tf.get_variable("scale", [arguments.width], initializer=tf.ones_initializer())
    stages = arguments.stages
    for stage in range(stages):
        with epl.replicate(1) if arguments.staged else tf.name_scope("stage"):
            for layer in range(arguments.layers // stages):
                name = "layer_%d_%d" % (stage, layer)
                w = tf.get_variable(name, [arguments.width, arguments.width], initializer=tf.random_normal_initializer(stddev=0.02, seed=1))
                h = tf.tanh(tf.matmul(h, w))
            if stage == stages - 1:
                loss = tf.reduce_mean(tf.square(h))
    step = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
    options = tf.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    feed = {x: np.random.RandomState(0).randn(arguments.batch * arguments.m, arguments.width).astype("f")}
    with tf.Session(config=options) as session:
        session.run(tf.global_variables_initializer())
        times = []
        for _ in range(arguments.steps + 2):
            start = time.perf_counter()
            session.run([loss, step], feed)
            times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
    print("MS %.3f MB %.1f END" % (1e3 * statistics.median(times[2:]), peak), flush=True)


def transfer(arguments):
    """Bytes per second of one tensor over two ranks: by a stage boundary, and by Horovod's all-to-all alone."""
    import horovod.tensorflow as hvd
    import numpy as np
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    hvd.init()
    count = arguments.bytes // 4
    fed = tf.placeholder(tf.float32, [None])
    splits = tf.placeholder(tf.int32, [2])
    moved, _ = hvd.alltoall(fed, splits=splits, name="raw")
    first = hvd.rank() == 0
    feed = {fed: np.zeros(count if first else 0, "f"), splits: [0, count] if first else [0, 0]}
    with tf.Session() as session:
        times = []
        for _ in range(arguments.steps + 2):
            start = time.perf_counter()
            session.run(moved.op, feed)
            times.append(time.perf_counter() - start)
    print("MS %.3f MB 0.0 END" % (1e3 * statistics.median(times[2:])), flush=True)


def boundary(arguments):
    """The same bytes over a boundary of two stages that compute nothing."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    import epl

    epl.init()
    count = arguments.bytes // 4
    with epl.replicate(1):
        with tf.device("/cpu:0"):
            fed = tf.placeholder(tf.float32, [])
            sent = tf.get_variable("value", [count], initializer=tf.zeros_initializer()) + fed
    with epl.replicate(1):
        got = tf.gather(tf.identity(sent), [0])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        times = []
        for _ in range(arguments.steps + 2):
            start = time.perf_counter()
            session.run(got.op, {fed: 1.0})
            times.append(time.perf_counter() - start)
    print("MS %.3f MB 0.0 END" % (1e3 * statistics.median(times[2:])), flush=True)


def start(ranks, arguments, **changed):
    """Run one side; returns the slowest rank's milliseconds, and the memory of all ranks in order."""
    given = dict(vars(arguments), **changed)
    me = [sys.executable, os.path.abspath(__file__), "--side", json.dumps(given)]
    env = dict(os.environ, OMP_NUM_THREADS="1", PATH="%s:%s" % (os.path.dirname(sys.executable), os.environ["PATH"]))
    if ranks > 1:
        me = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "--tag-output", "-np", str(ranks)] + me
    text = subprocess.run(me, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    found = re.findall(r"MS (\d+\.\d+) MB (\d+\.\d+) END", text)
    if len(found) != ranks:
        raise SystemExit("a side failed; run it to see why: %s" % " ".join(me))
    return max(float(ms) for ms, _ in found), [float(mb) for _, mb in found]


def speed(arguments):
    print("%4s %12s %12s %8s %8s %10s" % ("M", "one rank ms", "two ranks ms", "speedup", "ideal", "of ideal"))
    for m in arguments.micro_batches:
        ratios, ones, twos = [], [], []
        for _ in range(arguments.rounds):
            one, _ = start(1, arguments, m=m, staged=False, does="train")
            two, _ = start(2, arguments, m=m, staged=True, does="train")
            ratios.append(one / two)
            ones.append(one)
            twos.append(two)
        ideal = 2.0 * m / (m + 1)
        ratio = statistics.median(ratios)
        print("%4d %12.1f %12.1f %8.2f %8.2f %10.3f" % (m, statistics.median(ones), statistics.median(twos), ratio, ideal, ratio / ideal), flush=True)


def schedules(arguments):
    print("%-24s %4s %12s %s" % ("schedule", "M", "ms a step", "MB of each rank (median of %d rounds)" % arguments.rounds))
    for m in arguments.micro_batches:
        for name in ("PreferForward", "PreferBackward", "PreferBackwardOptimizer", "ZeroBubbleH1", "ZeroBubbleH2"):
            found = [start(2, arguments, m=m, staged=True, does="train", schedule=name) for _ in range(arguments.rounds)]
            memory = [statistics.median(values) for values in zip(*(mb for _, mb in found))]
            print("%-24s %4d %12.1f %s" % (name, m, statistics.median(ms for ms, _ in found), " ".join("%.0f" % mb for mb in memory)), flush=True)


def transfers(arguments):
    print("%12s %14s %14s %8s" % ("bytes", "all-to-all ms", "boundary ms", "ratio"))
    for size in (4096, 1 << 20, 1 << 24):
        pairs = [[start(2, arguments, bytes=size, does=what)[0] for what in ("transfer", "boundary")] for _ in range(arguments.rounds)]
        ratio = statistics.median(b / a for a, b in pairs)
        raw, ours = (statistics.median(column) for column in zip(*pairs))
        print("%12d %14.2f %14.2f %8.2f" % (size, raw, ours, ratio), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["speed", "schedules", "transfer"], default="speed")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--micro_batches", nargs="+", type=int, default=[2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--schedule", default="PreferBackward")
    arguments = parser.parse_args()
    if arguments.side:
        given = argparse.Namespace(**json.loads(arguments.side))
        {"train": train, "transfer": transfer, "boundary": boundary}[given.does](given)
    else:
        {"speed": speed, "schedules": schedules, "transfer": transfers}[arguments.what](arguments)


if __name__ == "__main__":
    main()
