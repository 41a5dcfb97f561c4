"""Devices and models that the tests of the balancers share."""

from epl.cluster.hardware.spec import Device
from epl.planner.cost.model import Layer, Model, Work

INFINITE = float("inf")


def device(kind, rate, memory=1e30, peak=None):
    """A device that does `rate` FLOP/s; `peak` where its data sheet says something else."""
    peak = rate if peak is None else peak
    return Device(kind, {"float32": peak}, memory, INFINITE, efficiency={"float32": rate / peak})


def layer(flops, parameters=0.0, activation=0.0, output=0.0, workspace=0.0, tied="", name="layer"):
    """A layer whose forward and backward passes take `flops` of one sample, a third of it forward."""
    forward, backward = Work(flops / 3), Work(flops * 2 / 3)
    return Layer(name, forward, backward, parameters=parameters, activation=activation, output=output, workspace=workspace, tied=tied)


def random_model(random, count, tied=False):
    layers = []
    for _ in range(count):
        name = "shared" if tied and random.random() < 0.3 else ""
        parameters = 5.0 if name else float(random.integers(0, 8))
        numbers = [float(random.integers(0, 5)) for _ in range(3)]
        layers.append(layer(float(random.integers(1, 12)) * 3, parameters, *numbers, tied=name))
    return Model(tuple(layers), weight_bytes=1, gradient_bytes=1, state_bytes=1)


def transformer(count, hidden, sequence, vocabulary, name="gpt"):
    """A decoder by the closed forms of Zero Bubble (Qi et al., ICLR 2024), table 1: F = s h (24 h + 4 s), backward twice that.

    The head is a product of [s, h] and [h, V]: 2 s h V forward. Activations: s (34 h + 5 a s) bytes in half precision
    (Korthikanti et al.); the attention heads have 64 columns.
    """
    block = sequence * hidden * (24 * hidden + 4 * sequence)
    backward = sequence * hidden * (48 * hidden + 8 * sequence)
    kept = sequence * (34 * hidden + 5 * (hidden // 64) * sequence)
    layers = [Layer("embedding", Work(), Work(), parameters=vocabulary * hidden, output=2 * sequence * hidden)]
    for i in range(count):
        own = Layer("%s%d" % (name, i), Work(block), Work(backward), parameters=12 * hidden**2, activation=kept, output=2 * sequence * hidden)
        layers.append(own)
    product = 2 * sequence * hidden * vocabulary
    layers.append(Layer("head", Work(product), Work(2 * product), parameters=vocabulary * hidden))
    return Model(tuple(layers))
