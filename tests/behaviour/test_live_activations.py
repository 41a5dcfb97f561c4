"""What stages keep alive while they run: never more than their schedule promises, counted by the ops themselves."""

import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.planner.schedules import NAMES, make_schedule, peak_activations
from tests.harness.layouts import Layout
from tests.harness.pool import request

WIDTH, STEPS = 4, 2


class Counter:
    """Counts the micro-batches between the forward pass of a stage and the gradient of its weights."""

    def __init__(self):
        self._lock = threading.Lock()
        self.alive, self.most, self.order = {}, {}, {}

    def _moved(self, device, stage, kind, by):
        with self._lock:
            self.alive[device] = self.alive.get(device, 0) + by
            self.most[device] = max(self.most.get(device, 0), self.alive[device])
            self.order.setdefault(device, []).append("%s%d" % (kind, stage))

    def layer(self, x, weights, device, stage):
        """x * weights, counted: forward, and where the gradient of the weights is computed."""

        def enter(value):
            self._moved(device, stage, "F", 1)
            return value

        def leave(value):
            self._moved(device, stage, "D", -1)
            return value

        @tf.custom_gradient
        def counted(x, weights):
            entered = tf.py_func(enter, [x], tf.float32)
            entered.set_shape(x.shape)

            def gradient(upstream):
                done = tf.py_func(leave, [tf.reduce_sum(entered * upstream, 0)], tf.float32)
                done.set_shape(weights.shape)
                return upstream * weights, done

            return entered * weights, gradient

        return counted(x, weights)


def counted(run, schedule):
    """For each device of the pipeline that is here: the most activations alive, the order of what happened, and what is left."""
    layout, counter = run.layout, Counter()
    devices = make_schedule(schedule, layout.stages, layout.m, layout.width)
    config = {"pipeline.strategy": schedule}
    with run.program(config):
        h = x = tf.placeholder(tf.float32, [None, WIDTH])
        for stage in range(layout.stages):
            with run.stage(stage):
                weights = tf.get_variable("w%d" % stage, [WIDTH], initializer=tf.ones_initializer())
                # A variable's value alone in a gradient: with it the first stage has gradients of inputs as the others have.
                h = counter.layer(h + tf.get_variable("b%d" % stage, [WIDTH]), tf.identity(weights), devices.device_of(stage), stage)
        with run.stage(layout.stages - 1):
            loss = tf.reduce_mean(tf.square(h))
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
        with run.session() as session:
            for _ in range(STEPS):
                session.run(train, {x: run.local(np.ones([layout.m * layout.replicas, WIDTH], np.float32))})
    return {"most": counter.most, "order": counter.order, "alive": counter.alive}


def promised(schedule, layout):
    """The most activations of each device, and per step the order in which stages are entered and done with."""
    plan = make_schedule(schedule, layout.stages, layout.m, layout.width)
    kinds = {"F": "F", plan.release: "D"}
    orders = [["%s%d" % (kinds[a.kind], a.chunk) for a in row if a.kind in kinds] for row in plan.devices]
    return peak_activations(plan), orders


def layouts_of(schedule):
    if schedule in ("Interleaved", "ZeroBubbleV"):
        return "2x1-s4v2-m4", "1x2-s4v2-m6"
    return "2x1-s2-m4", "1x4-s4-m8", "4x1-s4-m6"


@pytest.mark.parametrize(
    "schedule, layout, outcome",
    [
        pytest.param(name, layout, request(counted, layout, schedule=name), id="%s %s" % (layout, name))
        for name in NAMES
        for layout in layouts_of(name)
    ],
    indirect=["outcome"],
)
def test_no_more_than_the_schedule_promises(schedule, layout, outcome):
    peaks, orders = promised(schedule, Layout.parse(layout))
    seen = set()
    for found in outcome.ranks:
        for device, most in found["most"].items():
            seen.add(int(device))
            assert most == peaks[int(device)], "device %s" % device
            assert found["order"][device] == orders[int(device)] * STEPS, "device %s" % device
            assert found["alive"][device] == 0
    assert seen == set(range(len(peaks)))
