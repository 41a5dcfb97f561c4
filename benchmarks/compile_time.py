"""Compile time: seconds per pass for a transformer's training graph, next to what TensorFlow needs to import the result.

python benchmarks/compile_time.py [--layers 12 24] [--micro-batches 1 8 32]
"""

import argparse
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import tensorflow.compat.v1 as tf  # noqa: E402

import epl  # noqa: E402
from benchmarks.models import transformer  # noqa: E402
from epl.planner.plan import Task  # noqa: E402
from epl.runtime.compiler import Signature, compile_program, traits_of  # noqa: E402
from epl.runtime.graph_index import GraphIndex  # noqa: E402
from epl.runtime.planning import make_plan  # noqa: E402
from epl.runtime.store import Store  # noqa: E402


def measure(layers, micro_batches, ranks, show):
    tf.reset_default_graph()
    epl.init(epl.Config({"pipeline.num_micro_batch": micro_batches, "pipeline.accumulate_in_run": True}))
    epl.set_default_strategy(epl.replicate(1))
    feeds, loss = transformer(8, layers=layers)
    train = tf.train.AdamOptimizer(1e-3).minimize(loss, global_step=tf.train.get_or_create_global_step())
    graph = tf.get_default_graph()
    clock = time.perf_counter
    start = clock()
    whole = GraphIndex(graph).whole()
    index = clock() - start
    signature = Signature((loss.name, train.name), tuple(f.name for f in feeds), ("divide",) * len(feeds))
    start = clock()
    traits = traits_of(whole, signature)
    find = clock() - start
    import dataclasses

    plan = dataclasses.replace(make_plan(epl.Graph.get()), ranks=ranks)
    seconds = {}
    start = clock()
    executable = compile_program(whole, signature, traits, plan, Task(plan), [lambda i, p, before, after, s: seconds.__setitem__(p.name, s)])
    passes = clock() - start
    program = executable.program
    store = Store()
    start = clock()
    store.load(program, executable.task.key)
    load = clock() - start
    definition = program.to_graph_def()
    with tf.Graph().as_default():
        start = clock()
        tf.import_graph_def(definition, name="")
        reference = clock() - start
    total = index + find + passes + load
    print(
        "layers %2d  M %2d  ranks %4d  nodes %6d -> %6d  index %.2f  find %.2f  passes %.2f  load %.2f  total %.2f s"
        "  TensorFlow's import %.2f s  ratio %.2f"
        % (layers, micro_batches, ranks, len(whole.nodes), len(program.nodes), index, find, passes, load, total, reference, total / reference),
        flush=True,
    )
    if show:
        print("   " + "  ".join("%s %.2f" % item for item in seconds.items()), flush=True)
    store.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    for layers in arguments.layers:
        for micro_batches in arguments.micro_batches:
            measure(layers, micro_batches, 1, True)
    try:
        import horovod.tensorflow  # noqa: F401  (its ops must be known)
    except ImportError:
        return
    for ranks in (2, 64, 1024):
        measure(12, 1, ranks, False)


if __name__ == "__main__":
    main()
