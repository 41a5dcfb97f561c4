"""Two ranks with monitored sessions, supervisors, savers and estimators: rows 16, 24 to 26, 37, 40, 41, 43, 50.

All cases run in one job. The equivalence tests have the numbers; here it is about who
writes, who waits for whom, and how ranks that do not do quite the same end together.
"""

import glob
import json
import os
import tempfile
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, regression, scalar
from tests.harness.context import variables
from tests.harness.parametrize import cases
from tests.harness.pool import CaseFailed, request

W = {1: 0.1, 2: 0.19989696, 3: 0.29961747}
"""The weight of `regression` with Adam after so many steps on `X`."""


def drawn(run, total=100):
    """The regression on a dataset that repeats this rank's part of X: (w, loss, train, step)."""
    mine = run.local(X)
    value = run.next_batch(tf.data.Dataset.from_tensors(mine).repeat(total))
    w = scalar("w", 0)
    loss = tf.reduce_mean(tf.square(w * value - 3.0 * value))
    step = tf.train.get_or_create_global_step()
    return w, loss, tf.train.AdamOptimizer(0.1).minimize(loss, global_step=step), step


def steps_of(folder):
    """The steps of the checkpoints in a folder."""
    return sorted(int(name.split("-")[1].split(".")[0]) for name in os.listdir(folder) if name.endswith(".index"))


class Recorder(tf.train.SessionRunHook):
    """Keeps the steps that the runs end with."""

    def __init__(self, step):
        self.step = step
        self.seen = []

    def after_run(self, run_context, run_values):
        self.seen.append(int(run_context.session.run(self.step)))


# --- who writes ---------------------------------------------------------------------------


def own_folders(run):
    """Every rank gives all writers a folder of its own: what each rank has written."""
    mine = run.path("of rank %d" % run.rank)
    with run.program() as graph:
        w, loss, train, step = drawn(run)
        tf.summary.scalar("loss", loss)
        hooks = [
            tf.train.CheckpointSaverHook(mine, save_steps=2),
            tf.train.SummarySaverHook(save_steps=1, output_dir=mine, summary_op=tf.summary.merge_all()),
            tf.train.StepCounterHook(every_n_steps=1, output_dir=mine),
            tf.train.ProfilerHook(save_steps=2, output_dir=mine),
            tf.train.StopAtStepHook(last_step=3),
        ]
        with tf.summary.FileWriter(os.path.join(mine, "direct"), graph) as writer:
            writer.add_summary(tf.Summary(value=[tf.Summary.Value(tag="direct", simple_value=1.0)]), 1)
        tf.train.write_graph(graph, mine, "written.pbtxt")
        saver = tf.train.Saver([w])
        with tf.train.SingularMonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run(train)
            saver.save(session.raw_session(), os.path.join(mine, "by-hand"))
            tf.train.export_meta_graph(os.path.join(mine, "exported.meta"), graph=graph)
    return sorted({name.split(".out.")[0] for name in os.listdir(mine)}) if os.path.exists(mine) else []


@cases(own_folders, "2x1")
def test_row_24_only_rank_0_writes_whatever_the_hooks(outcome):
    assert outcome.ranks[1] == []
    written = set(outcome.ranks[0])
    assert written >= {"checkpoint", "direct", "events", "exported.meta", "graph.pbtxt", "written.pbtxt", "by-hand.index", "model.ckpt-3.index"}
    assert any(name.startswith("timeline-") for name in written)


def other_arguments(run):
    """Rank 1 has neither a checkpoint folder nor the role of a chief, as scripts for other tools have it."""
    folder = run.path("model") if run.rank == 0 else None
    with run.program():
        w, loss, train, step = drawn(run)
        tf.summary.scalar("loss", loss)
        recorder = Recorder(step)
        hooks = [tf.train.StopAtStepHook(num_steps=3), recorder]
        with tf.train.MonitoredTrainingSession(
            is_chief=run.rank == 0, checkpoint_dir=folder, save_checkpoint_steps=2, save_summaries_steps=1, hooks=hooks
        ) as session:
            while not session.should_stop():
                value = session.run([w, train])[0]
    return {"steps": recorder.seen, "w": float(value), "kept": steps_of(run.path("model"))}


@cases(other_arguments, "2x1")
def test_ranks_other_than_0_need_no_folder(outcome):
    for rank in outcome.ranks:
        assert rank["steps"] == [1, 2, 3] and rank["w"] == pytest.approx(W[2], rel=1e-5)
    assert outcome.ranks[0]["kept"] == [0, 2, 3]


def newer_summaries(run):
    """Summaries of the newer API, whose writer is a resource of the graph."""
    mine = run.path("of rank %d" % run.rank)
    with run.program():
        w, loss, train, step = drawn(run)
        writer = tf.compat.v2.summary.create_file_writer(mine)
        with writer.as_default():
            tf.compat.v2.summary.scalar("loss", loss, step=step)
        with run.session() as session:
            session.run(writer.init())
            for _ in range(3):
                session.run([train, tf.summary.all_v2_summary_ops()])
            session.run(writer.flush())
    return len(glob.glob(os.path.join(mine, "events*")))


@cases(newer_summaries, "2x1")
def test_newer_summaries_are_written_by_rank_0(outcome):
    assert outcome.ranks == [1, 0]


def last_checkpoints(run):
    """Every rank saves four times and keeps two: what each saver believes, and the files."""
    with run.program():
        _, _, train, step = drawn(run)
        saver = tf.train.Saver(max_to_keep=2)
        with run.session() as session:
            paths = []
            for _ in range(4):
                session.run(train)
                paths.append(saver.save(session, run.path("model"), global_step=step))
            latest = tf.train.latest_checkpoint(run.folder)
            return {"paths": paths, "kept": saver.last_checkpoints, "latest": latest, "steps": steps_of(run.folder)}


@cases(last_checkpoints, "2x1")
def test_all_savers_believe_the_same(outcome):
    first, second = outcome.ranks
    assert first == second
    assert first["kept"] == first["paths"][2:] and first["latest"] == first["paths"][3] and first["steps"] == [3, 4]


# --- saving and restoring -----------------------------------------------------------------


def chief_saves_alone(run):
    """Rank 0 alone saves between the steps."""
    with run.program():
        w, loss, train, step = drawn(run)
        saver = tf.train.Saver()
        with run.session() as session:
            for _ in range(3):
                session.run(train)
                if run.rank == 0:
                    saver.save(session, run.path("model"), global_step=step)
            return float(session.run(w))


@cases(chief_saves_alone, "2x1")
def test_rank_0_may_save_alone(outcome):
    assert outcome.ranks == [pytest.approx(W[3], rel=1e-5)] * 2


def saved_and_restored(run):
    """All ranks save under one name again and again, and restore it at once elsewhere."""
    found = []
    with run.program():
        w, loss, train, step = drawn(run)
        saver = tf.train.Saver()
        with run.session() as session:
            for _ in range(3):
                session.run(train)
                if run.rank == 0:
                    time.sleep(0.3)  # the other rank must wait for the file
                path = saver.save(session, run.path("model"))
                loaded = float(tf.train.load_variable(path, "w"))
                with tf.Session() as other:
                    saver.restore(other, path)
                    found.append([loaded, float(other.run(w))])
    return found


@cases(saved_and_restored, "2x1")
def test_what_a_rank_has_saved_it_can_restore(outcome):
    for rank in outcome.ranks:
        np.testing.assert_allclose(rank, [[W[i]] * 2 for i in (1, 2, 3)], rtol=1e-5)


def only_rank_0_prepares(run):
    """Rank 0 restores; rank 1 does not even initialise. Later rank 0 and rank 1 initialise differently."""
    with tf.Graph().as_default(), tf.Session() as session:
        if run.rank == 0:
            for name, value in (("w", 5.0), ("unused", 1.0)):
                tf.get_variable(name, initializer=value)
            session.run(tf.global_variables_initializer())
            tf.train.Saver().save(session, run.path("five"))
    with run.program():
        w = tf.get_variable("w", [], initializer=tf.random_normal_initializer())
        x = run.next_batch(tf.data.Dataset.from_tensors(run.local(X)).repeat())
        train = tf.train.GradientDescentOptimizer(0.01).minimize(tf.reduce_mean(tf.square(w * x - 3.0 * x)))
        with tf.Session() as session:
            session.run(tf.tables_initializer())
            if run.rank == 0:
                tf.train.Saver([w]).restore(session, run.path("five"))
            session.run(train)
            return float(session.run(w))


@cases(only_rank_0_prepares, "2x1")
def test_row_25_rank_0_may_prepare_for_all(outcome):
    assert outcome.ranks == [pytest.approx(5 - 0.01 * 2 * 7.5 * 2, rel=1e-5)] * 2


def unseeded(run):
    """Variables that begin at random, after the session has been created and after one step."""
    with run.program(seed=0):
        x = run.next_batch(tf.data.Dataset.from_tensors(np.ones([2, 3], np.float32) * (run.rank + 1)).repeat())
        loss = tf.reduce_mean(tf.square(tf.layers.dense(tf.layers.dense(x, 4), 1)))
        step = tf.train.get_or_create_global_step()
        train = tf.train.MomentumOptimizer(0.01, 0.9).minimize(loss, global_step=step)
        with tf.train.SingularMonitoredSession() as session:
            before = variables(session.raw_session())
            session.run(train)
            after = variables(session.raw_session())
    return {"before": before, "after": after}


@cases(unseeded, "2x1")
def test_row_16_unseeded_variables_are_equal(outcome):
    first, second = outcome.ranks
    for when in ("before", "after"):
        for name in first[when]:
            np.testing.assert_array_equal(first[when][name], second[when][name], err_msg=name)
    assert np.abs(first["before"]["dense/kernel"]).max() > 0


def save_three_steps(run):
    with run.program():
        w, loss, train, step = drawn(run)
        with tf.train.MonitoredTrainingSession(checkpoint_dir=run.folder, save_checkpoint_steps=3, save_summaries_steps=None) as session:
            for _ in range(3):
                session.run(train)
    return run.folder


def continue_from(run, folder):
    """One more step from a folder that another layout has written."""
    with run.program():
        w, loss, train, step = drawn(run)
        with tf.train.MonitoredTrainingSession(checkpoint_dir=folder, save_checkpoint_steps=1000, save_summaries_steps=None) as session:
            begin = int(session.run(step))
            session.run(train)
            return [begin, float(session.run(w))]


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(request(continue_from, "1x2", inputs={"folder": request(save_three_steps, "4x1")}), id="4x1-then-1x2"),
        pytest.param(request(continue_from, "2x1", inputs={"folder": request(save_three_steps, "1x2")}), id="1x2-then-2x1"),
    ],
    indirect=True,
)
def test_row_34_another_layout_goes_on(outcome):
    for begin, w in outcome.ranks:
        assert begin == 3 and w == pytest.approx(0.39908516, rel=1e-5)


# --- clocks -------------------------------------------------------------------------------


def clocks(run):
    """Hooks that go by the clock, on ranks whose clocks disagree; how often rank 0 was asked."""
    from epl.env import Env

    asked = []
    with run.program():
        w, loss, train, step = drawn(run)
        tf.summary.scalar("loss", loss)
        hooks = [
            tf.train.CheckpointSaverHook(run.folder, save_secs=0.5),
            tf.train.SummarySaverHook(save_secs=0.3, output_dir=run.folder, summary_op=tf.summary.merge_all()),
            tf.train.LoggingTensorHook({"w": w}, every_n_secs=100),
            tf.train.StepCounterHook(every_n_secs=0.4, every_n_steps=None, output_dir=run.folder),
            tf.train.StopAtStepHook(last_step=60),
        ]
        before = time.time
        try:
            if run.rank == 1:
                time.time = lambda: before() * 3
            with tf.train.SingularMonitoredSession(hooks=hooks) as session:
                control = Env.get().control
                decide = control.decide
                control.decide = lambda topic, *rest: asked.append(topic) or decide(topic, *rest)
                start = before()
                while not session.should_stop():
                    session.run(train)
                    time.sleep(0.02 if session.raw_session().run(step) % 2 == run.rank else 0.0)
            del control.decide
        finally:
            time.time = before
    asked = [topic for topic in asked if "of 100 s" in topic]
    return {"asked": len(asked), "kept": len(steps_of(run.folder)), "seconds": before() - start}


@cases(clocks, "2x1")
def test_timers_are_those_of_rank_0(outcome):
    first, second = outcome.ranks
    assert 2 <= first["kept"] <= first["seconds"] / 0.5 + 3
    assert 1 <= second["asked"] <= 30, "60 steps, and a timer that is not near its end"
    assert first["asked"] == second["asked"] + 1, "at the end rank 0 answers what might still be asked"


# --- the end ------------------------------------------------------------------------------


class StopAlone(tf.train.SessionRunHook):
    """Stops in the third run, on one rank only."""

    def __init__(self, mine, how):
        self.mine, self.how, self.runs = mine, how, 0

    def after_create_session(self, session, coord):
        self.coord = coord

    def after_run(self, run_context, run_values):
        self.runs += 1
        if self.mine and self.runs == 3:
            (self.coord if self.how == "coordinator" else run_context).request_stop()


def one_stops(run, stopping, how):
    """One rank ends the loop alone: how many steps each has made."""
    with run.program():
        w, loss, train, step = drawn(run)
        recorder = Recorder(step)
        hooks = [tf.train.LoggingTensorHook({"w": w}, every_n_secs=1000), StopAlone(run.rank == stopping, how), recorder]
        with tf.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run(train)
        # The ranks are in step afterwards.
        with tf.train.SingularMonitoredSession() as session:
            session.run(train)
            after = int(session.raw_session().run(step))
    return {"seen": recorder.seen, "after": after}


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(request(one_stops, "2x1", stopping=stopping, how=how), id="%s of rank %d" % (how, stopping))
        for how in ("hook", "coordinator")
        for stopping in (0, 1)
    ],
    indirect=True,
)
def test_when_one_rank_stops_all_stop(outcome):
    for rank in outcome.ranks:
        assert rank == {"seen": [1, 2, 3], "after": 1}


def step_function(run, stopping):
    """A step function with steps of its own, which asks for the end on one rank only."""
    with run.program():
        w, loss, train, step = drawn(run)
        seen = []

        def work(step_context):
            step_context.session.run(w)
            step_context.run_with_hooks(train)
            seen.append(int(step_context.session.run(step)))
            if len(seen) == 3 and run.rank == stopping:
                step_context.request_stop()

        with tf.train.MonitoredSession(hooks=[tf.train.StopAtStepHook(last_step=6)]) as session:
            while not session.should_stop():
                session.run_step_fn(work)
    return seen


@cases(step_function, "2x1", stopping=1)
def test_when_one_step_function_stops_all_stop(outcome):
    assert outcome.ranks == [[1, 2, 3]] * 2


@cases(step_function, "2x1", stopping=None)
def test_step_functions_run_to_the_end(outcome):
    assert outcome.ranks == [[1, 2, 3, 4, 5, 6]] * 2


def all_stop_fed(run):
    """Fed steps, and a hook that stops all ranks in the same step; a worker's hook that waits for other workers."""
    with run.program():
        x, w, _, train, step = regression(run, "adam")
        final = tf.train.FinalOpsHook(w)
        hooks = [tf.train.StopAtStepHook(last_step=3), tf.train.GlobalStepWaiterHook(wait_until_step=2 * run.rank), final]
        with tf.train.MonitoredSession(session_creator=None if run.rank == 0 else tf.train.WorkerSessionCreator(), hooks=hooks) as session:
            while not session.should_stop():
                session.run(train, {x: run.local(X)})
        return float(final.final_ops_values)


@cases(all_stop_fed, "2x1")
def test_fed_ranks_stop_together(outcome):
    assert outcome.ranks == [pytest.approx(W[3], rel=1e-5)] * 2


def one_stops_fed(run):
    """Fed steps, which one rank leaves alone."""
    with run.program():
        x, _, _, train, _ = regression(run)
        with tf.train.MonitoredSession(hooks=[StopAlone(run.rank == 1, "hook")]) as session:
            while not session.should_stop():
                session.run(train, {x: run.local(X)})


@pytest.mark.ranks
def test_when_one_fed_rank_stops_the_job_fails(pool):
    started = time.time()
    with pytest.raises(CaseFailed) as caught:
        pool.outcome(request(one_stops_fed, "2x1", isolated=True))
    from epl.runtime.lockstep import END  # plain cases of other files import this one, and must not import EPL

    assert END in str(caught.value) and "DivergenceError" in str(caught.value)
    assert time.time() - started < 60


def unequal_data(run):
    """Rank 1 has data for two steps only."""
    with run.program():
        w, loss, train, step = drawn(run, total=5 if run.rank == 0 else 2)
        recorder = Recorder(step)
        with tf.train.MonitoredTrainingSession(checkpoint_dir=run.folder, save_summaries_steps=None, hooks=[recorder]) as session:
            while not session.should_stop():
                session.run(train)
    return {"seen": recorder.seen, "kept": steps_of(run.folder) if run.rank == 0 else []}


@cases(unequal_data, "2x1")
def test_row_92_the_end_of_data_ends_all(outcome):
    assert [rank["seen"] for rank in outcome.ranks] == [[1, 2]] * 2
    assert outcome.ranks[0]["kept"] == [0, 2]


# --- supervisors --------------------------------------------------------------------------


def supervised(run):
    """A loop as in slim: a supervisor with a queue and its services, whose threads go by the clock."""
    tf.disable_eager_execution()  # else the supervisor's threads take themselves for eager ones
    with run.program():
        mine = run.local(X)
        queue = tf.FIFOQueue(8, [tf.float32], [[len(mine)]])
        tf.train.add_queue_runner(tf.train.QueueRunner(queue, [queue.enqueue(tf.constant(mine))]))
        value = queue.dequeue()
        w = scalar("w", 0)
        loss = tf.reduce_mean(tf.square(w * value - 3.0 * value))
        run.merge(loss)
        tf.summary.scalar("loss", loss)
        step = tf.train.get_or_create_global_step()
        train = tf.train.AdamOptimizer(0.1).minimize(loss, global_step=step)
        supervisor = tf.train.Supervisor(
            is_chief=run.rank == 0, logdir=run.path("log of %d" % run.rank), save_summaries_secs=0.1, save_model_secs=0.2
        )
        with supervisor.managed_session() as session:
            for _ in range(20):
                if supervisor.should_stop():
                    break
                number, weight, _ = session.run([step, w, train])
                time.sleep(0.02 * run.rank)
            result = [int(session.run(step)), float(session.run(w))]
    folder = run.path("log of %d" % run.rank)
    return {"result": result, "files": sorted({n.split(".")[0] for n in os.listdir(folder)}) if os.path.exists(folder) else []}


@cases(supervised, "2x1", isolated=True)
def test_row_43_supervisors(outcome):
    first, second = outcome.ranks
    assert first["result"] == second["result"] and first["result"][0] == 20
    assert second["files"] == []
    assert {"checkpoint", "events", "graph", "model"} <= set(first["files"])


# --- estimators ---------------------------------------------------------------------------


def model_fn(features, labels, mode):
    w = scalar("w", 0)
    if mode == "infer":
        outputs = {"serving_default": tf.estimator.export.PredictOutput({"y": w * features})}
        return tf.estimator.EstimatorSpec(mode, predictions={"y": w * features}, export_outputs=outputs)
    loss = tf.reduce_mean(tf.square(w * features - labels))
    train = tf.train.AdamOptimizer(0.1).minimize(loss, global_step=tf.train.get_global_step()) if mode == "train" else None
    metrics = {"w": tf.metrics.mean(w)} if mode == "eval" else None
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train, eval_metric_ops=metrics)


def inputs(run, repeat):
    mine = run.local(X)

    def input_fn():
        dataset = tf.data.Dataset.from_tensor_slices((mine, 3 * mine)).batch(len(mine))
        return dataset.repeat() if repeat else dataset

    return input_fn


def settings(**options):
    return tf.estimator.RunConfig(save_checkpoints_steps=2, log_step_count_steps=None, save_summary_steps=1000, **options)


def temporary_folder(run):
    """Every rank makes its estimator without a folder, under a TF_CONFIG without a chief, and uses it for everything."""
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": run.rank}})
    with run.program():
        del os.environ["TF_CONFIG"]
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": run.rank}})
        try:
            model = tf.estimator.Estimator(model_fn, config=settings())
        finally:
            del os.environ["TF_CONFIG"]
        model.train(inputs(run, True), steps=2)
        metrics = model.evaluate(inputs(run, False))
        in_memory = tf.estimator.experimental.InMemoryEvaluatorHook(model, inputs(run, False), every_n_iter=1)
        model.train(inputs(run, True), hooks=[in_memory], steps=1)
        predictions = [float(p["y"]) for p in model.predict(lambda: tf.data.Dataset.from_tensors(np.float32([2])))]
        path = model.export_saved_model(
            run.path("export"), lambda: tf.estimator.export.TensorServingInputReceiver(tf.placeholder(tf.float32, [None], "x"), {})
        )
        return {"metrics": {k: float(v) for k, v in metrics.items()}, "predictions": predictions, "path": path.decode(),
                "w": float(model.get_variable_value("w")), "there": os.path.exists(os.path.join(path.decode(), "saved_model.pb"))}  # fmt: skip


@cases(temporary_folder, "2x1")
def test_estimators_share_the_folder_of_rank_0(outcome):
    first, second = outcome.ranks
    for rank in outcome.ranks:
        assert rank["metrics"]["global_step"] == 2 and rank["metrics"]["w"] == pytest.approx(W[2], rel=1e-5)
        assert rank["predictions"] == [pytest.approx(2 * W[3], rel=1e-5)]
        assert rank["w"] == pytest.approx(W[3], rel=1e-5) and rank["there"]
    assert first["path"] == second["path"]


def early_return(run):
    """The checkpoint of a finished training is seen by rank 0 alone."""
    folder = run.path("model") if run.rank == 0 else tempfile.mkdtemp(dir=run.folder)
    with run.program():
        found = []
        for last in (2, 2, 3):
            model = tf.estimator.Estimator(model_fn, folder, settings())
            model.train(inputs(run, True), max_steps=last)
            found.append(int(model.get_variable_value("global_step")))
        return found


@cases(early_return, "2x1")
def test_row_26_all_return_early_or_none(outcome):
    assert outcome.ranks == [[2, 2, 3]] * 2


def evaluations(run):
    """Evaluations after each checkpoint, with an exporter."""
    evaluated = []

    def slow_input():
        evaluated.append(run.rank)
        time.sleep(0.5)
        return inputs(run, False)()

    with run.program():
        model = tf.estimator.Estimator(model_fn, run.path("model"), settings())
        exporter = tf.estimator.FinalExporter(
            "final", lambda: tf.estimator.export.TensorServingInputReceiver(tf.placeholder(tf.float32, [None], "x"), {})
        )
        metrics, exports = tf.estimator.train_and_evaluate(
            model,
            tf.estimator.TrainSpec(inputs(run, True), max_steps=6),
            tf.estimator.EvalSpec(slow_input, steps=None, exporters=[exporter], throttle_secs=0),
        )
        files = glob.glob(run.path("model/eval/events*"))
        return {"metrics": {k: float(v) for k, v in metrics.items()}, "exports": len(exports), "events": len(files), "evaluated": evaluated}


@cases(evaluations, "2x1")
def test_row_40_rank_0_evaluates_while_the_others_wait(outcome):
    first, second = outcome.ranks
    assert first["evaluated"] == [0, 0, 0] and second["evaluated"] == []
    assert first["metrics"] == second["metrics"] and first["metrics"]["global_step"] == 6
    assert first["exports"] == second["exports"] == 1 and first["events"] == 1


def long_evaluation(run):
    """Rank 0 alone evaluates for longer than the stall timeout, while rank 1 is in the next training already."""
    with run.program({"cluster.stall_timeout": 3}):
        model = tf.estimator.Estimator(model_fn, run.path("model"), settings())
        model.train(inputs(run, True), max_steps=2)
        if run.rank == 0:

            def slowly():
                time.sleep(5)
                return inputs(run, False)()

            assert model.evaluate(slowly)["global_step"] == 2
        model.train(inputs(run, True), max_steps=3)
        return float(model.get_variable_value("w"))


@cases(long_evaluation, "2x1", isolated=True)
def test_row_41_rank_0_may_evaluate_for_long(outcome):
    assert outcome.ranks == [pytest.approx(W[3], rel=1e-5)] * 2
