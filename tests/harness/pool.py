"""Starts the jobs that run cases, and keeps their results: few processes for many tests.

All requested cases with the same number of ranks share one job, or one per core if it is of
one process; the jobs of a group are started when the first of its results is asked for. Plain references share a job that
never imports EPL. A job that a case brought down is started anew without that case.
"""

import collections
import concurrent.futures
import importlib.util
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

from tests.harness.layouts import Layout
from tests.harness.results import decode, encode

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAX_RESTARTS = 8
MAX_CASES_PER_JOB = 200
MIN_CASES_PER_JOB = 10
START_SECONDS = 60


class Request(NamedTuple):
    """A case to be run: a function "module:name", its keyword arguments (sorted items) and a layout.

    compare:  also run it plainly
    isolated: run it in a job of its own, because it breaks the ranks on purpose
    apart:    run it only beside others that are marked so: no case that imports EPL is in its process
    inputs:   other cases (sorted items) that run before; the result of their rank 0 becomes a keyword argument
    """

    function: str
    layout: Layout
    kwargs: Tuple[Tuple[str, Any], ...] = ()
    compare: bool = False
    isolated: bool = False
    timeout: int = 90
    plain: bool = False
    apart: bool = False
    inputs: Tuple[Tuple[str, "Request"], ...] = ()

    @property
    def group(self) -> str:
        """Cases of a group share a job; it needs no results of its own group."""
        if self.isolated:
            return self.id
        kind = "apart" if self.apart else "plain" if self.plain else "%d ranks" % self.layout.ranks
        return kind + (", round %d" % self.round if self.round else "")

    @property
    def round(self) -> int:
        return max([one.round + (self.plain or not one.plain) for _, one in self.inputs], default=0)

    @property
    def processes(self) -> int:
        return 1 if self.plain else self.layout.ranks

    @property
    def id(self) -> str:
        kwargs = ",".join(["%s=%s" % (key, value) for key, value in self.kwargs] + ["%s=[%s]" % (key, one.id) for key, one in self.inputs])
        return "%s(%s)@%s" % (self.function, kwargs, self.layout.name if not self.plain else "plain of %d batches" % self.layout.batches)

    @property
    def reference(self) -> "Request":
        """The plain run; layouts with equally many user batches share it."""
        return self._replace(plain=True, layout=Layout(m=self.layout.batches, accumulate_in_run=True), compare=False, isolated=False)


def without_epl(function: Callable) -> Callable:
    """Mark a function whose plain cases need a process that has never imported EPL."""
    function.apart = True  # type: ignore[attr-defined]
    return function


def request(function: Callable, layout: Any, inputs: Optional[Dict[str, Request]] = None, **options: Any) -> Request:
    """A request for a function of a module that can be imported by name.

    options: `compare`, `isolated`, `timeout`, `plain`; the rest are keyword arguments of the function.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    name = "%s:%s" % (function.__module__, function.__name__)
    fields: Dict[str, Any] = {"apart": getattr(function, "apart", False)}
    fields.update((key, options.pop(key)) for key in ("compare", "isolated", "timeout", "plain") if key in options)
    return Request(name, layout, tuple(sorted(options.items())), inputs=tuple(sorted((inputs or {}).items())), **fields)


class CaseFailed(AssertionError):
    """A case raised, hung or was never reached."""


class Outcome(NamedTuple):
    """What a case gave: the result of each rank, and of the plain run if it was asked for."""

    ranks: List[Any]
    plain: Optional[Any] = None


def ranks_are_possible() -> str:
    """Why jobs of several ranks can't run here, or nothing."""
    if not find_mpirun():
        return "mpirun is not installed"
    if importlib.util.find_spec("horovod") is None:
        return "horovod is not installed"
    return ""


def find_mpirun() -> Optional[str]:
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


class Pool:
    """The cases of a test session."""

    def __init__(self, requests: Iterable[Request] = (), log: Callable[[str], None] = lambda text: None):
        self._log = log
        self._pending: Dict[str, Dict[str, Request]] = {}
        self._results: Dict[str, List[Dict[str, Any]]] = {}
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="epl-cases-"))
        self._jobs = itertools.count(1)
        self._logging = threading.Lock()
        self.problems: List[str] = []
        self.seconds: Dict[Tuple[str, str], float] = collections.Counter()
        """(Function, group) -> seconds that its cases took, those of their slowest rank."""
        for one in requests:
            self.add(one)

    def add(self, one: Request) -> None:
        for each in (one, one.reference) if one.compare else (one,):
            for _, earlier in each.inputs:
                self.add(earlier)
            if each.id not in self._results:
                self._pending.setdefault(each.group, {})[each.id] = each

    def outcome(self, one: Request) -> Outcome:
        """The results of a case; runs the job of its group if that has not happened yet."""
        return Outcome(self._get(one), self._get(one.reference)[0] if one.compare else None)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _get(self, one: Request) -> List[Any]:
        if one.id not in self._results:
            self.add(one)
            self._run_group(one.group)
        reports = self._results[one.id]
        failed = ["rank %d: %s\n%s" % (rank, report["status"], report.get("traceback") or report.get("error", "")) for rank, report in
                  enumerate(reports) if report["status"] != "ok"]  # fmt: skip
        if failed:
            raise CaseFailed("%s\n%s" % (one.id, "\n".join(failed)))
        return [report["result"] for report in reports]

    def _run_group(self, group: str) -> None:
        cases, inputs = self._with_inputs(list(self._pending.pop(group).values()))
        # Jobs of one process leave the other cores idle; jobs of ranks disturb each other.
        lanes = min(os.cpu_count() or 1, max(1, len(cases) // MIN_CASES_PER_JOB)) if cases and cases[0].processes == 1 else 1
        with concurrent.futures.ThreadPoolExecutor(lanes) as workers:
            list(workers.map(lambda lane: self._run_all(cases[lane::lanes], inputs), range(lanes)))

    def _run_all(self, cases: List[Request], inputs: Dict[str, Dict[str, Any]]) -> None:
        """Run cases in as few jobs as can be, one after the other."""
        restarts = 0
        while cases:
            now, later = cases[:MAX_CASES_PER_JOB], cases[MAX_CASES_PER_JOB:]
            left = self._run_job(now, inputs)
            if left:
                restarts += 1
            if restarts > MAX_RESTARTS:
                for case in left + later:
                    self._give_up(case, "not run", "%d jobs before it broke down" % restarts)
                return
            cases = left + later

    def _with_inputs(self, cases: List[Request]) -> Tuple[List[Request], Dict[str, Dict[str, Any]]]:
        """The cases whose inputs are there, and these inputs; the other cases fail."""
        ready, inputs = [], {}
        for case in cases:
            try:
                inputs[case.id] = {name: self._get(one)[0] for name, one in case.inputs}
                ready.append(case)
            except CaseFailed as error:
                self._give_up(case, "not run", "it needs the result of a case that failed: %s" % error)
        return ready, inputs

    def _give_up(self, case: Request, status: str, error: str) -> None:
        self._results[case.id] = [{"status": status, "error": error}] * case.processes

    def _run_job(self, cases: List[Request], inputs: Dict[str, Dict[str, Any]]) -> List[Request]:
        """Run one job; returns the cases that it did not reach."""
        folder = self._folder / ("job%d" % next(self._jobs))
        folder.mkdir()
        entries = []
        for number, case in enumerate(cases):
            shared = folder / ("case%d" % number)
            shared.mkdir()
            kwargs = dict(case.kwargs, **inputs[case.id])
            entries.append({"id": case.id, "function": case.function, "layout": list(case.layout), "kwargs": kwargs,
                            "plain": case.plain, "timeout": case.timeout, "folder": str(shared)})  # fmt: skip
        (folder / "job.json").write_text(encode({"folder": str(folder), "cases": entries}))
        started = time.time()
        ended = self._execute(folder, cases[0].processes, max(case.timeout for case in cases))
        left = self._collect(folder, cases, ended)
        if ended and not cases[0].isolated and not any(_stopped(self._results.get(case.id, [])) for case in cases):
            self.problems.append("%s ended with %s:\n%s" % (cases[0].group, ended, _tail(folder / "output")))
        with self._logging:
            self._log("%s: %d cases in %.0f s, %s" % (cases[0].group, len(cases) - len(left), time.time() - started, ended or "all done"))
        return left

    def _execute(self, folder: pathlib.Path, ranks: int, patience: float) -> str:
        """Run the processes of a job; returns what went wrong with it as a whole, or nothing."""
        command = [sys.executable, "-m", "tests.harness.many", str(folder / "job.json")]
        if ranks > 1:
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            command = [find_mpirun(), "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "--tag-output", "-np", str(ranks)] + root + command
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(command, cwd=str(ROOT), env=environment(), stdout=output, stderr=output, start_new_session=True)
            try:
                return _wait(process, folder, ranks, patience)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    try:
                        process.wait(5)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()

    def _collect(self, folder: pathlib.Path, cases: List[Request], ended: str) -> List[Request]:
        """Take over the reports of a job. A case that only some ranks finished failed."""
        reports: List[Dict[str, Dict[str, Any]]] = [_reports(folder, rank) for rank in range(cases[0].processes)]
        left, broken = [], False
        for case in cases:
            found = [report.get(case.id) for report in reports]
            unfinished = any(report is None or report["status"] == "start" for report in found)
            if all(report is None for report in found) and (broken or ended == ""):
                left.append(case)
                continue
            if unfinished and not broken:
                broken = True
                tail = _tail(folder / "output")
                found = [report if report and report["status"] != "start" else
                         {"status": "did not finish", "error": "the job ended (%s); its output ended with\n%s" % (ended or "early", tail)}
                         for report in found]  # fmt: skip
            elif unfinished:
                left.append(case)
                continue
            self._results[case.id] = found
            self.seconds[case.function, case.group] += max(report.get("seconds", 0.0) for report in found if report)
        if len(left) < len(cases):
            return left
        for case in cases:
            self._give_up(case, "not run", "its job did not even start: %s\n%s" % (ended, _tail(folder / "output")))
        return []


def _stopped(reports: List[Dict[str, Any]]) -> bool:
    """True when a case, or a broken start, explains how its job ended."""
    return any(report["status"] in ("did not finish", "not run") for report in reports)


def environment() -> Dict[str, str]:
    """The environment of a job: quiet, one thread per op, nothing of an outer launcher or EPL."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_", "HOROVOD_", "EPL_", "TF_CONFIG"))}
    clean.update(
        PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1", CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="2", TF_ENABLE_ONEDNN_OPTS="0",
        TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="2", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore",
    )  # fmt: skip
    return clean


def _wait(process: subprocess.Popen, folder: pathlib.Path, ranks: int, patience: float) -> str:
    """Wait for the end of a job whose logs must move."""
    seen, moved = None, time.time()
    while process.poll() is None:
        time.sleep(0.1)
        sizes = [os.path.getsize(path) for path in sorted(folder.glob("rank*.jsonl"))]
        if sizes != seen:
            seen, moved = sizes, time.time()
        if time.time() - moved > patience + START_SECONDS:
            return "nothing moved for %d s" % (patience + START_SECONDS)
    return "" if process.returncode == 0 else "exit code %d" % process.returncode


def _reports(folder: pathlib.Path, rank: int) -> Dict[str, Dict[str, Any]]:
    """The last report of a rank on each case."""
    path = folder / ("rank%d.jsonl" % rank)
    reports = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            report = decode(line)
        except ValueError:  # a line that a dying process did not finish
            continue
        reports[report["id"]] = report
    return reports


def _tail(path: pathlib.Path, lines: int = 60) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
