"""Applying passes in tests: every application also checks what holds for all passes."""

from epl.passes.base import check_program
from epl.passes.pipeline import default_passes
from epl.planner.plan import WHOLE, Plan, Task
from tests.unit.graph_text import fingerprint, parse


def task(devices=1, m=1, ranks=1, rank=0, part=WHOLE, parallel=True, stages=(), in_run=True, key="key", **plan):
    """A task on virtual CPU devices; other options are those of `Plan`."""
    layout = Plan(ranks=ranks, devices_per_rank=devices, micro_batches=m, accumulate_in_run=in_run, **plan)
    names = tuple("/device:CPU:%d" % d for d in range(devices))
    return Task(plan=layout, rank=rank, devices=names, stages=stages, parallel=parallel, part=part, key=key)


def apply(one, program, job):
    """Run a pass: the input stays as it is, the result is sound and the same again."""
    before = fingerprint(program)
    result = one(program, job)
    assert fingerprint(program) == before, "the pass %s changed its input" % one.name
    check_program(result)
    result.topological()
    assert list(result.nodes) == list(one(program, job).nodes), "the names of the pass %s are not deterministic" % one.name
    return result


def upto(last, program, job):
    """Parse a text if it is one, and run the passes of a job up to one class of pass."""
    program = parse(program) if isinstance(program, str) else program
    for one in default_passes(job):
        program = apply(one, program, job)
        if isinstance(one, last):
            return program
    raise ValueError(last)


def before(one, program, job):
    """The program that a class of pass is given."""
    program = parse(program) if isinstance(program, str) else program
    for item in default_passes(job):
        if isinstance(item, one):
            return program
        program = apply(item, program, job)
    raise ValueError(one)


TRAIN = """
    x = Placeholder() {shape: [4, 2]}
    w = VarHandleOp() {shape: [2], shared_name: w}
    start = Const() {value: [1.0, 2.0]}
    init = AssignVariableOp(w, start)
    read = ReadVariableOp(w)
    y = Mul(x, read)
    axes = Const() {value: [0, 1]}
    loss = Mean(y, axes)
    zero = Const() {value: 0}
    one = Const() {value: 0.5}  # backward=1 seed=1
    rows = Mean(x, zero)  # backward=1
    g = Mul(rows, one)  # backward=1 raw=1/w
    rate = Const() {value: 0.1}
    train = ResourceApplyGradientDescent(w, rate, g)
"""
"""loss = mean(x * w), trained by gradient descent; fed batches are all of one size."""

DRAWN = TRAIN.replace(
    "x = Placeholder() {shape: [4, 2]}",
    "i = IteratorV2() {output_types: [float], output_shapes: [[?, 2]]}\n    x = IteratorGetNext(i) {output_types: [float], output_shapes: [[?, 2]]}",
)
"""The same with an input that is drawn."""


def training(extra="", fetches="loss:0", targets="train", mode="divide", text=TRAIN):
    """A run of the training program, as the extract pass leaves it."""
    from epl.passes.extract import extract

    whole = parse(text + "\n" + extra)
    return extract(whole, [f for f in fetches.split(", ") + targets.split(", ") if f], ["x:0"], [mode])
