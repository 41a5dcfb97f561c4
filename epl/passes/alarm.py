"""Alarm: a way to see from outside that a step has failed while it waits for other ranks.

When an op fails, TensorFlow starts nothing more of the step, but waits for what is under
way. Horovod's ops can't be cancelled: a receive whose sender needs something of the
failed rank never ends, and neither does the step. So the step gets an op that TensorFlow
does cancel, the dequeuing of a queue in a loop. While the step lives the loop swallows
each `True` that is put into the queue; what stays there tells that the step has failed.

The loop takes a `False` as its end, which the step gives when all its collectives are
done. A flag says that they may have begun: before, nobody answers and nobody need.
`epl.runtime.alarm` asks and judges.
"""

from typing import Dict, List

from epl.ir import attrs as A
from epl.ir.build import DT_INT32, Builder
from epl.ir.endings import Endings
from epl.ir.program import APPLY, Feed, Node, Program, Ref
from epl.passes.base import Pass
from epl.passes.rewire import add_controls
from epl.planner.plan import Task

ALARM = "epl_alarm/"
"""With this begin the names of all that the pass adds."""

QUEUE = ALARM + "queue"
FLAG = ALARM + "flag"
_BOOL, _RESOURCE = 10, 20
_MOST = 1 << 20
"""Elements that the queue can hold: it is never full."""


class Alarm(Pass):
    """Add the loop to what talks to other ranks."""

    name = "alarm"

    def run(self, program: Program, task: Task) -> Program:
        waiting = _waiting(program)
        if not waiting or len(waiting) == 1 and not task.spread:
            return program  # replicas that have no other collective bring this one to its end
        nodes = dict(program.nodes)
        build = Builder(nodes, task.host, APPLY)
        scope = "%s%s/" % (ALARM, task.key)
        gate = program.agreement.gate if program.agreement is not None else None
        first = [gate] if gate else []
        queue, flag, yes, no = _queue(build), _flag(build), _constant(build, True), _constant(build, False)
        begun = build.assign(scope + "begun", flag, yes, _BOOL, first)
        for name in waiting:
            add_controls(nodes, name, [begun])
        ended = build.assign(scope + "ended", flag, no, _BOOL, waiting)
        last = _put(build, scope + "last", queue, no, waiting)
        targets = (begun, ended, last, _loop(build, scope, queue, yes, first))
        return program.replace(nodes=nodes, targets=program.targets + targets)


def _waiting(program: Program) -> List[str]:
    """The collectives of a run, without that in which the ranks agree that they have data, and those that may not run."""
    roots = [ref[0] for ref in program.fetches] + list(program.targets)
    run = program.ancestors(roots)
    gate = program.agreement.gate if program.agreement is not None else None
    before = program.ancestors([gate]) if gate else {}
    found = [n.name for n in program.nodes.values() if n.op.startswith("Horovod") and n.name in run and n.name not in before]
    if not found:
        return found
    # What waits for a branch that is not taken never runs: the loop would have no end.
    endings = Endings(program, program.topological())
    return [name for name in found if not endings.in_branch(name)]


def _loop(build: Builder, scope: str, queue: Ref, yes: Ref, first: List[str]) -> str:
    """Swallow elements of the queue until one is False; returns the node with which that ends."""
    frame = {"frame_name": A.of_str(scope + "loop"), "parallel_iterations": A.of_int(1)}
    handle = build.op("Enter", scope + "handle", [queue], first, T=A.of_type(_RESOURCE), is_constant=A.of_bool(True), **frame)
    start = build.op("Enter", scope + "start", [yes], first, T=A.of_type(_BOOL), is_constant=A.of_bool(False), **frame)
    again = (scope + "again", 0)
    turn = build.op("Merge", scope + "turn", [start, again], T=A.of_type(_BOOL), N=A.of_int(2))
    taken = build.op("QueueDequeueV2", scope + "taken", [handle], [turn[0]], component_types=A.of_types([_BOOL]), timeout_ms=A.of_int(-1))
    goes_on = build.op("LoopCond", scope + "goes_on", [taken])
    build.op("Switch", scope + "switch", [taken, goes_on], T=A.of_type(_BOOL))
    build.op("NextIteration", again[0], [(scope + "switch", 1)], T=A.of_type(_BOOL))
    return build.op("Exit", scope + "exit", [(scope + "switch", 0)], T=A.of_type(_BOOL))[0]


def _queue(build: Builder) -> Ref:
    return build.op(
        "FIFOQueueV2", QUEUE, component_types=A.of_types([_BOOL]), shapes=A.AttrValue(list=A.AttrValue.ListValue(shape=[A.of_shape(()).shape])),
        capacity=A.of_int(_MOST), container=A.of_str(""), shared_name=A.of_str(QUEUE),
    )  # fmt: skip


def _flag(build: Builder) -> Ref:
    return build.variable(FLAG, _BOOL, ())


def _constant(build: Builder, value: bool) -> Ref:
    return build.const(ALARM + ("yes" if value else "no"), value, _BOOL)


def _put(build: Builder, name: str, queue: Ref, value: Ref, controls: List[str]) -> str:
    return build.op("QueueEnqueueV2", name, [queue, value], controls, Tcomponents=A.of_types([_BOOL]), timeout_ms=A.of_int(-1))[0]


# What is run beside the steps, on the same queue and flag.


def ask_program() -> Program:
    """Put a True into the queue."""
    build = _beside()
    return Program(build.nodes, targets=[_put(build, ALARM + "ask", _queue(build), _constant(build, True), [])])


def look_program() -> Program:
    """The number of elements in the queue, and the flag."""
    build = _beside()
    size = build.op("QueueSizeV2", ALARM + "size", [_queue(build)])
    return Program(build.nodes, [size, build.read(ALARM + "read", _flag(build), _BOOL)])


def reset_program() -> Program:
    """Take as many elements from the queue as are fed, and lower the flag."""
    build = _beside()
    count = build.op("Placeholder", ALARM + "count", dtype=A.of_type(DT_INT32), shape=A.of_shape(()))
    taken = build.op(
        "QueueDequeueManyV2", ALARM + "take", [_queue(build), count], component_types=A.of_types([_BOOL]), timeout_ms=A.of_int(-1)
    )  # fmt: skip
    lowered = build.assign(ALARM + "lower", _flag(build), _constant(build, False), _BOOL)
    return Program(build.nodes, feeds=[Feed(count, count[0])], targets=[taken[0], lowered])


def _beside() -> Builder:
    nodes: Dict[str, Node] = {}
    return Builder(nodes, "/device:CPU:0", APPLY)
