"""Fingerprints of programs: what changes them and what does not."""

import os
import subprocess
import sys
import textwrap

import pytest

from epl.ir.digest import fingerprints, first_difference, program_digest
from tests.unit.graph_text import parse

NET = """
    x = Placeholder() {shape: [?]}
    w = VarHandleOp() {shape: []}
    read = ReadVariableOp(w)
    y = Mul(x, read)
    b = VarHandleOp() {shape: []}
    z = Add(y, other)
    other = ReadVariableOp(b)
    stop = NoOp(^z, ^y)
    fetches: z:0
    targets: stop
    feeds: x (divide)
"""


def digest(text):
    program = parse(text)
    return program_digest(program, fingerprints(program))


@pytest.mark.parametrize(
    "old, new",
    [
        ("y = ", "renamed = "),
        ("read = ", "w/read_1 = "),
        ("stop", "group_deps"),
        ("x = Placeholder() {shape: [?]}", "x = Placeholder() {shape: [7]}"),
        ("^z, ^y", "^y, ^z"),
    ],
)
def test_names_of_other_nodes_and_attributes_do_not_count(old, new):
    changed = NET.replace(old, new)
    word = old.split(" = ")[0]
    if " = " in old and "Placeholder" not in old:
        changed = changed.replace("(%s" % word, "(%s" % new.split(" = ")[0]).replace(", %s)" % word, ", %s)" % new.split(" = ")[0])
        changed = changed.replace("^%s" % word, "^%s" % new.split(" = ")[0])
    assert digest(changed) == digest(NET)


@pytest.mark.parametrize(
    "old, new",
    [
        ("Mul(", "AddV2("),
        ("w = ", "v = "),
        ("Mul(x, read)", "Mul(read, x)"),
        ("z:0", "y:0"),
        ("z:0", "z:0, y:0"),
        ("targets: stop", ""),
        ("(divide)", "(each)"),
        ("Add(y, other)", "Add(y, other, ^x)"),
    ],
)
def test_ops_edges_variables_and_the_signature_count(old, new):
    changed = NET.replace(old, new).replace("(w)", "(v)") if old == "w = " else NET.replace(old, new)
    assert digest(changed) != digest(NET)


def test_the_order_of_fetches_counts_and_that_of_targets_does_not():
    two = NET.replace("z:0", "z:0, y:0").replace("targets: stop", "targets: stop, x")
    assert digest(two.replace("z:0, y:0", "y:0, z:0")) != digest(two)
    assert digest(two.replace("stop, x", "x, stop")) == digest(two)


def test_a_loop_has_a_digest():
    text = """
        zero = Const() {value: 0}
        enter = Enter(zero) {frame_name: frame}
        merge = Merge(enter, next)
        stop = Less(merge, merge)
        cond = LoopCond(stop)
        switch = Switch(merge, cond)
        leave = Exit(switch)
        add = %s(switch:1)
        next = NextIteration(add)
        wait = NoOp(^next)
        fetches: leave:0
    """
    assert digest(text % "Neg") == digest(text % "Neg")
    program, changed = parse(text % "Neg"), parse(text % "Abs")
    ours, theirs = first_difference(fingerprints(program), fingerprints(changed))
    assert (ours[:2], theirs[:2]) == (("add", "Neg"), ("add", "Abs"))


def test_the_first_difference_of_two_programs():
    ours, theirs = fingerprints(parse(NET)), fingerprints(parse(NET.replace("Mul(", "AddV2(")))
    left, right = first_difference(ours, theirs)
    assert (left[:2], right[:2]) == (("y", "Mul"), ("y", "AddV2"))
    left, right = first_difference(ours, ours[:-1])
    assert (left[1], right) == (ours[-1][1], ("", "nothing", ""))
    assert first_difference(ours, ours) == (("", "nothing", ""),) * 2


SCRIPT = """
    import dataclasses
    import numpy as np
    import tensorflow.compat.v1 as tf
    from epl.planner.plan import Plan, Task
    from epl.runtime.compiler import Signature, compile_program, traits_of
    from tests.unit.graph_text import fingerprint
    from tests.unit.machine import user_graph

    with user_graph() as index:
        x = tf.placeholder(tf.float32, [None, 3], "x")
        h = tf.layers.batch_normalization(tf.layers.dense(x, 4), training=True)
        loss = tf.reduce_mean(tf.nn.dropout(tf.layers.dense(h, 2), rate=0.5, seed=1), name="loss")
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            tf.train.AdamOptimizer().minimize(loss, name="train")
        whole = index()
    signature = Signature(("loss:0", "train"), ("x:0",), ("divide",))
    plan = Plan(ranks=2, devices_per_rank=2, micro_batches=2, accumulate_in_run=True)
    task = Task(plan, devices=("/device:CPU:0", "/device:CPU:1"))
    executable = compile_program(whole, signature, traits_of(whole, signature), plan, task)
    text = executable.program.to_graph_def().SerializeToString(deterministic=True)
    import hashlib
    print(executable.task.key, executable.written, hashlib.sha1(text).hexdigest())
"""


def test_a_compiled_program_does_not_depend_on_the_hash_seed():
    results = []
    for seed in ("1", "2"):
        env = dict(os.environ, PYTHONHASHSEED=seed, TF_CPP_MIN_LOG_LEVEL="3", PYTHONPATH=os.getcwd())
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
        results.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate() for process in results]
    assert all(process.returncode == 0 for process in results), outputs
    lines = [out.strip().splitlines()[-1] for out, _ in outputs]
    assert lines[0] == lines[1] and len(lines[0].split()[0]) == 17, lines
