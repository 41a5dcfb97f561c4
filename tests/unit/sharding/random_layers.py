"""The blocks of random programs that are split: each makes one tensor out of earlier ones.

The values of a program are float tensors whose dimension 0 is the batch; `any`, `two`,
`three` and `image` give the n-th newest in a shape. Blocks keep numbers near 1, so that
round-off does not grow from step to step.
"""

import numpy as np
import tensorflow.compat.v1 as tf

from tests.unit.sharding.random_functions import BINARY, REDUCE, UNARY

COLUMNS, PLACES, CLASSES, WORDS = 6, 3, 5, 7
SIZES = (2, 3, 4, 5, 7, 8)
MOST = 40
"""Elements of a sample, after each block."""


def _widths(tensor):
    return [int(d) for d in tensor.shape[1:]]


class Layers:
    """kind methods take the numbers of two earlier values, and a number that decides the rest."""

    def __init__(self, rows):
        self.x = tf.placeholder(tf.float32, [rows, COLUMNS], "x")
        self.words = tf.placeholder(tf.int64, [rows, PLACES], "words")
        self.y = tf.placeholder(tf.int32, [rows], "y")
        self.flag = tf.placeholder(tf.bool, [], "flag")
        self.step = tf.train.get_or_create_global_step()
        self.values = [self.x]
        self.indices = [(self.y, CLASSES), (self.words, WORDS)]
        self.losses = []
        self.matrices, self.tables = [], []
        self.prefix = ""

    def variable(self, name, *shape, near=0.0, trainable=True):
        name = self.prefix + name
        values = np.asarray(near + 0.7 * np.random.RandomState(sum(map(ord, name))).uniform(-1, 1, shape), np.float32)
        return tf.get_variable(name, initializer=tf.constant(values), trainable=trainable)

    def keep(self, value):
        """Enter a value; a large one is cut, a number for each sample gets a dimension."""
        if value.shape.rank == 1:
            value = value[:, None]
        if np.prod(_widths(value)) > MOST:
            value = tf.reshape(value, [-1, int(np.prod(_widths(value)))])[:, : MOST // 4]
        self.values.append(value)

    # Operands.

    def any(self, n):
        return self.values[-1 - n % len(self.values)]

    def two(self, n):
        value = self.any(n)
        return value if value.shape.rank == 2 else tf.reshape(value, [-1, int(np.prod(_widths(value)))])

    def three(self, n):
        """The newest of rank 3 from there on, else what is there in two halves or twice."""
        order = [self.any(n + i) for i in range(len(self.values))]
        found = next((v for v in order if v.shape.rank == 3), None)
        if found is not None:
            return found
        value = self.two(n)
        width = int(value.shape[1])
        return tf.reshape(value, [-1, 2, width // 2]) if width % 2 == 0 and width > 2 else tf.stack([value, tf.sin(value)], 1)

    def image(self, n):
        order = [self.any(n + i) for i in range(len(self.values))]
        found = next((v for v in order if v.shape.rank == 4 and min(_widths(v)[:2]) > 1), None)
        if found is not None:
            return found
        value = self.two(n)
        return tf.reshape(tf.matmul(value, self.variable("image", int(value.shape[1]), 27)), [-1, 3, 3, 3])

    def index(self, n):
        return self.indices[-1 - n % len(self.indices)]

    def like(self, value, n):
        """Another value in a shape that can meet this one: its own, or one number for each sample."""
        other = self.any(n)
        if _widths(other) == _widths(value):
            return other
        other = tf.reduce_mean(other, list(range(1, other.shape.rank)), keepdims=True)
        return tf.reshape(other, [-1] + [1] * (value.shape.rank - 1))

    # Products.

    def dense(self, a, b, c):
        value = self.any(a)
        matrix = self.variable("w", _widths(value)[-1], SIZES[c % len(SIZES)])
        self.matrices.append(matrix)
        return tf.tanh(tf.tensordot(value, matrix, 1) if value.shape.rank > 2 else tf.matmul(value, matrix))

    def turned(self, a, b, c):
        value = self.two(a)
        return 0.5 * tf.matmul(value, self.variable("w", SIZES[c % len(SIZES)], int(value.shape[1])), transpose_b=True)

    def tied(self, a, b, c):
        """An earlier matrix, forward or back."""
        if not self.matrices:
            return self.dense(a, b, c)
        matrix = self.matrices[c % len(self.matrices)]
        value, back = self.two(a), bool(b % 2)
        wanted = int(matrix.shape[1 if back else 0])
        width = int(value.shape[1])
        value = value[:, :wanted] if width >= wanted else tf.pad(value, [[0, 0], [0, wanted - width]])
        return tf.tanh(tf.matmul(value, matrix, transpose_b=back))

    def einsum(self, a, b, c):
        value, size = self.three(a), SIZES[c % len(SIZES)]
        t, n = _widths(value)
        if b % 3 == 0:
            return 0.5 * tf.einsum("btn,nm->btm", value, self.variable("w", n, size))
        if b % 3 == 1:
            return 0.3 * tf.einsum("btn,tnm->bm", value, self.variable("w", t, n, size))
        return 0.5 * tf.einsum("btn,nhd->bhtd", value, self.variable("w", n, 2, 3))

    def pairs(self, a, b, c):
        value = tf.tanh(self.three(a))
        if c % 3 == 0:
            return 0.5 * tf.matmul(value, value, transpose_b=True)
        if c % 3 == 1:
            return 0.5 * tf.matmul(value, tf.sin(value), adjoint_a=True)
        return tf.matmul(value, tf.tile(self.variable("w", 1, _widths(value)[1], 3), tf.stack([tf.shape(value)[0], 1, 1])))

    def attend(self, a, b, c):
        value = self.three(a)
        t, n = _widths(value)
        q, k, v = (tf.reshape(tf.tensordot(value, self.variable(name, n, 4), 1), [-1, t, 2, 2]) for name in "qkv")
        scores = tf.nn.softmax(tf.einsum("bthd,bshd->bhts", q, k))
        return tf.reshape(tf.transpose(tf.matmul(scores, tf.transpose(v, [0, 2, 1, 3])), [0, 2, 1, 3]), [-1, t, 4])

    def convolve(self, a, b, c):
        image, padding = self.image(a), ("SAME", "VALID")[b % 2]
        channels = _widths(image)[2]
        if c % 2:
            return 0.5 * tf.nn.depthwise_conv2d(image, self.variable("kernel", 2, 2, channels, 2), strides=[1, 1, 1, 1], padding=padding)
        return 0.4 * tf.nn.conv2d(image, self.variable("kernel", 2, 2, channels, 3), strides=[1, 1, 1, 1], padding=padding)

    def pool(self, a, b, c):
        kind = (tf.nn.max_pool2d, tf.nn.avg_pool2d)[c % 2]
        return kind(self.image(a), [1, 2, 2, 1], [1, 1 + b % 2, 1, 1], "SAME")

    # Element by element.

    def bias(self, a, b, c):
        value = self.any(a)
        return tf.nn.bias_add(value, self.variable("b", _widths(value)[-1]))

    def scale(self, a, b, c):
        """A variable that is broadcast in one way or another."""
        value = self.any(a)
        widths = _widths(value)
        shapes = [widths[-1:], [1] + widths, [widths[0]] + [1] * (len(widths) - 1), [], [1] * len(widths)]
        shape = shapes[c % len(shapes)]
        return value * self.variable("gain", *shape, near=1.0) if b % 2 else value + self.variable("gain", *shape)

    def unary(self, a, b, c):
        return UNARY[c % len(UNARY)](self.any(a))

    def binary(self, a, b, c):
        value = self.any(a)
        return BINARY[c % len(BINARY)](value, self.like(value, b))

    def norm(self, a, b, c):
        value = self.any(a)
        width = _widths(value)[-1:]
        mean, variance = tf.nn.moments(value, [-1], keepdims=True)
        return (value - mean) * tf.rsqrt(variance + 0.3) * self.variable("gamma", *width, near=1.0) + self.variable("beta", *width)

    # Reductions.

    def reduced(self, a, b, c):
        value = self.any(a)
        axes = [1 + b % (value.shape.rank - 1)] if c % 4 or value.shape.rank < 4 else [1, -1]
        return REDUCE[c % len(REDUCE)](value, axes, keepdims=bool(c // 7 % 2))

    def soft(self, a, b, c):
        value = self.any(a)
        axis = -1 if c % 3 else 1
        return 0.4 * tf.nn.log_softmax(value, axis=axis) if b % 2 else tf.nn.softmax(value, axis=axis)

    def summed(self, a, b, c):
        value = self.any(a)
        return tf.cumsum(value, 1 + b % (value.shape.rank - 1), exclusive=bool(c % 2), reverse=bool(c // 2 % 2)) * 0.4

    @staticmethod
    def apart(value):
        """Columns that are not nearly equal: round-off must not decide which is larger."""
        width = _widths(value)[-1]
        return value + tf.constant(0.13 * ((np.arange(width) * 5) % max(width, 1)), tf.float32)

    def best(self, a, b, c):
        value = self.apart(self.two(a))
        found = tf.argmax(value, 1) if b % 2 else tf.argmin(value, 1, output_type=tf.int32)
        self.indices.append((found, int(value.shape[1])))
        return tf.reduce_max(value, 1, keepdims=True) + tf.cast(found, tf.float32)[:, None] * 0.1

    def top(self, a, b, c):
        value = self.apart(self.any(a))
        k = min(_widths(value)[-1], 1 + c % 3)
        found, places = tf.nn.top_k(value, k)
        if places.shape.rank == 2:
            self.indices.append((places, _widths(value)[-1]))
        return found if b % 2 else found * tf.cast(places, tf.float32)

    # Cross entropies: a number for each sample, which is also a loss.

    def classify(self, a, b, c):
        value = self.two(a)
        classes = int(value.shape[1])
        found, bound = self.index(b)
        label = found if found.shape.rank == 1 else found[:, c % int(found.shape[1])]
        if c % 3 == 0:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label % classes, logits=value)
        elif c % 3 == 1:
            each = tf.nn.softmax_cross_entropy_with_logits_v2(labels=tf.one_hot(label % classes, classes), logits=value)
        else:
            each = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.one_hot(label % classes, classes), logits=value), 1)
        self.losses.append(0.2 * tf.reduce_mean(each))
        return tf.tanh(each)

    def distil(self, a, b, c):
        value = self.two(a)
        other = self.two(b)
        width = min(int(value.shape[1]), int(other.shape[1]))
        labels = tf.nn.softmax(other[:, :width])
        return 0.3 * tf.nn.softmax_cross_entropy_with_logits_v2(labels=labels if c % 2 else tf.stop_gradient(labels), logits=value[:, :width])

    # Rows that are picked.

    def lookup(self, a, b, c):
        found, bound = self.index(a)
        same = [t for t in self.tables if int(t.shape[0]) >= bound]
        if c % 2 or not same:
            self.tables.append(self.variable("table", bound + b % 4, SIZES[c % len(SIZES)]))
            same = self.tables
        return tf.nn.embedding_lookup(same[-1], found)

    def words_of(self, a, b, c):
        """Logits by the table of an embedding."""
        if not self.tables:
            return self.lookup(a, b, c)
        table = self.tables[c % len(self.tables)]
        value, width = self.two(a), int(table.shape[1])
        have = int(value.shape[1])
        value = value[:, :width] if have >= width else tf.pad(value, [[0, 0], [0, width - have]])
        return 0.5 * tf.matmul(tf.tanh(value), table, transpose_b=True)

    def hot(self, a, b, c):
        found, bound = self.index(a)
        depth = bound + b % 3
        axis = -1 if c % 2 else 1
        hot = tf.one_hot(found, depth, axis=axis)
        if found.shape.rank == 1 and c % 3:
            return tf.matmul(hot, self.variable("table", depth, 4))
        return hot * 0.5 + self.variable("gain", depth if axis == -1 or found.shape.rank == 1 else 1)

    def picked(self, a, b, c):
        value = self.any(a)
        axis = 1 + b % (value.shape.rank - 1)
        width = _widths(value)[axis - 1]
        return tf.gather(value, [c % width, 0, (c + 1) % width], axis=axis)

    # Shapes.

    def joined(self, a, b, c):
        value = self.any(a)
        widths = _widths(value)
        if c % 3 == 0:
            return tf.reshape(value, [-1, int(np.prod(widths))])
        if c % 3 == 1 or len(widths) == 1:
            return tf.reshape(value, [tf.shape(value)[0], int(np.prod(widths[:-1])) * widths[-1], 1])
        return tf.reshape(value, [-1] + [int(np.prod(widths[:2]))] + widths[2:])

    def parted(self, a, b, c):
        value = self.two(a)
        width = int(value.shape[1])
        sizes = [n for n in range(2, width + 1) if width % n == 0]
        first = sizes[c % len(sizes)] if sizes else 1
        if b % 2:
            return tf.reshape(value, [-1, first, width // first])
        return tf.reshape(value, tf.stack([tf.shape(value)[0], width // first, first]))

    def rows(self, a, b, c):
        """Positions as samples, and back."""
        value = self.three(a)
        t, n = _widths(value)
        flat = tf.reshape(value, [-1, n])
        size = SIZES[c % len(SIZES)]
        made = tf.nn.relu(tf.matmul(flat, self.variable("w", n, size)) + self.variable("b", size))
        if b % 2:
            made = tf.nn.softmax(made)
        return tf.reshape(made, [-1, t, size])

    def time_first(self, a, b, c):
        value = tf.transpose(self.three(a), [1, 0, 2])
        n = int(value.shape[2])
        value = tf.tanh(tf.tensordot(value, self.variable("w", n, n), 1)) + self.variable("b", int(value.shape[0]), 1, 1)
        return tf.transpose(value, [1, 2, 0] if b % 2 else [1, 0, 2])

    def transposed(self, a, b, c):
        value = self.any(a)
        if value.shape.rank == 2:
            return tf.matmul(tf.transpose(value), self.variable("w", int(value.shape[1]), 3), transpose_a=True) if b % 2 else tf.transpose(
                tf.tanh(tf.transpose(value))
            )
        return tf.transpose(value, [0, 2, 1] + list(range(3, value.shape.rank)))

    def glued(self, a, b, c):
        one, other = self.two(a), self.two(b)
        if c % 3 == 0:
            return tf.concat([one, other], 1)
        width = min(int(one.shape[1]), int(other.shape[1]))
        return tf.stack([one[:, :width], tf.sin(other[:, :width])], c % 3)

    def cut(self, a, b, c):
        value = self.any(a)
        axis = 1 + b % (value.shape.rank - 1)
        width = _widths(value)[axis - 1]
        if c % 3 == 0:
            return tf.unstack(value, axis=axis)[c % width] + (0.0 if value.shape.rank > 2 else 1.0)
        if c % 3 == 1 and width > 1:
            first, rest = tf.split(value, [width // 2, width - width // 2], axis)
            return tf.concat([rest, tf.tanh(first)], axis)
        return tf.split(value, 2, axis)[1] if width % 2 == 0 else value

    def sliced(self, a, b, c):
        value = self.any(a)
        rank, axis = value.shape.rank, 1 + b % (value.shape.rank - 1)
        width = _widths(value)[axis - 1]
        if c % 3 == 0:
            begin, size = [0] * rank, [-1] * rank
            begin[axis] = c % width
            return tf.slice(value, begin, size)
        if c % 3 == 1:
            return value[(slice(None),) * axis + (slice(c % width, None),)]
        return value[(slice(None),) * axis + (slice(0, width, 2), None)]

    def padded(self, a, b, c):
        value = self.any(a)
        rank = value.shape.rank
        paddings = [[0, 0]] * rank
        paddings[1 + b % (rank - 1)] = [c % 2, 1]
        return tf.pad(value, paddings, "CONSTANT", constant_values=float(c % 3) * 0.5)

    def repeated(self, a, b, c):
        value = self.two(a)
        if c % 2:
            return tf.tile(value[:, None, :], [1, 2, 1])
        return tf.broadcast_to(value[:, None, :], tf.stack([tf.shape(value)[0], 2, int(value.shape[1])]))

    def squeezed(self, a, b, c):
        value = self.any(a)
        return tf.squeeze(tf.expand_dims(tf.tanh(value), 1 + c % value.shape.rank), [1 + c % value.shape.rank])

    # What is no plain function of a sample.

    def averaged(self, a, b, c):
        """A loss that is linear in the mean over the batch."""
        value = self.two(a)
        mean = tf.reduce_mean(value, 0, keepdims=bool(c % 2))
        self.losses.append(0.1 * tf.reduce_sum(mean * self.variable("by", int(value.shape[1]))))
        return tf.sin(value)

    def decay(self, a, b, c):
        """Weights in the loss, and on the way."""
        if not self.matrices:
            return self.dense(a, b, c)
        matrix = self.matrices[b % len(self.matrices)]
        self.losses.append(0.01 * (tf.nn.l2_loss(matrix) if c % 2 else tf.reduce_sum(tf.abs(matrix))))
        return self.any(a) + 0.1 * tf.reduce_mean(tf.square(matrix))

    def loop(self, a, b, c):
        value = self.two(a)
        w = self.variable("w", int(value.shape[1]), int(value.shape[1]))
        return tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, 0.5 * tf.tanh(tf.matmul(v, w)) + 0.3 * value), [tf.constant(0), value])[1]

    def cond(self, a, b, c):
        value = self.any(a)
        w = self.variable("w", _widths(value)[-1])
        return tf.cond(self.flag, lambda: tf.tanh(value * w), lambda: 0.5 * value)

    def timed(self, a, b, c):
        return self.any(a) * (1 + 0.1 * tf.cos(tf.cast(self.step, tf.float32)))

    def after(self, a, b, c):
        value = self.any(a)
        with tf.control_dependencies([tf.identity(self.any(b))]):
            return tf.tanh(value)

    # What depends on which samples are in a batch.

    def gram(self, a, b, c):
        value = tf.tanh(self.two(a))
        return tf.matmul(value, tf.matmul(value, value, transpose_a=True)) * 0.1

    def centred(self, a, b, c):
        value = self.any(a)
        mean, variance = tf.nn.moments(value, [0], keepdims=bool(c % 2))
        return (value - mean) * tf.rsqrt(variance + 0.5)

    def segments(self, a, b, c):
        value = self.two(a)
        table = tf.math.unsorted_segment_sum(tf.tanh(value), self.y, CLASSES)
        return tf.gather(table, self.y) * 0.3 + value

    def moving(self, a, b, c):
        """Statistics that the forward pass writes."""
        value = self.any(a)
        mean = self.variable("moving", *_widths(value)[-1:], trainable=False)
        update = tf.assign(mean, 0.9 * mean + 0.1 * tf.reduce_mean(value, list(range(value.shape.rank - 1))))
        with tf.control_dependencies([update]):
            return tf.tanh(value)

    def fused_norm(self, a, b, c):
        image = self.image(a)
        channels = _widths(image)[2]
        gamma, beta = self.variable("gamma", channels, near=1.0), self.variable("beta", channels)
        if c % 2:
            return tf.nn.fused_batch_norm(image, gamma, beta, epsilon=0.3)[0]
        return tf.nn.fused_batch_norm(image, gamma, beta, mean=tf.zeros([channels]), variance=tf.ones([channels]), is_training=False)[0]

    def dropped(self, a, b, c):
        return tf.nn.dropout(self.any(a), rate=0.3, seed=11 + c)

    def across(self, a, b, c):
        value = tf.tanh(self.two(a))
        return tf.matmul(tf.nn.softmax(tf.matmul(value, value, transpose_b=True)), value)


MIXING = ("gram", "centred", "segments", "moving", "fused_norm", "dropped", "across")
LOOPS = ("loop", "cond")
_NO_KINDS = ("variable", "keep", "any", "two", "three", "image", "index", "like", "apart")
KINDS = [n for n, f in vars(Layers).items() if callable(f) and not n.startswith("_") and n not in _NO_KINDS]
