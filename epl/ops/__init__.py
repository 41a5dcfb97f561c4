"""Building blocks for models and programs: initializers, layers and operations."""

from epl.ops.distributed_dense import DistributedDense, distributed_dense
from epl.ops.distributed_losses import distributed_sparse_softmax_cross_entropy_with_logits
from epl.ops.distributed_ops import distributed_argmax, distributed_equal
from epl.ops.gating import Gating, expert_capacity, top_k_gating
from epl.ops.moe import MixtureOfExperts, MoE, mixture_of_experts

__all__ = [
    "DistributedDense",
    "Gating",
    "MixtureOfExperts",
    "MoE",
    "distributed_argmax",
    "distributed_dense",
    "distributed_equal",
    "distributed_sparse_softmax_cross_entropy_with_logits",
    "expert_capacity",
    "mixture_of_experts",
    "top_k_gating",
]
