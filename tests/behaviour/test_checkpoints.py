"""Checkpoints of kinds of variables and savers, on local devices and in accumulation, to plain TensorFlow and back.

H9 and the rows on names, exports and `init_from_checkpoint` are in
`tests/equivalence/test_cases_checkpoints.py`, ranks in `test_ranks_savers.py`. Plain cases run
in a process that imports neither EPL nor Horovod.
"""

import os
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.behaviour.models import steps_of
from tests.equivalence.scripts import X, regression
from tests.harness.context import variables
from tests.harness.parametrize import cases, together
from tests.harness.pool import request, without_epl

KINDS = ("partitioned", "reference", "sharded", "checkpoint")
LAYOUTS = ("1x2", "1x1-m2", "1x2-m2run")


def model(run, kind):
    """A layer with momentum: (x, loss, train)."""
    x = tf.placeholder(tf.float32, [None, 7], "x")
    partitioner = tf.fixed_size_partitioner(3) if kind == "partitioned" else None
    with tf.variable_scope("layer", partitioner=partitioner):
        kernel = tf.get_variable("kernel", [7, 2], initializer=tf.glorot_uniform_initializer(seed=1))
    step = tf.train.get_or_create_global_step()
    y = tf.matmul(x, tf.convert_to_tensor(kernel))
    loss = run.merge(tf.reduce_mean(tf.square(y - 1.0)))
    return x, loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, global_step=step)


def batches(first, last):
    return [np.random.RandomState(number).randn(8, 7).astype(np.float32) for number in range(first, last)]


def writer(run, kind):
    """Functions that save and restore a session: (save(session), restore(session, path))."""
    if kind == "checkpoint":
        checkpoint = tf.train.Checkpoint(**{v.op.name.replace("/", "-"): v for v in tf.global_variables()})
        checkpoint.save_counter  # noqa: B018  makes the variable before the session initialises it
        return (
            lambda session: checkpoint.save(run.path("model"), session=session),
            lambda session, path: checkpoint.restore(path).assert_consumed().run_restore_ops(session),
        )
    saver = tf.train.Saver(sharded=kind == "sharded")
    return lambda session: saver.save(session, run.path("model"), global_step=3), lambda session, path: saver.restore(session, path)


def begin(run, kind):
    """Three steps, then a checkpoint."""
    with run.program(resource=kind != "reference"):
        x, loss, train = model(run, kind)
        save, _ = writer(run, kind)
        with run.session() as session:
            run.train(session, loss, train, [{x: batch} for batch in batches(0, 3)])
            return save(session)


def go_on(run, kind, path):
    """Two more steps from a checkpoint, after others that must leave no trace."""
    with run.program(resource=kind != "reference"):
        x, loss, train = model(run, kind)
        _, restore = writer(run, kind)
        with run.session() as session:
            run.train(session, loss, train, [{x: batch} for batch in batches(7, 9)])
            restore(session, path)
            losses = run.train(session, loss, train, [{x: batch} for batch in batches(3, 5)])
            found = {name: value for name, value in variables(session).items() if "counter" not in name}
            return dict(found, losses=losses)


def whole(run, kind):
    """All five steps in one session."""
    with run.program(resource=kind != "reference"):
        x, loss, train = model(run, kind)
        with run.session() as session:
            losses = run.train(session, loss, train, [{x: batch} for batch in batches(0, 5)])
            return dict(variables(session), losses=losses[3:])


def plain(function, kind, **inputs):
    return request(function, "1x1", plain=True, kind=kind, inputs=inputs)


def directions(kind):
    for layout in LAYOUTS:
        yield "plain-then-%s" % layout, request(go_on, layout, kind=kind, inputs={"path": plain(begin, kind)})
        yield "%s-then-plain" % layout, plain(go_on, kind, path=request(begin, layout, kind=kind))
    yield "1x2-then-1x1", request(go_on, "1x1", kind=kind, inputs={"path": request(begin, "1x2", kind=kind)})


@pytest.mark.parametrize(
    "outcomes",
    [
        pytest.param({"expected": plain(whole, kind), "found": one}, id="%s-%s" % (kind, name))
        for kind in KINDS
        for name, one in directions(kind)
        if kind == "partitioned" or "1x2" in name.split("-")
    ],
    indirect=True,
)
def test_training_goes_on_as_if_it_had_not_stopped(outcomes):
    expected = outcomes["expected"].ranks[0]
    for rank in outcomes["found"].ranks:
        assert set(rank) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(rank[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def partitioned_names(run, path):
    return [[name, shape] for name, shape in tf.train.list_variables(path)]


@together(
    epl=request(partitioned_names, "1x1", plain=True, inputs={"path": request(begin, "1x2", kind="partitioned")}),
    plain=request(partitioned_names, "1x1", plain=True, inputs={"path": plain(begin, "partitioned")}),
)
def test_partitioned_variables_are_saved_as_one(outcomes):
    names = [["global_step", []], ["layer/kernel", [7, 2]], ["layer/kernel/Momentum", [7, 2]]]
    assert outcomes["epl"].ranks == outcomes["plain"].ranks == [names]


def kept(run):
    """Five saves of which two are kept, and one of each hour."""
    with run.program():
        x, _, _, train, step = regression(run)
        saver = tf.train.Saver(max_to_keep=2, keep_checkpoint_every_n_hours=1e-9)
        twin = tf.train.Saver(max_to_keep=2)
        os.makedirs(run.path("all"))
        with run.session() as session:
            for _ in range(5):
                run.step(session, train, {x: X})
                saver.save(session, run.path("all/model"), global_step=step)
                twin.save(session, run.path("model"), global_step=step)
            state = tf.train.get_checkpoint_state(run.folder)
    return {
        "steps": steps_of(run.folder),
        "all": steps_of(run.path("all")),
        "last": [os.path.basename(path) for path in twin.last_checkpoints],
        "state": [os.path.basename(path) for path in state.all_model_checkpoint_paths],
        "metas": sorted(name for name in os.listdir(run.folder) if name.endswith(".meta")),
    }


@cases(kept, "1x2", "1x1-m2", compare=True)
def test_old_checkpoints_are_deleted(outcome):
    assert outcome.plain["steps"] == [4, 5] and outcome.plain["last"] == outcome.plain["state"] == ["model-4", "model-5"]
    assert outcome.ranks == [outcome.plain]


def between(run):
    """A save between the two runs of a step, and what a new session finds in it."""
    with run.program():
        x, w, loss, train, step = regression(run, "adam")
        saver = tf.train.Saver()
        with run.session() as session:
            for number in range(3):
                session.run(train, {x: run.local(X, number % 2)})
            path = saver.save(session, run.path("model"))
        with run.session(initialize=False) as session:
            saver.restore(session, path)
            found = [int(session.run(step)), float(session.run(w))]
            for number in range(2):
                session.run(train, {x: run.local(X, number)})
            return found + [int(session.run(step)), float(session.run(w))]


@cases(between, "1x1-m2", "1x2-m2")
def test_a_save_within_a_step_has_the_last_whole_step(outcome):
    assert outcome.ranks == [[1, pytest.approx(0.1, rel=1e-5), 2, pytest.approx(0.19989696, rel=1e-5)]]


# --- exports of graphs with EPL's default device ------------------------------------------


def export_from_accelerators(run):
    """All kinds of graph files, written where EPL gives every op an accelerator as its device."""
    import epl
    from epl.cluster import Cluster

    original = Cluster.available_gpus
    Cluster.available_gpus = lambda self, *args, **kwargs: ["/device:GPU:0", "/device:GPU:1"]
    try:
        epl.init()
        with tf.Graph().as_default() as graph:
            epl.set_default_strategy(epl.replicate(1))
            x = tf.placeholder(tf.float32, [None], "x")
            w = tf.get_variable("w", [], initializer=tf.zeros_initializer(), use_resource=True)
            with tf.device("/cpu:0"):
                y = tf.multiply(w, x, name="y")
            loss = tf.reduce_mean(tf.square(y - 3.0 * x))
            train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
            assert "GPU:0" in w.op.device
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(train, {x: X})
                tf.train.Saver().save(session, run.path("model"))
                tf.train.write_graph(graph, run.folder, "graph.pbtxt")
                tf.saved_model.simple_save(session, run.path("export"), {"x": x}, {"y": y})
                frozen = tf.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), ["y"])
                tf.train.write_graph(frozen, run.folder, "frozen.pb", as_text=False)
            assert "GPU:0" in w.op.device
    finally:
        Cluster.available_gpus = original
        epl.shutdown()
    return run.folder


@without_epl
def load_everywhere(run, folder):
    """What plain sessions without soft placement compute from these files, for x = 2; and devices that are named there."""
    found, devices = {}, set()

    def use(name, load):
        with tf.Graph().as_default() as graph, tf.Session() as session:
            load(session)
            found[name] = float(session.run("y:0", {"x:0": [2.0]})[0])
            devices.update(op.device for op in graph.get_operations())

    path = os.path.join(folder, "model")
    use("meta", lambda session: tf.train.import_meta_graph(path + ".meta").restore(session, path))
    use("export", lambda session: tf.saved_model.load(session, ["serve"], os.path.join(folder, "export")))

    def thaw(session):
        graph_def = tf.GraphDef()
        with open(os.path.join(folder, "frozen.pb"), "rb") as file:
            graph_def.ParseFromString(file.read())
        tf.import_graph_def(graph_def, name="")

    use("frozen", thaw)
    with open(os.path.join(folder, "graph.pbtxt")) as file:
        found["worker in graph.pbtxt"] = "job:worker" in file.read()
    found["devices"] = sorted(devices)
    found["modules"] = sorted({"epl", "horovod"} & set(sys.modules))
    return found


EXPORTED = request(export_from_accelerators, "1x1", isolated=True)


@cases(load_everywhere, "1x1", plain=True, inputs={"folder": EXPORTED})
def test_graphs_of_accelerators_load_without_them(outcome):
    (found,) = outcome.ranks
    assert found.pop("meta") == found.pop("export") == found.pop("frozen") == pytest.approx(2 * 0.45, rel=1e-5)
    assert found == {"worker in graph.pbtxt": False, "devices": ["", "/device:CPU:0"], "modules": []}
