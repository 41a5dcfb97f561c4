"""Two real ranks; one breaks, and the other must end with an error that names it. Design 2.8, cases 110 and 111."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from epl.config import Config
from epl.errors import BackendError
from epl.runtime import network
from epl.runtime.backend import Backend
from epl.runtime.gloo import GlooStore, assign_slots, slot_environment
from epl.runtime.ranks import detect_ranks
from epl.runtime.watchdog import PEER_FAILED_EXIT_CODE

pytest.importorskip("horovod")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

SCRIPT = pathlib.Path(__file__).with_name("job_script.py")
ROOT = SCRIPT.parents[2]
STALL = 3.0
LIMIT = 60.0


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EPL_", "HOROVOD_", "OMPI_", "TF_CONFIG"))}
    return dict(kept, PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1", EPL_CLUSTER_STALL_TIMEOUT=str(STALL), **more)


class Job:
    """Two ranks without any launcher: whatever ends, ends by itself."""

    def __init__(self, mode, folder):
        self.store = GlooStore("127.0.0.1", 0, assign_slots(["localhost"] * 2))
        self.store.start()
        self.files = [folder / ("%d.log" % rank) for rank in range(2)]
        self.processes = []
        for slot in assign_slots(["localhost"] * 2):
            variables = slot_environment(slot, "127.0.0.1", self.store.port, network.loopback_interface().name)
            with open(self.files[slot.rank], "wb") as log:
                command = [sys.executable, str(SCRIPT), mode]
                self.processes.append(subprocess.Popen(command, env=environment(**variables), stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        self.ended = [None, None]

    def wait(self, ranks=(0, 1)):
        """Until these ranks have ended. Fails when one hangs."""
        deadline = time.monotonic() + LIMIT
        while any(self.ended[rank] is None for rank in ranks):
            for rank, process in enumerate(self.processes):
                if self.ended[rank] is None and process.poll() is not None:
                    self.ended[rank] = time.time()
            assert time.monotonic() < deadline, "a rank hangs:\n" + "\n".join(self.output(rank) for rank in range(2))
            time.sleep(0.02)

    def output(self, rank):
        return self.files[rank].read_text()

    def codes(self):
        return [process.returncode for process in self.processes]

    def seconds(self):
        """From the fault to the end of rank 0."""
        return self.ended[0] - float(re.search(r"fault at ([0-9.]+)", self.output(1)).group(1))

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        self.store.stop()


@pytest.fixture
def job(tmp_path, request):
    one = Job(request.param, tmp_path)
    yield one
    one.close()


def told(job, record_property, limit):
    """What rank 0 wrote as the reason of its end, which must have come in time."""
    record_property("seconds", round(job.seconds(), 2))
    print("rank 0 ended %.2f s after the fault" % job.seconds())
    text = job.output(0)
    assert "epl: rank 0: the job is broken" in text, text
    assert job.seconds() < limit, text
    return "\n".join(line for line in text.splitlines() if line.startswith("epl: rank 0: "))


@pytest.mark.parametrize("job", ["kill"], indirect=True)
def test_a_killed_rank(job, record_property):
    job.wait()
    assert job.codes() == [PEER_FAILED_EXIT_CODE, -signal.SIGKILL]
    assert re.search(r"rank 1 \(.*\) died.*connection broke", told(job, record_property, 10))


@pytest.mark.parametrize("job", ["stop"], indirect=True)
def test_a_stopped_rank(job, record_property):
    job.wait([0])
    assert job.codes()[0] == PEER_FAILED_EXIT_CODE
    text = told(job, record_property, STALL + 10)
    assert re.search(r"rank 1 \(.*\).* has sent no sign of life for [3-9] s", text)
    assert "rank 0 (" in text and "is in program 'train', step 3" in text
    # Woken up, the stopped rank must not live on alone.
    job.processes[1].send_signal(signal.SIGCONT)
    job.wait()
    assert job.codes()[1] not in (0, None)


@pytest.mark.parametrize("job", ["raise"], indirect=True)
def test_a_rank_that_raises(job, record_property):
    job.wait()
    assert job.codes() == [PEER_FAILED_EXIT_CODE, 1]
    assert job.ended[1] <= job.ended[0], "launchers take the first rank that ends for the one that failed"
    text = told(job, record_property, 15)
    assert re.search(r"rank 1 \(.*\) failed", text) and "ValueError: the data of rank 1 is bad" in text and "job_script.py" in text
    own = job.output(1)
    assert "epl: rank 1: an uncaught exception ends this rank" in own and own.count("ValueError: the data of rank 1 is bad") == 1
    assert "\nTraceback" not in job.output(0), "the echo in Horovod must not hide the cause"


@pytest.mark.parametrize("job", ["exit"], indirect=True)
def test_a_rank_that_exits_with_an_error(job, record_property):
    job.wait()
    assert job.codes() == [PEER_FAILED_EXIT_CODE, 3]
    text = told(job, record_property, 15)
    assert re.search(r"rank 1 \(.*\) failed", text) and "sys.exit(3)" in text


@pytest.mark.parametrize("job", ["leave"], indirect=True)
def test_a_rank_that_ends_well_while_it_is_needed(job, record_property):
    job.wait()
    assert job.codes() == [PEER_FAILED_EXIT_CODE, 1]
    assert "ended in good order after 3 parallel programs, but rank 0 needs it in program 'train', step 3" in told(job, record_property, 15)


@pytest.mark.parametrize("job", ["diverge"], indirect=True)
def test_ranks_that_run_different_things(job, record_property):
    job.wait()
    assert job.codes() == [PEER_FAILED_EXIT_CODE] * 2
    expected = "rank 1 waits for agreement 'save' (number 0), but rank 0 is in program 'train', step 3"
    assert expected in told(job, record_property, 10)
    assert "DivergenceError" in job.output(1) and expected in job.output(1)


@pytest.mark.parametrize("job", ["busy"], indirect=True)
def test_a_busy_rank_is_not_taken_for_dead_and_a_good_end(job):
    """Also the backend's own collectives, in graph mode."""
    job.wait()
    assert job.codes() == [0, 0], job.output(0) + job.output(1)
    assert "no rank has failed, but some wait for more than %g s" % STALL in job.output(0)
    assert "broken" not in job.output(0) + job.output(1)
    for rank in range(2):
        assert "rank %d is done" % rank in job.output(rank) and "agree takes" in job.output(rank)


def test_a_rank_that_raises_under_mpirun():
    mpirun = pathlib.Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("mpirun is not installed")
    options = ["--allow-run-as-root", "--oversubscribe", "--tag-output", "--mca", "mpi_yield_when_idle", "1", "-np", "2"]
    command = [str(mpirun)] + options + [sys.executable, str(SCRIPT), "raise"]
    run = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90)
    assert run.returncode == 1, run.stdout
    # mpirun may put its tags in the middle of lines that ranks write at the same moment.
    assert "ValueError: the data of rank 1 is bad" in run.stdout
    assert re.search(r"epl: rank 0: rank 1 \(.*\) failed", run.stdout)


def test_no_horovod_is_an_error_and_not_a_job_of_one(monkeypatch):
    """Case 107: started by mpirun, but without Horovod."""
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "horovod", None)
    ranks = detect_ranks({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})
    with pytest.raises(BackendError, match=r"this is rank 1 of 2 \(found by mpi\).*pip install 'pyepl\[horovod\]'"):
        Backend.connect(ranks, Config())
