"""Train a small character-level transformer on English prose: the language help that Python itself ships.

    python examples/char_transformer.py --plain                             one device, without EPL
    epl-launch --num_workers 2 examples/char_transformer.py                 two ranks
    EPL_CLUSTER_DEVICES_PER_WORKER=2 python examples/char_transformer.py    two devices in one process
"""

import functools
from pydoc_data import topics

import compare
import numpy as np
import tensorflow.compat.v1 as tf

compare.quiet()
tf.disable_v2_behavior()
tf.enable_resource_variables()

WIDTH, HEADS, LENGTH = 64, 4, 64
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
TEST_SEQUENCES = 64


def load_data():
    """All help topics as character codes, cut into sequences; the last ones are held out."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    codes = {character: code for code, character in enumerate(CHARACTERS)}
    tokens = np.array([codes[c] for c in text if c in codes], np.int32)
    count = (len(tokens) - 1) // LENGTH
    inputs = tokens[: count * LENGTH].reshape(count, LENGTH)
    targets = tokens[1 : count * LENGTH + 1].reshape(count, LENGTH)
    return inputs[:-TEST_SEQUENCES], targets[:-TEST_SEQUENCES], inputs[-TEST_SEQUENCES:], targets[-TEST_SEQUENCES:]


def normalise(x, name):
    """Layer normalisation over the last dimension."""
    with tf.variable_scope(name):
        scale = tf.get_variable("scale", [WIDTH], initializer=tf.ones_initializer())
        offset = tf.get_variable("offset", [WIDTH], initializer=tf.zeros_initializer())
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.rsqrt(variance + 1e-6) * scale + offset


def attention(x):
    """Causal self-attention with several heads; x is [batch, length, width]."""
    head = WIDTH // HEADS
    qkv = tf.reshape(tf.layers.dense(x, 3 * WIDTH, use_bias=False, name="qkv"), [-1, LENGTH, 3, HEADS, head])
    query, key, value = tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4]))
    scores = tf.matmul(query, key, transpose_b=True) / np.sqrt(head).astype(np.float32)
    future = np.triu(np.full([LENGTH, LENGTH], -1e9, np.float32), k=1)
    mixed = tf.matmul(tf.nn.softmax(scores + future), value)
    mixed = tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [-1, LENGTH, WIDTH])
    return tf.layers.dense(mixed, WIDTH, name="out")


def build_model(inputs, targets, layers):
    with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
        table = tf.get_variable("table", [len(CHARACTERS), WIDTH], initializer=tf.random_normal_initializer(stddev=0.05))
        position = tf.get_variable("position", [LENGTH, WIDTH], initializer=tf.random_normal_initializer(stddev=0.05))
        x = tf.nn.embedding_lookup(table, inputs) + position
        for layer in range(layers):
            with tf.variable_scope("layer%d" % layer):
                x += attention(normalise(x, "norm1"))
                hidden = tf.layers.dense(normalise(x, "norm2"), 4 * WIDTH, activation=tf.nn.swish, name="mlp1")
                x += tf.layers.dense(hidden, WIDTH, name="mlp2")
        logits = tf.layers.dense(normalise(x, "norm"), len(CHARACTERS), name="logits")
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits))


def argument_parser(description, layers=2):
    parser = compare.argument_parser(description, steps=600, global_batch=32)
    parser.add_argument("--layers", type=int, default=layers, help="layers of the model (default: %(default)s)")
    return parser


def train(args, part, build_model, build_test=None):
    """Build the model twice, for training and for the test, and train. Returns the record of it."""
    tf.set_random_seed(1)
    train_inputs, train_targets, test_inputs, test_targets = load_data()
    loss = build_model(*compare.batches((train_inputs, train_targets), args.global_batch, part, seed=1))
    step = tf.train.get_or_create_global_step()
    optimizer = tf.train.AdamOptimizer(0.003, epsilon=1e-6)
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    train_op = optimizer.apply_gradients(zip(gradients, variables), global_step=step)

    fed_inputs = tf.placeholder(tf.int32, [None, LENGTH], "inputs")
    fed_targets = tf.placeholder(tf.int32, [None, LENGTH], "targets")
    test_loss = (build_test or build_model)(fed_inputs, fed_targets)
    test_feed = {fed_inputs: test_inputs, fed_targets: test_targets}

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
                held_out = session.run(test_loss, test_feed)
                if part.rank == 0:
                    values = (number, loss_now, held_out, held_out / np.log(2))
                    print("step %4d  loss %.4f  test loss %.4f  (%.2f bits per character)" % values, flush=True)
        record.finish(session)
    return record


def main():
    args = argument_parser(__doc__.splitlines()[0]).parse_args()
    part = compare.Part()
    if not args.plain:
        import epl

        epl.init()
        epl.set_default_strategy(epl.replicate(1))
        part = compare.Part.of(epl.Env.get().cluster)

    record = train(args, part, functools.partial(build_model, layers=args.layers))
    if not args.plain:
        epl.shutdown()
    compare.finish(record, args, part, ["--layers", str(args.layers)])


if __name__ == "__main__":
    main()
