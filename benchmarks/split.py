"""Split scopes on ranks with one thread each, against other ways to do the same.

    python benchmarks/split.py classes       # a classifier: split classes against data parallelism
    python benchmarks/split.py experts       # a mixture of experts: tokens exchanged against tokens gathered
    python benchmarks/split.py propagation   # how long the search for a transformer takes

The script starts itself. Both sides of a comparison run in turn, several rounds, and the
median of the ratios is printed. Bytes are what a rank sends in a step: those of the tensors
that Horovod's timeline names, by ring algorithms. Memory is the largest that a rank ever had.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

TIMED, TRACED = 3, 2
"""Runs before the clock starts; steps of a run whose messages are counted."""


def classifier(arguments, split):
    """Features in data parallelism and a softmax over many classes: (loss, feeds)."""
    import numpy as np
    import tensorflow.compat.v1 as tf

    x, y = tf.placeholder(tf.float32, [None, arguments.width]), tf.placeholder(tf.int64, [None])
    h = x
    for layer in range(2):
        h = tf.layers.dense(h, arguments.width, tf.nn.relu, name="features%d" % layer)
    with split():
        logits = tf.layers.dense(h, arguments.classes, name="classes", kernel_initializer=tf.zeros_initializer())
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    random = np.random.RandomState(0)
    return loss, {x: random.randn(arguments.batch, arguments.width).astype("f"), y: random.randint(0, arguments.classes, arguments.batch)}


def experts(arguments, split):
    """A layer of experts behind one that every rank has: (loss, feeds)."""
    import numpy as np
    import tensorflow.compat.v1 as tf

    import epl

    x = tf.placeholder(tf.float32, [arguments.batch, arguments.tokens, arguments.width])
    h = x * tf.get_variable("scale", [arguments.width], initializer=tf.ones_initializer())
    with split():
        found, balance = epl.ops.mixture_of_experts(h, arguments.experts, arguments.hidden, k=arguments.choices, name="experts")
    loss = tf.reduce_mean(tf.square(h + found)) + 0.01 * balance
    return loss, {x: np.random.RandomState(0).randn(arguments.batch, arguments.tokens, arguments.width).astype("f")}


@contextlib.contextmanager
def without_exchanges():
    """A planner that knows no all-to-all: what is divided is gathered before it is divided otherwise."""
    from epl.planner.sharding import strategy
    from epl.planner.sharding.strategy import BATCH

    known = strategy.moved_bytes

    def gathered(lane, size, source, target, group):
        exchanged = {source.kind, target.kind} == {"L", "S"} and lane.kind == BATCH
        return None if exchanged else known(lane, size, source, target, group)

    users = [m for name, m in list(sys.modules.items()) if name.startswith("epl.") and getattr(m, "moved_bytes", None) is known]
    for module in users:
        module.moved_bytes = gathered
    try:
        yield
    finally:
        for module in users:
            module.moved_bytes = known


def train(arguments):
    """One side: prints milliseconds a step and the largest resident memory."""
    import resource

    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    tf.logging.set_verbosity(tf.logging.ERROR)
    import epl

    divided = arguments.how != "replicated"
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": divided}))
    ranks = epl.Env.get().cluster.worker_num
    epl.set_default_strategy(epl.replicate(ranks if divided else 1))
    loss, feed = MODELS[arguments.what](arguments, (lambda: epl.split(ranks)) if divided else contextlib.nullcontext)
    step = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
    options = tf.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    with without_exchanges() if arguments.how == "gathered" else contextlib.nullcontext(), tf.Session(config=options) as session:
        session.run(tf.global_variables_initializer())
        times = []
        for _ in range(arguments.steps + TIMED):
            start = time.perf_counter()
            session.run([loss, step], feed)
            times.append(time.perf_counter() - start)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
    print("MS %.3f MB %.0f END" % (1e3 * statistics.median(times[TIMED:] or times), memory), flush=True)


MODELS = {"classes": classifier, "experts": experts}


def start(arguments, environ=None, **changed):
    """Run one side; returns the slowest rank's milliseconds and the largest rank's memory in MB."""
    given = dict(vars(arguments), **changed)
    me = [sys.executable, os.path.abspath(__file__), "--side", json.dumps(given)]
    env = dict(os.environ, OMP_NUM_THREADS="1", PATH="%s:%s" % (os.path.dirname(sys.executable), os.environ["PATH"]), **(environ or {}))
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-np", str(arguments.ranks)] + me
    text = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    found = [(float(ms), float(mb)) for ms, mb in re.findall(r"MS (\d+\.\d+) MB (\d+) END", text)]
    if len(found) != arguments.ranks:
        raise SystemExit("a side failed; run it to see why: %s" % shlex.join(command))
    return max(ms for ms, _ in found), max(mb for _, mb in found)


def sent_bytes(arguments, **changed):
    """Bytes that a rank sends in a step: what a run of more steps has in Horovod's timeline beyond one of fewer."""
    found = []
    for steps in (0, TRACED):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "timeline.json")
            start(arguments, {"HOROVOD_TIMELINE": path}, steps=steps, **changed)
            found.append(_ring_bytes(path, arguments.ranks))
    return (found[1] - found[0]) / TRACED


_BYTES = {"float64": 8, "int64": 8, "float16": 2, "uint8": 1, "int8": 1, "bool": 1}


def _ring_bytes(path, ranks):
    """The bytes of all operations of a timeline of the first rank; an event that ends one has the shape of its result."""
    with open(path) as file:
        text = file.read().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    kinds, total = {}, 0.0
    for event in events:
        name = event.get("name", "")
        if event.get("ph") == "B" and name in ("ALLREDUCE", "ALLGATHER", "ALLTOALL", "BROADCAST"):
            kinds[event["pid"]] = name
        shape = event.get("args", {}).get("shape")
        if shape is None or event["pid"] not in kinds:
            continue
        size = float(_BYTES.get(event["args"].get("dtype"), 4))
        for length in re.findall(r"\d+", shape):
            size *= int(length)
        total += size * (ranks - 1) / ranks * (2 if kinds[event["pid"]] == "ALLREDUCE" else 1)
    return total


def compare(arguments, label, sides):
    """Print both sides: names, then the ratio of the second to the first."""
    rounds = [[start(arguments, how=side) for side in sides] for _ in range(arguments.rounds)]
    times = [[ms for ms, _ in found] for found in rounds]
    ratios = [b / a for a, b in times]
    first, second = (statistics.median(column) for column in zip(*times))
    memory = [max(mb for _, mb in column) for column in zip(*rounds)]
    sent = [sent_bytes(arguments, how=side) / 1e6 for side in sides]
    numbers = (first, second, statistics.median(ratios), min(ratios), max(ratios)) + tuple(sent) + tuple(memory)
    print("%-16s %12.1f %12.1f %7.3f (%.3f to %.3f) %12.3f %12.3f %10.0f %10.0f" % ((label,) + numbers), flush=True)


def header(what, first, second):
    """First the times of both sides, then what each sends, then the memory of each."""
    columns = (what, first + " ms", second + " ms", "ratio", "MB sent", "MB sent", "MB held", "MB held")
    print("%-16s %12s %12s %25s %12s %12s %10s %10s" % columns, flush=True)


def many_classes(arguments):
    header("classes", "replicated", "split")
    for classes in arguments.classes:
        given = argparse.Namespace(**dict(vars(arguments), classes=classes))
        compare(given, "%d" % classes, ("replicated", "split"))


def many_experts(arguments):
    header("experts", "gathered", "exchanged")
    for choices in (1, 2):
        given = argparse.Namespace(**dict(vars(arguments), choices=choices, classes=0))
        compare(given, "%d, top %d" % (given.experts, choices), ("gathered", "exchanged"))


def propagation(arguments):
    """What one rank needs to choose forms for a training step of a transformer that is split as a whole."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    tf.logging.set_verbosity(tf.logging.ERROR)
    import epl
    from benchmarks.models import transformer
    from epl.passes.shard.hold import training_sharding
    from epl.runtime.graph_index import GraphIndex
    from epl.runtime.planning import make_plan

    print("%6s %6s %8s %10s %12s %16s" % ("layers", "lanes", "nodes", "seconds", "CPU seconds", "predicted ms"))
    for layers in arguments.layers:
        for lanes in arguments.lanes:
            tf.reset_default_graph()
            epl.init(epl.Config({"cluster.colocate_split_and_replicate": True, "cluster.devices_per_worker": lanes}))
            epl.set_default_strategy(epl.replicate(lanes))
            with epl.split(lanes):
                _, loss = transformer(8, layers=layers, width=512, heads=8, length=64, vocabulary=30000)
            tf.train.AdamOptimizer(1e-3).minimize(loss)
            whole, plan = GraphIndex(tf.get_default_graph()).whole(), make_plan(epl.Graph.get())
            times = []
            for _ in range(arguments.rounds):
                begin = time.perf_counter(), time.process_time()
                sharding = training_sharding(whole, plan)
                times.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
            seconds, busy = (statistics.median(column) for column in zip(*times))
            numbers = (layers, lanes, len(whole.nodes), seconds, busy, 1e3 * sharding.seconds)
            print("%6d %6d %8d %10.2f %12.2f %16.2f" % numbers, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["classes", "experts", "propagation"], default="classes")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="samples of a rank")
    parser.add_argument("--width", type=int, default=128, help="columns of the features, or of the tokens")
    parser.add_argument("--classes", nargs="+", type=int, default=[10000, 100000, 1000000])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512, help="hidden units of an expert")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 24])
    parser.add_argument("--lanes", nargs="+", type=int, default=[2, 4, 8])
    arguments = parser.parse_args()
    if arguments.side:
        train(argparse.Namespace(**json.loads(arguments.side)))
        return
    {"classes": many_classes, "experts": many_experts, "propagation": propagation}[arguments.what](arguments)


if __name__ == "__main__":
    main()
