"""An item table of which each rank holds a shard: rows by id, and their gradients home.

Item i is at place i // R of rank i % R: no index is needed, the order of a shard is that of the
ids, and no shard has more of the popular items than another, however ids were given.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sce.distributed.ranks import Ranks
from sce.errors import InputError

_BLOCK = 1 << 16  # ids whose rows are drawn together
_MOST_ITEMS = 2**31 - 1  # an id is 31 bits of a key


@dataclass(frozen=True)
class Rows:
    """Rows of the table, fetched from all ranks: a table of their own for one step."""

    ids: Tensor  # [u], ascending
    values: Tensor  # [u, d], a leaf, in float32 or wider

    def places(self, ids: Tensor) -> Tensor:
        """Return where ids are among the rows; negative ones, such as padding, stay."""
        return torch.searchsorted(self.ids, ids.long().contiguous()).where(ids >= 0, ids)


@dataclass(frozen=True)
class _Fetch:
    """An exchange of rows, which gradients go back along."""

    values: Tensor  # [u, d], of which the gradient is sent home
    order: Tensor  # [u]: the rows by the rank that has them
    send: list[int]  # rows from each rank
    served: Tensor  # [n]: places in the shard that others, and we, asked for, by rank
    receive: list[int]  # how many each asked for


class ShardedTable(nn.Module):
    """Item embeddings [n_items, dim] over all ranks, of which `shard` are those here.

    A step looks up rows, computes with them, and calls `send_gradients` after `backward`: `shard`
    then has a coalesced sparse gradient, summed over ranks, for `sce.RowwiseAdagrad`. Where a rank
    has several batches a step, `collect_gradients` follows each, and `send_gradients` the last.

    Args:
        n_items: Items in the catalogue.
        dim: Their width.
        ranks: The processes that share it, by default this one alone.
        seed: New rows follow from it and their ids: the same table for any number of ranks.
        dtype: Of the shard. Gradients are added up in float32 or wider.
        rows: All rows of the table, of which the shard is copied, in place of new ones.
    """

    def __init__(
        self,
        n_items: int,
        dim: int,
        ranks: Ranks | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        rows: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.ranks = Ranks() if ranks is None else ranks
        rank, size = self.ranks.rank, self.ranks.size
        if not 1 <= n_items <= _MOST_ITEMS:
            raise InputError(f"a table has from 1 to {_MOST_ITEMS:,} items; got {n_items:,}")
        self.n_items, self.dim = n_items, dim
        if rows is None:
            shard = torch.empty(-(-(n_items - rank) // size), dim, dtype=dtype)
            self._draw(shard, seed)
        else:
            shard = rows.detach()[rank::size].to(dtype, copy=True)
        self.shard = nn.Parameter(shard.to(self.ranks.device))
        self._fetches: list[_Fetch] = []
        self._entries: list[tuple[Tensor, Tensor]] = []  # places in the shard, and gradients

    def _draw(self, shard: Tensor, seed: int) -> None:
        """Draw the rows of a shard."""
        rank, size, n_items = self.ranks.rank, self.ranks.size, self.n_items
        bound = math.sqrt(6 / (n_items + self.dim))  # of Xavier, as in one process
        for block, first in enumerate(range(0, n_items, _BLOCK)):
            state = np.random.SeedSequence([seed, block]).generate_state(1, np.uint64)
            generator = torch.Generator().manual_seed(int(state[0]) >> 1)
            drawn = torch.empty(min(_BLOCK, n_items - first), self.dim)
            drawn.uniform_(-bound, bound, generator=generator)
            own = drawn[(rank - first) % size :: size]
            start = -(-(first - rank) // size)
            shard[start : start + len(own)] = own

    def look_up(self, ids: Tensor) -> Rows:
        """Fetch the rows of some ids, each once; negative ones, such as padding, are passed over.

        With gradients enabled, those of the rows go home with `send_gradients`.
        """
        distinct = ids.long().unique()
        return self.fetch(distinct[distinct >= 0])

    def fetch(self, ids: Tensor) -> Rows:
        """Fetch the rows of ascending, distinct ids."""
        ranks, size = self.ranks, self.ranks.size
        owners, order = (ids % size).sort(stable=True)
        counts = torch.searchsorted(owners, torch.arange(size + 1, device=ids.device)).diff()
        theirs = ranks.exchange(counts, [1] * size, [1] * size)
        known = torch.cat([counts, theirs, ids[:1], ids[-1:]]).tolist()  # the only sync
        send, receive, ends = known[:size], known[size : 2 * size], known[2 * size :]
        if outside := [item for item in ends if not 0 <= item < self.n_items]:
            raise InputError(f"item {outside[0]} is not in the catalogue of {self.n_items:,} items")
        asked = (ids[order] // ranks.size).int()
        served = ranks.exchange(asked, send, receive)
        found = ranks.exchange(self.shard.detach()[served], receive, send)
        wide = torch.promote_types(found.dtype, torch.float32)
        values = torch.empty_like(found, dtype=wide)
        values[order] = found.to(wide)
        if torch.is_grad_enabled() and self.shard.requires_grad:
            values.requires_grad_()
            self._fetches.append(_Fetch(values, order, send, served, receive))
        return Rows(ids, values)

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Send the gradients of fetched rows home, where they wait for `send_gradients`."""
        ranks, fetches = self.ranks, self._fetches
        self._fetches = []
        if not fetches:
            return
        # To each rank the rows of one fetch after another, so that entries come in the order of
        # ranks, and of fetches within a rank.
        parts = [
            (torch.zeros_like(f.values) if f.values.grad is None else f.values.grad)[f.order]
            for f in fetches
        ]
        given = _interleave(parts, [f.send for f in fetches])
        send, receive = (
            [sum(counts) for counts in zip(*each, strict=True)]
            for each in ([f.send for f in fetches], [f.receive for f in fetches])
        )
        values = ranks.exchange(given, send, receive)
        places = _interleave([f.served for f in fetches], [f.receive for f in fetches])
        self._entries.append((places, values))

    @torch.no_grad()
    def send_gradients(self) -> None:
        """Send the gradients of fetched rows home, and add them up there, rank by rank."""
        self.collect_gradients()
        if not self._entries:
            return
        places, values = (torch.cat(each) for each in zip(*self._entries, strict=True))
        self._entries = []
        places, order = places.sort(stable=True)
        rows, lengths = torch.unique_consecutive(places, return_counts=True)
        if len(rows):  # a segment must have something in it
            values = torch.segment_reduce(values[order], "sum", lengths=lengths, unsafe=True)
        self.shard.grad = torch.sparse_coo_tensor(
            rows.long().unsqueeze(0),
            values.to(self.shard.dtype),
            self.shard.shape,
            is_coalesced=True,
            check_invariants=False,
        )


def _interleave(parts: list[Tensor], counts: list[list[int]]) -> Tensor:
    """Join parts that are cut by rank: those of all parts for rank 0, for rank 1, ..."""
    cut = [part.split(each) for part, each in zip(parts, counts, strict=True)]
    return torch.cat([piece for pieces in zip(*cut, strict=True) for piece in pieces])
