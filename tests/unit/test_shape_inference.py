"""Static shapes: what is inferred must be what a run shows."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.errors import ProgramError
from epl.utils.shape_inference import get_tf_tensor_shape, infer_shape, inferred_shapes
from epl.utils.static_shapes import agree, is_known, refine

SIZELESS = (tf.resource, tf.variant, tf.string)


@pytest.fixture(autouse=True)
def _version_1_control_flow():
    was_enabled = tf.control_flow_v2_enabled()
    tf.disable_control_flow_v2()
    with tf.Graph().as_default():
        yield
    if was_enabled:
        tf.enable_control_flow_v2()


@pytest.fixture(params=[False, True], ids=["reference", "resource"])
def _variables(request):
    were_resources = tf.resource_variables_enabled()
    (tf.enable_resource_variables if request.param else tf.disable_resource_variables)()
    yield
    (tf.enable_resource_variables if were_resources else tf.disable_resource_variables)()


def rows(batch=10, width=10, number=50):
    data = np.random.RandomState(0).rand(number, width).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((data, np.zeros(number, np.int64))).batch(batch).repeat(1)


def next_of(dataset):
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


def minimise(loss):
    return tf.train.MomentumOptimizer(0.001, 0.9).minimize(loss)


def check_against_run(fetches, may_be_unknown=()):
    """Every inferred shape equals the observed ones; every executed tensor got one."""
    graph = tf.get_default_graph()
    metadata = tf.RunMetadata()
    with tf.Session() as sess:
        sess.run([tf.global_variables_initializer(), tf.tables_initializer()])
        infer_shape(graph)
        sess.run(fetches, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    compared = 0
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            for output in node.output:
                try:
                    tensor = graph.get_tensor_by_name("%s:%d" % (node.node_name, output.slot))
                except (KeyError, ValueError):
                    continue  # an op that TensorFlow's optimizer added
                if tensor.dtype.base_dtype in SIZELESS or tensor.op.type in may_be_unknown:
                    continue
                observed = [d.size for d in output.tensor_description.shape.dim]
                assert get_tf_tensor_shape(tensor) == observed, tensor
                compared += 1
    return compared


@pytest.mark.usefixtures("_variables")
def test_mlp_with_a_computed_reshape():
    x, _ = next_of(rows())
    x = tf.layers.dense(x, 16)
    shape = tf.shape(x)
    x = tf.reshape(x, [shape[0] * 4, shape[1] // 4])
    x = tf.reshape(x, tf.stack([shape[0], 16]))
    for units in (16, 16, 10):
        x = tf.layers.dense(x, units)
    loss = tf.reduce_mean(x)
    assert check_against_run([minimise(loss), loss]) >= 40
    assert get_tf_tensor_shape(x) == [10, 10]


@pytest.mark.usefixtures("_variables")
def test_attention_head_of_a_bert_like_model():
    x, _ = next_of(rows(batch=10, width=1024))
    x = tf.reshape(x, [-1, 64, 16])  # 1024 values as 64 tokens of 16
    weights = [tf.get_variable(n, [16, 4, 4]) for n in "qkv"]
    q, k, v = (tf.einsum("BLE,EHD->BLHD", x, w) for w in weights)
    scores = tf.nn.softmax(tf.einsum("BLHD,BMHD->BHLM", q, k))
    context = tf.einsum("BHLM,BMHD->BLHD", scores, v)
    context = tf.reshape(context, [tf.shape(context)[0], tf.shape(context)[1], 16])
    context = tf.transpose(context, [1, 0, 2])[:8]
    loss = tf.reduce_mean(tf.layers.dense(context, 3))
    assert check_against_run([minimise(loss), loss]) > 70
    assert get_tf_tensor_shape(scores) == [10, 4, 64, 64]
    assert get_tf_tensor_shape(context) == [8, 10, 16]


def test_recurrent_network_and_its_gradient():
    x, _ = next_of(rows(batch=5, width=24))
    x = tf.reshape(x, [-1, 3, 8])
    outputs, _ = tf.nn.dynamic_rnn(tf.nn.rnn_cell.BasicLSTMCell(8), x, dtype=tf.float32)
    outputs, _ = tf.nn.dynamic_rnn(tf.nn.rnn_cell.BasicRNNCell(4, name="second"), outputs, dtype=tf.float32)
    loss = tf.reduce_mean(outputs)
    assert check_against_run([minimise(loss), loss], may_be_unknown=("BroadcastGradientArgs",)) > 300
    matmul = tf.get_default_graph().get_tensor_by_name("rnn_1/while/second/MatMul:0")
    assert get_tf_tensor_shape(matmul) == [5, 4]


def test_branch_with_gradient():
    x, _ = next_of(rows())
    x = tf.layers.dense(x, 4)
    x = tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2.0, lambda: tf.layers.dense(x, 4))
    loss = tf.reduce_mean(x)
    # TensorFlow 2.13 does not tell how many axes a broadcast in a branch has.
    unknown = ("BroadcastGradientArgs",) if tf.__version__.startswith(("2.12.", "2.13.")) else ()
    check_against_run([minimise(loss), loss], unknown)
    assert get_tf_tensor_shape(x) == [10, 4]


def test_value_that_grows_round_a_loop_stays_unknown():
    x, _ = next_of(rows(batch=2, width=3))
    invariants = [tf.TensorShape([]), tf.TensorShape([None, 3]), tf.TensorShape([None, 3])]
    _, grown, kept = tf.while_loop(
        lambda i, g, k: i < 3,
        lambda i, g, k: (i + 1, tf.concat([g, k], 0), tf.tanh(k)),
        [tf.constant(0), x, x],
        shape_invariants=invariants,
    )
    after = tf.while_loop(lambda v: tf.reduce_sum(v) < 0.0, lambda v: v + 1.0, [grown], shape_invariants=[tf.TensorShape([None, 3])])
    infer_shape(tf.get_default_graph())
    assert get_tf_tensor_shape(grown) is None
    assert grown.shape.as_list() == [None, 3]
    assert get_tf_tensor_shape(kept) == [2, 3]
    # What follows from a refuted assumption must go with it.
    assert after.shape.as_list() == [None, 3]


def test_two_values_that_swap_round_a_loop():
    x, _ = next_of(rows(batch=2, width=3))
    y = tf.placeholder(tf.float32, [None, 3])
    any_rows = tf.TensorShape([None, 3])
    loop = tf.while_loop(
        lambda i, a, b, c: i < 3,
        lambda i, a, b, c: (i + 1, b, a, c * 2.0),
        [tf.constant(0), x, y, x],
        shape_invariants=[tf.TensorShape([]), any_rows, any_rows, any_rows],
    )
    infer_shape(tf.get_default_graph())
    assert [t.shape.as_list() for t in loop[1:]] == [[None, 3], [None, 3], [2, 3]]


def test_control_flow_of_tensorflow_2():
    tf.enable_control_flow_v2()
    try:
        x, _ = next_of(rows())
        x = tf.reshape(x, [-1, 5])  # 20 rows
        _, y = tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, tf.tanh(v)), [tf.constant(0), x])
        any_rows = tf.TensorShape([None, 5])
        _, grown = tf.while_loop(
            lambda i, v: i < 2, lambda i, v: (i + 1, tf.concat([v, v], 0)), [tf.constant(0), x], shape_invariants=[tf.TensorShape([]), any_rows]
        )
        z = tf.cond(tf.reduce_sum(y) > 0.0, lambda: y * 2.0, lambda: y * 3.0)
    finally:
        tf.disable_control_flow_v2()
    infer_shape(tf.get_default_graph())
    assert [t.shape.as_list() for t in (y, z, grown)] == [[20, 5], [20, 5], [None, 5]]


def shapes_of(dataset):
    tensors = tf.nest.flatten(next_of(dataset))
    infer_shape(tf.get_default_graph())
    return [t.shape.as_list() for t in tensors]


def test_batch_of_known_size():
    assert shapes_of(rows(batch=8)) == [[8, 10], [8]]  # 50 rows: the last batch has 2
    assert shapes_of(rows(batch=7).prefetch(2).shuffle(3)) == [[7, 10], [7]]


def test_fewer_rows_than_a_batch():
    small = tf.data.Dataset.from_tensor_slices(np.zeros((4, 3), np.float32))
    assert shapes_of(small.batch(10)) == [[4, 3]]
    assert shapes_of(small.repeat(2).batch(10)) == [[8, 3]]
    assert shapes_of(small.repeat().batch(10)) == [[10, 3]]
    assert shapes_of(small.take(2).batch(10)) == [[2, 3]]
    assert shapes_of(small.skip(1).batch(10)) == [[3, 3]]
    assert shapes_of(small.concatenate(small).batch(6)) == [[6, 3]]
    assert shapes_of(small.filter(lambda row: row[0] >= 0.0).batch(10)) == [[10, 3]]
    assert shapes_of(tf.data.Dataset.range(3).batch(5)) == [[3]]


def test_functions_after_the_batch():
    assert shapes_of(rows().map(lambda x, y: (tf.reshape(x, [-1, 5]), y + 1))) == [[20, 5], [10]]
    assert shapes_of(tf.data.Dataset.zip((rows(), rows(5)))) == [[10, 10], [10], [5, 10], [5]]
    assert shapes_of(tf.data.Dataset.range(4).flat_map(lambda i: rows())) == [[10, 10], [10]]
    assert shapes_of(tf.data.Dataset.range(4).interleave(lambda i: rows(), cycle_length=2)) == [[10, 10], [10]]


def test_padded_and_fused_batches():
    ragged = tf.data.Dataset.range(1, 9).map(lambda n: tf.fill([n], n))
    assert shapes_of(ragged.padded_batch(4, padded_shapes=[None])) == [[4, None]]
    assert shapes_of(ragged.padded_batch(4, padded_shapes=[9])) == [[4, 9]]


def test_one_shot_iterator_captures_its_dataset_in_a_function():
    x, y = tf.data.make_one_shot_iterator(rows(batch=6)).get_next()
    mapped = tf.data.make_one_shot_iterator(rows(batch=6).map(lambda x, y: tf.reshape(x, [-1, 5]))).get_next()
    infer_shape(tf.get_default_graph())
    assert (x.shape.as_list(), y.shape.as_list()) == ([6, 10], [6])
    assert mapped.shape.as_list() == [12, 5]


def test_iterator_with_two_datasets_has_what_they_agree_on():
    first = rows(batch=6)
    iterator = tf.data.Iterator.from_structure(tf.data.get_output_types(first), tf.data.get_output_shapes(first))
    iterator.make_initializer(first)
    x, _ = iterator.get_next()
    iterator.make_initializer(rows(batch=6))
    assert inferred_shapes(tf.get_default_graph())[x.name] == (6, 10)
    iterator.make_initializer(rows(batch=5))
    assert inferred_shapes(tf.get_default_graph())[x.name] == (None, 10)


def test_iterator_chosen_at_run_time_stays_unknown():
    handle = tf.placeholder(tf.string, [])
    data = rows()
    x, _ = tf.data.Iterator.from_string_handle(handle, tf.data.get_output_types(data), tf.data.get_output_shapes(data)).get_next()
    infer_shape(tf.get_default_graph())
    assert x.shape.as_list() == [None, 10]


def test_placeholder_stays_unknown():
    x = tf.placeholder(tf.float32, [None, 4])
    y = tf.layers.dense(x, 2)
    infer_shape(tf.get_default_graph())
    assert get_tf_tensor_shape(y) is None
    assert y.shape.as_list() == [None, 2]
    assert get_tf_tensor_shape(tf.placeholder(tf.float32)) is None
    assert get_tf_tensor_shape(tf.constant(1.0)) == []


def test_pure_variant_changes_nothing():
    x, _ = next_of(rows())
    y = tf.layers.dense(x, 4)
    before = tf.get_default_graph().as_graph_def(add_shapes=True).SerializeToString(deterministic=True)
    assert inferred_shapes(tf.get_default_graph())[y.name] == (10, 4)
    assert tf.get_default_graph().as_graph_def(add_shapes=True).SerializeToString(deterministic=True) == before


def test_contradiction_is_an_error():
    x, _ = next_of(rows(batch=10))
    tf.identity(x).set_shape([12, 10])
    with pytest.raises(ProgramError, match="contradict the batch size"):
        infer_shape(tf.get_default_graph())


def test_shapes_as_tuples():
    assert agree([(1, 2), (1, 3)]) == (1, None)
    assert agree([(1, 2), (1,)]) is None
    assert agree([(1, 2), None]) is None
    assert agree([]) is None
    assert refine((None, 2), (3, 4)) == (3, 2)
    assert refine(None, (3,)) == (3,)
    assert refine((None,), (3, 4)) == (None,)
    assert is_known(()) and not is_known(None) and not is_known((1, None))
