"""Recognise handwritten digits (the 8x8 images of scikit-learn) with a small convolutional network.

    python examples/digits.py --plain                             one device, without EPL
    epl-launch --num_workers 2 examples/digits.py                 two ranks
    EPL_CLUSTER_DEVICES_PER_WORKER=2 python examples/digits.py    two devices in one process
"""

import compare
import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

compare.quiet()
tf.disable_v2_behavior()
tf.enable_resource_variables()

TEST_IMAGES = 360


def load_data():
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16.0).astype(np.float32)
    labels = digits.target.astype(np.int64)
    return train_test_split(images, labels, test_size=TEST_IMAGES, random_state=0, stratify=labels)


def build_model(images, labels):
    with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
        net = tf.layers.conv2d(images, 16, 3, padding="same", activation=tf.nn.swish, name="conv1")
        net = tf.layers.conv2d(net, 32, 3, padding="same", activation=tf.nn.swish, name="conv2")
        net = tf.layers.max_pooling2d(net, 2, 2)
        net = tf.reshape(net, [-1, 4 * 4 * 32])
        net = tf.layers.dense(net, 64, activation=tf.nn.swish, name="dense1")
        logits = tf.layers.dense(net, 10, name="dense2")
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32))
    return loss, accuracy


def main():
    args = compare.argument_parser(__doc__.splitlines()[0], steps=300, global_batch=64).parse_args()
    part = compare.Part()
    if not args.plain:
        import epl

        epl.init()
        epl.set_default_strategy(epl.replicate(1))
        part = compare.Part.of(epl.Env.get().cluster)

    tf.set_random_seed(1)
    train_images, test_images, train_labels, test_labels = load_data()
    loss, accuracy = build_model(*compare.batches((train_images, train_labels), args.global_batch, part, seed=1))
    step = tf.train.get_or_create_global_step()
    train_op = tf.train.AdamOptimizer(0.003, epsilon=1e-6).minimize(loss, global_step=step)

    fed_images = tf.placeholder(tf.float32, [None, 8, 8, 1], "images")
    fed_labels = tf.placeholder(tf.int64, [None], "labels")
    _, test_accuracy = build_model(fed_images, fed_labels)
    test_feed = {fed_images: test_images, fed_labels: test_labels}

    if not args.plain:
        for value in (loss, accuracy):  # report the mean over all replicas, not this rank's value
            epl.add_to_collection(value, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)

    record = compare.Record()
    with tf.train.MonitoredTrainingSession() as session:
        for number in range(1, args.steps + 1):
            _, loss_now, accuracy_now = session.run([train_op, loss, accuracy])
            record.add(session, loss_now)
            if number % 50 == 0 or number == args.steps:
                held_out = session.run(test_accuracy, test_feed)
                if part.rank == 0:
                    values = (number, loss_now, 100 * accuracy_now, 100 * held_out)
                    print("step %4d  loss %.4f  accuracy %5.1f %%  test accuracy %5.1f %%" % values, flush=True)
        record.finish(session)
    if not args.plain:
        epl.shutdown()
    compare.finish(record, args, part)


if __name__ == "__main__":
    main()
