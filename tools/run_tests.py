"""Run the tests: those with jobs of their own one after the other, the rest on all cores.

    python tools/run_tests.py [--all] [pytest's options]

Paths among the options choose tests, which then run in one process.
"""

import os
import subprocess
import sys

ONE_AFTER_THE_OTHER = ("tests/contract", "tests/behaviour", "tests/equivalence")
"""Their cases share processes, use all cores and some of them measure time."""
SIDE_BY_SIDE = ("tests/unit",)
NOTHING_CHOSEN = 5


def pytest(arguments):
    return subprocess.call([sys.executable, "-m", "pytest"] + list(arguments))


def main(arguments):
    options = [a for a in arguments if a != "--all"]
    if "--all" in arguments:
        options = ["-m", "slow or not slow"] + options
    if any(a.startswith("tests") for a in options):
        return pytest(options)
    codes = [
        pytest(["-n", str(os.cpu_count() or 1), "--dist", "loadfile"] + options + list(SIDE_BY_SIDE)),
        pytest(options + list(ONE_AFTER_THE_OTHER)),
    ]
    failed = [code for code in codes if code not in (0, NOTHING_CHOSEN)]
    return failed[0] if failed else min(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
