"""Predict the next word of Python's help texts: a classifier among thousands of words that is split over the devices.

    python examples/word_classifier.py --plain                             one device, without EPL
    epl-launch --num_workers 2 examples/word_classifier.py                 two ranks, each with half of the classes
    EPL_CLUSTER_DEVICES_PER_WORKER=2 python examples/word_classifier.py    two devices in one process
"""

import contextlib
import functools
import re
from pydoc_data import topics

import compare
import numpy as np
import tensorflow.compat.v1 as tf

compare.quiet()
tf.disable_v2_behavior()
tf.enable_resource_variables()

CONTEXT, WIDTH, HIDDEN = 6, 32, 256
TEST_WORDS = 4096


def load_data():
    """(contexts, next words, number of different words): all help topics in a row, the last words of them held out."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    words = re.findall(r"[a-z]+", text.lower())
    numbers = {word: number for number, word in enumerate(sorted(set(words)))}
    codes = np.array([numbers[word] for word in words], np.int32)
    contexts = np.stack([codes[at : len(codes) - CONTEXT + at] for at in range(CONTEXT)], 1)
    return contexts, codes[CONTEXT:], len(numbers)


def build_model(contexts, words, classes, split):
    """(loss, share of words that are predicted)."""
    with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
        table = tf.get_variable("table", [classes, WIDTH], initializer=tf.random_normal_initializer(stddev=0.05))
        h = tf.reshape(tf.nn.embedding_lookup(table, contexts), [-1, CONTEXT * WIDTH])
        h = tf.layers.dense(h, HIDDEN, activation=tf.nn.swish, name="features")
        with split():
            logits = tf.layers.dense(h, classes, name="classes")
            loss = tf.losses.sparse_softmax_cross_entropy(words, logits)
            hits = tf.equal(tf.argmax(logits, -1, output_type=tf.int32), words)
            return loss, tf.reduce_mean(tf.cast(hits, tf.float32))


def train(args, part, split):
    """Train, and return the record of it."""
    tf.set_random_seed(1)
    contexts, words, classes = load_data()
    if part.rank == 0:
        print("%d words of text, %d different ones" % (len(words), classes), flush=True)
    arrays = contexts[:-TEST_WORDS], words[:-TEST_WORDS]
    loss, _ = build_model(*compare.batches(arrays, args.global_batch, part, seed=1), classes, split)
    train_op = tf.train.AdamOptimizer(0.003, epsilon=1e-6).minimize(loss, global_step=tf.train.get_or_create_global_step())

    fed_contexts, fed_words = tf.placeholder(tf.int32, [None, CONTEXT], "contexts"), tf.placeholder(tf.int32, [None], "words")
    _, accuracy = build_model(fed_contexts, fed_words, classes, split)
    test_feed = {fed_contexts: contexts[-TEST_WORDS:], fed_words: words[-TEST_WORDS:]}

    if not args.plain:
        import epl

        # Report the mean over all replicas, not this rank's value.
        epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)

    record = compare.Record()
    with tf.train.MonitoredTrainingSession() as session:
        for number in range(1, args.steps + 1):
            _, loss_now = session.run([train_op, loss])
            record.add(session, loss_now)
            if number % 100 == 0 or number == args.steps:
                found = session.run(accuracy, test_feed)
                if part.rank == 0:
                    print("step %4d  loss %.4f  test words predicted %.1f %%" % (number, loss_now, 100 * found), flush=True)
        record.finish(session)
    return record


def main():
    parser = compare.argument_parser(__doc__.splitlines()[0], steps=600, global_batch=256)
    parser.add_argument("--group", type=int, help="devices that share the classes (default: all)")
    args = parser.parse_args()
    part, split = compare.Part(), contextlib.nullcontext
    if not args.plain:
        import epl

        epl.init(epl.Config({"cluster.colocate_split_and_replicate": True}))
        cluster = epl.Env.get().cluster
        devices = args.group or cluster.total_gpu_num
        epl.set_default_strategy(epl.replicate(devices))
        split = functools.partial(epl.split, devices)
        part = compare.Part.of(cluster)

    record = train(args, part, split)
    if not args.plain:
        epl.shutdown()
    compare.finish(record, args, part)


if __name__ == "__main__":
    main()
