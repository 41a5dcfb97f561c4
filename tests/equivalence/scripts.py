"""Small models that several case files share."""

import contextlib
import os
import re
import time

import numpy as np
import tensorflow.compat.v1 as tf

X = np.float32([1, 3, 2, 4])
"""The four samples of `regression`; two user batches are [1, 3] and [2, 4]."""

OPTIMIZERS = {
    "sgd": lambda rate: tf.train.GradientDescentOptimizer(rate),
    "momentum": lambda rate: tf.train.MomentumOptimizer(rate, 0.9),
    "adam": lambda rate: tf.train.AdamOptimizer(rate),
}
RATES = {"sgd": 0.01, "momentum": 0.01, "adam": 0.1}


SPLIT_RANKS, SPLIT_DEVICES, SPLIT_UNEVEN = "2x1-p2", "1x2-p2", "1x3-p3"
"""Layouts in which two ranks, two devices of one rank, or three share what is split."""


def scalar(name, value, **options):
    return tf.get_variable(name, [], initializer=tf.constant_initializer(float(value)), **options)


def held(session, name):
    """The shapes in which this process holds a variable, in the order of its devices."""
    from epl.runtime.adapters.sessions import rank_session

    found = {}
    for program in rank_session(session).programs():
        for node in program.nodes.values():
            if node.op == "VarHandleOp" and node.origin == name:
                found[node.name] = [d.size for d in node.attr("shape").shape.dim]
    return [found[key] for key in sorted(found)]


def normal(name, *shape, seed=1, stddev=0.3):
    return tf.get_variable(name, shape, initializer=tf.random_normal_initializer(stddev=stddev, seed=seed))


def regression(run, optimizer="sgd", rate=None, start=0.0):
    """y = 3x with the mean square as loss: (x, w, loss, train, step). In layouts with two stages the second one has the loss."""
    x = tf.placeholder(tf.float32, [None], "x")
    with run.stage(0):
        w = scalar("w", start)
        y = w * x
    with run.stage(1):
        loss = tf.reduce_mean(tf.square(y - 3.0 * x))
    run.merge(loss)
    step = tf.train.get_or_create_global_step()
    train = OPTIMIZERS[optimizer](RATES[optimizer] if rate is None else rate).minimize(loss, global_step=step)
    return x, w, loss, train, step


def judge_variables(outcome):
    """The variables of every rank equal the plain ones."""
    for number, rank in enumerate(outcome.ranks):
        for name, value in outcome.plain.items():
            np.testing.assert_allclose(rank[name], value, rtol=1e-5, atol=1e-6, err_msg="%s on rank %d" % (name, number))


def traffic(session, fetches, feeds=None):
    """What a run moves between ranks beside the agreement ahead of it: [[collective, shapes it gives], ...], by TensorFlow's own trace.

    An all-gather gives the rows of all ranks together.
    """
    metadata = tf.RunMetadata()
    session.run(fetches, feeds, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    found = []
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            collective = re.search(r" = Horovod(\w+)\(", node.timeline_label)
            if collective and not node.node_name.endswith(".epl_agree"):
                shapes = [[dim.size for dim in output.tensor_description.shape.dim] for output in node.output]
                found.append([collective[1].lower(), shapes])
    return sorted(found)


@contextlib.contextmanager
def umask_of(run):
    """Files that are made inside tell by their mode which rank has made them: `maker` reads it."""
    before = os.umask(_UMASKS[run.rank])
    try:
        yield
    finally:
        os.umask(before)


def maker(path):
    """The rank that has made a file inside `umask_of`."""
    return _UMASKS.index(0o666 & ~os.stat(path).st_mode)


_UMASKS = [0o022, 0o026, 0o020, 0o024]


@contextlib.contextmanager
def raises():
    """Collects the error of the block: a list that gets one dict with its type names, its text and how long it took."""
    caught, started = [], time.time()
    try:
        yield caught
    except Exception as error:
        names = [one.__name__ for one in type(error).__mro__]
        caught.append({"types": names, "text": str(error), "seconds": time.time() - started})
