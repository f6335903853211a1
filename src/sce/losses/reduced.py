"""RECE: cross-entropy over the items that random hashing puts beside a state (arXiv 2408.02354).

torch.func cannot transform it (its gradient is written by hand, in bounded memory): use backward()
or torch.autograd.grad.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from sce.losses.base import BatchShape, DataSummary, LossMemory, LossOfPositions, LossSettings
from sce.losses.gradients import CatalogueGradient, add_rows
from sce.losses.inputs import Inputs, apply, check_size, compute_dtype, once

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
        ignore_index: Target of positions that do not count, such as padding.
        reduction: "mean" over the positions that count, "sum", or "none".
    """

    def __init__(
        self,
        *,
        rounds: int = 1,
        extra_chunks: int = 1,
        n_buckets: int | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(ignore_index=ignore_index, reduction=reduction)
        check_size("rounds", rounds)
        check_size("extra_chunks", extra_chunks, least=0)
        if n_buckets is not None:
            check_size("n_buckets", n_buckets)
        self.rounds, self.extra_chunks, self.n_buckets = rounds, extra_chunks, n_buckets

    def _losses(self, inputs: Inputs, generator: Generator | None) -> Tensor:
        x, y, targets, valid = inputs.states, inputs.catalogue, inputs.targets, inputs.valid
        if valid is not None:  # chunks are those of the states that count
            x, targets = x[valid], targets[valid]
        hashed = self._hash(x.detach(), y.detach(), generator)
        losses: Tensor = apply(_ReducedCrossEntropy, x, y, inputs.bias, targets, hashed)
        return (
            losses if valid is None else losses.new_zeros(len(valid)).masked_scatter(valid, losses)
        )

    def _hash(self, x: Tensor, y: Tensor, generator: Generator | None) -> "_Hashed":
        n_chunks, dtype = self._n_chunks(len(y), len(x)), compute_dtype(x, y)
        orders: tuple[list[Tensor], list[Tensor]] = ([], [])
        for _ in range(self.rounds):
            vectors = torch.empty(n_chunks, x.shape[1], dtype=dtype, device=x.device)
            vectors.normal_(generator=generator)
            for rows, found in zip((x, y), orders, strict=True):
                found.append(_nearest(rows, vectors).argsort(stable=True))
        return _Hashed(n_chunks, self.extra_chunks, torch.stack(orders[0]), torch.stack(orders[1]))

    def _n_chunks(self, n_items: int, targets: float) -> int:
        if self.n_buckets is not None:
            return min(self.n_buckets, n_items)
        return max(1, int(math.sqrt(4 * (1 + 2 * self.extra_chunks) * min(n_items, targets))))

    def memory(self, shape: BatchShape) -> LossMemory:
        """Return the bytes of orders, of the valid states, and of the chunks computed at once."""
        v, c, d = shape.max_targets, shape.n_items, shape.dim
        n_chunks = self._n_chunks(c, v)
        wide_x, wide_y = v / n_chunks, min(c, (1 + 2 * self.extra_chunks) * c / n_chunks)
        tile = min(n_chunks, max(1, _AT_ONCE // (max(wide_x, d) * max(wide_y, d))))
        logits, rows, items = tile * wide_x * wide_y, tile * wide_x * d, tile * wide_y * d
        states, orders = 4 * v * d, 8 * self.rounds * (v + c) * (1 + (self.rounds > 1))
        # Logits, a second time, and whether they count; rows of states and of items.
        scored = (9 + 8 * (self.rounds > 1)) * logits + 4 * (rows + items)
        hashing = 4 * min(_AT_ONCE, n_chunks * max(v, c)) + 24 * max(v, c)
        # The gradient of the states and of the tile's items, which are sorted to be added up.
        backward = states + max(2 * states, scored + (12 + 48 / d) * items)
        kept = states + orders
        return LossMemory(kept + max(hashing, scored, states), kept + backward - shape.state_bytes)


@dataclass(frozen=True)
class ReducedCrossEntropySettings(LossSettings):
    """Settings of RECE."""

    rounds: int = 1
    """How often states and items are hashed."""
    extra_chunks: int = 1
    """Chunks of items on either side of a state's own that are negatives too."""
    n_buckets: int | None = None
    """Random vectors of a round, and chunks. [default: the authors', by items and targets]"""

    def build(self, data: DataSummary) -> ReducedCrossEntropy:
        """Make the loss."""
        return ReducedCrossEntropy(**vars(self))


class _Tile(NamedTuple):
    """Some chunks of a round."""

    rows: Tensor  # [g, x]: states
    items: Tensor  # [g, y]
    place: Tensor  # [g, x]: where results go: the states, or behind the last
    absent: Tensor  # [g, x, y]: where there is none, as chunks differ in size


class _Hashed(NamedTuple):
    """States and items in the order of each round, which is cut into chunks."""

    n_chunks: int
    extra: int
    order_x: Tensor  # [rounds, v]
    order_y: Tensor  # [rounds, items]

    def tiles(self, dim: int) -> Iterator[_Tile]:
        """Yield all chunks, as many at once as the memory is meant for."""
        (rounds, v), c = self.order_x.shape, self.order_y.shape[1]
        numbers = torch.arange(self.n_chunks, device=self.order_x.device)
        wide_x = math.ceil(v / self.n_chunks)
        wide_y = min(c, math.ceil((1 + 2 * self.extra) * c / self.n_chunks))
        step = max(1, _AT_ONCE // (max(wide_x, dim) * max(wide_y, dim)))
        for number in range(rounds if v else 0):
            for chunks in numbers.split(step):
                first, last = chunks - self.extra, chunks + self.extra
                rows, is_row = self._cut(self.order_x[number], chunks, chunks, wide_x)
                items, is_item = self._cut(self.order_y[number], first, last, wide_y)
                absent = ~(is_row.unsqueeze(2) & is_item.unsqueeze(1))
                yield _Tile(rows, items, rows.where(is_row, v), absent)

    def _cut(self, order: Tensor, first: Tensor, last: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return what chunks `first` to `last` hold, [g, width], and which of it is present."""
        start, end = (
            -(-chunk.clamp(0, self.n_chunks) * len(order) // self.n_chunks)  # rounded up
            for chunk in (first, last + 1)
        )
        places = start.unsqueeze(1) + torch.arange(width, device=order.device)
        return order[places.clamp(max=len(order) - 1)], places < end.unsqueeze(1)

    def chunks(self) -> tuple[Tensor, Tensor]:
        """Return the chunk of each state and of each item, in each round."""
        found = []
        for order in (self.order_x, self.order_y):
            n = order.shape[1]
            chunk = torch.arange(n, device=order.device) * self.n_chunks // max(1, n)
            found.append(torch.empty_like(order).scatter_(1, order, chunk.expand_as(order)))
        return found[0], found[1]


class _Scorer:
    """Logits of the negatives, less the logarithm of how many rounds bring them."""

    def __init__(
        self,
        states: Tensor,
        catalogue: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        hashed: _Hashed,
    ) -> None:
        self.dtype = compute_dtype(states, catalogue)
        self.x, self.catalogue, self.bias = states.to(self.dtype), catalogue, bias
        self.targets, self.hashed = targets, hashed
        self.chunks = hashed.chunks() if len(hashed.order_x) > 1 else None

    def y(self, items: Tensor) -> Tensor:
        return self.catalogue[items].to(self.dtype)

    def positives(self) -> Tensor:
        logits = (self.x * self.y(self.targets)).sum(dim=1)
        return logits if self.bias is None else logits + self.bias[self.targets]

    def negatives(self, tile: _Tile, y: Tensor) -> Tensor:
        """Return [g, x, y]; -inf at targets, and where there is none."""
        logits = self.x[tile.rows] @ y.mT
        if self.bias is not None:
            logits += self.bias[tile.items].unsqueeze(1)
        if self.chunks is not None:
            times = torch.zeros_like(logits)
            for of_x, of_y in zip(*self.chunks, strict=True):
                apart = of_x[tile.rows].unsqueeze(2) - of_y[tile.items].unsqueeze(1)
                times += apart.abs_() <= self.hashed.extra
            logits -= times.log_()
        hidden = tile.items.unsqueeze(1) == self.targets[tile.rows].unsqueeze(2)
        return logits.masked_fill_(hidden.logical_or_(tile.absent), -torch.inf)


class _ReducedCrossEntropy(torch.autograd.Function):
    """Between the passes there are two numbers a state; logits are computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,  # [v, d]
        catalogue: Tensor,  # [items, d]
        bias: Tensor | None,  # [items]
        targets: Tensor,  # [v]
        hashed: _Hashed,
    ) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            scorer = _Scorer(states, catalogue, bias, targets, hashed)
            positives = scorer.positives()
            losses = positives.new_zeros(len(states) + 1)  # of the target alone it is 0
            for tile in hashed.tiles(states.shape[1]):
                found = scorer.negatives(tile, scorer.y(tile.items)).logsumexp(dim=2)
                losses[tile.place] = torch.logaddexp(
                    losses[tile.place], found.sub_(positives[tile.rows])
                )
        ctx.hashed = hashed
        ctx.save_for_backward(states, catalogue, bias, targets, positives, losses[:-1])
        return losses[:-1].clone()

    @staticmethod
    @once
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        states, catalogue, bias, targets, positives, losses = ctx.saved_tensors
        grad_bias = None if bias is None else torch.zeros_like(bias)
        with torch.autocast(states.device.type, enabled=False):
            scorer = _Scorer(states, catalogue, bias, targets, ctx.hashed)
            x, scale = scorer.x, grad_losses.to(scorer.dtype).unsqueeze(1)
            of_positives = torch.expm1(-losses).unsqueeze(1) * scale  # probabilities less one
            grad_x = torch.cat([of_positives * scorer.y(targets), torch.zeros_like(x[:1])])
            touched = [targets, ctx.hashed.order_y.flatten()]
            total = CatalogueGradient(catalogue, touched, scorer.dtype)
            total.add(targets, of_positives * x)
            if grad_bias is not None:
                add_rows(grad_bias.unsqueeze(1), targets, of_positives)
            for tile in ctx.hashed.tiles(states.shape[1]):
                y = scorer.y(tile.items)
                weights = scorer.negatives(tile, y).sub_((positives + losses)[tile.rows, None])
                weights = weights.exp_().mul_(scale[tile.rows])
                grad_x[tile.place] += weights @ y
                total.add(tile.items.flatten(), (weights.mT @ x[tile.rows]).flatten(0, 1))
                if grad_bias is not None:
                    summed = weights.sum(dim=1).flatten().unsqueeze(1)
                    add_rows(grad_bias.unsqueeze(1), tile.items.flatten(), summed)
        return grad_x[:-1].to(states.dtype), total.finish(), grad_bias, None, None


def _nearest(rows: Tensor, vectors: Tensor) -> Tensor:
    """Return which of the vectors [b, d] has the largest product with each row, [n]."""
    with torch.autocast(rows.device.type, enabled=False):
        parts = rows.split(max(1, _AT_ONCE // len(vectors)))
        return torch.cat([(part.to(vectors.dtype) @ vectors.T).argmax(dim=1) for part in parts])
