"""The harness itself: data and layouts fit together, and the models meet the tolerances in plain TensorFlow."""

import numpy as np
import pytest

from tests.harness import data, results, stage_cover
from tests.harness.cover import AXES, full_matrix, pairwise_cover
from tests.harness.layouts import Layout
from tests.harness.models import MODELS
from tests.harness.optimizers import OPTIMIZERS
from tests.harness.pool import CaseFailed, Pool, request
from tests.harness.runner import close, run_case
from tests.harness.staged import STAGED
from tests.harness.towers import run_towers

STAGED_LAYOUTS = [Layout.parse(name) for name in ("2x1-s2-m4", "1x2-s4v2", "4x1-s2-m2", "2x2-s4", "2x2-s2", "1x4-s2-m2", "2x3-s2-m2")]
LAYOUTS = [Layout.parse(spread + micro) for spread in AXES["spread"] for micro in AXES["micro"]]


@pytest.mark.parametrize("layout", LAYOUTS + STAGED_LAYOUTS, ids=lambda layout: layout.name)
def test_layout_uses_every_batch_once(layout):
    used = [number for run in range(layout.runs) for rank in range(layout.ranks) for number in layout.batches_of(rank, run)]
    assert sorted(used) == list(range(layout.batches))
    assert Layout.parse(layout.name) == layout


def test_layout_keeps_replica_then_micro_batch_order():
    layout = Layout.parse("2x2-m2run")
    assert layout.batches_of(0) == [0, 1, 2, 3] and layout.batches_of(1) == [4, 5, 6, 7]
    layout = Layout.parse("2x2-m2")
    assert [layout.batches_of(1, run) for run in range(2)] == [[4, 6], [5, 7]]
    assert layout.batches_of_run(1) == [1, 3, 5, 7]


def test_layout_rejects_other_names():
    with pytest.raises(ValueError, match="RANKSxDEVICES"):
        Layout.parse("2x")
    with pytest.raises(ValueError, match="do not fit"):
        Layout.parse("3x1-s2")


def test_layout_of_stages():
    layout = Layout.parse("4x1-s2-m2")
    assert layout.replicas == 2 and layout.runs == 1
    assert [layout.batches_of(rank) for rank in range(4)] == [[0, 1], [], [2, 3], []]
    assert [layout.seen_by(rank) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    across = Layout.parse("2x3-s2")
    assert [across.batches_of(rank) for rank in range(2)] == [[0, 1], [2]]
    assert [across.seen_by(rank) for rank in range(2)] == [[0], [2]]
    assert Layout.parse("2x1-s4v2").replicas == 1


def test_few_cases_of_stages_meet_most_values():
    cases = stage_cover.few()
    assert len(set(cases)) == len(cases) == stage_cover.FEW and cases == stage_cover.few()
    assert {case.model for case in cases} == set(STAGED) and {case.schedule for case in cases} == set(stage_cover.SCHEDULES)
    assert {case.optimizer for case in cases} == set(OPTIMIZERS)
    assert len({case.layout._replace(m=1) for case in cases}) >= len(stage_cover.SPREADS)
    assert 2000 < len(list(stage_cover.full_matrix())) < 5000


def test_local_part_and_stream():
    layout = Layout.parse("2x1-m2")
    step = {"x": np.arange(8)}
    assert data.local_part(step["x"], layout, 1, 1).tolist() == [6, 7]
    stream, size = data.local_stream([step, {"x": np.arange(8, 16)}], layout, 1)
    assert size == 2 and stream["x"].tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    with pytest.raises(ValueError, match="divided into 4"):
        data.local_part(np.arange(6), layout, 0)


def test_results_keep_every_bit():
    value = {"a": np.float32([0.1, 1e-30]), "b": [1, None, "x", np.int64(3)], "c": {"d": np.zeros([0, 2], np.int64)}}
    again = results.decode(results.encode(value))
    assert again["a"].dtype == np.float32 and (again["a"] == value["a"]).all()
    assert again["b"] == [1, None, "x", 3] and again["c"]["d"].shape == (0, 2)


def test_cover_is_pairwise():
    cases = pairwise_cover()
    assert len(cases) >= 60 and len(set(cases)) == len(cases) and cases == pairwise_cover()
    assert {(case.model, case.optimizer) for case in cases} == {(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS}
    assert {case.layout for case in cases} == set(LAYOUTS)
    assert len(list(full_matrix())) == (len(MODELS) * 4 + 1) * len(LAYOUTS) * 2


def plain(function, **kwargs):
    return request(function, "1x1", **kwargs)._replace(plain=True)


@pytest.mark.parametrize(
    "outcomes",
    [
        pytest.param(
            {
                "reference": plain(run_case, model=model, optimizer=optimizer, seed=0),
                "towers": plain(run_towers, model=model, optimizer=optimizer, towers=4),
            },
            id="%s-%s" % (model, optimizer),
            marks=[] if number % 5 == 0 else [pytest.mark.slow],
        )
        for number, (model, optimizer) in enumerate((model, optimizer) for model in MODELS for optimizer in OPTIMIZERS)
    ],
    indirect=True,
)
def test_towers_in_plain_tensorflow_equal_the_reference(outcomes):
    reference, towers = outcomes["reference"].ranks[0], outcomes["towers"].ranks[0]
    close(towers["losses"], reference["losses"], "losses")
    assert set(towers["variables"]) == set(reference["variables"])
    for name, value in reference["variables"].items():
        close(towers["variables"][name], value, name)


@pytest.mark.parametrize(
    "outcomes",
    [
        pytest.param(
            {
                "feed": plain(run_case, model=model, optimizer="adam", seed=0),
                "dataset": plain(run_case, model=model, optimizer="adam", input="dataset", session="monitored"),
            },
            id=model,
        )
        for model in MODELS
    ],
    indirect=True,
)
def test_dataset_gives_what_feeds_give(outcomes):
    feed, dataset = outcomes["feed"].ranks[0], outcomes["dataset"].ranks[0]
    close(dataset["losses"], feed["losses"], "losses")
    for name, value in feed["variables"].items():
        close(dataset["variables"][name], value, name)


def succeed(run):
    return run.rank


def use(run, number, earlier):
    return [run.plain, number, earlier]


def fail(run, rank):
    if run.rank == rank:
        raise KeyError("wrong on rank %d" % rank)
    return run.rank


def hang(run, rank):
    if run.rank == rank:
        import time

        time.sleep(1000)
    return run.rank


@pytest.mark.ranks
def test_a_failing_rank_does_not_hide_the_other_cases():
    cases = {"ok": request(succeed, "2x1"), "bad": request(fail, "2x1", rank=1), "stuck": request(hang, "2x1", rank=0, timeout=5)}
    cases["last"] = request(fail, "2x1", rank=7)
    pool = Pool(cases.values())
    try:
        assert pool.outcome(cases["ok"]).ranks == [0, 1]
        with pytest.raises(CaseFailed, match="rank 1: error(.|\n)*wrong on rank 1"):
            pool.outcome(cases["bad"])
        with pytest.raises(CaseFailed, match="rank 0: did not finish(.|\n)*in hang"):
            pool.outcome(cases["stuck"])
        assert pool.outcome(cases["last"]).ranks == [0, 1]
    finally:
        pool.close()


@pytest.mark.slow
def test_a_case_may_use_the_result_of_another():
    plain_one = plain(succeed)
    first = request(use, "1x1", number=1, inputs={"earlier": plain_one})
    second = plain(use, number=2, inputs={"earlier": first})
    third = request(use, "1x1", number=3, inputs={"earlier": second})
    assert first.group == "1 ranks" and second.group == "plain, round 1" and third.group == "1 ranks, round 1"
    pool = Pool([third, first])
    try:
        assert pool.outcome(third).ranks == [[False, 3, [True, 2, [False, 1, 0]]]]
    finally:
        pool.close()
