"""Train the transformer of char_transformer.py as a pipeline of stages.

    epl-launch --num_workers 2 examples/char_transformer_pipeline.py                 two stages on two ranks
    epl-launch --num_workers 4 examples/char_transformer_pipeline.py                 two replicas of two stages
    epl-launch --num_workers 4 examples/char_transformer_pipeline.py --stages 4      four stages
    EPL_CLUSTER_DEVICES_PER_WORKER=2 python examples/char_transformer_pipeline.py    two stages in one process
"""

import functools

import char_transformer
import compare
import tensorflow.compat.v1 as tf
from char_transformer import CHARACTERS, LENGTH, WIDTH, attention, normalise

import epl


def build_model(inputs, targets, layers, stages):
    with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
        with stages[0]:
            table = tf.get_variable("table", [len(CHARACTERS), WIDTH], initializer=tf.random_normal_initializer(stddev=0.05))
            position = tf.get_variable("position", [LENGTH, WIDTH], initializer=tf.random_normal_initializer(stddev=0.05))
            x = tf.nn.embedding_lookup(table, inputs) + position
        for layer in range(layers):
            with tf.variable_scope("layer%d" % layer), stages[layer * len(stages) // layers]:
                x += attention(normalise(x, "norm1"))
                hidden = tf.layers.dense(normalise(x, "norm2"), 4 * WIDTH, activation=tf.nn.swish, name="mlp1")
                x += tf.layers.dense(hidden, WIDTH, name="mlp2")
        with stages[-1]:
            logits = tf.layers.dense(normalise(x, "norm"), len(CHARACTERS), name="logits")
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits))


def parse_arguments():
    parser = char_transformer.argument_parser(__doc__.splitlines()[0], layers=4)
    parser.add_argument("--stages", type=int, default=2, help="stages of the pipeline (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches of a replica and step (default: %(default)s)")
    parser.add_argument("--schedule", default="PreferBackward", help="their order, see pipeline.strategy (default: %(default)s)")
    args = parser.parse_args()
    if args.plain:
        parser.error("char_transformer.py is the plain script")
    if args.layers < args.stages:
        parser.error("%d layers are too few for %d stages" % (args.layers, args.stages))
    return args


def main():
    args = parse_arguments()
    epl.init(epl.Config({"pipeline.num_micro_batch": args.micro_batches, "pipeline.strategy": args.schedule}))
    stages = [epl.replicate(1, name="stage_%d" % number) for number in range(args.stages)]

    cluster = epl.Env.get().cluster
    # Two of the schedules put several stages on each device.
    devices = args.stages // 2 if args.schedule == "ZeroBubbleV" else min(args.stages, cluster.total_gpu_num)
    part = compare.Part.of(cluster, devices, args.micro_batches)

    record = char_transformer.train(args, part, functools.partial(build_model, layers=args.layers, stages=stages))
    epl.shutdown()
    compare.finish(record, args, part, ["--layers", str(args.layers)], script=char_transformer.__file__)


if __name__ == "__main__":
    main()
