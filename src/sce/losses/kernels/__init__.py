"""Scalable Cross-Entropy, and exact, in Triton kernels: the loss and both gradients, fused.

Imported only when a GPU asks for them: nothing else needs triton.
"""

from sce.losses.kernels.centres import draw_seed
from sce.losses.kernels.full import fused_full_cross_entropy
from sce.losses.kernels.function import FusedOptions, buckets_of, fused_cross_entropy
from sce.losses.kernels.operator import fused_operator

__all__ = [
    "FusedOptions",
    "buckets_of",
    "draw_seed",
    "fused_cross_entropy",
    "fused_full_cross_entropy",
    "fused_operator",
]
