"""Which ops compute in half precision, as Micikevicius et al. ("Mixed Precision Training", ICLR 2018) sort them."""

ALLOW = frozenset(
    "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum Conv1D Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D "
    "Conv3DBackpropFilterV2 Conv3DBackpropInputV2 DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter "
    "DepthwiseConv2dNativeBackpropInput".split()
)
"""Sums of products: most of the time is spent here, and the hardware adds them up in float32."""

INFER = frozenset(
    "Add AddV2 AddN Sub Mul Neg Maximum Minimum BiasAdd BiasAddGrad Relu ReluGrad Relu6 Relu6Grad LeakyRelu LeakyReluGrad Elu EluGrad Selu "
    "SeluGrad Tanh TanhGrad Sigmoid SigmoidGrad Identity StopGradient PreventGradient Snapshot Reshape Transpose Squeeze ExpandDims Concat "
    "ConcatV2 Split SplitV Pack Unpack Slice StridedSlice StridedSliceGrad Pad PadV2 MirrorPad MirrorPadGrad Tile GatherV2 GatherNd Reverse "
    "ReverseV2 Select SelectV2 MaxPool MaxPoolGrad AvgPool AvgPoolGrad DepthToSpace SpaceToDepth BroadcastTo ZerosLike OnesLike "
    "Roll Shape ShapeN Size Rank".split()
)
"""Ops that do as what they are given: in half precision where all of that is."""
