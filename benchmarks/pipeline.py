"""A pipeline of stages on ranks, one thread each, against one rank that holds all of them.

    python benchmarks/pipeline.py speed       # throughput against the ideal p M / (M + p - 1) of one rank
    python benchmarks/pipeline.py schedules   # step time and bubbles of the schedules, from timelines
    python benchmarks/pipeline.py memory      # what activations take under each schedule
    python benchmarks/pipeline.py transfer    # bytes per second against raw Horovod all-to-all

`--micro-batches 2,4,8,16,32` says for which numbers of micro-batches. `--schedules` chooses among all
schedules; Interleaved and ZeroBubbleV have two stages of half the size on each device.

`--work matmul` computes on the rank's core. `--work sleep` waits instead, as a process does
whose accelerator is busy: it shows what the runtime adds where Horovod's thread has a core
of its own. `--beside` keeps as many cores busy for the one rank as the pipeline does: cores that
share a clock, caches or memory are slower together. The script starts itself. Both sides of a comparison run in turn, several
rounds, and the median of the ratios is printed.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)


CHUNKS = {"Interleaved": 2, "ZeroBubbleV": 2}
"""Stages on a device, where it is not one."""


def schedule_of(name, arguments, m):
    """The schedule as EPL makes it for the benchmarked pipeline."""
    from epl.planner.schedules import make_schedule

    return make_schedule(name, arguments.stages * CHUNKS.get(name, 1), m, arguments.stages)


def matmul_layer(h, name, arguments):
    """A square layer: three products of the same size a micro-batch, one forward and two backward."""
    import tensorflow.compat.v1 as tf

    w = tf.get_variable(name, [arguments.width, arguments.width], initializer=tf.random_normal_initializer(stddev=0.02, seed=1))
    return tf.tanh(tf.matmul(h, w))


def sleep_layer(h, name, arguments):
    """Waits a third of its time forward, a third for the gradient of its input, a third for that of its weight."""
    import tensorflow.compat.v1 as tf

    seconds = 1e-3 * arguments.sleep * arguments.stages / arguments.layers / 3.0

    def wait(value):
        time.sleep(seconds)
        return value

    def waited(value):
        result = tf.py_func(wait, [value], tf.float32)
        result.set_shape(value.shape)
        return result

    @tf.custom_gradient
    def layer(h, w):
        return waited(h * w), lambda upstream: (waited(upstream * w), waited(tf.reduce_sum(upstream * h, 0)))

    return layer(h, tf.identity(tf.get_variable(name, [arguments.width], initializer=tf.ones_initializer())))


def activation_layer(h, name, arguments):
    """Keeps one tensor of the size of its input, with next to no weights."""
    import tensorflow.compat.v1 as tf

    return tf.tanh(h * tf.get_variable(name, [arguments.width], initializer=tf.ones_initializer()))


LAYERS = {"matmul": matmul_layer, "sleep": sleep_layer, "activations": activation_layer}


def train(arguments):
    """One side of a training comparison: prints milliseconds per step and how much the resident memory grew, at most."""
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
    stages = arguments.stages * CHUNKS.get(arguments.schedule, 1)
    for stage in range(stages):
        with epl.replicate(1) if arguments.staged else tf.name_scope("stage"):
            for layer in range(arguments.layers // stages):
                h = LAYERS[arguments.work](h, "layer_%d_%d" % (stage, layer), arguments)
            if stage == stages - 1:
                loss = tf.reduce_mean(tf.square(h))
    step = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
    options = tf.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    feed = {x: np.random.RandomState(0).randn(arguments.batch * arguments.m, arguments.width).astype("f")}
    with tf.Session(config=options) as session:
        session.run(tf.global_variables_initializer())
        session.run(loss, {x: feed[x][: arguments.m]})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        times = []
        for _ in range(arguments.steps + 2):
            start = time.perf_counter()
            session.run([loss, step], feed)
            times.append(time.perf_counter() - start)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024.0
    print("MS %.3f MB %.1f END" % (1e3 * statistics.median(times[2:]), grown), flush=True)


def transfer(arguments):
    """Bytes per second of one tensor over two ranks, by Horovod's all-to-all alone. As at a boundary, TensorFlow makes what is sent."""
    import horovod.tensorflow as hvd
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    hvd.init()
    count = arguments.bytes // 4 if hvd.rank() == 0 else 0
    # What is fed keeps TensorFlow from computing the all-to-all once and for all, as it would with constants.
    fed, length = tf.placeholder(tf.float32, []), tf.placeholder(tf.int32, [])
    if count:
        sent = tf.get_variable("value", [count], initializer=tf.zeros_initializer()) + fed
    else:
        sent = tf.fill(tf.reshape(length, [1]), fed)
    moved, _ = hvd.alltoall(sent, splits=tf.constant([0, count], tf.int32), name="raw")
    _time(arguments, tf.gather(moved, [0]) if not count else moved, {fed: 1.0, length: 0})


def boundary(arguments):
    """The same bytes over a boundary of two stages that compute nothing."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.enable_resource_variables()
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
    _time(arguments, got, {fed: 1.0})


def _time(arguments, fetched, feed):
    """Prints the milliseconds of a run."""
    import tensorflow.compat.v1 as tf

    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        times = []
        for _ in range(arguments.steps + 2):
            start = time.perf_counter()
            session.run(fetched.op, feed)
            times.append(time.perf_counter() - start)
    print("MS %.3f MB 0.0 END" % (1e3 * statistics.median(times[2:])), flush=True)


def command_of(arguments, changed):
    return [sys.executable, os.path.abspath(__file__), "--side", json.dumps(dict(vars(arguments), **changed))]


def environment(environ=None):
    return dict(os.environ, OMP_NUM_THREADS="1", PATH="%s:%s" % (os.path.dirname(sys.executable), os.environ["PATH"]), **(environ or {}))


def start_apart(count, arguments, **changed):
    """Run one side in several processes at once that know nothing of each other; returns the slowest one's milliseconds."""
    me = command_of(arguments, changed)
    running = [subprocess.Popen(me, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(count)]
    found = [re.search(r"MS (\d+\.\d+) MB", process.communicate()[0]) for process in running]
    if not all(found):
        raise SystemExit("a side failed; run it to see why: %s" % " ".join(me))
    return max(float(one.group(1)) for one in found)


def start(ranks, arguments, environ=None, **changed):
    """Run one side; returns the slowest rank's milliseconds, and the memory of all ranks in order."""
    me, env = command_of(arguments, changed), environment(environ)
    if ranks > 1:
        me = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "--tag-output", "-np", str(ranks)] + me
    text = subprocess.run(me, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    lines = re.findall(r"(?:\[1,(\d+)\]<stdout>:)?MS (\d+\.\d+) MB (-?\d+\.\d+) END", text)
    found = {int(rank or 0): (float(ms), float(mb)) for rank, ms, mb in lines}
    if len(found) != ranks:
        raise SystemExit("a side failed; run it to see why: %s" % " ".join(me))
    return max(ms for ms, _ in found.values()), [found[rank][1] for rank in range(ranks)]


def speed(arguments):
    """`ideal` is the speedup of a pipeline without zero bubbles or chunks, `on paper` that of the schedule; both leave out transfers."""
    from epl.planner.schedules import simulate

    print("%-24s %4s %12s %12s %8s %8s %10s %9s" % ("schedule", "M", "one rank ms", "pipeline ms", "speedup", "ideal", "of ideal", "on paper"))
    p = arguments.stages
    for m in arguments.micro_batches:
        rounds = []
        for _ in range(arguments.rounds):
            one = start_apart(p if arguments.beside else 1, arguments, m=m, staged=False)
            rounds.append((one, {name: start(p, arguments, m=m, schedule=name)[0] for name in arguments.schedules}))
        ideal = float(p * m) / (m + p - 1)
        for name in arguments.schedules:
            ratio = statistics.median(one / found[name] for one, found in rounds)
            one, many = statistics.median(one for one, _ in rounds), statistics.median(found[name] for _, found in rounds)
            paper = p * (1 - simulate(schedule_of(name, arguments, m)).bubble_share)
            numbers = (name, m, one, many, ratio, ideal, ratio / ideal, paper)
            print("%-24s %4d %12.1f %12.1f %8.2f %8.2f %10.3f %9.2f" % numbers, flush=True)


def schedules(arguments):
    """Bubbles as `epl report` measures them; the steps are timed without the timeline."""
    from epl.cli.report import summary
    from epl.planner.schedules import simulate
    from epl.profiler.timeline import load_trace

    print("%-24s %4s %12s %10s %12s %10s" % ("schedule", "M", "ms a step", "bubbles", "on paper", "order"))
    for m in arguments.micro_batches:
        for name in arguments.schedules:
            times, bubbles, kept = [], [], True
            for _ in range(arguments.rounds):
                times.append(start(arguments.stages, arguments, m=m, schedule=name)[0])
                with tempfile.TemporaryDirectory() as folder:
                    start(arguments.stages, arguments, {"EPL_TIMELINE": folder}, m=m, schedule=name)
                    found = summary(load_trace(folder))
                bubbles.append(found["bubble"])
                kept = kept and found["in_order"]
            paper = simulate(schedule_of(name, arguments, m)).bubble_share
            numbers = (name, m, statistics.median(times), 100 * statistics.median(bubbles), 100 * paper, "kept" if kept else "NOT kept")
            print("%-24s %4d %12.1f %8.1f %% %10.1f %% %10s" % numbers, flush=True)


def memory(arguments):
    from epl.planner.schedules import peak_activations

    size = arguments.layers // arguments.stages * arguments.batch * arguments.width * 4 / 2.0**20
    print("activations of one device and micro-batch: %.0f MB" % size)
    print("%-24s %4s %24s %24s" % ("schedule", "M", "promised, MB by rank", "grown, MB by rank"))
    for m in arguments.micro_batches:
        for name in arguments.schedules:
            found = [start(arguments.stages, arguments, m=m, schedule=name)[1] for _ in range(arguments.rounds)]
            promised = [size / CHUNKS.get(name, 1) * peak for peak in peak_activations(schedule_of(name, arguments, m))]
            grown = [statistics.median(column) for column in zip(*found)]
            print("%-24s %4d %24s %24s" % (name, m, *(" ".join("%.0f" % mb for mb in row) for row in (promised, grown))), flush=True)


def transfers(arguments):
    """Both sides send a tensor that TensorFlow has made, with the same pause between Horovod's rounds."""
    from epl.runtime.backend import CYCLE_TIME_MS

    alike = {"HOROVOD_CYCLE_TIME": os.environ.get("HOROVOD_CYCLE_TIME", CYCLE_TIME_MS)}
    print("%12s %14s %14s %16s %16s %8s" % ("bytes", "all-to-all ms", "boundary ms", "all-to-all B/s", "boundary B/s", "ratio"))
    for size in (4096, 1 << 20, 1 << 24):
        pairs = [[start(2, arguments, alike, bytes=size, does=what)[0] for what in ("transfer", "boundary")] for _ in range(arguments.rounds)]
        ratio = statistics.median(b / a for a, b in pairs)
        raw, ours = (statistics.median(column) for column in zip(*pairs))
        print("%12d %14.2f %14.2f %16.3g %16.3g %8.2f" % (size, raw, ours, 1e3 * size / raw, 1e3 * size / ours, ratio), flush=True)


def numbers_of(text):
    """"2,4,8" as a list."""
    return [int(number) for number in text.split(",") if number]


def main():
    names = ["PreferForward", "PreferBackward", "PreferBackwardOptimizer", "ZeroBubbleH1", "ZeroBubbleH2"]
    all_names = names + list(CHUNKS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["speed", "schedules", "memory", "transfer"], default="speed")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--micro-batches", "--micro_batches", nargs="+", type=numbers_of, default=[[2, 4, 8, 16, 32]], help="such as 2,4,8,16,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2, help="devices of the pipeline; some schedules have two stages on each")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--schedules", nargs="+", choices=all_names, default=names, help="default: those with one stage on each device")
    parser.add_argument("--work", choices=sorted(LAYERS), help="default: matmul; for memory: activations")
    parser.add_argument("--beside", action="store_true", help="time the one rank while as many others do the same: all cores are busy on both sides")
    parser.add_argument("--sleep", type=float, default=42.0, help="milliseconds that a stage sleeps for each micro-batch (--work sleep)")
    arguments = parser.parse_args()
    if arguments.side:
        given = argparse.Namespace(**json.loads(arguments.side))
        {"train": train, "transfer": transfer, "boundary": boundary}[given.does](given)
        return
    arguments.micro_batches = [m for given in arguments.micro_batches for m in given]
    pieces = max(arguments.stages * CHUNKS.get(name, 1) for name in arguments.schedules)
    if arguments.layers % pieces:
        parser.error("%d layers can't be cut into %d equal stages" % (arguments.layers, pieces))
    arguments.work = arguments.work or ("activations" if arguments.what == "memory" else "matmul")
    arguments.does, arguments.staged, arguments.schedule = "train", True, "PreferBackward"
    {"speed": speed, "schedules": schedules, "memory": memory, "transfer": transfers}[arguments.what](arguments)


if __name__ == "__main__":
    main()
