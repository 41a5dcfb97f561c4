"""Names that are part of the public behaviour of EPL."""

REDUCE_METHOD_MEAN = "mean"
REDUCE_METHOD_SUM = "sum"

GC_COLLECTION = "collection"
"""Value of `gradient_checkpoint.type`: the script picks the checkpoints."""

GC_AUTO = "auto"
"""Value of `gradient_checkpoint.type`: EPL picks the checkpoints."""

GC_COLLECTION_NAME = "checkpoints"
"""The TensorFlow collection in which a script puts its checkpoint tensors."""

GC_PREFIX = "EPL_GRADIENT_CHECKPOINTS"
"""Operations that compute an activation again are named EPL_GRADIENT_CHECKPOINTS/<original>."""

AUTO_STAGE_POLICY_BALANCE_OP_NUM = "balance_op_num"
"""Policy of the automatic stage cut: equal numbers of operations."""

AUTO_STAGE_POLICY_REPEATED_LAYERS = "repeated_layers"
"""Policy of the automatic stage cut: equal numbers of repeated layers; of operations where layers don't repeat so."""

REPLICA_PREFIX = "EPL_REPLICA_"
MICRO_BATCH_PREFIX = "EPL_MICRO_BATCH_"
"""Clones are named EPL_REPLICA_<r>/EPL_MICRO_BATCH_<m>/<original>; index 0 has no prefix."""
