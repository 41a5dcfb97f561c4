"""Tensors of every type over the boundary of two stages, and their gradients back."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.harness.context import variables
from tests.harness.parametrize import cases

FLOATS = ("float16", "bfloat16", "float32", "float64")
WHOLES = {"int8": 16, "uint8": 32, "int16": 4000, "uint16": 8000, "int32": 2**27, "int64": 2**40, "uint32": 2**29, "uint64": 2**50}
"""Types of whole numbers, and what makes X fill their range."""
KINDS = FLOATS + tuple(WHOLES) + ("bool",)
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}
"""About two steps of the type: sums over a batch are rounded in another order when it is divided. Other types are exact."""
X = np.float64([[1, -2, 3, 0.5], [0.25, 4, -1, 2], [5, 1.5, -3, 2], [-0.5, 1, 7, 3]])


def crossing(run):
    """For each type what the second stage has got, and its gradient in the first stage; then the variables after three steps."""
    with run.program():
        x = tf.placeholder(tf.float64, [None, 4])
        made, weights, parts, losses = {}, {}, {}, []
        with run.stage(0):
            for name in KINDS:
                kind = tf.as_dtype(name)
                if kind.is_floating:
                    weights[name] = tf.get_variable("w_" + name, [4], kind, tf.ones_initializer())
                    made[name] = tf.cast(x, kind) * weights[name]
                else:
                    number = (tf.abs(x) if kind.is_unsigned else x) * WHOLES.get(name, 1)
                    made[name] = x > 1.0 if kind == tf.bool else tf.cast(tf.cast(number, tf.int64), kind)
        with run.stage(1):
            for name, value in made.items():
                kind = tf.as_dtype(name)
                v = tf.get_variable("v_" + name, [], kind if kind.is_floating else tf.float64, tf.ones_initializer())
                seen = value * v if kind.is_floating else tf.cast(value, tf.float64) / WHOLES.get(name, 1) * v
                parts[name] = run.merge(tf.identity(value), "GLOBAL_CONCAT_OBJECTS")
                losses.append(tf.cast(tf.reduce_mean(tf.square(seen)), tf.float64))
            loss = run.merge(tf.add_n(losses))
        slopes = dict(zip(weights, tf.gradients(loss, list(weights.values()))))
        train = tf.train.GradientDescentOptimizer(1 / 256.0).minimize(loss)
        with run.session() as session:
            for _ in range(2):
                run.step(session, train, {x: X})
            ((total, got, back, _),) = run.step(session, [loss, parts, slopes, train], {x: X})
            return {"loss": float(total), "got": plainly(got), "slopes": plainly(back), "values": plainly(variables(session))}


def plainly(arrays):
    """[type, values] of arrays, whose types JSON may not have."""
    found = {name: np.asarray(value) for name, value in arrays.items()}
    return {name: [value.dtype.name, value.astype(np.float64 if value.dtype.name in FLOATS else np.int64)] for name, value in found.items()}


def judge_types(outcome):
    plain = outcome.plain
    assert sorted(plain["got"]) == sorted(KINDS) and sorted(plain["slopes"]) == sorted(FLOATS)
    for number, rank in enumerate(outcome.ranks):
        assert rank["loss"] == pytest.approx(plain["loss"], rel=2e-3)
        for what in ("got", "slopes", "values"):
            for name, (kind, value) in plain[what].items():
                where = "%s of %s on rank %d" % (what, name, number)
                assert rank[what][name][0] == kind, where
                np.testing.assert_allclose(rank[what][name][1], value, rtol=TOLERANCE.get(kind, 0), err_msg=where)


@cases(crossing, "2x1-s2-m2", "1x2-s2-m2", "4x1-s2", compare=True)
def test_tensors_of_all_types_cross_the_boundary(outcome):
    judge_types(outcome)


class Descent(tf.train.GradientDescentOptimizer):
    """Updates complex variables, which TensorFlow's kernels can do but its optimizers refuse."""

    def _valid_dtypes(self):
        return {tf.float64, tf.complex64, tf.complex128}


START = [1 + 0.5j, -0.25j, 0.5, -1 + 1j]


def complex_numbers(run):
    """Activations, gradients and variables of complex types: what the second stage gets, and the variables after two steps."""
    with run.program():
        x = tf.placeholder(tf.float64, [None, 4])
        made, parts, losses = {}, {}, []
        for stage in range(2):
            with run.stage(stage):
                for name in ("complex64", "complex128"):
                    given = made.get(name, tf.cast(x, name))
                    if stage:
                        parts[name] = run.merge(tf.identity(given), "GLOBAL_CONCAT_OBJECTS")
                    made[name] = given * tf.get_variable("w%d_%s" % (stage, name), initializer=tf.constant(START, name))
                if stage:
                    losses = [tf.reduce_mean(tf.cast(tf.math.real(v * tf.math.conj(v + 0.5)), tf.float64)) for v in made.values()]
                    loss = run.merge(tf.add_n(losses))
        train = Descent(1 / 256.0).minimize(loss)
        with run.session() as session:
            run.step(session, train, {x: X})
            ((total, got, _),) = run.step(session, [loss, parts, train], {x: X})
            found = dict({"got_" + name: value for name, value in got.items()}, **variables(session))
            return {"loss": float(total), "values": {name: [str(v.dtype), np.real(v), np.imag(v)] for name, v in found.items()}}


@cases(complex_numbers, "2x1-s2-m2", "4x1-s2", "2x1", compare=True)
def test_complex_numbers_cross_and_are_summed(outcome):
    plain = outcome.plain
    assert len(plain["values"]) == 6
    for rank in outcome.ranks:
        assert rank["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        for name, (kind, *parts) in plain["values"].items():
            assert rank["values"][name][0] == kind == name.rpartition("_")[2]
            np.testing.assert_allclose(rank["values"][name][1:], parts, rtol=1e-5, atol=1e-6, err_msg=name)
