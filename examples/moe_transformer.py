"""Train the transformer of char_transformer.py with experts in place of its feed-forward layers, the experts split over the devices.

    python examples/moe_transformer.py --plain                             one device, without EPL's scopes
    epl-launch --num_workers 2 examples/moe_transformer.py                 two ranks, each with half of the experts
    EPL_CLUSTER_DEVICES_PER_WORKER=2 python examples/moe_transformer.py    two devices in one process
"""

import contextlib
import functools

import char_transformer
import compare
import tensorflow.compat.v1 as tf
from char_transformer import CHARACTERS, LENGTH, WIDTH, attention, normalise

import epl


def build_model(inputs, targets, layers, experts, choices, split, balance=0.0):
    """The loss, to which the load of the experts adds with the factor `balance`."""
    loads = []
    with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
        table = tf.get_variable("table", [len(CHARACTERS), WIDTH], initializer=tf.random_normal_initializer(stddev=0.05))
        position = tf.get_variable("position", [LENGTH, WIDTH], initializer=tf.random_normal_initializer(stddev=0.05))
        x = tf.nn.embedding_lookup(table, inputs) + position
        for layer in range(layers):
            with tf.variable_scope("layer%d" % layer):
                x += attention(normalise(x, "norm1"))
                tokens = normalise(x, "norm2")
                with split():
                    found, load = epl.ops.mixture_of_experts(tokens, experts, 4 * WIDTH, k=choices, activation=tf.nn.swish, name="experts")
                x += found
                loads.append(load)
        logits = tf.layers.dense(normalise(x, "norm"), len(CHARACTERS), name="logits")
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits))
        return loss + balance * tf.add_n(loads)


def main():
    parser = char_transformer.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=16, help="experts of a layer (default: %(default)s)")
    parser.add_argument("--choices", type=int, default=2, help="experts of a token: 1 is the Switch Transformer, 2 is GShard (default: %(default)s)")
    parser.add_argument("--group", type=int, help="devices that share the experts (default: all)")
    args = parser.parse_args()
    part, split = compare.Part(), contextlib.nullcontext
    if not args.plain:
        epl.init(epl.Config({"cluster.colocate_split_and_replicate": True}))
        cluster = epl.Env.get().cluster
        devices = args.group or cluster.total_gpu_num
        epl.set_default_strategy(epl.replicate(devices))
        split = functools.partial(epl.split, devices)
        part = compare.Part.of(cluster)

    build = functools.partial(build_model, layers=args.layers, experts=args.experts, choices=args.choices, split=split)
    record = char_transformer.train(args, part, functools.partial(build, balance=0.01), build)
    if not args.plain:
        epl.shutdown()
    compare.finish(record, args, part, ["--layers", str(args.layers), "--experts", str(args.experts), "--choices", str(args.choices)])


if __name__ == "__main__":
    main()
