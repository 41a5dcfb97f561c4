"""Whether all ranks are about to run the same program."""

from typing import Any, Dict

from epl.errors import DivergenceError
from epl.ir.digest import first_difference
from epl.runtime.compiler import Executable, plan_summary


def refuse_other_programs(control: Any, executable: Executable) -> None:
    """Refuse to start a program that is not the same on all ranks; collective.

    Raises DivergenceError that names the first difference.
    """
    task = executable.task
    mine: Dict[str, Any] = {"key": task.key, "summary": plan_summary(task.plan), "nodes": len(executable.lines)}
    others = control.agree("program", mine)
    if all(o["key"] == mine["key"] and o["summary"] == mine["summary"] for o in others):
        return
    for rank, other in enumerate(others):
        for section in ("config", "plan"):
            for name, value in mine["summary"][section].items():
                theirs = other["summary"][section].get(name)
                if theirs != value:
                    raise DivergenceError(
                        "Ranks %d and %d differ in %s '%s': %r here, %r there; start all ranks with the same settings"
                        % (task.rank, rank, section, name, value, theirs)
                    )
    lines = control.agree("program lines", {"lines": executable.lines})
    reference = 0 if task.rank else next(r for r, o in enumerate(others) if o["key"] != mine["key"])
    ours, theirs = first_difference(executable.lines, [tuple(x) for x in lines[reference]["lines"]])
    raise DivergenceError(
        "Rank %d does not run the program that rank %d runs: the first difference is node '%s' (%s) here and node '%s' (%s) there. "
        "Every rank must build the same graph and make the same run calls" % (task.rank, reference, ours[0], ours[1], theirs[0], theirs[1])
    )
