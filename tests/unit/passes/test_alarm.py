"""Alarm: the loop that tells whether a step lives."""

import pytest

from epl.passes.agree import GATE
from epl.passes.alarm import FLAG, QUEUE, Alarm
from epl.passes.communicate import Communicate
from tests.unit.graph_text import fingerprint, parse
from tests.unit.passes.steps import DRAWN, apply, before, task
from tests.unit.passes.test_cut import TWO, cloned, hvd, in_two_stages, on_ranks

SCOPE = "epl_alarm/key/"


def test_the_loop_lives_as_long_as_the_collectives():
    for program in cloned(TWO, m=2, last=Alarm):
        waiting = sorted(hvd(program))
        assert len(waiting) == 3
        assert all(SCOPE + "begun" in program.nodes[name].controls for name in waiting)
        assert sorted(program.nodes[SCOPE + "last"].controls) == sorted(program.nodes[SCOPE + "ended"].controls) == waiting
        assert program.nodes[SCOPE + "begun"].inputs[0] == (FLAG, 0) and program.nodes[SCOPE + "last"].inputs[0] == (QUEUE, 0)
        assert program.nodes[SCOPE + "taken"].op == "QueueDequeueV2" and program.nodes[SCOPE + "turn"].inputs[1] == (SCOPE + "again", 0)
        assert {SCOPE + name for name in ("begun", "ended", "last", "exit")} <= set(program.targets)


def test_it_begins_when_all_have_data():
    # Then a step that ends because there is none leaves no cancelled wait, of which TensorFlow warns.
    for program in cloned(in_two_stages(DRAWN) + "targets: train", last=Alarm, m=2):
        gate = program.nodes[GATE]
        assert all(GATE in program.nodes[SCOPE + name].controls for name in ("begun", "handle", "start"))
        agreement = next(name for name in hvd(program) if name in program.ancestors([gate.name]))
        assert agreement not in program.nodes[SCOPE + "ended"].controls and SCOPE + "begun" not in program.nodes[agreement].controls


@pytest.mark.parametrize("collectives, added", [("a", False), ("a, b", True)])
def test_one_collective_of_replicas_needs_none(collectives, added):
    text = "x = Placeholder() {shape: [2]}\na = HorovodAllreduce(x)\nb = HorovodAllreduce(x)\nfeeds: x\ntargets: "
    assert (QUEUE in apply(Alarm(), parse(text + collectives), task(ranks=2)).nodes) == added


def test_what_does_not_run_is_not_waited_for():
    text = """
        x = Placeholder() {shape: [2]}
        p = Placeholder() {dtype: bool, shape: []}
        s = Switch(x, p)
        inside = Neg(s:1)
        joined = Merge(inside, s:0)
        a = Neg(x)
        b = Neg(x)
        unused = Neg(x)
        feeds: x, p
        targets: a, b, joined
    """
    program = parse(text)
    program = program.replace(nodes={k: n.replace(op="HorovodAllreduce") if n.op == "Neg" else n for k, n in program.nodes.items()})
    program = apply(Alarm(), program, task(ranks=2))
    assert program.nodes[SCOPE + "last"].controls == ("a", "b")


def test_without_collectives_there_is_none():
    program = before(Alarm, TWO, task())
    assert fingerprint(apply(Alarm(), program, task())) == fingerprint(program)


def test_all_ranks_get_it():
    for job in on_ranks([(0, 1), (2, 3)]):
        assert QUEUE in apply(Alarm(), before(Alarm, TWO, job), job).nodes
    assert Communicate.name != Alarm.name
