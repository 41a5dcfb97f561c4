"""Schedule: gates enforce the order of a schedule's actions, and nothing else waits for them."""

import pytest

from epl.passes.cut import RECEIVE, TRANSFERS
from epl.passes.pipeline import default_passes
from epl.passes.schedule import GATE, Scheduling
from epl.planner.schedules import make_schedule
from tests.unit.graph_text import parse
from tests.unit.machine import join
from tests.unit.passes.test_cut import on_ranks
from tests.unit.random_programs import SCHEDULES, Block, Layout, Spec, compare, graph_of

STAGE = """
    w{0} = VarHandleOp() {{shape: [2], shared_name: w{0}}}  # taskgraph={0}
    read{0} = ReadVariableOp(w{0})  # taskgraph={0}
    y{0} = Mul({1}, read{0})  # taskgraph={0}
    z{0} = Tanh(y{0})  # taskgraph={0}
"""
GRADIENT = """
    t{0} = TanhGrad(z{0}, {2})  # backward=1 taskgraph={0}
    v{0} = Mul({1}, t{0})  # backward=1 taskgraph={0}
    g{0} = Mean(v{0}, zero)  # backward=1 raw=1/w{0} taskgraph={0}
    train{0} = ResourceApplyGradientDescent(w{0}, rate, g{0})
"""
EARLIER = "d{0} = Mul(t{0}, read{0})  # backward=1 taskgraph={0}"
"""The gradient that the stage before is given."""


def pipeline(stages):
    """Training of y = tanh(x * w0) and so on; the names of the first letter are told by `SLOTS`."""
    forward = [STAGE.format(i, "z%d" % (i - 1) if i else "x") for i in range(stages)]
    backward = []
    for i in reversed(range(stages)):
        backward.append(GRADIENT.format(i, "z%d" % (i - 1) if i else "x", "d%d" % (i + 1) if i < stages - 1 else "one"))
        backward.append(EARLIER.format(i) if i else "")
    return "\n".join(
        ["x = Placeholder() {shape: [?, 2]}  # taskgraph=0", "zero = Const() {value: 0}", "rate = Const() {value: 0.1}"]
        + forward
        + ["one = OnesLike(z%d)  # backward=1 seed=1 taskgraph=%d" % (stages - 1, stages - 1)]
        + backward
        + ["feeds: x (divide)", "targets: " + ", ".join("train%d" % i for i in range(stages))]
    )


SLOTS = {"y": "F", "z": "F", "t": "B", "d": "B", "v": "W", "g": "W"}


def compiled(text, stages, name, m, until=None, **layout):
    programs = []
    whole = parse(text)
    for job in on_ranks([tuple(range(stages))], m=m, schedule=name, **layout):
        program = whole
        for one in default_passes(job):
            program = one(program, job)
            if until is not None and isinstance(one, until):
                break
        programs.append((job, program))
    return programs


def actions_of(program, stage, split):
    """(kind, micro-batch) -> the nodes of an action, found by the names of the text."""
    found = {}
    for node in program.nodes.values():
        kind = SLOTS.get(node.origin[:-1]) if node.origin[-1:].isdigit() else None
        if kind is None or node.op in TRANSFERS or node.op.startswith("Epl") or node.micro_batch is None:
            continue
        # What the first stage computes backward, no earlier one waits for.
        kind = "W" if kind == "B" and stage == 0 else kind
        found.setdefault((kind if split or kind == "F" else "B", node.micro_batch), set()).add(node.name)
    return found


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_action_waits_for_the_one_before(name, stages):
    text = pipeline(stages)
    for m in range(2, 9):
        schedule = make_schedule(name, stages, m)
        for stage, (_, program) in enumerate(compiled(text, stages, name, m, Scheduling)):
            found = actions_of(program, stage, schedule.split_backward)
            order = [found[a.kind, a.micro_batch] for a in schedule.devices[stage] if (a.kind, a.micro_batch) in found]
            assert len(order) == len(found) >= 2 * m
            for earlier, later in zip(order, order[1:]):
                ends = {n for n in earlier if not any(c in earlier for c, _ in program.consumers.get(n, ()))}
                for name_of in later:
                    node = program.nodes[name_of]
                    # What waits for the rest of its own action waits for the gate with it.
                    if not any(s in later for s in [s for s, _ in node.inputs] + list(node.controls)):
                        assert ends <= program.ancestors([name_of]).keys(), "stage %d, m %d: %s does not wait for %s" % (stage, m, name_of, ends)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_transfer_is_gated(name):
    for _, program in compiled(pipeline(3), 3, name, 4, Scheduling):
        gates = {n for n in program.nodes if n.startswith(GATE)}
        assert len(gates) == len([n for n in gates if program.nodes[n].op == "NoOp"]) >= 7
        for node in program.nodes.values():
            if node.op in TRANSFERS:
                assert not gates & set(node.controls), node
            if node.op == RECEIVE:
                assert not gates & program.ancestors([node.name]).keys(), node


def test_what_is_fed_is_not_gated():
    """How much it is may be needed by all stages before the first of them goes backward."""
    _, program = compiled(pipeline(2), 2, "PreferBackward", 4, Scheduling)[0]
    fed = [node for node in program.nodes.values() if node.origin in {feed.node for feed in program.feeds} | {"x"} and node.micro_batch]
    assert fed and not [node for node in fed if any(control.startswith(GATE) for control in node.controls)]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_ranks_never_wait_for_each_other_in_a_circle(name, stages):
    text = pipeline(stages)
    for m in range(1, 9):
        join([program for _, program in compiled(text, stages, name, m)]).topological()


@pytest.mark.parametrize("layout", [dict(m=1), dict(m=4, parallel=False)], ids=str)
def test_one_micro_batch_has_no_gates(layout):
    for _, program in compiled(pipeline(2), 2, "PreferBackward", until=Scheduling, **layout):
        assert not [n for n in program.nodes if n.startswith(GATE)]


LOOPS = ("loop", "cond", "nested")


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("name", ["PreferForward", "ZeroBubbleH1"])
def test_gates_are_alive(name, kind):
    """A gate that waits for a node of a branch that is not taken, or of a loop, would never open."""
    from epl.runtime.compiler import Signature, compile_program, traits_of

    spec = Spec(2, (Block(kind, 0), Block(kind, 1)))
    whole, _ = graph_of(spec, 2)
    signature = Signature(("loss:0", "train"), ("x:0", "ids:0", "y:0", "flag:0", "scale:0"), ("divide",) * 3 + ("same",) * 2)
    for job in on_ranks([(0, 1)], m=3, schedule=name):
        program = compile_program(whole, signature, traits_of(whole, signature), job.plan, job).program
        facts, gates = program.facts, [n for n in program.nodes.values() if n.name.startswith(GATE)]
        assert len(gates) >= 5
        for gate in gates:
            for source in gate.controls:
                origin = program.nodes[source].origin
                assert not facts.endings.in_branch(origin), (gate.name, source)
                assert origin not in facts.frames or program.nodes[source].op == "Exit", (gate.name, source)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages, layout", [(2, (2, 1, 4)), (3, (1, 3, 3))], ids=str)
def test_the_same_training_in_any_order(name, stages, layout):
    blocks = [Block("dense", s, 0, 3) for s in range(stages)] + [Block("loop", stages - 1), Block("tied", stages - 1, 0, 2)]
    compare(Spec(stages, tuple(blocks), "momentum", clip=True), Layout(*layout, schedule=name))
