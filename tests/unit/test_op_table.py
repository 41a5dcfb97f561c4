"""What is known of TensorFlow's op types."""

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.core.framework import types_pb2

from epl import compat
from epl.errors import ProgramError
from epl.ir import op_table
from epl.ir.program import Node
from tests.unit.graph_text import parse
from tests.unit.machine import user_graph

OPS = compat.registered_ops()
SETS = {name: ops for name, ops in vars(op_table).items() if isinstance(ops, frozenset) and ops and isinstance(next(iter(ops)), str)}


@pytest.mark.parametrize("name", sorted(SETS))
def test_all_listed_ops_exist(name):
    assert sorted(op for op in SETS[name] if op not in OPS) == []


def test_every_seeded_generator_is_known():
    """Ops with a generator in the kernel repeat their numbers in clones unless the clones' seeds differ."""
    seeded = {op.name for op in OPS.values() if op.is_stateful and {"seed", "seed2"} <= {a.name for a in op.attr}}
    left_out = {name for name in seeded if name.startswith("CudnnRNN") or name in op_table.SHARED_HANDLES or name.endswith("Dataset")}
    assert seeded - left_out == set(op_table.RANDOM)


def test_every_handle_that_gets_a_name_can_have_one():
    named = (op_table.SHARED_HANDLES | op_table.VARIABLES) - op_table.UNNAMED_HANDLES
    assert [name for name in sorted(named) if "shared_name" not in {a.name for a in OPS[name].attr}] == []


def test_every_op_that_returns_a_reference_to_its_first_input_is_known():
    """The reference output of an assignment names the variable again."""
    same = {op.name for op in OPS.values() if op.output_arg and op.output_arg[0].is_ref and op.input_arg and op.input_arg[0].is_ref}
    known = op_table.PASS_THROUGH | op_table.STATE_WRITES | {"RefMerge", "RefNextIteration", "RefExit", "RefSelect", "DebugGradientRefIdentity"}
    assert sorted(name for name in same if name not in known and not op_table.is_apply(name)) == []


def test_every_op_that_writes_a_variable_is_known():
    writers = [name for name in OPS if name.startswith(("Scatter", "ResourceScatter", "Assign")) and "Xla" not in name and name != "ScatterNd"]
    assert [name for name in sorted(writers) if not op_table.writes_state(name) and OPS[name].is_stateful or "Ref" in name] == []
    assert op_table.writes_state("ScatterNdMax") and op_table.writes_state("ResourceScatterNdMin") and op_table.writes_state("RngReadAndSkip")


@pytest.mark.parametrize("op", ["ApplyAdam", "ResourceApplyMomentum", "SparseApplyFtrl", "ResourceSparseApplyAdagradV2"])
def test_apply_ops(op):
    assert op_table.is_apply(op) and op_table.writes_state(op)


@pytest.mark.parametrize("op", ["Apply", "MatMul", "Assign", "ResourceApply"])
def test_other_ops_are_no_apply_ops(op):
    assert not op_table.is_apply(op)


def test_the_variable_behind_a_handle():
    program = parse("""
        w = VariableV2() {shape: [2]}
        one = Const() {value: [1.0, 1.0]}
        p = Const() {value: true}
        set = Assign(w, one)
        read = Identity(set)
        switch = Switch(read, p)
        enter = Enter(switch:1) {frame_name: f}
        y = Neg(enter)
        h = VarHandleOp() {shape: [2]}
        h/set = AssignVariableOp(h, one)
        h/read = ReadVariableOp(h, ^h/set)
    """)
    found = {name: op_table.variable_of(program, name) for name in program.nodes}
    assert {k: v for k, v in found.items() if v} == {"w": "w", "set": "w", "read": "w", "switch": "w", "enter": "w", "h": "h"}
    assert op_table.variable_of(program, "gone") is None


def test_output_types_come_from_the_op_and_its_attributes():
    program = parse("""
        x = Const() {value: [1.0, 2.0]}
        axis = Const() {value: 0}
        parts = Split(axis, x) {num_split: 2}
        many = IdentityN(x, axis)
        u = Unique(axis)
        h = VarHandleOp() {shape: []}
        w = VariableV2() {shape: []}
        epl = EplThing(x, axis)
    """)
    types = {name: op_table.output_types(node, program) for name, node in program.nodes.items() if name != "epl"}
    assert types["parts"] == [1, 1] and types["many"] == [1, 3] and types["u"] == [3, 3] and types["h"] == [20] and types["w"] == [1]
    assert op_table.output_types(program.nodes["epl"].replace(info={"dtype": 1})) == [1, 1]
    assert op_table.dtype_of(program, "many", 1) == types_pb2.DT_INT32
    with pytest.raises(ProgramError, match="Tensor 'many:2' does not exist: the node has 2 outputs"):
        op_table.dtype_of(program, "many", 2)


def test_an_unknown_op_type_is_an_error():
    with pytest.raises(ProgramError, match="Node 'x' has the op type 'NoSuchOp', which this TensorFlow does not know; load the library"):
        op_table.output_types(Node("x", "NoSuchOp"))


@pytest.mark.parametrize(
    "op, is_source",
    [
        ("RandomUniform", True),
        ("StatefulUniform", True),
        ("IteratorGetNext", True),
        ("StackV2", True),
        ("TemporaryVariable", True),
        ("PyFunc", True),
        ("Iterator", False),
        ("MapDataset", False),
        ("MatMul", False),
    ],
)
def test_sources(op, is_source):
    assert op_table.is_source(parse(""), Node("x", op)) == is_source


def test_handles_are_told_from_values():
    program = parse("""
        w = VariableV2() {shape: []}
        h = VarHandleOp() {shape: []}
        x = Const() {value: 1.0}
        both = IdentityN(h, x)
        neg = Neg(x)
        read = ReadVariableOp(h)
    """)
    found = [ref for ref in [(n, 0) for n in program.nodes] + [("both", 1)] if op_table.is_handle(program.nodes[ref[0]], ref[1], program)]
    assert found == [("w", 0), ("h", 0), ("both", 0)]


def functions():
    """A graph with v2 control flow on variables a, b, c and an iterator."""
    with user_graph(v2=True) as index:
        a, b, c = (tf.get_variable(n, [], initializer=tf.zeros_initializer()) for n in "abc")
        p = tf.placeholder(tf.bool, [], "p")

        def write():
            with tf.control_dependencies([b.assign_add(a)]):
                return tf.constant(1.0)

        tf.cond(p, write, lambda: c + 0.0, name="writes_b")
        tf.cond(p, lambda: a + 0.0, lambda: c + 0.0, name="reads")

        def body(i):
            return i + tf.cond(p, write, lambda: 0.0)

        tf.while_loop(lambda i: i < c, body, [0.0], name="loop")
        tf.cond(p, lambda: tf.random_uniform([]), lambda: 0.0, name="random")
        iterator = tf.data.make_one_shot_iterator(tf.data.Dataset.range(3))
        tf.cond(p, iterator.get_next, lambda: tf.constant(0, tf.int64), name="draws")
        return index()


def test_what_functions_write_and_draw():
    program = functions()

    def written(name):
        node = program.nodes[name]
        return [op_table.variable_of(program, *node.inputs[i]) for i in op_table.written_inputs(program, node)]

    assert written("writes_b") == ["b"] and written("loop") == ["b"] and written("reads") == [] and written("random") == []
    assert op_table.writes(program, program.nodes["loop"]) and not op_table.writes(program, program.nodes["reads"])
    sources = {name for name in ("writes_b", "reads", "loop", "random", "draws") if op_table.is_source(program, program.nodes[name])}
    assert sources == {"random", "draws"}
    assert {n.name for n in program.nodes.values() if op_table.draws(program, n)} == {"draws"}
    assert all(op_table.is_call(program, program.nodes[name]) for name in ("reads", "loop", "draws"))
    assert not op_table.is_call(program, program.nodes["a"])


def test_a_function_that_calls_itself_ends():
    program = functions()
    library = type(program.library)()
    library.CopyFrom(program.library)
    for function in library.function:
        for node in function.node_def:
            for value in node.attr.values():
                if value.HasField("func"):
                    value.func.name = function.signature.name
    recursive = program.replace(library=library)
    op_table.written_inputs(recursive, program.nodes["loop"])
    assert not op_table.function_contains(recursive, op_table.called_functions(recursive, program.nodes["loop"])[0], frozenset(["NoSuchOp"]))


def test_stateful_ops():
    program = parse("w = VarHandleOp() {shape: []}\nx = Const() {value: 1.0}")
    assert op_table.is_stateful(program.nodes["w"]) and not op_table.is_stateful(program.nodes["x"])
    assert compat.op_def("NoSuchOp") is None
