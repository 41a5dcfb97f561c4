"""A rank killed at any moment of a job ends the others, with an error that names it and what they wait for."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.behaviour import killed_ranks
from tests.behaviour.killed_ranks import RENDEZVOUS_TIMEOUT, STALL_TIMEOUT, parts_of
from tests.harness.pool import ROOT

pytest.importorskip("horovod")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

FEW = ["start-1", "horovod-1-3", "compile-1", "train-0-2-0", "evaluate-1", "end-0"]
"""In one job. See `killed_ranks` for what the names mean."""

PHASES = ["start", "horovod", "frozen", "compile", "train", "evaluate", "close", "end"]
STAYING = ["%s-%d" % (phase, victim) for phase in PHASES for victim in (0, 1)]
MANY = STAYING + ["train-1-2-%d" % seed for seed in range(1, 7)] + ["train-0-2-%d" % seed for seed in range(7, 11)] + [
    "start-0-2-11", "start-1-2-12", "start-0-2-13", "start-1-2-14", "start-2-4-21", "horovod-2-4", "train-2-4", "train-0-4", "compile-3-4",
    "evaluate-1-4", "end-2-4"]  # fmt: skip

RUNNING = [case for case in MANY if case.startswith(("compile", "train", "evaluate"))]
"""Those in which a rank is killed while others wait for it in a run."""

SECONDS = {"start": RENDEZVOUS_TIMEOUT[1] + 15, "horovod": 6}
"""Within which the others end, when ranks are still missing, and when they wait in Horovod's start; afterwards it is by the stall timeout."""


def run_cases(folder, cases):
    """What became of each case."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_", "HOROVOD_", "EPL_", "TF_CONFIG"))}
    env.update(PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="2", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", PYTHONUNBUFFERED="1")
    command = [sys.executable, killed_ranks.__file__, str(folder)] + list(cases)
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=580)
    found = {line["case"]: line for line in (json.loads(text) for text in done.stdout.splitlines() if text.startswith("{"))}
    assert done.returncode == 0 and set(found) == set(cases), done.stdout
    for one in found.values():
        for survivor in one["survivors"]:
            with open(survivor["log"], errors="replace") as log:
                survivor["text"] = log.read()
    return found


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Also in one job; a test that needs it starts it for all of them."""
    found = {}
    for at in range(0, len(MANY), 12):
        found.update(run_cases(tmp_path_factory.mktemp("many"), MANY[at : at + 12]))
    return found


def judge_end(case, found):
    """All survivors have ended in time, with an error."""
    phase = parts_of(case)[0]
    assert found["reached"], [one["text"][-2000:] for one in found["survivors"]]
    for one in found["survivors"]:
        assert one["code"] not in (0, None), one["text"][-2000:]
        assert one["seconds"] < SECONDS.get(phase, STALL_TIMEOUT + 5), "rank %d needed %.1f s" % (one["rank"], one["seconds"])


def judge_name(case, found):
    """Each of them names the killed rank, by its place among the workers where nobody has heard of it yet."""
    phase, victim, _, seed = parts_of(case)
    died = r"rank %d (\(.*\) )?died.*its connection broke without a goodbye" % victim
    in_horovod = r"rank %d \(127.0.0.1:\d+, .*\) %%s while Horovod started" % victim
    never_came = r"ClusterError: still waiting for 1 of \d workers: %d \(127.0.0.1:\d+\)" % victim
    # Of several that wait, some give up earlier than others, which miss them too.
    left = r"ClusterError: still waiting for \d of \d workers: .*%d \(127.0.0.1:\d+(, which was there and has ended)?\)" % victim
    wanted = {
        "start": never_came if seed is None else "%s|%s" % (died, left),
        "horovod": in_horovod % "died",
        "frozen": in_horovod % r"has sent no sign of life for \d+ s",
    }.get(phase, died)
    for one in found["survivors"]:
        assert re.search(wanted, one["text"]), one["text"][-2000:]


def judge_place(found):
    """Each of them names the program or the agreement in which it waits for the killed one, or where that one was."""
    for one in found["survivors"]:
        place = re.search(r"(in program|the last was) '\w+', step \d+|wait(s|ed) for .*(agreement|decision) '[^']+' \(number \d+\)", one["text"])
        assert place, one["text"][-2000:]


@pytest.mark.parametrize("case", FEW)
def test_the_others_end_in_time(case, few):
    judge_end(case, few[case])


@pytest.mark.parametrize("case", FEW)
def test_they_name_the_killed_rank(case, few):
    judge_name(case, few[case])


@pytest.mark.parametrize("case", ["compile-1", "evaluate-1"])
def test_they_name_what_they_wait_for(case, few):
    judge_place(few[case])


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestAtAnyMoment:
    @pytest.mark.parametrize("case", MANY)
    def test_the_others_end_in_time(self, case, many):
        judge_end(case, many[case])

    @pytest.mark.parametrize("case", MANY)
    def test_they_name_the_killed_rank(self, case, many):
        judge_name(case, many[case])

    @pytest.mark.parametrize("case", RUNNING)
    def test_they_name_what_they_wait_for(self, case, many):
        judge_place(many[case])
