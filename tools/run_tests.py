"""Run the tests: first those of single modules, on all cores, then those with jobs of their own.

    python tools/run_tests.py [--all] [pytest's options]

Paths among the options choose tests, which then run in one process.
"""

import os
import subprocess
import sys
import tempfile

UNIT = ("tests/unit",)
WITH_JOBS = (("tests/equivalence",), ("tests/contract", "tests/behaviour"))
"""Each group in a process of its own, beside the others: the cases of the first share processes and use all cores, those of
the second start many processes and wait for them."""
NOTHING_CHOSEN = 5


def command(arguments):
    return [sys.executable, "-m", "pytest"] + list(arguments)


def run_beside(groups):
    """The exit codes of groups that run at the same time; what they print comes one group after the other."""
    outputs = [tempfile.TemporaryFile() for _ in groups[1:]]
    others = [subprocess.Popen(command(group), stdout=output, stderr=output) for group, output in zip(groups[1:], outputs)]
    try:
        codes = [subprocess.call(command(groups[0]))]
        for process, output in zip(others, outputs):
            codes.append(process.wait())
            output.seek(0)
            sys.stdout.buffer.write(output.read())
            sys.stdout.buffer.flush()
        return codes
    finally:
        for process in others:
            if process.poll() is None:
                process.terminate()


def main(arguments):
    options = [a for a in arguments if a != "--all"]
    if "--all" in arguments:
        options = ["-m", "slow or not slow"] + options
    if any(a.startswith("tests") for a in options):
        return subprocess.call(command(options))
    codes = [subprocess.call(command(["-n", str(os.cpu_count() or 1), "--dist", "loadfile"] + options + list(UNIT)))]
    codes += run_beside([options + list(group) for group in WITH_JOBS])
    failed = [code for code in codes if code not in (0, NOTHING_CHOSEN)]
    return failed[0] if failed else min(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
