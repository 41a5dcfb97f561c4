"""Sessions, hooks, summaries, the Estimator: rows 26, 37, 40 to 43, 48 to 50."""

import glob
import os
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, judge_variables, maker, regression, scalar, umask_of
from tests.harness.context import variables
from tests.harness.parametrize import cases, together
from tests.harness.pool import request

VALUES = {"losses": [67.5, 63.075005, 58.80432], "w": 0.29961747}


def sessions(run, kind):
    """Three updates in a session of some kind."""
    with run.program() as graph:
        x, w, loss, train, _ = regression(run, "adam")
        init = tf.global_variables_initializer()
        steps = [{x: X}] * 3

        def work(session):
            return {"losses": run.train(session, loss, train, steps), "w": float(session.run(w)), "nothing": [session.run([]), session.run({})]}

        if kind == "interactive":
            session = tf.InteractiveSession(graph=graph)
            session.run(init)
            found = work(session)
            session.close()
            return found
        if kind == "supervisor":
            supervisor = tf.train.Supervisor(graph=graph, logdir=None, init_op=init, summary_op=None)
            with supervisor.managed_session() as session:
                return work(session)
        if kind == "singular":
            with tf.train.SingularMonitoredSession() as session:
                return work(session)
        with tf.Session(graph=graph, config=tf.ConfigProto(allow_soft_placement=True)) as session:
            init.run()
            return work(session)


@cases(sessions, "1x2", "2x1", "2x1-m2", kind="plain")
def test_row_43_session(outcome):
    judge_values(outcome)


@cases(sessions, "1x2", "2x1", kind="interactive")
def test_row_43_interactive_session(outcome):
    judge_values(outcome)


@cases(sessions, "1x2", "2x1", kind="supervisor")
def test_row_43_supervisor(outcome):
    judge_values(outcome)


@cases(sessions, "1x2", "2x1", "1x1-m2", kind="singular")
def test_row_43_singular_monitored_session(outcome):
    judge_values(outcome)


def judge_values(outcome):
    for rank in outcome.ranks:
        assert rank["losses"] == pytest.approx(VALUES["losses"], rel=1e-5)
        assert rank["w"] == pytest.approx(VALUES["w"], rel=1e-5)
        assert rank["nothing"] == [[], {}]


def tensor_to_train(run, kind):
    """A training op that is a tensor: the loss behind the update, as slim has it, or the new global step; all variables after three updates."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        w = scalar("w", 0)
        loss = tf.reduce_mean(tf.square(w * x - 3.0 * x))
        step = tf.train.get_or_create_global_step()
        rule = tf.train.AdamOptimizer(0.1)
        if kind == "loss":
            update = rule.minimize(loss, global_step=step)
        else:
            update = rule.minimize(loss)
        with tf.control_dependencies([update]):
            train = tf.identity(loss) if kind == "loss" else step.assign_add(1)
        with run.session() as session:
            for _ in range(3):
                run.step(session, train, {x: X})
            seen = variables(session)
            after = run.step(session, run.merge(tf.identity(loss)), {x: X})
            return dict(seen, loss=np.float32(np.mean(after)))


@cases(tensor_to_train, "1x2", "2x1", "2x2", "1x2-m2", "1x2-m2run", compare=True, kind="loss")
def test_row_43_the_training_op_is_the_loss_behind_the_update(outcome):
    assert outcome.plain["loss"] == pytest.approx(54.690495, rel=1e-5)  # of all replicas
    judge_variables(outcome)


@cases(tensor_to_train, "1x2", "2x1", "2x2", "1x2-m2run", compare=True, kind="step")
def test_row_43_the_training_op_is_the_new_step(outcome):
    assert outcome.plain["loss"] == pytest.approx(54.690495, rel=1e-5)
    judge_variables(outcome)


def finalized(run):
    """The number of ops of the user's graph over a hundred runs, and whether it can be finalized."""
    with run.program() as graph:
        x, w, loss, train, step = regression(run)
        counts = set()
        with tf.train.MonitoredTrainingSession(log_step_count_steps=None) as session:
            for number in range(100):
                fetches = {"loss": loss, "w": w} if number % 10 == 9 else [train, loss, (step,)]
                session.run(fetches, {x: run.local(X)})
                counts.add(len(graph.get_operations()))
            return {"finalized": graph.finalized, "counts": sorted(counts)}


@cases(finalized, "1x2", "2x1", "1x1-m2run")
def test_row_48_runs_add_no_ops(outcome):
    for rank in outcome.ranks:
        assert rank["finalized"] and len(rank["counts"]) == 1


def events_of(folder):
    """For each events file in a folder and below its maker and [step, value] of the summaries of the loss in it."""
    found = []
    for name in sorted(glob.glob(os.path.join(folder, "**", "events*"), recursive=True)):
        values = [[event.step, float(tf.make_ndarray(value.tensor) if value.HasField("tensor") else value.simple_value)]
                  for event in tf.train.summary_iterator(name) for value in event.summary.value if value.tag == "loss"]  # fmt: skip
        found.append({"maker": maker(name), "values": values})
    return found


def summaries(run, how="monitored"):
    """The loss as a summary of each step: the events files, after every rank has left its session."""
    folder = run.path("all")
    # In one folder two writers of the same second would share a file.
    mine = os.path.join(folder, "of rank %d" % run.rank)
    with run.program(), umask_of(run):
        x, w, loss, train, step = regression(run, "adam")
        tf.summary.scalar("loss", loss)
        merged = tf.summary.merge_all()
        if how == "by hand":
            with run.session() as session, tf.summary.FileWriter(mine) as writer:
                for number in range(3):
                    for text, _ in run.step(session, [merged, train], {x: X}):
                        writer.add_summary(text, number)
        else:
            if how == "monitored":
                session = tf.train.MonitoredTrainingSession(checkpoint_dir=folder, save_checkpoint_secs=None, save_summaries_steps=1,
                                                            log_step_count_steps=None)  # fmt: skip
            else:
                session = tf.train.MonitoredSession(hooks=[tf.train.SummarySaverHook(save_steps=1, output_dir=mine, summary_op=merged)])
            with session:
                for _ in range(3):
                    run.step(session, train, {x: X})
    open(run.path("rank %d is through" % run.rank), "w").close()
    while len(glob.glob(run.path("rank * is through"))) < run.ranks:
        time.sleep(0.05)
    return events_of(folder)


@cases(summaries, "2x1", "2x2", compare=True, how="hook")
def test_row_50_hooks_with_folders_of_their_own(outcome):
    judge_summaries(outcome)


@cases(summaries, "1x1", "2x1", "1x2", "1x1-m2run", "2x1-m2run", "2x2", compare=True)
def test_row_50_summaries_are_merged_and_written_once(outcome):
    judge_summaries(outcome)


@cases(summaries, "2x1", "2x1-m2run", compare=True, how="by hand")
def test_row_50_summaries_that_the_script_writes(outcome):
    judge_summaries(outcome)


def judge_summaries(outcome):
    """One file, of the chief; its steps and values are those of plain TensorFlow."""
    (plain,) = outcome.plain
    assert [value for _, value in plain["values"]] == pytest.approx(VALUES["losses"], rel=1e-5)
    for rank in outcome.ranks:
        (file,) = rank
        assert file["maker"] == 0
        assert [step for step, _ in file["values"]] == [step for step, _ in plain["values"]]
        assert [value for _, value in file["values"]] == pytest.approx(VALUES["losses"], rel=1e-5)


@cases(summaries, "1x1-m2", "2x1-m2")
def test_row_50_one_summary_per_step_of_several_runs(outcome):
    for (file,) in outcome.ranks:
        assert file["maker"] == 0 and len({step for step, _ in file["values"]}) == len(file["values"]) == 3, file


# --- Estimator ----------------------------------------------------------------------------


def model_of(run):
    """The regression as a model function; in layouts with two stages the second one has the loss."""

    def model_fn(features, labels, mode):
        with run.stage(0):
            w = scalar("w", 0)
            y = w * features
        if mode == "infer":
            return tf.estimator.EstimatorSpec(mode, predictions={"y": y})
        with run.stage(1):
            loss = tf.reduce_mean(tf.square(y - labels))
            metrics = {"error": tf.metrics.mean(tf.abs(y - labels))} if mode == "eval" else None
        train = tf.train.AdamOptimizer(0.1).minimize(loss, global_step=tf.train.get_global_step()) if mode == "train" else None
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train, eval_metric_ops=metrics)

    return model_fn


def input_of(run, repeat=True):
    mine = run.local(X)

    def input_fn():
        dataset = tf.data.Dataset.from_tensor_slices((mine, 3 * mine)).batch(len(X) if run.plain else len(X) // run.layout.batches)
        return dataset.repeat() if repeat else dataset

    return input_fn


def estimator(run, name="model", every=2):
    settings = tf.estimator.RunConfig(model_dir=run.path(name), save_checkpoints_steps=every, log_step_count_steps=1000, save_summary_steps=1000)
    return tf.estimator.Estimator(model_of(run), config=settings)


def again(run):
    """`train` to a step that the checkpoint has reached already, then to a later one."""
    with run.program():
        model = estimator(run)
        found = []
        for last in (2, 2, 3):
            model.train(input_of(run), max_steps=last)
            found.append(int(model.get_variable_value("global_step")))
        return found + [float(model.get_variable_value("w"))]


@cases(again, "1x2", "2x1")
def test_row_26_training_that_is_finished_already(outcome):
    for rank in outcome.ranks:
        assert rank[:3] == [2, 2, 3] and rank[3] == pytest.approx(VALUES["w"], rel=1e-5)


def train_and_evaluate(run):
    """Checkpoints every two steps, each evaluated."""
    with run.program():
        model = estimator(run)
        spec = tf.estimator.TrainSpec(input_of(run), max_steps=6)
        tf.estimator.train_and_evaluate(model, spec, tf.estimator.EvalSpec(input_of(run, repeat=False), steps=None, throttle_secs=0))
        events = glob.glob(run.path("model/eval/events*"))
        return {"step": int(model.get_variable_value("global_step")), "w": float(model.get_variable_value("w")), "events": len(events)}


@cases(train_and_evaluate, "1x2", "2x1", compare=True)
def test_row_40_train_and_evaluate(outcome):
    for rank in outcome.ranks:
        assert rank["step"] == 6 and rank["w"] == pytest.approx(outcome.plain["w"], rel=1e-5)


@cases(train_and_evaluate, "1x2", "2x1", compare=True)
def test_row_42_evaluation_leaves_events(outcome):
    assert outcome.ranks[0]["events"] >= 1


class Evaluated(tf.train.SessionRunHook):
    """Keeps what each evaluation computes with: the variables when it begins and when it ends, and its metric."""

    def __init__(self):
        self.found = []

    def begin(self):
        self.metric = tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)[:2]

    def after_create_session(self, session, coord):
        self.before = variables(session)

    def end(self, session):
        after = variables(session)
        total, count = (float(value) for value in session.run(self.metric))
        same = all(np.array_equal(after[name], value) for name, value in self.before.items())
        self.found.append({"variables": after, "error": total / count, "samples": count, "same": same})


class Trained(tf.train.SessionRunHook):
    """Keeps the variables after each run, and the loss in it."""

    def __init__(self, loss_of):
        self.loss_of, self.losses, self.found = loss_of, [], []

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(self.loss_of(run_context.session.graph))

    def after_run(self, run_context, run_values):
        self.losses.append(float(run_values.results))
        self.found.append(variables(run_context.session))


def normalized_of(run):
    """As `model_of`, with a variable that only the forward pass moves, and a loss that is merged."""
    build = model_of(run)

    def model_fn(features, labels, mode):
        with run.stage(0):
            seen = tf.get_variable("seen", [], initializer=tf.zeros_initializer(), trainable=False)
            if mode == "train":
                tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(seen, 0.5 * (seen - tf.reduce_mean(features))))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            spec = build(features, labels, mode)
        tf.add_to_collection(tf.GraphKeys.LOSSES, run.merge(spec.loss))
        return spec

    return model_fn


def in_memory(run, evaluate=True, every=2):
    """Five steps; evaluations of the weights in memory before, in between and after, on data of another length on each rank."""
    with run.program():
        settings = tf.estimator.RunConfig(model_dir=run.path("model"), save_checkpoints_steps=1000, log_step_count_steps=None,
                                          save_summary_steps=1000)  # fmt: skip
        model = tf.estimator.Estimator(normalized_of(run), config=settings)
        evaluated, trained = Evaluated(), Trained(lambda graph: graph.get_collection(tf.GraphKeys.LOSSES)[0])

        def samples():
            x = np.arange(1, 3 + 2 * run.rank, dtype=np.float32)
            return tf.data.Dataset.from_tensor_slices((x, 3 * x)).batch(1)

        hooks = [trained]
        if evaluate:
            hooks.append(tf.estimator.experimental.InMemoryEvaluatorHook(model, samples, hooks=[evaluated], every_n_iter=every))
        model.train(input_of(run), hooks=hooks, max_steps=5)
        final = {name: model.get_variable_value(name) for name in model.get_variable_names()}
        events = glob.glob(run.path("model/eval/events*"))
        return {"evaluated": evaluated.found, "trained": trained.found, "losses": trained.losses, "final": final, "events": len(events)}


@cases(in_memory, "2x1", "1x2", compare=True)
def test_row_49_evaluation_in_memory(outcome):
    for number, rank in enumerate(outcome.ranks):
        # before the first step, after the second and fourth, and at the end
        assert [int(one["variables"]["global_step"]) for one in rank["evaluated"]] == [0, 2, 4, 5]
        for one in rank["evaluated"]:
            step, w = int(one["variables"]["global_step"]), one["variables"]["w"]
            assert one["same"] and one["samples"] == 2 + 2 * number
            assert one["error"] == pytest.approx(abs(w - 3) * np.mean(np.arange(1, 3 + 2 * number)), rel=1e-5)
            if step == 0:
                assert w == 0
                continue
            for name, value in one["variables"].items():
                np.testing.assert_array_equal(value, rank["trained"][step - 1][name], err_msg="%s of step %d" % (name, step))
    assert outcome.ranks[0]["events"] == 1


@together(plain=request(in_memory, "2x1", plain=True, evaluate=False), one=request(in_memory, "1x2"), two=request(in_memory, "2x1"))
def test_row_49_training_is_as_without_it(outcomes):
    plain = outcomes["plain"].ranks[0]
    assert plain["evaluated"] == [] and plain["final"]["seen"] == pytest.approx(2.5 * (1 - 0.5**5)) and plain["final"]["global_step"] == 5
    for layout in ("one", "two"):
        for rank in outcomes[layout].ranks:
            assert len(rank["trained"]) == 5
            assert sorted(rank["final"]) == sorted(plain["final"]) and len(plain["final"]) == 7
            for name, value in plain["final"].items():
                np.testing.assert_allclose(rank["final"][name], value, rtol=1e-5, err_msg="%s at the end" % name)
            for step, values in enumerate(plain["trained"]):
                for name, value in values.items():
                    np.testing.assert_allclose(rank["trained"][step][name], value, rtol=1e-5, err_msg="%s of step %d" % (name, step))
        losses = np.mean([rank["losses"] for rank in outcomes[layout].ranks], 0)
        np.testing.assert_allclose(losses, plain["losses"], rtol=1e-5)


def chief_evaluates(run, seconds=6, patience=4):
    """Rank 0 evaluates for longer than the stall timeout while the others already train on."""
    with run.program({"cluster.stall_timeout": patience}):
        model = estimator(run)
        model.train(input_of(run), max_steps=2)
        started = time.time()
        if run.rank == 0:

            def slowly():
                features, labels = tf.data.make_one_shot_iterator(input_of(run, repeat=False)()).get_next()

                def wait(value):
                    time.sleep(seconds)
                    return value

                slow = tf.py_func(wait, [features], tf.float32)
                slow.set_shape(features.shape)
                return slow, labels

            assert model.evaluate(slowly)["global_step"] == 2
            assert time.time() - started > seconds
        model.train(input_of(run), max_steps=3)
        return {name: model.get_variable_value(name) for name in model.get_variable_names()}


def judge_chief_evaluates(outcomes):
    (plain,) = outcomes["plain"].ranks
    assert sorted(plain) == ["beta1_power", "beta2_power", "global_step", "w", "w/Adam", "w/Adam_1"]
    judge_variables(outcomes["ranks"]._replace(plain=plain))


@together(plain=request(chief_evaluates, "2x1", plain=True, seconds=0), ranks=request(chief_evaluates, "2x1"))
def test_row_41_the_chief_may_evaluate_for_long(outcomes):
    judge_chief_evaluates(outcomes)


@pytest.mark.slow
@together(
    plain=request(chief_evaluates, "2x1", plain=True, seconds=0),
    ranks=request(chief_evaluates, "2x1", seconds=90, patience=60, timeout=240),
)
def test_row_41_the_chief_may_evaluate_for_90_seconds(outcomes):
    judge_chief_evaluates(outcomes)


def export(run):
    """Every rank exports the trained model."""
    with run.program():
        model = estimator(run)
        model.train(input_of(run), max_steps=2)

        def receiver():
            x = tf.placeholder(tf.float32, [None])
            return tf.estimator.export.TensorServingInputReceiver(x, {"x": x})

        path = model.export_saved_model(run.path("export"), receiver)
        exports = sorted(name for name in os.listdir(run.path("export")) if not name.startswith("temp"))
        return {"path": path and os.fsdecode(path), "exports": exports}


def exported(run, earlier):
    """Plain TensorFlow's outputs of an exported model."""
    with tf.Graph().as_default(), tf.Session() as session:
        signature = tf.saved_model.load(session, ["serve"], earlier["path"]).signature_def["serving_default"]
        (x,), (y,) = signature.inputs.values(), signature.outputs.values()
        return session.run(y.name, {x.name: np.float32([2, -5])}).tolist()


def export_in(layout):
    """A parameter: what each rank has exported in a layout, and what plain TensorFlow computes with it."""
    one = request(export, layout)
    return pytest.param({"ranks": one, "loaded": request(exported, "1x1", plain=True, inputs={"earlier": one})}, id=layout)


@pytest.mark.parametrize("outcomes", [export_in(layout) for layout in ("1x2", "2x1")], indirect=True)
def test_row_37_exports(outcomes):
    judge_exports(outcomes)


def judge_exports(outcomes):
    ranks = outcomes["ranks"].ranks
    assert ranks[0]["path"] and len(ranks[0]["exports"]) == 1, ranks
    assert np.all([len(rank["exports"]) <= 1 for rank in ranks])
    w = 0.19989696
    assert outcomes["loaded"].ranks == [pytest.approx([2 * w, -5 * w], rel=1e-5)]
