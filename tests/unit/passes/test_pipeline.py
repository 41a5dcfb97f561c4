"""The list of passes, how it is run, and what all passes have in common."""

import pytest

from epl.errors import PassError, ProgramError
from epl.ir.program import Node
from epl.passes.base import Pass, check_program, run_passes
from epl.passes.clone import AGGREGATE
from epl.passes.dump import dump_instrument, program_text
from epl.passes.pipeline import default_passes
from epl.passes.rewire import add_controls, rewire
from epl.planner.plan import FIRST, LAST, MIDDLE
from tests.unit.graph_text import expect, fingerprint, parse
from tests.unit.passes.steps import TRAIN, apply, task, training


class Adds(Pass):
    """Adds a node."""

    name = "adds"

    def run(self, program, task):
        return program.replace(nodes=dict(program.nodes, new=Node("new", "NoOp")))


class Fails(Pass):
    name = "fails"

    def run(self, program, task):
        raise KeyError("oops")


class Refuses(Pass):
    name = "refuses"

    def run(self, program, task):
        raise ProgramError("no")


class Wrong(Pass):
    name = "wrong"

    def run(self, program, task):
        return None


class Demands(Adds):
    """Checks before and after."""

    name = "demands"

    def requires(self, program, task):
        if "x" not in program.nodes:
            raise ProgramError("x is needed")

    def ensures(self, program, task):
        if len(program.nodes) > 2:
            raise PassError("too many")


X = parse("x = Const() {value: 1.0}")


def test_passes_run_in_order_and_are_watched():
    seen = []
    result = run_passes(X, task(), [Adds(), Adds()], [lambda *facts: seen.append(facts)])
    assert list(result.nodes) == ["x", "new"] and list(X.nodes) == ["x"]
    assert [(position, one.name, len(old.nodes), len(new.nodes)) for position, one, old, new, _ in seen] == [(0, "adds", 1, 2), (1, "adds", 2, 2)]
    assert all(seconds >= 0 for *_, seconds in seen)


def test_a_failure_names_the_pass_and_those_before_it():
    with pytest.raises(PassError, match="Pass 'fails' failed after adds -> demands: KeyError: 'oops'"):
        run_passes(X, task(), [Adds(), Demands(), Fails()])
    with pytest.raises(PassError, match="Pass 'fails' failed after nothing: KeyError"):
        run_passes(X, task(), [Fails()])


def test_a_refusal_comes_through_as_it_is():
    with pytest.raises(ProgramError, match="^no$"):
        run_passes(X, task(), [Adds(), Refuses()])


def test_the_contract_of_a_pass_is_checked():
    with pytest.raises(PassError, match="Pass 'wrong' returned <class 'NoneType'>; a pass returns a Program"):
        Wrong()(X, task())
    with pytest.raises(ProgramError, match="x is needed"):
        Demands()(parse(""), task())
    with pytest.raises(PassError, match="too many"):
        Demands()(parse("x = Const() {value: 1.0}\ny = Neg(x)"), task())
    with pytest.raises(NotImplementedError):
        Pass()(X, task())


def test_passes_have_names_of_their_own():
    names = [one.name for one in default_passes(task())]
    assert len(set(names)) == len(names) and all(names)


JOBS = [
    task(),
    task(parallel=False),
    task(devices=3, m=2),
    task(ranks=2, rank=1, devices=2),
    task(m=2, in_run=False, part=FIRST),
    task(m=3, in_run=False, part=MIDDLE, ranks=2),
    task(m=2, in_run=False, part=LAST, devices=2),
    task(devices=2, aggregate_at="apply", reduce_method="sum"),
    task(ranks=2, fp16=True),
]
EVERYTHING = """
    m = VarHandleOp() {shape: [2]}
    old = ReadVariableOp(m)
    new = Add(old, rows)
    set = AssignVariableOp(m, new)
    key = Const() {value: "k"}
    summary = ScalarSummary(key, loss)
    shape = Const() {value: [2]}
    noise = RandomUniform(shape) {dtype: float, seed: 1}
    noisy = Mul(noise, y)  # collection=global_sum_objects
    scaled = Mul(loss, rate, ^g)
    end = NoOp(^train, ^set)
"""


@pytest.mark.parametrize("job", JOBS, ids=range(len(JOBS)))
def test_every_pass_keeps_its_input_and_leaves_a_sound_program(job):
    fetches = "loss:0, y:0, x:0, g:0, summary:0, noisy:0, scaled:0"
    program = training(EVERYTHING, fetches=fetches, targets="end", mode="divide" if job.parallel else "same")
    for one in default_passes(job):
        program = apply(one, program, job)
    assert not [n for n in program.nodes.values() if n.op.startswith("Epl")]
    assert len(program.fetches) == 7
    program.to_graph_def()


def test_nothing_is_left_over():
    """Every node of the result is needed: programs do not carry what nobody runs."""
    job = task(devices=2, m=2, ranks=2)
    program = training(EVERYTHING, fetches="loss:0", targets="end")
    for one in default_passes(job):
        program = apply(one, program, job)
    assert program.pruned() is program


# Rewiring.


def test_rewiring_replaces_tensors_and_drops_what_is_unused():
    program = parse("""
        a = Const() {value: 1.0}
        old = Neg(a)
        new = Exp(a)
        b = Add(old, a, ^old)
        c = Neg(old)
        fetches: b:0, old:0
        targets: c
    """)
    before = fingerprint(program)
    result = rewire(program, program.nodes, {("old", 0): ("new", 0)}, keep=lambda n: n.name == "c")
    assert fingerprint(program) == before
    expect(
        result,
        """
        a = Const()
        old = Neg(a)
        new = Exp(a)
        b = Add(new, a, ^old)
        c = Neg(old)
        fetches: b:0, new:0
        targets: c
        """,
    )


def test_edges_and_targets_of_a_lowered_node_go_to_what_took_its_place():
    program = parse("a = Const() {value: 1.0}\nold = EplMerge(a)\nb = Neg(a, ^old, ^a)\nfetches: b:0\ntargets: old, a")
    nodes = {name: node for name, node in program.nodes.items() if name != "old"}
    result = rewire(program, nodes, {("old", 0): ("a", 0)})
    assert result.nodes["b"].controls == ("a",) and result.targets == ("a",)
    check_program(result)


def test_controls_are_added_once():
    nodes = {"a": Node("a", "NoOp", (), ["b"])}
    same = nodes["a"]
    add_controls(nodes, "a", ["b", "a"])
    assert nodes["a"] is same
    add_controls(nodes, "a", ["c", "b", "c"])
    assert nodes["a"].controls == ("b", "c") and same.controls == ("b",)


# Dumps.


def test_a_program_is_written_after_each_pass(tmp_path):
    job = task(devices=2, key="key")
    run_passes(training(), job, default_passes(job), [dump_instrument(str(tmp_path), job)])
    folder = tmp_path / "rank0_key"
    files = sorted(path.name for path in folder.iterdir() if path.suffix == ".txt")
    assert files == ["%02d_%s.txt" % (i, one.name) for i, one in enumerate(default_passes(job))]
    text = (folder / next(name for name in files if name.endswith("_clone.txt"))).read_text()
    line = "EPL_REPLICA_1/y = Mul(EPL_REPLICA_1/x, EPL_REPLICA_1/read) @/device:CPU:1  # FORWARD replica=1 micro_batch=0"
    assert text.startswith("# clone: ") and line in text.splitlines()
    assert not [path for path in folder.iterdir() if path.suffix == ".new"]


def test_the_dump_shows_edges_places_and_the_signature():
    text = program_text(parse(TRAIN + "\ntargets: train\nfetches: loss:0\nfeeds: x (divide)"))
    lines = text.splitlines()
    assert "g = Mul(rows, one)  # FORWARD" in lines
    assert lines[-3:] == ["fetches: loss:0", "targets: train", "feeds: x:0 -> x (divide)"]
    node = Node("a", AGGREGATE, [("b", 1)], ["c"], device="/device:CPU:0", origin="b", replica=1, micro_batch=0, phase="APPLY", taskgraph=2)
    assert program_text(X.replace(nodes={"a": node})).splitlines()[0] == (
        "a = EplAggregate(b:1, ^c) @/device:CPU:0  # APPLY taskgraph=2 replica=1 micro_batch=0"
    )
