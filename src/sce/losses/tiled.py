"""Softmax over a target and negatives, tile by tile, and logits: no more than a tile at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sce.losses.base import BatchShape, LossMemory
from sce.losses.gradients import CatalogueGradient, add_rows
from sce.losses.inputs import apply, compute_dtype, once, rounded

_AT_ONCE = 1 << 21  # numbers of states that are gathered with their targets


class Tile(NamedTuple):
    """Groups of states, each with negatives that its states share."""

    rows: Tensor  # [g, x]: states; where it is padding, any
    items: Tensor  # [g, y]: negatives; equal ones count as often as they are there
    place: Tensor | slice  # [g, x]: where results go, behind the last: padding; or what `rows` are
    absent: Tensor | None = None  # broadcasts to [g, x, y]: pairs that there are not
    offset: Tensor | None = None  # likewise: added to the logits
    ascending: bool = False  # the items: none are equal, none absent


Tiles = Callable[..., Iterable[Tile]]
"""Makes the tiles of states of so many dimensions, from tensors; called once more going back."""


class Options(NamedTuple):
    """Of the softmax."""

    sparse: bool = False  # the catalogue's gradient
    cast: torch.dtype | None = None  # to which factors of products are rounded
    losses: Tensor | None = None  # [v], if they are known


_DEFAULT = Options()


def tiled_cross_entropy(
    states: Tensor,
    catalogue: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    tiles: Tiles,
    *drawn: Tensor | None,  # of which tiles are made
    options: Options = _DEFAULT,
) -> Tensor:
    """Return the loss of each state [v]: its target against the negatives of all its tiles.

    A negative that is the target does not count. What is drawn is kept by autograd alone, which
    sees when it is overwritten, and what checkpointing draws anew.
    """
    given = (states, catalogue, bias, targets, *drawn)
    losses: Tensor = apply(_TiledCrossEntropy, tiles, options, *given)
    return losses


def tiled_logits(
    states: Tensor,
    catalogue: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    tiles: Tiles,
    *drawn: Tensor | None,
    k: int,
) -> tuple[Tensor, Tensor]:
    """Return the logits with the targets [v], and with the k negatives of the one tile of each."""
    given = (states, catalogue, bias, targets, *drawn)
    logits: tuple[Tensor, Tensor] = apply(_TiledLogits, tiles, k, *given)
    return logits


def tiled_memory(
    shape: BatchShape,
    tile: tuple[float, float, float],
    kept: float,
    *,
    offset: bool = False,
    distinct: float = 1.0,
) -> LossMemory:
    """Return the bytes of a call whose tiles are [g, x, y], and of what else is kept.

    Of a tile's items a share is `distinct`: their sums.
    """
    g, x, y = tile
    logits, rows, items = g * x * y, g * x * shape.dim, g * y * shape.dim
    states = 4 * shape.max_targets * shape.dim
    # Logits, once more, and whether they count; rows of states and of items.
    scored = (17 if offset else 9) * logits + 4 * (rows + items)
    # The gradient of the states, and of the tile's items, which are sorted to be added up.
    added = 4 * (logits + rows) + (8 + 4 * distinct + 48 / shape.dim) * items
    backward = states + max(2 * states, scored, added)
    kept += states
    return LossMemory(kept + max(scored, states), kept + backward - shape.state_bytes)


class Scorer:
    """Logits of tiles, and what their gradients come to."""

    def __init__(
        self,
        states: Tensor,  # [v, d]
        catalogue: Tensor,  # [items, d]
        bias: Tensor | None,  # [items]
        targets: Tensor,  # [v]
        cast: torch.dtype | None = None,
    ) -> None:
        self.states, self.catalogue, self.bias, self.targets = states, catalogue, bias, targets
        self.dtype, self.cast = compute_dtype(states, catalogue), cast

    def _round(self, factor: Tensor) -> Tensor:
        return rounded(factor, self.cast).to(self.dtype)

    def x(self, tile: Tile) -> Tensor:
        """Return the states [g, x, d]."""
        return self._round(_of_states(self.states, tile))

    def y(self, items: Tensor) -> Tensor:
        """Return rows of the catalogue [..., d]."""
        rows = self.catalogue.index_select(0, items.flatten())
        return self._round(rows.unflatten(0, items.shape))

    def pairs(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield states, a few at a time, and their targets' rows."""
        v, d = self.states.shape
        step = max(1, _AT_ONCE // d)
        for start in range(0, max(1, v), step):
            part = slice(start, min(start + step, v))
            yield part, self._round(self.states[part]), self.y(self.targets[part])

    def positives(self) -> Tensor:
        """Return the logits with the targets [v]."""
        found = torch.cat([(x * y).sum(dim=1) for _, x, y in self.pairs()])
        return found if self.bias is None else found + self.bias[self.targets]

    def negatives(self, tile: Tile, x: Tensor, y: Tensor) -> Tensor:
        """Return [g, x, y]; -inf at targets, and where there is none.

        Ascending items come first in memory: on ARM, torch prepares long for transposed factors.
        """
        logits = (y @ x.mT.contiguous()).mT if tile.ascending else x @ y.mT
        if self.bias is not None:
            logits += self.bias[tile.items].unsqueeze(1)
        if tile.offset is not None:
            logits += tile.offset
        targets = self.targets[tile.rows]
        if not tile.ascending:
            hidden = tile.items.unsqueeze(1) == targets.unsqueeze(2)
            if tile.absent is not None:
                hidden |= tile.absent
            return logits.masked_fill_(hidden, -torch.inf)
        column = torch.searchsorted(tile.items.contiguous(), targets)
        column = column.clamp_(max=tile.items.shape[1] - 1)
        hit = tile.items.gather(1, column) == targets
        column = column.unsqueeze(2)
        kept = logits.gather(2, column).masked_fill_(hit.unsqueeze(2), -torch.inf)
        return logits.scatter_(2, column, kept)

    def losses(self, positives: Tensor, tiles: Iterable[Tile], n: int) -> Tensor:
        """Return the losses at n places: how far a log-sum-exp is above the positive logit.

        The logarithm is added to a difference of logits, which is exact, not to a large number.
        """
        losses = positives.new_zeros(n + 1)  # of the target alone it is 0
        for tile in tiles:
            logits = self.negatives(tile, self.x(tile), self.y(tile.items))
            largest = logits.amax(dim=2)
            shift = torch.where(largest == -torch.inf, 0.0, largest)  # nothing but -inf: sum 0
            found = logits.sub_(shift.unsqueeze(2)).exp_().sum(dim=2).log_()
            found += shift - positives[tile.rows]
            place = _place(tile)
            losses[place] = torch.logaddexp(losses[place], found.flatten())
            del logits
        return losses[:-1]

    def gradients(
        self,
        needs: Sequence[bool],
        tiles: Callable[[], Iterable[Tile]],
        of_positives: Tensor,  # [v]
        weights_of: Callable[[Tile, Tensor, Tensor], Tensor],  # of a tile's x and y: [g, x, y]
        *,
        sparse: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of states, catalogue and bias, given those of logits."""
        (v, d), targets = self.states.shape, self.targets
        grad_x = self.states.new_zeros(v + 1, d, dtype=self.dtype)
        total = grad_bias = None
        if needs[1]:
            touched = chain([targets], (tile.items for tile in tiles()))
            total = CatalogueGradient(self.catalogue, touched, self.dtype, sparse=sparse)
        if needs[2] and self.bias is not None:
            grad_bias = torch.zeros_like(self.bias).unsqueeze(1)
            add_rows(grad_bias, targets, of_positives.unsqueeze(1))
        for part, x, y in self.pairs():
            weight = of_positives[part].unsqueeze(1)
            torch.mul(weight, y, out=grad_x[part])
            if total is not None:
                total.add(targets[part], weight * x)
        for tile in tiles():
            x, y = self.x(tile), self.y(tile.items)
            weights = weights_of(tile, x, y)
            if isinstance(tile.place, slice):
                grad_x[tile.place] += (weights @ y).flatten(0, 1)
            else:
                padding = (tile.place == v).unsqueeze(2)
                weights.masked_fill_(padding, 0)
                x.masked_fill_(padding, 0)
                grad_x.index_add_(0, tile.place.flatten(), (weights @ y).flatten(0, 1))
            del y
            if total is not None:
                total.add(tile.items.flatten(), (weights.mT @ x).flatten(0, 1))
            if grad_bias is not None:
                add_rows(grad_bias, tile.items.flatten(), weights.sum(dim=1).view(-1, 1))
            del weights
        of_states = grad_x[:-1].to(self.states.dtype)
        of_catalogue = None if total is None else total.finish()
        return of_states, of_catalogue, None if grad_bias is None else grad_bias.squeeze(1)


def _of_states(table: Tensor, tile: Tile) -> Tensor:
    """Return rows [g, x, ...] of a table of the states, a view where they lie together."""
    together = isinstance(tile.place, slice)
    rows = table[tile.place] if together else table.index_select(0, tile.rows.flatten())
    found: Tensor = rows.unflatten(0, tile.rows.shape)
    return found


def _place(tile: Tile) -> Tensor | slice:
    return tile.place if isinstance(tile.place, slice) else tile.place.flatten()


class _TiledCrossEntropy(torch.autograd.Function):
    """Between the passes there are two numbers a state."""

    @staticmethod
    def forward(
        ctx: Any,
        tiles: Tiles,
        options: Options,
        states: Tensor,
        catalogue: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        *drawn: Tensor | None,
    ) -> Tensor:
        scorer, losses = Scorer(states, catalogue, bias, targets, options.cast), options.losses
        with torch.autocast(states.device.type, enabled=False):
            positives = scorer.positives()
            if losses is None:
                losses = scorer.losses(positives, tiles(states.shape[1], *drawn), len(states))
        ctx.tiles, ctx.sparse, ctx.cast = tiles, options.sparse, options.cast
        ctx.save_for_backward(positives, losses, states, catalogue, bias, targets, *drawn)
        return losses.clone()

    @staticmethod
    @once
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        positives, losses, states, catalogue, bias, targets, *drawn = ctx.saved_tensors
        scorer = Scorer(states, catalogue, bias, targets, ctx.cast)
        scale = grad_losses.to(scorer.dtype)
        # Where no gradient comes, none goes on: a place that is not in use may have any logits.
        idle = scale == 0
        positives, losses = positives.masked_fill(idle, torch.inf), losses.masked_fill(idle, 0)

        def weights(tile: Tile, x: Tensor, y: Tensor) -> Tensor:
            found = scorer.negatives(tile, x, y).sub_(positives[tile.rows].unsqueeze(2))
            found = found.sub_(losses[tile.rows].unsqueeze(2)).exp_()
            return found.mul_(scale[tile.rows].unsqueeze(2))

        of_positives = torch.expm1(-losses) * scale  # probabilities less one
        with torch.autocast(scale.device.type, enabled=False):
            grads = scorer.gradients(
                ctx.needs_input_grad[2:],
                partial(ctx.tiles, states.shape[1], *drawn),
                of_positives,
                weights,
                sparse=ctx.sparse,
            )
        return None, None, *grads, *[None] * (1 + len(drawn))


class _TiledLogits(torch.autograd.Function):
    """Logits that are kept: a row of negatives for each state."""

    @staticmethod
    def forward(
        ctx: Any,
        tiles: Tiles,
        k: int,
        states: Tensor,
        catalogue: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        *drawn: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        scorer, v = Scorer(states, catalogue, bias, targets), len(states)
        with torch.autocast(states.device.type, enabled=False):
            positives = scorer.positives()
            negatives = positives.new_zeros(0, k)
            for tile in tiles(states.shape[1], *drawn):
                logits = scorer.negatives(tile, scorer.x(tile), scorer.y(tile.items)).flatten(0, 1)
                if isinstance(tile.place, slice) and len(logits) == v:  # all of them
                    negatives = logits
                    continue
                if len(negatives) == 0:  # padding has those of some state, which go behind the last
                    negatives = logits.new_zeros(v + 1, k)
                negatives[_place(tile)] = logits
                del logits
        ctx.tiles = tiles
        ctx.save_for_backward(states, catalogue, bias, targets, *drawn)
        return positives, negatives.resize_(v, k)

    @staticmethod
    @once
    def backward(
        ctx: Any, grad_positives: Tensor, grad_negatives: Tensor
    ) -> tuple[Tensor | None, ...]:
        states, catalogue, bias, targets, *drawn = ctx.saved_tensors
        scorer = Scorer(states, catalogue, bias, targets)

        def weights(tile: Tile, *_: Tensor) -> Tensor:
            # At -inf a negative has no part in the loss, whose gradient is 0 there.
            return _of_states(grad_negatives, tile)

        with torch.autocast(grad_positives.device.type, enabled=False):
            tiles = partial(ctx.tiles, states.shape[1], *drawn)
            grads = scorer.gradients(ctx.needs_input_grad[2:], tiles, grad_positives, weights)
        return None, None, *grads, *[None] * (1 + len(drawn))
