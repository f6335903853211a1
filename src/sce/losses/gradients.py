"""The gradient of the catalogue, collected row by row in an order that never changes."""

from collections.abc import Iterable

import torch
from torch import Tensor


class CatalogueGradient:
    """Adds up rows of the catalogue's gradient in the precision the loss computes in.

    In half precision small contributions would be rounded away: such a catalogue gets a wider
    buffer, of the touched rows alone, and so does a `sparse` gradient.
    """

    def __init__(
        self, catalogue: Tensor, touched: Iterable[Tensor], dtype: torch.dtype, sparse: bool = False
    ) -> None:
        self.catalogue, self.sparse = catalogue, sparse
        self.slots: Tensor | None = None
        if not sparse and catalogue.dtype == dtype:
            self.sum = torch.zeros_like(catalogue, memory_format=torch.contiguous_format)
            return
        used = torch.zeros(len(catalogue), dtype=torch.bool, device=catalogue.device)
        for items in touched:
            used[items] = True
        self.rows = used.nonzero().squeeze(1)
        self.slots = used.cumsum(0, dtype=torch.int32).sub_(1)
        self.sum = catalogue.new_zeros((len(self.rows), catalogue.shape[1]), dtype=dtype)

    def add(self, items: Tensor, values: Tensor) -> None:
        """Add values [n, d] to the rows items [n], which may repeat."""
        add_rows(self.sum, items if self.slots is None else self.slots[items], values)

    def finish(self) -> Tensor:
        """Return the gradient [c, d] in the catalogue's own precision; a sparse one coalesced."""
        if self.slots is None:
            return self.sum
        values = self.sum.to(self.catalogue.dtype)
        if self.sparse:
            given = (self.rows.unsqueeze(0), values, self.catalogue.shape)
            return torch.sparse_coo_tensor(*given, is_coalesced=True, check_invariants=False)
        dense = torch.zeros_like(self.catalogue, memory_format=torch.contiguous_format)
        dense[self.rows] = values
        return dense


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values [n, d] to rows [n] of total, which may repeat: the same bits in every run.

    On CUDA `index_add_` adds them with atomics, as they come.
    """
    if not total.is_cuda:
        total.index_add_(0, rows, values)
    elif torch.cuda.is_current_stream_capturing():
        _add_captured(total, rows, values)
    else:
        _add_sorted(total, rows, values)


def _add_sorted(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Bring equal rows together, add up each run in order, and write each sum once."""
    if rows.numel() == 0:  # a segment must have something in it
        return
    ordered, order = rows.to(torch.int32).sort(stable=True)  # half the passes of 64 bits
    distinct, lengths = torch.unique_consecutive(ordered, return_counts=True)
    sums: Tensor = torch.segment_reduce(values[order], "sum", lengths=lengths, unsafe=True)
    total.index_add_(0, distinct, sums)


def _add_captured(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Do the same without asking the device how many runs there are, as in a CUDA graph."""
    n = len(rows)
    if n == 0:
        return
    ordered, order = rows.to(torch.int32).sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    # Behind the last run come empty ones, whose sums are 0: rows repeat with these alone.
    number = torch.arange(n, device=rows.device)
    run = (first.cumsum(0) - 1).where(first, n)
    starts = number.new_full((n + 1,), n).scatter_(0, run, number.where(first, n))
    sums: Tensor = torch.segment_reduce(
        values[order], "sum", offsets=starts, unsafe=True, initial=0
    )
    total.index_add_(0, ordered[starts[:-1].clamp_(max=n - 1)], sums)
