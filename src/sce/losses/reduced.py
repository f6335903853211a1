"""RECE: cross-entropy over the items that random hashing puts beside a state (arXiv 2408.02354).

torch.func cannot transform it (its gradient is written by hand, in bounded memory): use backward()
or torch.autograd.grad.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from sce.losses.base import BatchShape, DataSummary, LossMemory, LossOfPositions, LossSettings
from sce.losses.inputs import Inputs, check_size, check_size_or_none
from sce.losses.tiled import Tile, tiled_cross_entropy, tiled_memory

_AT_ONCE = 1 << 22  # logits, or numbers of gathered rows


class ReducedCrossEntropy(LossOfPositions):
    """RECE, the softmax over the target and the items that share a chunk with its hidden state.

    In each round the states, and the items, are sorted by which of `n_buckets` random vectors has
    the largest product with them, and cut into as many chunks. Negatives of a state are the items
    of its chunk, and of `extra_chunks` on either side; what several rounds bring counts once.

    >>> loss = ReducedCrossEntropy(rounds=2)
    >>> loss(torch.randn(8, 20, 32), torch.randn(1000, 32), torch.randint(1000, (8, 20))).shape
    torch.Size([])

    Args:
        rounds: How often states and items are hashed.
        extra_chunks: Chunks on either side whose items are negatives too.
        n_buckets: Random vectors of a round, and chunks. Default: the authors',
            √(4·(1 + 2·extra_chunks)·min(items, targets)).
        options: See `Loss`.
    """

    def __init__(
        self,
        *,
        rounds: int = 1,
        extra_chunks: int = 1,
        n_buckets: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.rounds = check_size("rounds", rounds)
        self.extra_chunks = check_size("extra_chunks", extra_chunks, least=0)
        self.n_buckets = check_size_or_none("n_buckets", n_buckets)

    def _losses(self, inputs: Inputs, generator: Generator | None) -> Tensor:
        x, y, targets, valid = inputs.states, inputs.catalogue, inputs.targets, inputs.valid
        if valid is not None:  # chunks are those of the states that count
            x, targets = x[valid], targets[valid]
        n_chunks = self._n_chunks(len(y), len(x))
        orders: tuple[list[Tensor], list[Tensor]] = ([], [])
        for _ in range(self.rounds):
            vectors = torch.empty(n_chunks, x.shape[1], dtype=inputs.dtype, device=x.device)
            vectors.normal_(generator=generator)
            for rows, found in zip((x.detach(), y.detach()), orders, strict=True):
                found.append(_nearest(rows, vectors).argsort(stable=True))
        tiles = partial(_tiles, n_chunks, self.extra_chunks)
        losses = tiled_cross_entropy(x, y, inputs.bias, targets, tiles, *map(torch.stack, orders))
        return (
            losses if valid is None else losses.new_zeros(len(valid)).masked_scatter(valid, losses)
        )

    def _n_chunks(self, n_items: int, targets: float) -> int:
        if self.n_buckets is not None:
            return min(self.n_buckets, n_items)
        return max(1, int(math.sqrt(4 * (1 + 2 * self.extra_chunks) * min(n_items, targets))))

    def memory(self, shape: BatchShape) -> LossMemory:
        """Return the bytes of orders, of the valid states, and of the chunks computed at once."""
        v, c, d = shape.max_targets, shape.n_items, shape.dim
        n_chunks = self._n_chunks(c, v)
        wide_x, wide_y = v / n_chunks, min(c, (1 + 2 * self.extra_chunks) * c / n_chunks)
        at_once = min(n_chunks, max(1, _AT_ONCE // (max(wide_x, d) * max(wide_y, d))))
        several = self.rounds > 1
        kept = 8 * self.rounds * (v + c) * (1 + several)  # orders, and chunks
        distinct = min(1.0, (1 + 2 * self.extra_chunks / at_once) / (1 + 2 * self.extra_chunks))
        tile = (at_once, wide_x, wide_y)
        found = tiled_memory(shape, tile, kept, offset=several, distinct=distinct)
        hashing = 4 * (v * d + min(_AT_ONCE, n_chunks * max(v, c))) + 24 * max(v, c)
        return found._replace(forward=max(found.forward, kept + hashing))


@dataclass(frozen=True)
class ReducedCrossEntropySettings(LossSettings):
    """Settings of RECE."""

    rounds: int = 1
    """How often states and items are hashed."""
    extra_chunks: int = 1
    """Chunks of items on either side of a state's own that are negatives too."""
    n_buckets: int | None = None
    """Number of buckets; of rece, vectors and chunks of a round. [default: sce: from alpha, beta
    and the mean batch; rece: the authors', from items and targets]"""

    def build(self, data: DataSummary) -> ReducedCrossEntropy:
        """Make the loss."""
        return ReducedCrossEntropy(**vars(self))


def _tiles(n: int, extra: int, dim: int, order_x: Tensor, order_y: Tensor) -> Iterator[Tile]:
    """Yield the n chunks of each round, as many at once as the memory is meant for.

    Orders of states [rounds, v] and of items [rounds, items] are cut into chunks.
    """
    (rounds, v), c = order_x.shape, order_y.shape[1]
    chunk_x, chunk_y = _chunks(order_x, n), _chunks(order_y, n)
    numbers = torch.arange(n, device=order_x.device)
    wide_x, wide_y = math.ceil(v / n), min(c, math.ceil((1 + 2 * extra) * c / n))
    step = max(1, _AT_ONCE // (max(wide_x, dim) * max(wide_y, dim)))
    for number in range(rounds if v else 0):
        for chunks in numbers.split(step):
            rows, is_row = _cut(order_x[number], n, chunks, chunks, wide_x)
            items, is_item = _cut(order_y[number], n, chunks - extra, chunks + extra, wide_y)
            offset = None
            if rounds > 1:  # what several bring counts once
                times = torch.zeros((*rows.shape, wide_y), device=rows.device)
                for of_x, of_y in zip(chunk_x, chunk_y, strict=True):
                    apart = of_x[rows].unsqueeze(2) - of_y[items].unsqueeze(1)
                    times += apart.abs_() <= extra
                offset = times.log_().neg_()
            absent = ~is_item.unsqueeze(1)
            yield Tile(rows, items, rows.where(is_row, v), absent, offset)


def _cut(order: Tensor, n: int, first: Tensor, last: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return what chunks `first` to `last` of n hold, [g, width], and which of it is present."""
    start, end = (
        -(-chunk.clamp(0, n) * len(order) // n)  # rounded up
        for chunk in (first, last + 1)
    )
    places = start.unsqueeze(1) + torch.arange(width, device=order.device)
    return order[places.clamp(max=len(order) - 1)], places < end.unsqueeze(1)


def _chunks(order: Tensor, n: int) -> Tensor:
    """Return which of the n chunks each state, or item, is in, in each round."""
    size = order.shape[1]
    chunk = torch.arange(size, device=order.device) * n // max(1, size)
    return torch.empty_like(order).scatter_(1, order, chunk.expand_as(order))


def _nearest(rows: Tensor, vectors: Tensor) -> Tensor:
    """Return which of the vectors [b, d] has the largest product with each row, [n]."""
    with torch.autocast(rows.device.type, enabled=False):
        parts = rows.split(max(1, _AT_ONCE // len(vectors)))
        return torch.cat([(part.to(vectors.dtype) @ vectors.T).argmax(dim=1) for part in parts])
