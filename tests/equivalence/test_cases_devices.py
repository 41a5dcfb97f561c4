"""Which device a node is given: row 102. The programs are compiled for GPUs that need not be there, and not run."""

import pytest
import tensorflow.compat.v1 as tf

from epl.ir import op_table
from epl.ir.program import DIVIDE
from epl.planner.plan import Plan, Task
from epl.runtime.compiler import Signature, compile_program, traits_of
from tests.equivalence.scripts import scalar
from tests.unit.machine import user_graph

CPU = "/device:CPU:0"
LAYOUTS = pytest.mark.parametrize("ranks, devices, m", [(1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2)])


def on_gpus(ranks, devices, m):
    """What the last rank of a layout runs of a model with Python functions and strings, and the names of its GPUs."""
    names = tuple("/device:GPU:%d" % number for number in range(devices))
    with user_graph() as index:
        with tf.device("/job:worker/replica:0/task:0/device:GPU:0"):
            dataset = tf.data.Dataset.from_tensor_slices(["1", "2", "3", "4"])
            dataset = dataset.map(lambda text: (tf.py_function(lambda value: float(value.numpy()), [text], tf.float32), text))
            x, text = tf.data.make_initializable_iterator(dataset.batch(2)).get_next()
            doubled = tf.py_func(lambda value: 2 * value, [tf.reshape(x, [-1])], tf.float32)
            tripled = tf.py_function(lambda value: 3 * value, [doubled], tf.float32)
            joined = tf.strings.join([text, tf.placeholder(tf.string, [None], name="fed"), tf.constant("!")])
            length = tf.cast(tf.strings.length(joined), tf.float32)
            loss = tf.reduce_mean(tf.square(scalar("w", 0) * tf.reshape(tripled, [-1]) - length))
            tf.train.GradientDescentOptimizer(0.01).minimize(loss, name="train")
            tf.identity(joined, name="shown")
        plan = Plan(ranks=ranks, devices_per_rank=devices, micro_batches=m, accumulate_in_run=True)
        signature = Signature(("train", "shown:0"), ("fed:0",), (DIVIDE,))
        program = compile_program(index(), signature, traits_of(index(), signature), plan, Task(plan, ranks - 1, names)).program
    return program, names


@LAYOUTS
def test_row_102_python_functions_stay_on_the_cpu(ranks, devices, m):
    program, names = on_gpus(ranks, devices, m)
    for op in ("PyFunc", "EagerPyFunc", "IteratorGetNext"):
        assert [node.device for node in program.nodes.values() if node.op == op] == [CPU] * devices * m, op
    assert {node.device for node in program.nodes.values() if node.op == "Square"} == set(names), "what need not stay is on the GPUs"
    assert not [node for node in program.nodes.values() if "/job:" in node.device], "nothing goes to another process"


@LAYOUTS
def test_row_102_strings_stay_on_the_cpu(ranks, devices, m):
    program, _ = on_gpus(ranks, devices, m)
    nodes = [node for node in program.nodes.values() if not node.op.startswith("Horovod")]
    strings = set()
    for node in nodes:
        strings |= {(node.name, number) for number, one in enumerate(op_table.output_types(node, program)) if one == tf.string.as_datatype_enum}
    users = [node for node in nodes if strings & set(node.inputs) or any(name == node.name for name, _ in strings)]
    assert {"StringJoin", "StringLength", "Placeholder", "Const", "Identity", "IteratorGetNext"} <= {node.op for node in users}
    assert {node.op: node.device for node in users if node.device != CPU} == {}
