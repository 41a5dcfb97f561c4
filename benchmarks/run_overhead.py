"""Overhead of a cached `run` beyond plain `Session.run`, in microseconds, paired in one process.

python benchmarks/run_overhead.py [--rounds 15] [--runs 400]
"""

import argparse
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import epl  # noqa: E402


def build(annotate):
    if annotate:
        epl.set_default_strategy(epl.replicate(1))
    x = tf.placeholder(tf.float32, [None, 8], "x")
    y = tf.placeholder(tf.float32, [None], "y")
    w = tf.get_variable("w", [8], initializer=tf.zeros_initializer())
    loss = tf.reduce_mean(tf.square(tf.linalg.matvec(x, w) - y))
    train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
    return x, y, loss, train


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--runs", type=int, default=400)
    arguments = parser.parse_args()
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    config = tf.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    data = np.ones((4, 8), np.float32), np.ones(4, np.float32)
    with tf.Graph().as_default():
        x, y, loss, train = build(False)
        plain = tf.Session(config=config)
        plain.run(tf.global_variables_initializer())
        plain_call = lambda: plain.run([loss, train], {x: data[0], y: data[1]})  # noqa: E731
        plain_call()
    epl.init()
    x2, y2, loss2, train2 = build(True)
    ours = tf.Session(config=config)
    ours.run(tf.global_variables_initializer())
    our_call = lambda: ours.run([loss2, train2], {x2: data[0], y2: data[1]})  # noqa: E731
    our_call()
    differences = []
    for _ in range(arguments.rounds):
        times = []
        for call in (plain_call, our_call):
            start = time.perf_counter()
            for _ in range(arguments.runs):
                call()
            times.append((time.perf_counter() - start) / arguments.runs * 1e6)
        differences.append(times)
    plain_us, our_us = np.median(differences, 0)
    print(
        "plain %.0f us  EPL %.0f us  overhead %+.0f us (median of %d paired rounds of %d runs)"
        % (plain_us, our_us, np.median([b - a for a, b in differences]), arguments.rounds, arguments.runs)
    )


if __name__ == "__main__":
    main()
