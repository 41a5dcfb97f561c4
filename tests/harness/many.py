"""Runs many cases in one process, or in each rank of one mpirun: python -m tests.harness.many JOB.json

All ranks take the same cases in the same order and append JSON lines to `rank<r>.jsonl`
in the job's folder: {"id", "status": "start"}, then {"id", "status": "ok", "result"} or
{"id", "status": "error", "type", "error", "traceback"}. After an error a rank waits until
the others are through with the case as well; if they are not soon, they hang in it, and
the rank ends the whole job. The parent (`tests.harness.pool`) starts a new one with what is left.
"""

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any, Dict

from tests.harness.layouts import Layout
from tests.harness.results import decode, encode

GRACE = 20.0
ABORTED = 70


def rank_and_ranks() -> tuple:
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)), int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))


def resolve(name: str) -> Any:
    """The function named "module:function"."""
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def log_of(folder: str, rank: int) -> str:
    return os.path.join(folder, "rank%d.jsonl" % rank)


def run_one(case: Dict[str, Any], rank: int) -> Dict[str, Any]:
    """Run one case; never raises."""
    from tests.harness.context import Run

    started = time.time()
    try:
        run = Run(Layout(*case["layout"]), rank, case["plain"], case["folder"])
        result = resolve(case["function"])(run, **case["kwargs"])
        return {"status": "ok", "result": result, "seconds": time.time() - started}
    except BaseException as error:
        return {
            "status": "error",
            "type": type(error).__name__,
            "error": str(error),
            "traceback": traceback.format_exc(),
            "seconds": time.time() - started,
        }


def others_are_through(folder: str, case: str, ranks: int) -> bool:
    """Wait until every rank has reported on the case; False if that takes too long."""
    end = time.time() + GRACE
    while time.time() < end:
        if all(_has_reported(log_of(folder, rank), case) for rank in range(ranks)):
            return True
        time.sleep(0.1)
    return False


def _has_reported(path: str, case: str) -> bool:
    if not os.path.exists(path):
        return False
    with open(path) as lines:
        heads = [line[:500] for line in lines]
    return any('"id": %s,' % json.dumps(case) in head and '"status": "start"' not in head for head in heads)


def main(path: str) -> None:
    with open(path) as file:
        job = decode(file.read())
    rank, ranks = rank_and_ranks()
    with open(log_of(job["folder"], rank), "a") as log:
        for case in job["cases"]:
            _write(log, {"id": case["id"], "status": "start"})
            faulthandler.dump_traceback_later(case["timeout"], exit=True)
            outcome = run_one(case, rank)
            try:
                _write(log, dict({"id": case["id"]}, **outcome))
            except TypeError as error:
                outcome = {"status": "error", "type": "TypeError", "error": str(error), "traceback": ""}
                _write(log, dict({"id": case["id"]}, **outcome))
            faulthandler.cancel_dump_traceback_later()
            if outcome["status"] == "error" and ranks > 1 and not others_are_through(job["folder"], case["id"], ranks):
                os._exit(ABORTED)
        _write(log, {"id": "", "status": "done"})
    if "epl" in sys.modules:
        faulthandler.dump_traceback_later(GRACE, exit=True)
        sys.modules["epl"].shutdown()
        faulthandler.cancel_dump_traceback_later()


def _write(log: Any, line: Dict[str, Any]) -> None:
    log.write(encode(line) + "\n")
    log.flush()


if __name__ == "__main__":
    main(sys.argv[1])
