"""Data parallel on 2 ranks against a hand-written Horovod script: same models, paired rounds in the same processes.

    mpirun -np 2 python benchmarks/data_parallel.py [--models mlp cnn transformer]

Each rank has one thread. The hand-written script is `hvd.DistributedOptimizer`. The
ratio is the median over rounds of EPL's time by the other's; below 1 EPL is faster.
"""

import argparse
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import horovod.tensorflow as hvd  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import epl  # noqa: E402
from benchmarks.models import MODELS  # noqa: E402

SIZES = {"mlp": {"batch": 64}, "cnn": {"batch": 16}, "transformer": {"batch": 8}}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "transformer"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one round of one side")
    arguments = parser.parse_args()
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    config = tf.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    epl.init()
    rank = epl.Env.get().cluster.worker_index
    from epl.runtime.job import connect_job

    connect_job(epl.Env.get().config)
    for name in arguments.models:
        sides = []
        env = epl.Env.get()
        env.adapters.remove()  # the other side is plain TensorFlow
        with tf.Graph().as_default():
            feeds, loss = MODELS[name](**SIZES[name])
            optimizer = hvd.DistributedOptimizer(tf.train.AdamOptimizer(1e-3))
            train = optimizer.minimize(loss)
            start = hvd.broadcast_global_variables(0)
            theirs = tf.Session(config=config)
            theirs.run(tf.global_variables_initializer())
            theirs.run(start)
            sides.append((theirs, [loss, train], feeds))
            theirs.run([loss, train], feeds)
        env.adapters.install()
        graph = tf.Graph()
        with graph.as_default():
            epl.init()
            epl.set_default_strategy(epl.replicate(1))
            feeds, loss = MODELS[name](**SIZES[name])
            train = tf.train.AdamOptimizer(1e-3).minimize(loss)
            ours = tf.Session(config=config)
            ours.run(tf.global_variables_initializer())
            sides.append((ours, [loss, train], feeds))
            ours.run([loss, train], feeds)
        times = []
        count = None
        for _ in range(arguments.rounds + 1):
            row = []
            for session, fetches, feeds in sides:
                if count is None:
                    begin = time.perf_counter()
                    for _ in range(5):
                        session.run(fetches, feeds)
                    row.append((time.perf_counter() - begin) / 5)
                    continue
                begin = time.perf_counter()
                for _ in range(count):
                    session.run(fetches, feeds)
                row.append((time.perf_counter() - begin) / count)
            if count is None:
                steps = epl.Env.get().control.agree("steps", {"n": max(3, int(arguments.seconds / row[0]))})
                count = steps[0]["n"]
                continue
            times.append(row)
        if rank == 0:
            a, b = np.median(times, 0) * 1e3
            print(
                "%-12s Horovod %.2f ms  EPL %.2f ms  ratio %.3f (median of %d paired rounds of %d steps)"
                % (name, a, b, np.median([y / x for x, y in times]), arguments.rounds, count),
                flush=True,
            )


if __name__ == "__main__":
    main()
