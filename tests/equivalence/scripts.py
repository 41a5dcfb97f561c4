"""Small models that several case files share."""

import contextlib
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


def scalar(name, value, **options):
    return tf.get_variable(name, [], initializer=tf.constant_initializer(float(value)), **options)


def regression(run, optimizer="sgd", rate=None, start=0.0):
    """y = 3x with the mean square as loss: (x, w, loss, train, step)."""
    x = tf.placeholder(tf.float32, [None], "x")
    w = scalar("w", start)
    loss = tf.reduce_mean(tf.square(w * x - 3.0 * x))
    run.merge(loss)
    step = tf.train.get_or_create_global_step()
    train = OPTIMIZERS[optimizer](RATES[optimizer] if rate is None else rate).minimize(loss, global_step=step)
    return x, w, loss, train, step


def judge_variables(outcome):
    """The variables of every rank equal the plain ones."""
    for number, rank in enumerate(outcome.ranks):
        for name, value in outcome.plain.items():
            np.testing.assert_allclose(rank[name], value, rtol=1e-5, atol=1e-6, err_msg="%s on rank %d" % (name, number))


@contextlib.contextmanager
def raises():
    """Collects the error of the block: a list that gets one dict with its type names, its text and how long it took."""
    caught, started = [], time.time()
    try:
        yield caught
    except Exception as error:
        names = [one.__name__ for one in type(error).__mro__]
        caught.append({"types": names, "text": str(error), "seconds": time.time() - started})
