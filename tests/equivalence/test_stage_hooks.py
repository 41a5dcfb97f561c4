"""Sessions, hooks, summaries and Estimators of models cut into two stages: rows 26, 37, 40, 42, 43, 48 to 50."""

import glob
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, regression
from tests.equivalence.test_cases_hooks import (
    VALUES,
    again,
    export_in,
    finalized,
    in_memory,
    judge_exports,
    judge_summaries,
    judge_values,
    sessions,
    summaries,
    train_and_evaluate,
)
from tests.equivalence.test_cases_stages import REPLICAS, STAGES
from tests.harness.parametrize import cases, together
from tests.harness.pool import request


@cases(again, "2x1-s2-m2", "4x1-s2")
def test_row_26_training_that_is_finished_already(outcome):
    for rank in outcome.ranks:
        assert rank[:3] == [2, 2, 3] and rank[3] == pytest.approx(VALUES["w"], rel=1e-5)


@pytest.mark.parametrize("outcomes", [export_in(layout) for layout in STAGES], indirect=True)
def test_row_37_exports(outcomes):
    judge_exports(outcomes)


@cases(train_and_evaluate, *STAGES, *REPLICAS, compare=True)
def test_row_40_train_and_evaluate(outcome):
    for rank in outcome.ranks:
        assert rank["step"] == 6 and rank["w"] == pytest.approx(outcome.plain["w"], rel=1e-5)
        # Row 42: evaluations leave events, in one file.
        assert rank["events"] == 1


@cases(sessions, *STAGES, "4x1-s2", kind="plain")
def test_row_43_session(outcome):
    judge_values(outcome)


@cases(sessions, *STAGES, kind="interactive")
def test_row_43_interactive_session(outcome):
    judge_values(outcome)


@cases(sessions, *STAGES, kind="supervisor")
def test_row_43_supervisor(outcome):
    judge_values(outcome)


@cases(sessions, *STAGES, kind="singular")
def test_row_43_singular_monitored_session(outcome):
    judge_values(outcome)


@cases(finalized, *STAGES)
def test_row_48_runs_add_no_ops(outcome):
    for rank in outcome.ranks:
        assert rank["finalized"] and len(rank["counts"]) == 1


@cases(in_memory, "2x1-s2", "2x1-s2-m2", "1x2-s2-m2", compare=True)
def test_row_49_evaluation_in_memory(outcome):
    for rank in outcome.ranks:
        # before the first step, after the second and fourth, and at the end
        assert [int(one["variables"]["global_step"]) for one in rank["evaluated"]] == [0, 2, 4, 5]
        for one in rank["evaluated"]:
            step, w = int(one["variables"]["global_step"]), one["variables"]["w"]
            assert one["same"] and one["samples"] == 2, "the samples of the rank of the first stage"
            assert one["error"] == pytest.approx(abs(w - 3) * 1.5, rel=1e-5)
            assert w == 0 if step == 0 else w > 0
            for name, value in one["variables"].items() if step else ():
                np.testing.assert_array_equal(value, rank["trained"][step - 1][name], err_msg="%s of step %d" % (name, step))
    assert outcome.ranks[0]["events"] == 1


IN_MEMORY = {layout: request(in_memory, layout) for layout in ("2x1-s2", "2x1-s2-m2", "1x2-s2-m2")}


@together(plain=request(in_memory, "2x1", plain=True, evaluate=False), **IN_MEMORY)
def test_row_49_training_is_as_without_it(outcomes):
    plain = outcomes["plain"].ranks[0]
    for layout in IN_MEMORY:
        for rank in outcomes[layout].ranks:
            assert len(rank["trained"]) == 5 and sorted(rank["final"]) == sorted(plain["final"])
            np.testing.assert_allclose(rank["losses"], plain["losses"], rtol=1e-5)
            for name in plain["final"].keys() - ({"seen"} if "m2" in layout else set()):  # one update for each micro-batch
                np.testing.assert_allclose(rank["final"][name], plain["final"][name], rtol=1e-5, err_msg="%s at the end" % name)


@cases(summaries, *STAGES, *REPLICAS, compare=True)
def test_row_50_summaries_are_merged_and_written_once(outcome):
    judge_summaries(outcome)


@cases(summaries, "2x1-s2-m2", "4x1-s2", compare=True, how="hook")
def test_row_50_hooks_with_folders_of_their_own(outcome):
    judge_summaries(outcome)


@cases(summaries, "2x1-s2-m2", compare=True, how="by hand")
def test_row_50_summaries_that_the_script_writes(outcome):
    judge_summaries(outcome)


def hooks_of_tensorflow(run):
    """A loop that StopAtStep ends, with LoggingTensor and StepCounter: what they saw and wrote."""
    logged = []
    with run.program():
        x, w, loss, train, step = regression(run, "adam")
        hooks = [
            tf.train.StopAtStepHook(last_step=3),
            tf.train.LoggingTensorHook({"loss": loss, "w": w}, every_n_iter=1, formatter=lambda values: logged.append(dict(values)) or ""),
            tf.train.StepCounterHook(every_n_steps=1, output_dir=run.path("counted by %d" % run.rank)),
        ]
        runs = 0
        with tf.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run(train, {x: run.local(X)})
                runs += 1
    tf.summary.FileWriterCache.clear()  # the hook leaves its writer open
    files = glob.glob(os.path.join(run.folder, "counted by *", "events*"))
    counted = [event.step for name in files for event in tf.train.summary_iterator(name)
               for value in event.summary.value if value.tag == "global_step/sec"] if run.rank == 0 else []  # fmt: skip
    return {"runs": runs, "losses": [one["loss"] for one in logged], "w": [one["w"] for one in logged], "counted": counted}


@cases(hooks_of_tensorflow, *STAGES, "4x1-s2", compare=True)
def test_hooks_of_tensorflow_see_each_step(outcome):
    assert outcome.plain["counted"], "plain TensorFlow counts steps"
    for number, rank in enumerate(outcome.ranks):
        assert rank["runs"] == 3
        assert rank["losses"] == pytest.approx(VALUES["losses"], rel=1e-5)
        assert rank["w"] == pytest.approx(outcome.plain["w"], rel=1e-5, abs=1e-7)
        assert number or rank["counted"] == outcome.plain["counted"]
