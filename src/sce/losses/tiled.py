"""Softmax over a target and negatives, tile by tile: logits are computed twice, and never kept."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sce.losses.base import BatchShape, LossMemory
from sce.losses.gradients import CatalogueGradient, add_rows
from sce.losses.inputs import apply, compute_dtype, once


class Tile(NamedTuple):
    """Groups of states, each with negatives that its states share."""

    rows: Tensor  # [g, x]: states
    items: Tensor  # [g, y]: negatives; equal ones count as often as they are there
    place: Tensor  # [g, x]: where results go: that of the state, or behind the last
    absent: Tensor | None = None  # broadcasts to [g, x, y]: pairs that there are not
    offset: Tensor | None = None  # likewise: added to the logits


Tiles = Callable[[int], Iterable[Tile]]
"""Makes the tiles of states of so many dimensions; called in the backward pass once more."""


def tiled_cross_entropy(
    states: Tensor, catalogue: Tensor, bias: Tensor | None, targets: Tensor, tiles: Tiles
) -> Tensor:
    """Return the loss of each state [v]: its target against the negatives of all its tiles.

    A negative that is the target does not count.
    """
    losses: Tensor = apply(_TiledCrossEntropy, states, catalogue, bias, targets, tiles)
    return losses


def tiled_memory(
    shape: BatchShape, tile: tuple[float, float, float], kept: float, *, offset: bool = False
) -> LossMemory:
    """Return the bytes of a call whose tiles are [g, x, y], and of what else is kept."""
    g, x, y = tile
    logits, rows, items = g * x * y, g * x * shape.dim, g * y * shape.dim
    states = 4 * shape.max_targets * shape.dim
    # Logits, once more, and whether they count; rows of states and of items.
    scored = (17 if offset else 9) * logits + 4 * (rows + items)
    # The gradient of the states, and of the tile's items, which are sorted to be added up.
    added = 4 * (logits + rows + items) + (12 + 48 / shape.dim) * items
    backward = states + max(2 * states, scored, added)
    kept += states
    return LossMemory(kept + max(scored, states), kept + backward - shape.state_bytes)


class _Scorer:
    def __init__(
        self, states: Tensor, catalogue: Tensor, bias: Tensor | None, targets: Tensor
    ) -> None:
        self.dtype = compute_dtype(states, catalogue)
        self.x, self.targets = states.to(self.dtype), targets
        self.catalogue, self.bias = catalogue, bias

    def y(self, items: Tensor) -> Tensor:
        return self.catalogue[items].to(self.dtype)

    def positives(self) -> Tensor:
        logits = (self.x * self.y(self.targets)).sum(dim=1)
        return logits if self.bias is None else logits + self.bias[self.targets]

    def negatives(self, tile: Tile, y: Tensor) -> Tensor:
        """Return [g, x, y]; -inf at targets, and where there is none."""
        logits = self.x[tile.rows] @ y.mT
        if self.bias is not None:
            logits += self.bias[tile.items].unsqueeze(1)
        if tile.offset is not None:
            logits += tile.offset
        hidden = tile.items.unsqueeze(1) == self.targets[tile.rows].unsqueeze(2)
        if tile.absent is not None:
            hidden |= tile.absent
        return logits.masked_fill_(hidden, -torch.inf)


class _TiledCrossEntropy(torch.autograd.Function):
    """Between the passes there are two numbers a state."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,  # [v, d]
        catalogue: Tensor,  # [items, d]
        bias: Tensor | None,  # [items]
        targets: Tensor,  # [v]
        tiles: Tiles,
    ) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            scorer = _Scorer(states, catalogue, bias, targets)
            positives = scorer.positives()
            losses = positives.new_zeros(len(states) + 1)  # of the target alone it is 0
            for tile in tiles(states.shape[1]):
                # Of large logits the log-sum-exp would be rounded, of their differences it is not.
                logits = scorer.negatives(tile, scorer.y(tile.items))
                found = logits.sub_(positives[tile.rows, None]).logsumexp(dim=2)
                losses[tile.place] = torch.logaddexp(losses[tile.place], found)
                del logits
        losses = losses[:-1]
        ctx.tiles = tiles
        ctx.save_for_backward(states, catalogue, bias, targets, positives, losses)
        return losses.clone()

    @staticmethod
    @once
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        states, catalogue, bias, targets, positives, losses = ctx.saved_tensors
        d, grad_bias = states.shape[1], None if bias is None else torch.zeros_like(bias)
        with torch.autocast(states.device.type, enabled=False):
            scorer = _Scorer(states, catalogue, bias, targets)
            x, scale = scorer.x, grad_losses.to(scorer.dtype).unsqueeze(1)
            of_positives = torch.expm1(-losses).unsqueeze(1) * scale  # probabilities less one
            grad_x = torch.cat([of_positives * scorer.y(targets), x.new_zeros(1, d)])
            touched = chain([targets], (tile.items for tile in ctx.tiles(d)))
            total = CatalogueGradient(catalogue, touched, scorer.dtype)
            total.add(targets, of_positives * x)
            if grad_bias is not None:
                add_rows(grad_bias.unsqueeze(1), targets, of_positives)
            for tile in ctx.tiles(d):
                y = scorer.y(tile.items)
                # One by one: the sum of a large logit and a small loss would be rounded.
                weights = scorer.negatives(tile, y).sub_(positives[tile.rows, None])
                weights = weights.sub_(losses[tile.rows, None]).exp_().mul_(scale[tile.rows])
                grad_x[tile.place] += weights @ y
                total.add(tile.items.flatten(), (weights.mT @ x[tile.rows]).flatten(0, 1))
                if grad_bias is not None:
                    summed = weights.sum(dim=1).flatten().unsqueeze(1)
                    add_rows(grad_bias.unsqueeze(1), tile.items.flatten(), summed)
        return grad_x[:-1].to(states.dtype), total.finish(), grad_bias, None, None
