"""The closed formula of every rule, written out."""

import dataclasses

import pytest
import tensorflow.compat.v1 as tf

from epl import compat
from epl.planner import op_costs
from epl.planner.op_costs import BYTE_RULES, FLOP_RULES, OpCost, TensorSpec, op_cost, op_flops, plain_attrs, tensor_bytes, total

B, L, M, K, N = 4, 6, 8, 5, 7
H, W, C, F = 9, 10, 3, 16  # image and filters


def specs(*shapes, dtype="float32"):
    return [TensorSpec(s, dtype) for s in shapes]


def flops(op_type, inputs, outputs, **attrs):
    return op_flops(op_type, attrs, specs(*inputs), specs(*outputs))


# --- Costs as values -----------------------------------------------------------------------


def test_costs_add_up_and_scale():
    a, b = OpCost(1, 10, 100), OpCost(2, 20, 200)
    assert a + b == OpCost(3, 30, 300)
    assert a * 3 == 3 * a == OpCost(3, 30, 300)
    assert a * 0.5 == OpCost(0.5, 5, 50)
    assert total([a, b, b]) == OpCost(5, 50, 500)
    assert total([]) == OpCost() == OpCost(0, 0, 0)
    assert a.bytes == 110
    with pytest.raises(TypeError):
        a + 1
    with pytest.raises(TypeError):
        a * b
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.flops = 2
    assert len({a, OpCost(1, 10, 100)}) == 1


# --- Products ------------------------------------------------------------------------------


def test_matmul():
    assert flops("MatMul", [(M, K), (K, N)], [(M, N)]) == 2 * M * K * N
    assert flops("MatMul", [(K, M), (K, N)], [(M, N)], transpose_a=True) == 2 * M * K * N
    assert flops("MatMul", [(M, K), (N, K)], [(M, N)], transpose_b=True) == 2 * M * K * N
    # The contract's layer: 10 rows of 10 values, 16 units.
    assert flops("MatMul", [(10, 10), (10, 16)], [(10, 16)]) == 3200
    assert flops("BiasAdd", [(10, 16), (16,)], [(10, 16)]) == 160


def test_batch_matmul():
    assert flops("BatchMatMulV2", [(B, L, M, K), (B, L, K, N)], [(B, L, M, N)]) == 2 * B * L * M * K * N
    assert flops("BatchMatMulV2", [(B, 1, M, K), (L, K, N)], [(B, L, M, N)]) == 2 * B * L * M * K * N
    assert flops("BatchMatMul", [(B, K, M), (B, K, N)], [(B, M, N)], adj_x=True) == 2 * B * M * K * N


@pytest.mark.parametrize(
    "equation, inputs, output, expected",
    [
        ("mk,kn->mn", [(M, K), (K, N)], (M, N), 2 * M * K * N),
        ("blk,khn->blhn", [(B, L, K), (K, M, N)], (B, L, M, N), 2 * B * L * K * M * N),
        ("...k,kn->...n", [(B, L, K), (K, N)], (B, L, N), 2 * B * L * K * N),
        ("k...,kn->...n", [(K, B, L), (K, N)], (B, L, N), 2 * B * L * K * N),
        ("m,n->mn", [(M,), (N,)], (M, N), M * N),  # nothing is summed over
        ("mn->nm", [(M, N)], (N, M), 0),
        ("mn->n", [(M, N)], (N,), M * N - N),
    ],
)
def test_einsum(equation, inputs, output, expected):
    assert flops("Einsum", inputs, [output], equation=equation) == expected


def test_convolutions_and_their_gradients():
    image, kernel, out = (B, H, W, C), (3, 2, C, F), (B, 5, 5, F)
    expected = 2 * (B * 5 * 5 * F) * (3 * 2 * C)
    assert flops("Conv2D", [image, kernel], [out]) == expected
    assert flops("Conv2DBackpropInput", [(4,), kernel, out], [image]) == expected
    assert flops("Conv2DBackpropFilter", [image, (4,), out], [kernel]) == expected
    grouped = (3, 2, C, F)  # of an image with 2 * C channels
    assert flops("Conv2D", [(B, H, W, 2 * C), grouped], [out]) == expected
    volume = (3, 3, 3, C, F)
    assert flops("Conv3D", [(B, L, H, W, C), volume], [(B, L, H, W, F)]) == 2 * (B * L * H * W * F) * (27 * C)


def test_depthwise_convolution_and_its_gradients():
    image, kernel, out = (B, H, W, C), (3, 2, C, 4), (B, H, W, C * 4)
    expected = 2 * (B * H * W * C * 4) * (3 * 2)
    assert flops("DepthwiseConv2dNative", [image, kernel], [out]) == expected
    assert flops("DepthwiseConv2dNativeBackpropInput", [(4,), kernel, out], [image]) == expected
    assert flops("DepthwiseConv2dNativeBackpropFilter", [image, (4,), out], [kernel]) == expected


# --- Element-wise, reductions, and the rest --------------------------------------------------


@pytest.mark.parametrize("op_type, each", [("Relu", 1), ("Tanh", 1), ("SquaredDifference", 2), ("TanhGrad", 3), ("RsqrtGrad", 4), ("Softmax", 5)])
def test_element_wise(op_type, each):
    assert flops(op_type, [(M, N), (M, N)], [(M, N)]) == each * M * N


def test_broadcast_counts_the_output():
    assert flops("AddV2", [(M, 1), (N,)], [(M, N)]) == M * N
    assert flops("AddN", [(M, N)] * 3, [(M, N)]) == 2 * M * N


def test_reductions():
    assert flops("Sum", [(M, N), (1,)], [(M,)]) == M * N - M
    assert flops("Mean", [(M, N), (1,)], [(M,)]) == (M * N - M) + M
    assert flops("Max", [(M, N), (1,)], [()]) == M * N - 1
    assert flops("BiasAddGrad", [(M, N)], [(N,)]) == M * N - N
    assert flops("L2Loss", [(M, N)], [()]) == 2 * M * N
    assert flops("SparseSegmentSum", [(100, N), (L,), (L,)], [(3, N)]) == L * N


def test_cross_entropy():
    assert flops("SparseSoftmaxCrossEntropyWithLogits", [(B, N), (B,)], [(B,), (B, N)]) == 5 * B * N + 3 * B
    assert flops("SoftmaxCrossEntropyWithLogits", [(B, N), (B, N)], [(B,), (B, N)]) == 9 * B * N


def test_pooling():
    pooled, window = (B, 4, 5, C), [1, 2, 3, 1]
    assert flops("MaxPool", [(B, 8, 15, C)], [pooled], ksize=window) == B * 4 * 5 * C * 6
    assert flops("AvgPool", [(B, 8, 15, C)], [pooled], ksize=window) == B * 4 * 5 * C * (6 + 1)
    assert flops("AvgPoolGrad", [(4,), pooled], [(B, 8, 15, C)], ksize=window) == B * 4 * 5 * C * (6 + 1)
    assert flops("MaxPoolGrad", [(B, 8, 15, C), pooled, pooled], [(B, 8, 15, C)], ksize=window) == B * 4 * 5 * C


def test_batch_norm():
    x = (B, H, W, C)
    assert flops("FusedBatchNormV3", [x, (C,)], [x], is_training=True) == 8 * B * H * W * C
    assert flops("FusedBatchNormV3", [x, (C,)], [x], is_training=False) == 4 * B * H * W * C
    assert flops("FusedBatchNormGradV3", [x, x], [x]) == 10 * B * H * W * C


def test_optimizers():
    w, s = (M, N), ()
    assert flops("ApplyGradientDescent", [w, s, w], [w]) == 2 * M * N
    assert flops("ApplyMomentum", [w, w, s, w, s], [w]) == 4 * M * N
    assert flops("ResourceApplyMomentum", [s, s, s, w, s], [], use_nesterov=True) == 7 * M * N
    assert flops("ApplyAdam", [w, w, w, s, s, s, s, s, s, w], [w]) == 12 * M * N
    assert flops("ApplyAdagrad", [w, w, s, w], [w]) == 6 * M * N
    assert flops("ApplyRMSProp", [w, w, w, s, s, s, s, w], [w]) == 11 * M * N
    # A sparse update costs what its rows cost.
    assert flops("SparseApplyMomentum", [w, w, s, (2, N), (2,), s], [w]) == 4 * 2 * N


def test_integers_and_random_bits_are_no_floating_point_operations():
    assert op_flops("AddV2", {}, specs((M,), (M,), dtype="int32"), specs((M,), dtype="int32")) == 0
    assert op_flops("Equal", {}, specs((M,), (M,), dtype="int64"), specs((M,), dtype="bool")) == 0
    assert op_flops("Equal", {}, specs((M,), (M,)), specs((M,), dtype="bool")) == M
    assert op_flops("RandomUniform", {}, specs((2,), dtype="int32"), specs((M, N))) == 0
    assert flops("Reshape", [(M, N), (2,)], [(N, M)]) == 0
    assert flops("NoSuchOp", [(M,)], [(M,)]) == 0
    assert op_flops("MatMul", {}, specs((M, K), (K, N), dtype="bfloat16"), specs((M, N), dtype="bfloat16")) == 2 * M * K * N


def test_unknown_shapes_give_no_number():
    assert flops("MatMul", [(None, K), (K, N)], [(None, N)]) is None
    assert flops("Tanh", [None], [None]) is None
    assert flops("Reshape", [None], [None]) == 0
    assert op_cost("Transpose", {}, specs(None), specs(None)) is None
    # A rule looks only at what it needs.
    assert flops("Sum", [(M, N), (None,)], [(M,)]) == M * N - M


# --- Bytes ---------------------------------------------------------------------------------


def cost(op_type, inputs, outputs, **attrs):
    return op_cost(op_type, attrs, inputs, outputs)


def test_each_tensor_moves_once():
    half = specs((M, K), (K, N), dtype="float16")
    assert cost("MatMul", half, specs((M, N), dtype="float16")) == OpCost(2 * M * K * N, 2 * (M * K + K * N), 2 * M * N)
    assert cost("AddV2", specs((M, N), (N,)), specs((M, N))) == OpCost(M * N, 4 * (M * N + N), 4 * M * N)
    assert cost("Transpose", specs((M, N)), specs((N, M))) == OpCost(0, 4 * M * N, 4 * M * N)
    axes_of_unknown_number = TensorSpec((None,), "int32")
    assert cost("Sum", [TensorSpec((M, N)), axes_of_unknown_number], specs((M,))) == OpCost(M * N - M, 4 * M * N, 4 * M)
    assert cost("Cast", specs((M,)), specs((M,), dtype="float16")) == OpCost(0, 4 * M, 2 * M)


@pytest.mark.parametrize("op_type", ["Identity", "Reshape", "ReadVariableOp", "Const", "Switch", "Shape", "StopGradient"])
def test_forwarded_buffers_cost_nothing(op_type):
    assert cost(op_type, specs((M, N)), specs((M, N))) == OpCost()


def test_partial_reads():
    index = TensorSpec((B,), "int64")
    rows = 4 * B * N
    assert cost("GatherV2", [TensorSpec((1000, N)), index, TensorSpec((), "int32")], specs((B, N))) == OpCost(0, rows + 8 * B + 4, rows)
    vectors = specs((2,), (2,), (2,), dtype="int32")
    assert cost("StridedSlice", specs((1000, N)) + vectors, specs((B, N))) == OpCost(0, rows + 24, rows)
    segments = [TensorSpec((1000, N)), index, TensorSpec((B,), "int32")]
    assert cost("SparseSegmentSum", segments, specs((2, N))) == OpCost(B * N, rows + 8 * B + 4 * B, 4 * 2 * N)


def test_reserve_space_of_batch_norm_is_left_out():
    x, c, unknown = TensorSpec((B, H, W, C)), TensorSpec((C,)), TensorSpec((None,))
    size = 4 * B * H * W * C
    forward = cost("FusedBatchNormV3", [x, c, c, c, c], [x, c, c, c, c, unknown])
    assert forward == OpCost(8 * B * H * W * C, size + 4 * 4 * C, size + 4 * 4 * C)
    backward = cost("FusedBatchNormGradV3", [x, x, c, c, c, unknown], [x, c, c, TensorSpec((0,)), TensorSpec((0,))])
    assert backward == OpCost(10 * B * H * W * C, 2 * size + 3 * 4 * C, size + 2 * 4 * C)


def test_writes():
    assert cost("Fill", [TensorSpec((2,), "int32"), TensorSpec(())], specs((M, N))) == OpCost(0, 0, 4 * M * N)
    assert cost("Assign", specs((M, N), (M, N)), specs((M, N))) == OpCost(0, 4 * M * N, 4 * M * N)


def test_updates_read_and_write_their_state():
    w, resource, scalar = TensorSpec((M, N)), TensorSpec((), "resource"), TensorSpec(())
    size = 4 * M * N
    adam = OpCost(12 * M * N, 3 * size + size, 3 * size)  # variable and two slots, and the gradient
    assert cost("ApplyAdam", [w] * 3 + [scalar] * 6 + [w], [w]) == adam
    assert cost("ResourceApplyAdam", [resource] * 3 + [scalar] * 6 + [w], []) == adam
    assert cost("ResourceApplyGradientDescent", [resource, scalar, w], []) == OpCost(2 * M * N, 2 * size, size)


def test_tensor_bytes():
    assert tensor_bytes(TensorSpec((M, N), "float64")) == 8 * M * N
    assert tensor_bytes(TensorSpec((), "bool")) == 1
    assert tensor_bytes(TensorSpec(None, "resource")) == 0
    assert tensor_bytes(TensorSpec(None)) is None


# --- The tables ----------------------------------------------------------------------------


@pytest.mark.skipif(compat.tf_version() < (2, 12), reason="the tables name ops of TensorFlow 2.12 to 2.15")
def test_every_rule_is_for_an_op_of_tensorflow():
    assert {n for n in set(FLOP_RULES) | set(BYTE_RULES) if compat.op_def(n) is None} == set()


def test_attributes_become_plain_values():
    with tf.Graph().as_default():
        a = tf.ones([2, 3])
        matmul = tf.matmul(a, a, transpose_b=True)
        pooled = tf.nn.max_pool2d(tf.ones([1, 4, 4, 1]), 2, 2, "SAME")
        einsum = tf.einsum("mk,nk->mn", a, a)
    found = plain_attrs(matmul.op.node_def.attr)
    assert (found["transpose_a"], found["transpose_b"]) == (False, True)
    assert "T" not in found
    plain = plain_attrs(pooled.op.node_def.attr)
    assert plain["ksize"] == [1, 2, 2, 1]
    assert plain["padding"] == "SAME"
    assert plain_attrs(einsum.op.node_def.attr)["equation"] == "mk,nk->mn"
    assert op_costs.op_flops("MatMul", plain_attrs(matmul.op.node_def.attr), specs((2, 3), (2, 3)), specs((2, 2))) == 2 * 2 * 3 * 2
