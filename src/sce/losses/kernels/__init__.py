"""Triton kernels with the signatures and the results of the plain functions.

Imported only when a GPU asks for them: nothing else needs triton.
"""

from torch import Tensor

from sce.losses.buckets import Buckets
from sce.losses.kernels.bucketed import bucketed_cross_entropy
from sce.losses.kernels.selection import top_rows

__all__ = ["bucketed_cross_entropy", "fill_buckets", "top_rows"]


def fill_buckets(
    states: Tensor,  # [n, d]
    catalogue: Tensor,  # [c, d]
    centres: Tensor,  # [n_buckets, d]
    *,
    valid: Tensor,  # [n]: states that may be picked
    bucket_size_x: int,
    bucket_size_y: int,
) -> Buckets:
    """Give each bucket the states and the items with the largest dot product with its centre."""
    return Buckets(
        states=top_rows(centres, states, bucket_size_x, valid=valid),
        items=top_rows(centres, catalogue, bucket_size_y),
    )
