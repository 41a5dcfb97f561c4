"""Communicate: collectives become Horovod's ops."""

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.core.framework import types_pb2

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir.build import Builder
from epl.ir.program import Feed, Program
from epl.passes.agree import FLAG
from epl.passes.communicate import ANCHOR, Communicate, collective_name, ended_program
from epl.passes.pipeline import default_passes
from tests.unit.graph_text import fingerprint, parse
from tests.unit.machine import join, user_graph
from tests.unit.passes.steps import DRAWN, apply, task, training


def program_of(*collectives, dtype=1, text="x = Placeholder() {shape: [2], dtype: %s}\nc = Const() {value: %s, dtype: %s}"):
    """A program with collectives (op, name, inputs, info); `x` is fed and `c` is constant."""
    name = types_pb2.DataType.Name(dtype)[3:].lower()
    program = parse(text % (name, "[true]" if name == "bool" else "[1]", name))
    nodes = dict(program.nodes)
    build = Builder(nodes, "/device:CPU:0")
    fetches = []
    for op, label, inputs, info in collectives:
        build.op(op, label, [(i, 0) for i in inputs], ["x"], info=dict(info, dtype=dtype))
        fetches += [(label, i) for i, _ in enumerate(inputs)]
    return program.replace(nodes=nodes, fetches=fetches)


def communicate(program, job=None):
    result = apply(Communicate(), program, job or task(ranks=2, key="KEY"))
    assert not [n for n in result.nodes.values() if n.op.startswith("Epl")]
    join([result, result]).topological()
    return result


def hvd(result):
    return {n.name: n for n in result.nodes.values() if n.op.startswith("Horovod")}


def test_an_all_reduce():
    result = communicate(program_of(("EplAllReduce", "sum", ["x"], {"scale": 0.5})))
    node = hvd(result)["epl_comm/KEY.000"]
    assert (node.op, node.inputs, node.controls) == ("HorovodAllreduce", (("x", 0),), ("x",))
    values = {key: node.attr(key) for key in ("T", "reduce_op", "prescale_factor", "postscale_factor", "ignore_name_scope", "process_set_id")}
    assert values == {
        "T": A.of_type(1), "reduce_op": A.of_int(1), "prescale_factor": A.of_float(1.0), "postscale_factor": A.of_float(0.5),
        "ignore_name_scope": A.of_bool(True), "process_set_id": A.of_int(0),
    }  # fmt: skip
    assert node.str_attr("_epl_collective") == "epl_comm/KEY.000" and result.fetches == (("epl_comm/KEY.000", 0),)


def test_a_program_without_collectives_is_left_as_it_is():
    program = program_of()
    assert fingerprint(apply(Communicate(), program, task(ranks=2))) == fingerprint(program)


def test_several_tensors_travel_in_a_group():
    result = communicate(program_of(("EplAllReduce", "sum", ["x", "c"], {"scale": 1.0})))
    node = hvd(result)["epl_comm/KEY.000"]
    assert (node.op, node.int_attr("num_tensors")) == ("HorovodGroupedAllreduce", 2)
    assert result.fetches == (("epl_comm/KEY.000", 0), ("epl_comm/KEY.000", 1))


def test_the_largest_value():
    assert hvd(communicate(program_of(("EplAllReduce", "m", ["x"], {"scale": 1.0, "op": "max"}))))["epl_comm/KEY.000"].int_attr("reduce_op") == 4


def test_gather_and_broadcast():
    result = communicate(program_of(("EplAllGather", "g", ["x"], {}), ("EplBroadcast", "b", ["x"], {"root": 1})))
    gather, broadcast = hvd(result).values()
    assert (gather.op, gather.name) == ("HorovodAllgather", "epl_comm/KEY.000")
    assert (broadcast.op, broadcast.name, broadcast.int_attr("root_rank")) == ("HorovodBroadcast", "epl_comm/KEY.001", 1)


@pytest.mark.parametrize("shape, tied", [
    (None, {"shape", "tied"}), ((0, 4), {"tied"}), ((0, None), {"shape", "tied"}), ((2,), set()), ((None,), set()),
])  # fmt: skip
def test_what_may_be_empty_is_not_known_to_be_so(shape, tied):
    """A vector that TensorFlow knows to be empty, the shape of a scalar for one, it takes for a constant: it would run the collective itself."""
    result = communicate(program_of(("EplShare", "s", ["x"], {"shape": shape, "ranks": (0, 1), "name": "s"})))
    name = "epl_comm/KEY.s/"
    slices = {node.name[len(name) :]: node for node in result.nodes.values() if node.op == "Slice"}
    assert slices.keys() == tied
    for node in slices.values():
        assert node.inputs[1] == ("epl_nothing/length", 0) and ANCHOR in result.ancestors([node.name])
    for node in hvd(result).values():
        assert not tied or result.nodes[node.inputs[0][0]].op == "Slice"


def test_names_count_and_do_not_depend_on_the_users_nodes():
    collectives = [("EplAllReduce", "a/b", ["x"], {"scale": 1.0}), ("EplAllReduce", "d", ["x"], {"scale": 1.0, "name": "flag"})]
    assert list(hvd(communicate(program_of(*collectives)))) == ["epl_comm/KEY.000", "epl_comm/KEY.flag"]
    assert collective_name("k", "003") == "epl_comm/k.003" and collective_name("k", "f", "other") == "other/k.f"


@pytest.mark.parametrize("dtype", ["DT_FLOAT", "DT_HALF", "DT_DOUBLE", "DT_INT32", "DT_BFLOAT16", "DT_BOOL", "DT_UINT8", "DT_COMPLEX64", "DT_QUINT8"])
@pytest.mark.parametrize("op, info", [("EplAllGather", {}), ("EplBroadcast", {"root": 0})])
def test_constant_inputs_are_tied_to_the_anchor(op, info, dtype):
    """TensorFlow would compute them once and for all: Horovod's ops look pure to it."""
    number = types_pb2.DataType.Value(dtype)
    result = communicate(program_of((op, "g", ["c"], info), dtype=number))
    (node,) = hvd(result).values()
    source = result.nodes[node.inputs[0][0]]
    assert source.op == ("LogicalOr" if dtype == "DT_BOOL" else "AddV2")
    constant = source.inputs[0][0]
    if dtype in ("DT_BFLOAT16", "DT_COMPLEX64", "DT_QUINT8"):
        assert result.nodes[constant].op == result.nodes[result.fetches[0][0]].op == "Bitcast"
        assert node.attr("T").type == {"DT_BFLOAT16": types_pb2.DT_UINT16, "DT_COMPLEX64": types_pb2.DT_INT64, "DT_QUINT8": types_pb2.DT_UINT8}[dtype]
        constant = result.nodes[constant].inputs[0][0]
    assert constant == "c"
    assert ANCHOR in result.ancestors([source.name]) and result.feeds[-1].node == ANCHOR


@pytest.mark.parametrize("text, anchored", [
    ("y = Neg(c)", True),
    ("y = Neg(x)", False),
    ("w = VarHandleOp() {shape: [1]}\ny = ReadVariableOp(w)", False),
    ("y = PlaceholderWithDefault(c) {shape: [1]}", True),
    ("s = Const() {value: [1]}\ny = RandomUniform(s) {dtype: float}", False),
])  # fmt: skip
def test_only_what_could_be_folded_is_tied(text, anchored):
    base = "x = Placeholder() {shape: [2], dtype: %s}\nc = Const() {value: %s, dtype: %s}\n"
    result = communicate(program_of(("EplAllGather", "g", ["y"], {}), text=base + text))
    (node,) = hvd(result).values()
    assert (node.inputs[0][0] != "y") == anchored


def test_bfloat16_is_reduced_in_float():
    result = communicate(program_of(("EplAllReduce", "s", ["x"], {"scale": 1.0}), dtype=types_pb2.DT_BFLOAT16))
    (node,) = hvd(result).values()
    assert node.attr("T").type == 1 and result.nodes[node.inputs[0][0]].op == "Cast" and result.nodes[result.fetches[0][0]].op == "Cast"


@pytest.mark.parametrize("dtype, wire", [("complex64", types_pb2.DT_FLOAT), ("complex128", types_pb2.DT_DOUBLE)])
def test_complex_numbers_are_reduced_by_their_parts(dtype, wire):
    with user_graph() as index:
        x = tf.placeholder(dtype, [2], "x")
        tf.identity(x, name="y")
        program = index()
    nodes = dict(program.nodes)
    number = tf.as_dtype(dtype).as_datatype_enum
    build = Builder(nodes, "/device:CPU:0")
    build.op("EplAllReduce", "s", [("x", 0), ("y", 0)], info={"dtype": number, "scale": 0.5})
    result = communicate(program.replace(nodes=nodes, fetches=[("s", 0), ("s", 1)], feeds=[Feed(("x", 0), "x")]))
    (node,) = hvd(result).values()
    assert node.attr("T").type == wire
    graph = tf.Graph()
    with graph.as_default(), tf.Session(graph=graph) as session:
        tf.import_graph_def(join([result, result]).to_graph_def(), name="")
        feeds = {"rank%d/x:0" % rank: [1 + 2j, rank * 4j] for rank in range(2)}
        feeds.update({"rank%d/%s:0" % (rank, ANCHOR): 0 for rank in range(2)})
        for fetched in session.run(["rank1/%s:0" % name for name, _ in result.fetches], feeds):
            assert fetched.dtype == dtype and fetched.tolist() == [1 + 2j, 2j]


@pytest.mark.parametrize("op, dtype, error", [
    ("EplAllReduce", "DT_BOOL", r"A tensor of type bool can't be reduced over ranks \(thing\)"),
    ("EplAllReduce", "DT_UINT32", "A tensor of type uint32 can't be reduced over ranks"),
    ("EplAllGather", "DT_FLOAT8_E5M2", r"A tensor of type float8_e5m2 can't travel between ranks \(thing\)"),
])  # fmt: skip
def test_types_that_do_not_travel(op, dtype, error):
    with pytest.raises(ProgramError, match=error):
        communicate(program_of((op, "thing", ["x"], {"scale": 1.0, "root": 0}), dtype=types_pb2.DataType.Value(dtype)))


def lowered(program, job):
    for one in default_passes(job):
        program = apply(one, program, job)
    return program


@pytest.mark.parametrize("options", [dict(), dict(devices=2, m=2), dict(fp16=True), dict(statistics_reduce="first")], ids=str)
def test_all_ranks_have_the_same_collectives(options):
    extra = "m = VarHandleOp() {shape: [2]}\nset = AssignVariableOp(m, rows)\nv = Identity(y)  # collection=global_concat_objects"
    programs = [lowered(training(extra, fetches="v:0", targets="train, set"), task(ranks=3, rank=rank, **options)) for rank in range(3)]
    assert len({tuple((n.name, n.op) for n in p.nodes.values() if n.op.startswith("Horovod")) for p in programs}) == 1


def test_collectives_wait_for_the_gate():
    program = lowered(parse(DRAWN + "\nfetches: loss:0\ntargets: train").pruned(), task(ranks=2))
    waits = {n.name.rpartition(".")[2]: "epl_gate" in n.controls for n in program.nodes.values() if n.op.startswith("Horovod")}
    assert waits == {FLAG: False, "000": True}


def test_a_rank_whose_input_has_ended_answers_the_others():
    waiting = lowered(parse(DRAWN + "\ntargets: train").pruned(), task(ranks=2, key="KEY"))
    program = ended_program("KEY", waiting)
    assert isinstance(program, Program)
    (node,) = hvd(program).values()
    assert node.name == "epl_ended/KEY.epl_agree" and program.fetches == ((node.name, 0),) and program.feeds[0].node == ANCHOR
    names = [n.rpartition("/")[2] for n in hvd(waiting)]
    assert node.name.rpartition("/")[2] in names
    assert ANCHOR in program.ancestors([node.name]), "it must not be folded"
