"""Scalable Cross-Entropy in Triton kernels: the loss and both gradients, fused.

Imported only when a GPU asks for them: nothing else needs triton.
"""

from sce.losses.kernels.centres import NOWHERE
from sce.losses.kernels.function import FusedOptions, fused_cross_entropy
from sce.losses.kernels.selection import top_rows

__all__ = ["NOWHERE", "FusedOptions", "fused_cross_entropy", "top_rows"]
