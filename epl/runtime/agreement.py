"""Whether all ranks are about to run the same program."""

from typing import Any, Dict, Sequence

from epl.errors import DivergenceError
from epl.ir.digest import first_difference
from epl.runtime.compiler import Executable, plan_summary


def refuse_other_programs(control: Any, executable: Executable, fetches: Sequence[str]) -> None:
    """Refuse to start a program that is not the same on all ranks; collective.

    Args:
      control: the control channel.
      executable: what this rank is about to run.
      fetches: what the user's `run` names, for the error.

    Raises DivergenceError that names the first difference.
    """
    task = executable.task
    mine: Dict[str, Any] = {"key": task.key, "summary": plan_summary(task.plan), "nodes": len(executable.lines)}
    others = control.agree("program", mine)
    if all(o["key"] == mine["key"] and o["summary"] == mine["summary"] for o in others):
        return
    for rank, other in enumerate(others):
        for section in ("version", "config", "plan"):
            for name, value in mine["summary"][section].items():
                theirs = other["summary"][section].get(name)
                if theirs != value:
                    raise DivergenceError(
                        "Ranks %d and %d differ in %s '%s': %r here, %r there; start all ranks with the same settings"
                        % (task.rank, rank, section, name, value, theirs)
                    )
    lines = control.agree("program lines", {"lines": executable.lines, "fetches": list(fetches)})
    reference = 0 if task.rank else next(r for r, o in enumerate(others) if o["key"] != mine["key"])
    ours, theirs = first_difference(executable.lines, [tuple(x) for x in lines[reference]["lines"]])
    if ours != theirs:
        what = "the first difference is node '%s' (%s) here and node '%s' (%s) there" % (ours[0], ours[1], theirs[0], theirs[1])
    else:
        what = _other_fetches(fetches, lines[reference]["fetches"])
    raise DivergenceError(
        "Rank %d does not run the program that rank %d runs: %s. Every rank must build the same graph and make the same run calls"
        % (task.rank, reference, what)
    )


def refuse_other_writes(lists: Sequence[Sequence[str]]) -> None:
    """Refuse to go on when ranks have initialised or restored other variables: each holds only some of them.

    Args:
      lists: the variables that each rank has written outside training.

    Raises DivergenceError.
    """
    for rank, written in enumerate(lists):
        missing = sorted(set(lists[0]) ^ set(written))
        if missing:
            here, there = (0, rank) if missing[0] in lists[0] else (rank, 0)
            raise DivergenceError(
                "Variable '%s' was initialised, restored or assigned on rank %d, but not on rank %d. With stages in several processes no rank "
                "has all variables: run the same initialisation and Saver.restore on every rank" % (missing[0], here, there)
            )


def _other_fetches(here: Sequence[str], there: Sequence[str]) -> str:
    """How the fetches of one run differ between two ranks; those of hooks are among them."""
    parts = []
    for only, place in ((set(here) - set(there), "here"), (set(there) - set(here), "there")):
        if only:
            names = ", ".join("'%s'" % name for name in sorted(only)[:5])
            parts.append("%s%s is fetched only %s" % (names, " and more" if len(only) > 5 else "", place))
    if not parts:
        return "the same is fetched or fed in another way"
    return "; ".join(parts) + " (if a hook does it, give all ranks the same hooks)"
