"""Apply groups: an update and what only it needs wait for the group before."""

import pytest

from epl.passes.apply_groups import ApplyGroups
from tests.unit.graph_text import fingerprint
from tests.unit.passes.steps import TRAIN, apply, before, task, training


def trainer(count, norm=False):
    """A gradient, a scaled gradient and an update for each of several variables; with `norm` all scales share a value."""
    lines = [TRAIN[: TRAIN.index("    train =")]]
    for i in range(count):
        lines.append(
            """
    v{0} = VarHandleOp() {{shape: [2], shared_name: v{0}}}
    g{0} = Mul(rows, one)  # backward=1 raw=1/v{0}
    s{0} = Mul(g{0}, {1})
    t{0} = ResourceApplyGradientDescent(v{0}, rate, s{0})""".format(i, "all" if norm else "rate")
        )
    if norm:
        lines.append("    all = AddN(%s)" % ", ".join("g%d" % i for i in range(count)))
    return "\n".join(lines)


def grouped(count, job, **options):
    text = trainer(count, **options)
    targets = ", ".join("t%d" % i for i in range(count))
    program = before(ApplyGroups, training(text=text, targets=targets), job)
    return program, apply(ApplyGroups(), program, job)


def gates(program):
    """Gate -> what it waits for, and node -> the gate that it waits for."""
    named = {n.name: n for n in program.nodes.values() if n.name.startswith("epl_apply_grad")}
    waits = {n.name: c for n in program.nodes.values() if n.name not in named for c in n.controls if c in named}
    return {name: node.controls for name, node in named.items()}, waits


def test_one_group_changes_nothing():
    program, result = grouped(2, task())
    assert fingerprint(result) == fingerprint(program)


def test_groups_of_equal_size():
    _, result = grouped(5, task(apply_groups=2))
    made, waits = gates(result)
    assert made == {"epl_apply_grad_group/0_0": ("t0", "t1", "t2"), "epl_apply_grad_group/0_1": ("t3", "t4", "epl_apply_grad_group/0_0")}
    assert waits == {"s3": "epl_apply_grad_group/0_0", "s4": "epl_apply_grad_group/0_0"}


def test_more_groups_than_variables():
    made, waits = gates(grouped(2, task(apply_groups=5))[1])
    assert len(made) == 2 and waits == {"s1": "epl_apply_grad_group/0_0"}


def test_what_groups_share_does_not_wait():
    _, waits = gates(grouped(3, task(apply_groups=3), norm=True)[1])
    assert waits == {"s1": "epl_apply_grad_group/0_0", "s2": "epl_apply_grad_group/0_1"}


def test_collectives_do_not_wait():
    program, result = grouped(2, task(ranks=2, apply_groups=2))
    added = [n.name for n in program.nodes.values() if n.op.startswith("Epl")]
    assert added and all(result.nodes[name].controls == program.nodes[name].controls for name in added)


def test_each_replica_has_groups_of_its_own():
    made, waits = gates(grouped(2, task(devices=2, apply_groups=2))[1])
    assert set(made) == {"epl_apply_grad_group/%d_%d" % (replica, group) for replica in (0, 1) for group in (0, 1)}
    assert waits["EPL_REPLICA_1/s1"] == "epl_apply_grad_group/1_0"


@pytest.mark.parametrize("part, count", [("first", 0), ("middle", 0), ("last", 2)])
def test_accumulated_gradients_are_applied_in_the_last_run(part, count):
    made, _ = gates(grouped(2, task(m=3, in_run=False, part=part, apply_groups=2))[1])
    assert len(made) == count and all(name.startswith("epl_apply_grad_ga_group/") for name in made)
