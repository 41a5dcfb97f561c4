"""What a program holds while it runs, on graphs small enough to count by hand."""

import tensorflow.compat.v1 as tf

from epl.planner.cost.liveness import Held, held_bytes
from epl.planner.plan import Plan, Task
from epl.profiler.timeline.memory import memory_of, text
from tests.unit.graph_text import parse

CPU = "/device:CPU:0"
ROW = 4 * 8
"""Bytes of a sample of 8 floats."""


def held(lines, rows=1):
    program = parse(lines)
    nodes = {name: node.replace(device=node.device or CPU) for name, node in program.nodes.items()}
    return held_bytes(program.replace(nodes=nodes), program.shape_of, rows)


def test_a_result_lives_until_its_last_reader_has_run():
    found = held(
        """
        x = Placeholder() {shape: [?, 8]}
        a = Square(x)
        b = Sigmoid(a)
        c = Mul(a, b)
        fetches: c
        """,
        rows=10,
    )
    # x is fed; a and b are alive together, and c is written over b, whose last reader it is.
    assert found == {CPU: Held(0.0, 2 * 10 * ROW)}


def test_the_order_of_control_edges_counts():
    together = """
        x = Placeholder() {shape: [4, 8]}
        a = Square(x)
        b = Sigmoid(x, ^%s)
        p = MatMul(a, a) {transpose_b: true}
        q = MatMul(b, b) {transpose_b: true}
        fetches: p, q
        """
    both, one = (held(together % gate)[CPU].peak for gate in ("a", "p"))
    assert both == 4 * ROW * 2 + 4 * 4 * 4
    assert one == 4 * ROW + 2 * 4 * 4 * 4


def test_aliases_share_a_buffer_and_shapes_hold_none():
    found = held(
        """
        x = Placeholder() {shape: [4, 8]}
        a = Square(x)
        same = Identity(a)
        size = Shape(a)
        late = Fill(size, y)
        y = Placeholder() {shape: []}
        b = MatMul(same, same) {transpose_b: true}
        fetches: b, late
        """
    )
    # While `b` is computed: a (with its alias), b; `late` has the bytes of a, whose shape alone it needs, and lies beside both.
    assert found[CPU].peak <= 4 * ROW + 4 * ROW + 4 * 4 * 4 + 8


def test_each_device_and_its_variables():
    found = held(
        """
        v = VarHandleOp() {shape: [8, 8], dtype: float} @/device:CPU:1
        w = ReadVariableOp(v) {dtype: float} @/device:CPU:1
        x = Placeholder() {shape: [?, 8]}
        y = MatMul(x, w) @/device:CPU:1
        fetches: y
        """,
        rows=3,
    )
    assert found["/device:CPU:1"] == Held(8 * 8 * 4.0, 3 * ROW)
    assert found[CPU].peak == 0


def test_the_table_has_a_row_for_each_device():
    rows = [{"rank": 1, "device": "CPU:0", "stages": [1], "variables": 1e6, "peak": 2.5e6, "predicted": 2.4e6}]
    assert text(rows).splitlines()[1].split() == ["rank", "1", "CPU:0", "1", "1.0", "2.5", "2.4"]
    assert text([]) is None


def test_measured_and_predicted_of_a_run():
    program = parse(
        """
        x = Placeholder() {shape: [?, 8]}
        a = Square(x)
        b = Sigmoid(a)
        fetches: b
        """
    )
    program = program.replace(nodes={name: node.replace(device=CPU) for name, node in program.nodes.items()})
    with tf.Graph().as_default():
        tf.import_graph_def(program.to_graph_def(), name="")
        metadata = tf.RunMetadata()
        with tf.Session() as session:
            session.run("b:0", {"x:0": [[1.0] * 8] * 50}, tf.RunOptions(trace_level=tf.RunOptions.SOFTWARE_TRACE), metadata)
    row, = memory_of([(program, {name: name for name in program.nodes}, metadata)], Task(Plan()))
    assert row["predicted"] == 50 * ROW
    assert row["peak"] >= 50 * ROW
    assert (row["rank"], row["device"], row["stages"]) == (0, "CPU:0", [])
