"""Initial values of large variables are computed in parts, and are those of plain TensorFlow."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.ir import attrs as A
from epl.planner.sharding.rules import initial
from epl.planner.sharding.spec import R, S
from tests.unit.machine import Machine, Plain, user_graph


def numbers(shape, dtype=None, partition_info=None):
    return tf.constant(np.arange(np.prod(shape)).reshape(shape), dtype)


INITIALIZERS = {
    "uniform": tf.random_uniform_initializer(-0.3, 0.7, seed=5),
    "normal": tf.random_normal_initializer(1.0, 0.2, seed=6),
    "truncated": tf.truncated_normal_initializer(stddev=0.2, seed=7),
    "glorot": tf.glorot_uniform_initializer(seed=8),
    "scaled": tf.variance_scaling_initializer(seed=9),
    "double": tf.random_normal_initializer(seed=10, dtype=tf.float64),
    "ones": tf.ones_initializer(),
    "constant": tf.constant_initializer(0.3),
    "numbers": numbers,
}
SHAPES = {"rows": (31, 6), "columns": (6, 31), "kernel": (3, 3, 2, 11)}


def in_parts(monkeypatch):
    """Whatever is small is initialised in parts, too."""
    monkeypatch.setattr(initial, "LARGE", 1)
    monkeypatch.setattr(initial, "LONG", 1)


def program(initializer, shape, seed=1):
    with user_graph() as index:
        if seed:
            tf.set_random_seed(seed)
        dtype = tf.float64 if initializer == "double" else tf.float32
        with tf.get_default_graph()._attr_scope({A.TASKGRAPH: A.of_int(0)}):
            w = tf.get_variable("w", shape, dtype, initializer=INITIALIZERS[initializer])
            x = tf.placeholder(dtype, [None, int(np.prod(shape))], "x")
            loss = tf.reduce_mean(tf.square(tf.matmul(x, tf.reshape(w, [-1, 1]))))
        tf.train.AdamOptimizer(0.1).minimize(loss, name="train")
        tf.group(tf.global_variables_initializer(), name="init")
        return index()


def machine(whole, form, devices=3, ranks=1):
    made = Machine(whole, devices, ranks, lanes=devices * ranks, split=(0,))
    made.whole = made.whole.replace(held={} if form == R else dict.fromkeys(("w", "w/Adam", "w/Adam_1"), form))
    return made


def compiled(made):
    """The ops of the first compiled program, with their shapes."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(made.executables[0].program.to_graph_def(), name="")
    return graph.get_operations()


CASES = [(i, s) for i in INITIALIZERS for s in SHAPES]


@pytest.mark.parametrize("initializer, shape", CASES)
def test_parts_are_slices_of_the_whole(initializer, shape, monkeypatch):
    in_parts(monkeypatch)
    whole = program(initializer, SHAPES[shape])
    plain = Plain(whole)
    plain.run("init")
    wanted = plain.run(["w/Read/ReadVariableOp:0", "w/Adam_1/Read/ReadVariableOp:0"])
    for dim, length in enumerate(SHAPES[shape]):
        for devices, ranks in ((3, 1), (1, 3)) if length >= 3 else ():
            made = machine(whole, S(dim), devices, ranks)
            made.run("init")
            for found in made.run(["w/Read/ReadVariableOp:0", "w/Adam_1/Read/ReadVariableOp:0"]):
                for one, other in zip(found, wanted):
                    np.testing.assert_array_equal(one, other, err_msg="%s on %dx%d" % (S(dim), ranks, devices))


@pytest.mark.parametrize("devices, ranks", [(3, 1), (1, 3)])
@pytest.mark.parametrize("initializer", ["uniform", "truncated", "double"])
def test_starting_again_gives_the_next_numbers(initializer, devices, ranks, monkeypatch):
    """As in plain TensorFlow, where an op goes on from where it was."""
    in_parts(monkeypatch)
    whole = program(initializer, (31, 6))
    plain, made = Plain(whole), machine(whole, S(0), devices, ranks)
    seen = []
    for name in ("init", "init", "w/Assign", "init"):
        plain.run(name), made.run(name)
        (wanted,) = plain.run(["w/Read/ReadVariableOp:0"])
        np.testing.assert_array_equal(made.run("w/Read/ReadVariableOp:0")[0][0], wanted)
        seen.append(wanted)
    assert all((a != b).any() for i, a in enumerate(seen) for b in seen[:i])


def test_rows_that_are_drawn_in_several_turns(monkeypatch):
    from epl.passes.shard.lower import initial as lowering

    in_parts(monkeypatch)
    monkeypatch.setattr(lowering, "_CHUNK", 70)
    whole = program("truncated", (13, 31))
    plain, made = Plain(whole), machine(whole, S(1))
    plain.run("init"), made.run("init")
    np.testing.assert_array_equal(made.run("w/Read/ReadVariableOp:0")[0][0], plain.run("w/Read/ReadVariableOp:0")[0])


def size_of(op, tensor):
    if op.type == "Fill" and tensor.shape.num_elements() is None:
        return int(np.prod(tf.get_static_value(op.inputs[0].op.inputs[0])))
    return tensor.shape.num_elements() or 0


@pytest.mark.parametrize("initializer", ["uniform", "truncated", "ones", "constant", "numbers"])
def test_nothing_of_the_whole_size_is_made(initializer, monkeypatch):
    in_parts(monkeypatch)
    whole = program(initializer, (3000, 7))
    made = machine(whole, S(0))
    made.run("init")
    sizes = [size_of(op, t) for op in compiled(made) for t in op.outputs if t.dtype == tf.float32]
    assert 7000 <= max(sizes) <= 7000 + 4


def test_small_ones_are_drawn_as_ever():
    made = machine(program("uniform", (30, 7)), S(0))
    made.run("init")
    assert any(op.type == "RandomUniform" for op in compiled(made))


def test_what_has_no_seed_differs_between_parts(monkeypatch):
    in_parts(monkeypatch)
    monkeypatch.setitem(INITIALIZERS, "unseeded", tf.random_normal_initializer())
    made = machine(program("unseeded", (300, 4), seed=0), S(0))
    made.run("init")
    value = made.run("w/Read/ReadVariableOp:0")[0][0]
    assert abs(np.corrcoef(value[:100].ravel(), value[100:200].ravel())[0, 1]) < 0.2 and 0.9 < value.std() < 1.1


def test_what_is_not_divided_is_drawn_whole(monkeypatch):
    in_parts(monkeypatch)
    whole = program("normal", (31, 6))
    plain, made = Plain(whole), machine(whole, R)
    plain.run("init"), made.run("init")
    np.testing.assert_array_equal(made.run("w/Read/ReadVariableOp:0")[0][0], plain.run("w/Read/ReadVariableOp:0")[0])
