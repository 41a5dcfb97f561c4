"""Parts: checkpoints of stages in several processes are those of plain TensorFlow."""

import dataclasses

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.errors import ProgramError
from epl.passes.checkpoint import Checkpoint
from epl.passes.parts import Parts
from tests.unit.graph_text import parse
from tests.unit.machine import Plain, user_graph
from tests.unit.passes.steps import upto
from tests.unit.passes.test_cut import on_ranks
from tests.unit.random_programs import Layout, Ranks, taskgraph

LAYOUTS = [Layout(2), Layout(4), Layout(2, 3), Layout(2, 2, near=False), Layout(1, 2)]


def saved(sharded=False, resource=True):
    """A graph with variables in two stages and in none; its names are `init`, `more`, and those of the saver."""
    with user_graph(resource=resource) as index:
        variables = []
        for stage in (0, 1, None):
            with taskgraph(stage):
                value = np.arange(4, dtype=np.float32) + 10 * (stage if stage is not None else 5)
                variables.append(tf.get_variable("v%s" % stage, initializer=tf.constant(value)))
        with taskgraph(1):
            tf.identity(variables[0] + variables[1], name="sum")
        tf.group(tf.global_variables_initializer(), name="init")
        tf.group(*[tf.assign_add(v, tf.ones_like(v)) for v in variables], name="more")
        for v in variables:
            tf.identity(v.read_value(), name="value/" + v.op.name)
        saver = tf.train.Saver(sharded=sharded, max_to_keep=None)
        return index(), saver.saver_def, [v.op.name for v in variables]


def values(runner, names):
    found = [runner.run("value/%s:0" % name) for name in names]
    return [np.asarray(v[0] if isinstance(runner, Plain) else [rank[0] for rank in v]) for v in found]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("sharded, resource", [(False, True), (True, True), (False, False)])
def test_a_checkpoint_of_any_layout_is_a_plain_one(tmp_path, layout, sharded, resource):
    whole, saver, names = saved(sharded, resource)
    prefix = np.array(str(tmp_path / "model"))
    machine = Ranks(whole, layout, 2)
    machine.run("init"), machine.run("more")
    wanted = [np.arange(4) + 1 + base for base in (0, 10, 50)]
    found = [v[0] for v in machine.run(saver.save_tensor_name, {saver.filename_tensor_name: prefix})]
    assert {str(np.asarray(v).astype(str)) for v in found} == {str(prefix)}
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file())[-1] == "model.index"
    reader = tf.train.load_checkpoint(str(prefix))
    for name, value in zip(names, wanted):
        np.testing.assert_array_equal(reader.get_tensor(name), value)
    plain, other = Plain(whole), Ranks(whole, Layout(2), 2)
    for runner in (plain, other):
        runner.run("init"), runner.run(saver.restore_op_name, {saver.filename_tensor_name: prefix})
        for found, value in zip(values(runner, names), wanted):
            np.testing.assert_array_equal(np.broadcast_to(value, found.shape), found)


SAVE = """
    a = VarHandleOp() {shape: [2], shared_name: a}  # taskgraph=0
    b = VarHandleOp() {shape: [2], shared_name: b}  # taskgraph=1
    file = Placeholder() {dtype: string, shape: []}
    ra = ReadVariableOp(a)
    rb = ReadVariableOp(b)
    names = Const() {value: ["a", "b"]}
    slices = Const() {value: ["", ""]}
    save = SaveV2(file, names, slices, ra, rb)
    done = Identity(file, ^save)
    feeds: file
"""


def test_each_stage_writes_its_own_part_and_the_chief_merges():
    found = [upto(Checkpoint, SAVE + "fetches: done", task) for task in on_ranks([(0, 1), (2, 3)], parallel=False)]
    ops = [{n.name: n.op for n in p.nodes.values() if n.op in ("SaveV2", "MergeV2Checkpoints")} for p in found]
    assert [sorted(o) for o in ops] == [["save/epl_merge", "save/epl_part_0"], ["save/epl_part_1"], [], []]
    assert ops[0]["save/epl_merge"] == "MergeV2Checkpoints"


def test_replicas_within_one_process_are_saved_as_they_are():
    program = parse(SAVE + "fetches: done")
    job = on_ranks([(0, 0)], parallel=False)[0]
    whole = dataclasses.replace(job, plan=dataclasses.replace(job.plan, places=()))
    assert Parts()(program, whole) is program


def test_names_that_are_no_constants_are_refused():
    text = SAVE.replace('names = Const() {value: ["a", "b"]}', "names = Placeholder() {dtype: string, shape: [2]}") + "feeds: names\nfetches: done"
    with pytest.raises(ProgramError, match="Node 'save' saves tensors whose names are no constants.*Save with tf.train.Saver"):
        [upto(Parts, text, task) for task in on_ranks([(0, 1)], parallel=False)]


RESTORE = """
    a = VarHandleOp() {shape: [2], shared_name: a}  # taskgraph=0
    b = VarHandleOp() {shape: [2], shared_name: b}  # taskgraph=1
    file = Placeholder() {dtype: string, shape: []}
    names = Const() {value: ["a", "b"]}
    slices = Const() {value: ["", ""]}
    restore = RestoreV2(file, names, slices) {dtypes: [float, float]}
    sa = AssignVariableOp(a, restore)
    sb = AssignVariableOp(b, restore:1)
    all = NoOp(^sa, ^sb)
    feeds: file
    targets: all
"""


def test_each_stage_reads_its_own_variables():
    for task, name in zip(on_ranks([(0, 1)], parallel=False), (b"a", b"b")):
        program = upto(Checkpoint, RESTORE, task)
        node = program.nodes["restore"]
        assert len(node.attr("dtypes").list.type) == 1
        assert list(tf.make_ndarray(program.nodes[node.inputs[1][0]].attr("value").tensor)) == [name]
        assert not any(n.op.startswith("Horovod") for n in program.nodes.values())
