"""Scalable Cross-Entropy in Triton kernels: the loss and both gradients, fused.

Imported only when a GPU asks for them: nothing else needs triton.
"""

from sce.losses.kernels.centres import NOWHERE, draw_seed
from sce.losses.kernels.function import Fused, FusedOptions, fused_cross_entropy
from sce.losses.kernels.operator import fused_operator
from sce.losses.kernels.selection import top_rows

__all__ = [
    "NOWHERE",
    "Fused",
    "FusedOptions",
    "draw_seed",
    "fused_cross_entropy",
    "fused_operator",
    "top_rows",
]
