"""Checkpoints and exports between layouts and plain TensorFlow: H9, rows 24, 25, 27 to 31, 34.

A checkpoint is written in one case and read in another, in both directions; "plain" cases
run in a process that imports neither EPL nor Horovod.
"""

import glob
import os
import sys
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, maker, regression, umask_of
from tests.harness.context import variables
from tests.harness.parametrize import cases
from tests.harness.pool import request, without_epl

NAMES = ["beta1_power", "beta2_power", "global_step", "w", "w/Adam", "w/Adam_1"]
W3, LOSS4, W4 = 0.29961747, 54.690495, 0.39908516
LAYOUTS = ("2x1", "1x2", "1x1-m2", "1x1-m2run", "2x1-m2", "2x2")


def train_and_save(run):
    """Three updates of the regression with Adam, on the same four samples; returns the checkpoint."""
    with run.program():
        x, w, loss, train, _ = regression(run, "adam")
        saver = tf.train.Saver()
        with run.session() as session:
            run.train(session, loss, train, [{x: X}] * 3)
            path = saver.save(session, run.path("model.ckpt"))
            return {"path": path or run.path("model.ckpt"), "w": float(session.run(w))}


def train_and_export(run):
    """Every rank exports the trained model; returns the folder of the export and the files in it."""
    with run.program():
        x, w, loss, train, _ = regression(run, "adam")
        y = w * x
        with run.session() as session:
            run.train(session, loss, train, [{x: X}] * 3)
            tf.saved_model.simple_save(session, run.path("export"), {"x": x}, {"y": y})
            session.run(w)
            return run.path("export")


def train_and_freeze(run):
    """Every rank freezes the trained model, the first one writes it; returns the file and the value that it computes here."""
    with run.program() as graph:
        x, w, loss, train, _ = regression(run, "adam")
        y = tf.multiply(w, x, name="y")
        with run.session() as session:
            run.train(session, loss, train, [{x: X}] * 3)
            frozen = tf.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), ["y"]).SerializeToString()
            if run.rank == 0:
                with open(run.path("frozen.pb"), "wb") as file:
                    file.write(frozen)
            return {"path": run.path("frozen.pb"), "y": session.run(y, {x: np.float32([2])})[0]}


def resume(run, earlier):
    """The fourth update from a checkpoint: the loss before it, and w after it."""
    with run.program():
        x, w, loss, train, step = regression(run, "adam")
        saver = tf.train.Saver([variable for variable in tf.global_variables() if variable.op.name in NAMES])
        with run.session() as session:
            saver.restore(session, earlier["path"])
            restored = [int(session.run(step)), float(session.run(w))]
            (value,) = run.train(session, loss, train, [{x: X}])
            return {"restored": restored, "loss": value, "w": float(session.run(w))}


def resume_all(run, earlier, partial=False):
    """As `resume`, with a saver of all variables, of which the graph may have more than the checkpoint: all of them afterwards.

    partial: the checkpoint is restored in the middle of a step.
    """
    with run.program():
        x, w, loss, train, _ = regression(run, "adam")
        saver = tf.train.Saver()
        with run.session() as session:
            for number in range(1, run.runs if partial else 0):
                session.run(train, {x: 100 * run.local(X, number)})
            saver.restore(session, earlier["path"])
            restored = variables(session)
            (value,) = run.train(session, loss, train, [{x: X}])
            after = variables(session)
            again = saver.save(session, run.path("again.ckpt"))
            return {"restored": restored, "loss": value, "after": after, "path": again}


@without_epl
def inspect(run, earlier):
    """What plain TensorFlow finds in a checkpoint and in its graph."""
    found = {"names": [name for name, _ in tf.train.list_variables(earlier["path"])]}
    found["w"] = float(tf.train.load_variable(earlier["path"], "w"))
    found["modules"] = sorted({"epl", "horovod"} & set(sys.modules))
    found["files"] = sorted(os.listdir(os.path.dirname(earlier["path"])))
    with tf.Graph().as_default(), tf.Session() as session:
        saver = tf.train.import_meta_graph(earlier["path"] + ".meta")
        saver.restore(session, earlier["path"])
        w = next(variable for variable in tf.global_variables() if variable.op.name == "w")
        found["meta"] = float(session.run(w))
        found["ops"] = sorted({op.type for op in session.graph.get_operations() if op.type.lower().startswith(("horovod", "epl"))})
    return found


def load_export(run, folder):
    """Plain TensorFlow computes w * 2 with an exported model."""
    with tf.Graph().as_default(), tf.Session() as session:
        signature = tf.saved_model.load(session, ["serve"], folder).signature_def["serving_default"]
        return float(session.run(signature.outputs["y"].name, {signature.inputs["x"].name: np.float32([2])})[0])


@without_epl
def load_frozen(run, earlier):
    """Plain TensorFlow computes w * 2 with a frozen graph."""
    graph_def = tf.GraphDef()
    with open(earlier["path"], "rb") as file:
        graph_def.ParseFromString(file.read())
    with tf.Graph().as_default() as graph, tf.Session() as session:
        tf.import_graph_def(graph_def, name="")
        (value,) = session.run("y:0", {"x:0": np.float32([2])})
        ops = sorted(op.type for op in graph.get_operations())
        return {"y": value, "here": earlier["y"], "ops": ops, "modules": sorted({"epl", "horovod"} & set(sys.modules))}


SAVED = {layout: request(train_and_save, layout) for layout in LAYOUTS}
PLAIN = request(train_and_save, "1x1", plain=True)


@pytest.mark.parametrize("outcomes", [pytest.param({"plain": PLAIN}, id="plain")] + [pytest.param({"epl": one}, id=layout) for layout, one in
                                                                                SAVED.items()], indirect=True)  # fmt: skip
def test_row_29_value_before_saving(outcomes):
    for outcome in outcomes.values():
        for rank in outcome.ranks:
            assert rank["w"] == pytest.approx(W3, rel=1e-5)


@pytest.mark.parametrize(
    "outcome", [pytest.param(request(inspect, "1x1", plain=True, inputs={"earlier": one}), id=layout) for layout, one in SAVED.items()], indirect=True
)
def test_row_31_plain_tensorflow_reads_the_checkpoint(outcome):
    (found,) = outcome.ranks
    assert found["names"] == NAMES
    assert found["w"] == pytest.approx(W3, rel=1e-5)
    assert found["modules"] == []
    assert not [name for name in found["files"] if "part-" in name or "temp" in name], found["files"]


@pytest.mark.parametrize(
    "outcome", [pytest.param(request(inspect, "1x1", plain=True, inputs={"earlier": one}), id=layout) for layout, one in SAVED.items()], indirect=True
)
def test_row_27_plain_tensorflow_loads_the_graph(outcome):
    (found,) = outcome.ranks
    assert found["meta"] == pytest.approx(W3, rel=1e-5)
    assert found["ops"] == []


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(request(load_export, "1x1", plain=True, inputs={"folder": request(train_and_export, layout)}), id=layout)
        for layout in ("1x2", "2x1", "1x1-m2", "2x1-m2run")
    ],
    indirect=True,
)
def test_row_28_plain_tensorflow_loads_the_export(outcome):
    assert outcome.ranks == [pytest.approx(2 * W3, rel=1e-5)]


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(request(load_frozen, "1x1", plain=True, inputs={"earlier": request(train_and_freeze, layout)}), id=layout)
        for layout in ("1x2", "2x1")
    ],
    indirect=True,
)
def test_row_27_plain_tensorflow_loads_the_frozen_graph(outcome):
    (found,) = outcome.ranks
    assert found["modules"] == []
    assert found["y"] == found["here"] == pytest.approx(2 * W3, rel=1e-5)
    assert found["ops"].count("Placeholder") == 1 and set(found["ops"]) <= {"Const", "Identity", "Mul", "Placeholder"}, found["ops"]


def judge_resumed(outcome):
    for rank in outcome.ranks:
        assert rank["restored"] == [3, pytest.approx(W3, rel=1e-5)]
        assert rank["loss"] == pytest.approx(LOSS4, rel=1e-5)
        assert rank["w"] == pytest.approx(W4, rel=1e-5)


@pytest.mark.parametrize(
    "outcome", [pytest.param(request(resume, "1x1", plain=True, inputs={"earlier": one}), id=layout) for layout, one in SAVED.items()], indirect=True
)
def test_row_34_plain_tensorflow_resumes(outcome):
    judge_resumed(outcome)


@pytest.mark.parametrize(
    "outcome", [pytest.param(request(resume, layout, inputs={"earlier": PLAIN}), id=layout) for layout in LAYOUTS], indirect=True
)
def test_row_29_a_plain_checkpoint_is_resumed(outcome):
    judge_resumed(outcome)


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(request(resume, after, inputs={"earlier": SAVED[before]}), id="%s-then-%s" % (before, after))
        for before, after in (("2x1", "1x2"), ("2x1", "1x1-m2"), ("1x2", "2x1"), ("1x1-m2", "2x1"), ("2x2", "1x1-m2run"), ("1x1-m2run", "2x2"))
    ],
    indirect=True,
)
def test_row_34_another_layout_resumes(outcome):
    judge_resumed(outcome)


def rich(run):
    """A net with batch normalisation, Adam and a schedule: (x, loss, train). Batches have two samples, the same two in each replica."""
    x = tf.placeholder(tf.float32, [None, 3])
    h = tf.layers.dense(x, 4, kernel_initializer=tf.glorot_uniform_initializer(seed=1), name="hidden")
    h = tf.tanh(tf.layers.batch_normalization(h, momentum=0.9, training=True, name="norm"))
    loss = run.merge(tf.reduce_mean(tf.square(tf.layers.dense(h, 1, kernel_initializer=tf.glorot_uniform_initializer(seed=2), name="out") - 0.5)))
    step = tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(0.05, step, 1, 0.9)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        train = tf.train.AdamOptimizer(rate).minimize(loss, global_step=step)
    return x, loss, train


def rich_batch(run, number):
    """The samples of a process; all replicas get the same, so that the global batch is the same in every layout."""
    return np.tile(np.random.RandomState(number).randn(2, 3).astype(np.float32), [1 if run.plain else run.layout.devices, 1])


def train_rich(run, earlier=None, first=0, last=3):
    """Steps from a checkpoint or from the beginning, then a checkpoint: all variables before and after them, as a run sees them."""
    with run.program():
        x, loss, train = rich(run)
        saver = tf.train.Saver()
        with run.session() as session:
            if earlier is not None:
                saver.restore(session, earlier["path"])
            before = variables(session)
            losses = [float(session.run([loss, train], {x: rich_batch(run, number)})[0]) for number in range(first, last)]
            path = saver.save(session, run.path("rich.ckpt"))
            return {"path": path, "before": before, "losses": losses, "after": variables(session)}


RICH = {layout: request(train_rich, layout) for layout in ("1x1", "1x2", "2x1", "2x2", "4x1")}
RICH["plain"] = request(train_rich, "1x1", plain=True)


def resumed(before, after):
    """A parameter: three steps in one layout, three more in another, and six without a break."""
    again = request(train_rich, after, inputs={"earlier": RICH[before]}, first=3, last=6)
    whole = request(train_rich, "1x1", plain=True, last=6)
    return pytest.param({"whole": whole, "before": RICH[before], "after": again}, id="%s-then-%s" % (before, after))


@pytest.mark.parametrize(
    "outcomes",
    [
        resumed(*pair)
        for pair in (("2x1", "1x1"), ("1x1", "2x1"), ("2x1", "4x1"), ("2x1", "1x2"), ("1x2", "4x1"), ("2x2", "2x1"), ("4x1", "1x2"), ("plain", "2x1"))
    ],
    indirect=True,
)
def test_row_34_resumes_exactly(outcomes):
    saved, whole = outcomes["before"].ranks[0]["after"], outcomes["whole"].ranks[0]
    assert int(saved["global_step"]) == 3 and len(saved) == 23
    for rank in outcomes["after"].ranks:
        assert sorted(rank["before"]) == sorted(saved)
        for name, value in saved.items():
            np.testing.assert_array_equal(rank["before"][name], value, err_msg="%s after restoring" % name)
        assert rank["losses"] == pytest.approx(whole["losses"][3:], rel=1e-5)
        for name, value in whole["after"].items():
            np.testing.assert_allclose(rank["after"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
            np.testing.assert_array_equal(rank["after"][name], outcomes["after"].ranks[0]["after"][name], err_msg="%s differs between ranks" % name)


ALL4 = {"global_step": 4, "w": W4, "beta1_power": 0.9**5, "beta2_power": 0.999**5}


def judge_all(restored, after, plain):
    """All variables after restoring and after the fourth update are those of plain TensorFlow; whatever else there is was restored as 0."""
    assert set(plain["restored"]) == set(plain["after"]) == set(NAMES)
    for name in NAMES:
        np.testing.assert_array_equal(restored[name], plain["restored"][name], err_msg="%s after restoring" % name)
        np.testing.assert_allclose(after[name], plain["after"][name], rtol=1e-5, err_msg=name)
    for name, value in ALL4.items():
        assert float(after[name]) == pytest.approx(value, rel=1e-5), name
    for name in set(after) - set(NAMES):
        assert "accum" in name and not np.any(restored[name]), "%s is not empty after restoring" % name


def resume_in(layout, **options):
    """A parameter: the resumed case in a layout beside the plain one."""
    plain = request(resume_all, "1x1", plain=True, inputs={"earlier": PLAIN})
    return pytest.param({"plain": plain, "found": request(resume_all, layout, inputs={"earlier": PLAIN}, **options)}, id=layout)


@pytest.mark.parametrize("outcomes", [resume_in(layout) for layout in ("1x1-m2", "2x1-m2", "1x1-m2run", "2x1")], indirect=True)
def test_row_30_accumulators_are_optional(outcomes):
    (plain,) = outcomes["plain"].ranks
    for rank in outcomes["found"].ranks:
        judge_all(rank["restored"], rank["after"], plain)
        assert rank["loss"] == pytest.approx(LOSS4, rel=1e-5)


@pytest.mark.parametrize("outcomes", [resume_in(layout, partial=True) for layout in ("1x1-m2", "2x1-m2")], indirect=True)
def test_row_30_restoring_in_the_middle_of_a_step_starts_a_new_one(outcomes):
    (plain,) = outcomes["plain"].ranks
    for rank in outcomes["found"].ranks:
        judge_all(rank["restored"], rank["after"], plain)


@pytest.mark.parametrize(
    "outcome",
    [pytest.param(request(inspect, "1x1", plain=True, inputs={"earlier": request(resume_all, layout, inputs={"earlier": PLAIN})}), id=layout)
     for layout in ("1x1-m2", "2x1-m2")],
    indirect=True,
)  # fmt: skip
def test_row_30_plain_graphs_need_no_accumulators(outcome):
    (found,) = outcome.ranks
    assert found["names"] == NAMES
    assert found["w"] == found["meta"] == pytest.approx(W4, rel=1e-5)


def together_at(run, what):
    """Wait until all ranks are here."""
    open(run.path("rank %d %s" % (run.rank, what)), "w").close()
    while len(glob.glob(run.path("rank * %s" % what))) < run.ranks:
        time.sleep(0.02)


def entries(folder):
    """The files in a folder: [rank that made it, time of its last change in ns] by name."""
    return {name: [maker(os.path.join(folder, name)), os.stat(os.path.join(folder, name)).st_mtime_ns] for name in sorted(os.listdir(folder))}


class Late(tf.train.SessionRunHook):
    """Ranks other than 0 come to the end of the session later."""

    def __init__(self, run):
        self.run = run

    def end(self, session):
        if self.run.rank:
            time.sleep(1.2)


def chief_writes(run, seconds=None):
    """All ranks use one checkpoint folder: its files when rank 0 is through, when all are, and what is in them."""
    folder = run.path("model")
    saving = {"save_checkpoint_steps": 2} if seconds is None else {"save_checkpoint_secs": seconds}
    with run.program(), umask_of(run):
        x, _, loss, train, _ = regression(run, "adam")
        open(run.path("made by %d" % run.rank), "w").close()
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=folder, log_step_count_steps=None, save_summaries_steps=1, hooks=[Late(run)], **saving
        ) as session:
            for _ in range(5):
                session.run(train, {x: run.local(X)})
            values = variables(session._tf_sess())
        first = entries(folder) if run.rank == 0 else {}
        together_at(run, "is through")
        files = entries(folder)
        latest = tf.train.latest_checkpoint(folder)
        reader = tf.train.load_checkpoint(latest)
        saved = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    makers = [maker(run.path("made by %d" % rank)) for rank in range(run.ranks)]
    return {"first": first, "files": files, "latest": os.path.basename(latest), "saved": saved, "values": values, "makers": makers}


def judge_writer(outcome, kept):
    first, plain = outcome.ranks[0], outcome.plain
    assert first["makers"] == list(range(len(outcome.ranks))), "the mode of a file tells its maker"
    assert first["first"] == first["files"], "no file changes or appears after rank 0 is through"
    assert {rank for rank, _ in first["files"].values()} == {0}
    assert sorted(name.split(".")[0] for name in first["files"]) == sorted(name.split(".")[0] for name in plain["files"])
    assert {name for name in first["files"] if name.startswith("model.ckpt-")} == {
        "model.ckpt-%d.%s" % (step, part) for step in kept for part in ("index", "meta", "data-00000-of-00001")
    }
    for rank in outcome.ranks:
        assert rank["latest"] == plain["latest"] == "model.ckpt-5"
        assert sorted(rank["saved"]) == sorted(rank["values"]) == NAMES
        for name in NAMES:
            np.testing.assert_array_equal(rank["saved"][name], first["values"][name], err_msg=name)
            np.testing.assert_array_equal(rank["values"][name], first["values"][name], err_msg=name)
            np.testing.assert_allclose(rank["saved"][name], plain["saved"][name], rtol=1e-5, err_msg=name)


@cases(chief_writes, "2x1", "1x2", "4x1", compare=True)
def test_row_24_only_the_chief_writes(outcome):
    judge_writer(outcome, (0, 2, 4, 5))


@cases(chief_writes, "2x1", compare=True, seconds=100000)
def test_row_24_the_last_checkpoint_is_the_chiefs_too(outcome):
    judge_writer(outcome, (0, 5))


def chief_restores(run, earlier, own_saver=False):
    """Only rank 0 restores; the others start with values of their own and get those of rank 0: all variables after each of two updates.

    own_saver: only rank 0 has the ops of a saver at all.
    """
    with run.program(seed=0):
        x = tf.placeholder(tf.float32, [None], "x")
        w = tf.get_variable("w", [], initializer=tf.random_uniform_initializer(5, 6))
        loss = run.merge(tf.reduce_mean(tf.square(w * x - 3.0 * x)))
        train = tf.train.AdamOptimizer(0.1).minimize(loss, global_step=tf.train.get_or_create_global_step())
        saver = None if own_saver and run.rank else tf.train.Saver()
        with run.session() as session:
            own = float(session.run(w))
            if run.rank == 0:
                saver.restore(session, earlier["path"])
            found = []
            for _ in range(2):
                (value,) = run.train(session, loss, train, [{x: X}])
                found.append(dict(variables(session), loss=value))
            return {"own": own, "found": found}


def restored_on_the_chief(layout, **options):
    plain = request(chief_restores, "1x1", plain=True, inputs={"earlier": PLAIN})
    return pytest.param({"plain": plain, "found": request(chief_restores, layout, inputs={"earlier": PLAIN}, **options)},
                        id="-".join([layout] + sorted(options)))  # fmt: skip


@pytest.mark.parametrize("outcomes", [restored_on_the_chief("2x1"), restored_on_the_chief("4x1"), restored_on_the_chief("2x1", own_saver=True),
                                      restored_on_the_chief("2x2")], indirect=True)  # fmt: skip
def test_row_25_a_restore_on_the_chief_reaches_all(outcomes):
    (plain,), ranks = outcomes["plain"].ranks, outcomes["found"].ranks
    assert sorted(plain["found"][0]) == sorted(NAMES + ["loss"])
    assert len({rank["own"] for rank in ranks}) == len(ranks), "each rank had a value of its own"
    for number, rank in enumerate(ranks):
        assert rank["found"][0]["loss"] == pytest.approx(LOSS4, rel=1e-5) and rank["found"][0]["w"] == pytest.approx(W4, rel=1e-5)
        for update in (0, 1):
            for name, value in plain["found"][update].items():
                where = "%s on rank %d after %d updates" % (name, number, update + 1)
                np.testing.assert_array_equal(rank["found"][update][name], ranks[0]["found"][update][name], err_msg=where)
                np.testing.assert_allclose(rank["found"][update][name], value, rtol=1e-5, err_msg=where)
