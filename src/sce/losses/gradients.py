"""The gradient of the catalogue, collected row by row."""

from collections.abc import Iterable

import torch
from torch import Tensor


class CatalogueGradient:
    """Adds up rows of the catalogue's gradient in the precision the loss computes in.

    A catalogue of that precision is summed in place. One in half precision would lose small
    contributions to rounding: it gets a wider buffer, of the rows that are touched and no others.
    """

    def __init__(self, catalogue: Tensor, touched: Iterable[Tensor], dtype: torch.dtype) -> None:
        self.dense = torch.zeros_like(catalogue, memory_format=torch.contiguous_format)
        self.sum = self.dense
        self.slots: Tensor | None = None
        if catalogue.dtype != dtype:
            used = torch.zeros(len(catalogue), dtype=torch.bool, device=catalogue.device)
            for items in touched:
                used[items] = True
            self.rows = used.nonzero().squeeze(1)
            self.slots = used.cumsum(0, dtype=torch.int32).sub_(1)
            self.sum = self.dense.new_zeros((len(self.rows), catalogue.shape[1]), dtype=dtype)

    def add(self, items: Tensor, values: Tensor) -> None:
        """Add values [n, d] to the rows items [n], which may repeat."""
        self.sum.index_add_(0, items if self.slots is None else self.slots[items], values)

    def finish(self) -> Tensor:
        """Return the gradient [c, d] in the catalogue's own precision."""
        if self.slots is not None:
            self.dense[self.rows] = self.sum.to(self.dense.dtype)
        return self.dense
