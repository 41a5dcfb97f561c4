"""The Bazel files work with Debian's bazel-bootstrap, offline, and run tests with the prepared interpreter."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "bazel-bootstrap"
TARGETS = ("//:test_ranks", "//:test_layouts")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def install_bazel():
    """Install the distribution's Bazel, or skip with the reason why not."""
    if not shutil.which("apt-get") or os.geteuid() != 0:
        pytest.skip("no bazel on PATH, and only root can install it: apt-get install " + PACKAGE)
    environ = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", PACKAGE]):
        done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            pytest.skip("no bazel on PATH, and '%s' failed: %s" % (" ".join(command), done.stdout.decode(errors="replace")[-300:]))


@pytest.fixture(scope="module")
def bazel(tmp_path_factory):
    """A function that runs bazel on this tree, with this interpreter as python3, and returns its output."""
    if not shutil.which("bazel"):
        install_bazel()
    if not shutil.which("bazel"):
        pytest.skip(PACKAGE + " has no command named bazel here")
    output = tmp_path_factory.mktemp("bazel")
    environ = dict(os.environ, PATH=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]))

    def run(command, *arguments):
        line = ["bazel", "--output_user_root=%s" % output, "--batch", command] + list(arguments)
        done = subprocess.run(line, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        text = done.stdout.decode(errors="replace")
        assert done.returncode == 0, text[-5000:]
        return text

    yield run
    subprocess.run(["chmod", "-R", "u+w", str(output)], check=False)  # so that pytest can remove it
    shutil.rmtree(output, ignore_errors=True)


def test_libraries_build(bazel):
    bazel("build", "//:epl", "//:test_support")


def test_every_unit_test_file_has_a_target(bazel):
    targets = {line for line in bazel("query", "tests(//:unit)").splitlines() if line.startswith("//:")}
    files = {"//:" + "_".join(path.relative_to(ROOT / "tests" / "unit").with_suffix("").parts) for path in ROOT.glob("tests/unit/**/test_*.py")}
    assert targets == files


def test_unit_tests_run(bazel):
    output = bazel("test", *TARGETS)
    assert "Executed %d out of %d tests: %d tests pass" % ((len(TARGETS),) * 3) in output
