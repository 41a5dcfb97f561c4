"""What a pass is, and how passes are run one after another."""

import time
from typing import Callable, List, Sequence, Tuple

from epl.errors import EplError, PassError
from epl.ir.program import Program
from epl.planner.plan import Task


class Pass:
    """A pure function of a program and a task.

    A subclass gives `name` and `run`; `requires` and `ensures` raise when the
    program given or made breaks the contract of the pass. The input program is
    never changed.
    """

    name = ""

    def run(self, program: Program, task: Task) -> Program:
        raise NotImplementedError

    def requires(self, program: Program, task: Task) -> None:
        """Check the input."""

    def ensures(self, program: Program, task: Task) -> None:
        """Check the result."""

    def __call__(self, program: Program, task: Task) -> Program:
        self.requires(program, task)
        result = self.run(program, task)
        if not isinstance(result, Program):
            raise PassError("Pass '%s' returned %r; a pass returns a Program" % (self.name, type(result)))
        self.ensures(result, task)
        return result


Instrument = Callable[[int, Pass, Program, Program, float], None]
"""Called after each pass with (position, pass, before, after, seconds)."""


def run_passes(program: Program, task: Task, passes: Sequence[Pass], instruments: Sequence[Instrument] = ()) -> Program:
    """Run passes in order.

    Raises:
      EplError: as raised by a pass for a program that can't be made to obey.
      PassError: a pass failed otherwise; the message names the passes before it.
    """
    done: List[str] = []
    for position, item in enumerate(passes):
        start = time.perf_counter()
        try:
            result = item(program, task)
        except EplError:
            raise
        except Exception as error:
            history = " -> ".join(done) or "nothing"
            raise PassError("Pass '%s' failed after %s: %s: %s" % (item.name, history, type(error).__name__, error)) from error
        for instrument in instruments:
            instrument(position, item, program, result, time.perf_counter() - start)
        program = result
        done.append(item.name)
    return program


def check_program(program: Program) -> None:
    """Raise `PassError` unless every edge, fetch, target and feed names an existing node."""
    nodes = program.nodes
    missing: List[Tuple[str, str]] = []
    for node in nodes.values():
        missing.extend((node.name, s) for s, _ in node.inputs if s not in nodes)
        missing.extend((node.name, s) for s in node.controls if s not in nodes)
    missing.extend(("a fetch", r[0]) for r in program.fetches if r[0] not in nodes)
    missing.extend(("a target", t) for t in program.targets if t not in nodes)
    missing.extend(("a feed", f.node) for f in program.feeds if f.node not in nodes)
    if missing:
        raise PassError("Dangling edges: %s" % ", ".join("%s needs '%s'" % pair for pair in missing[:5]))
