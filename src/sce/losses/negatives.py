"""Where the negatives of the sampled losses come from. All are drawn on the device of the loss.

A sampler is a module called as `sampler(rows, k, n_items, targets, generator=...)`. It returns
`rows` independent draws of k items each, and, when it corrects for how it draws, the logarithm of
how often each drawn item is expected among the k.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Draw(NamedTuple):
    """Drawn items, and the correction to subtract from their logits."""

    items: Tensor  # [rows, k]
    log_expected: Tensor | None  # [rows, k]: log of the expected count of each item among the k


class UniformNegatives(nn.Module):
    """Every item of the catalogue alike.

    Args:
        replacement: Whether an item may be drawn twice in a row of k. Without replacement, a k
            beyond the catalogue means all of it.
    """

    correct = False

    def __init__(self, *, replacement: bool = True) -> None:
        super().__init__()
        self.replacement = replacement

    def forward(
        self,
        rows: int,
        k: int,
        n_items: int,
        targets: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> Draw:
        """Draw k items for each row."""
        if self.replacement:
            shape = (rows, k)
            items = torch.randint(n_items, shape, device=targets.device, generator=generator)
            return Draw(items, None)
        return Draw(_draw_distinct(rows, min(k, n_items), n_items, targets.device, generator), None)


class PopularityNegatives(nn.Module):
    """Items in proportion to their counts, raised to a power, with replacement.

    Args:
        counts: How often each item of the catalogue occurs: [items], not negative, not all zero.
        power: 1 draws by popularity, 0 uniformly among the items that occur, 0.75 as word2vec does.
        correct: Correct the logits of the negatives for how often they are drawn (logQ).
    """

    def __init__(self, counts: Tensor, *, power: float = 1.0, correct: bool = False) -> None:
        super().__init__()
        weights = _share(counts, power)
        self.correct = correct
        # No buffers: they would follow the model to half precision, and forget most of the items.
        self.cumulative = weights.cumsum(0)
        self.log_share = weights.log().float()

    def forward(
        self,
        rows: int,
        k: int,
        n_items: int,
        targets: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> Draw:
        """Draw k items for each row."""
        if len(self.cumulative) != n_items:
            raise ValueError(
                f"popularity counts are for {len(self.cumulative)} items, the catalogue has "
                f"{n_items}"
            )
        if self.cumulative.device != targets.device:
            self.cumulative = self.cumulative.to(targets.device)
            self.log_share = self.log_share.to(targets.device)
        at = torch.rand((rows, k), dtype=torch.float64, device=targets.device, generator=generator)
        # The last entry is the sum of all, up to rounding: scaling by it keeps the search inside.
        items = torch.searchsorted(self.cumulative, at * self.cumulative[-1], right=True)
        items = items.clamp_(max=n_items - 1)
        return Draw(items, self.log_share[items] + math.log(k) if self.correct else None)


class InBatchNegatives(nn.Module):
    """Targets of other positions of the batch: popular items come often, so they are corrected.

    Args:
        counts: How often each item occurs in training, for the correction: [items]. Without them
            the share of an item among the batch's own targets is used.
        correct: Correct the logits of the negatives for how often they are drawn (logQ).
    """

    def __init__(self, counts: Tensor | None = None, *, correct: bool = True) -> None:
        super().__init__()
        self.correct = correct
        # What is in a batch occurs: an item that the counts never saw is taken to occur once.
        log_share = None if counts is None else _share(counts.clamp(min=1), 1.0).log().float()
        self.log_share = log_share

    def forward(
        self,
        rows: int,
        k: int,
        n_items: int,
        targets: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> Draw:
        """Draw k targets of the batch for each row."""
        if len(targets) == 0:
            return Draw(targets.new_zeros((rows, 0)), None)
        at = torch.randint(len(targets), (rows, k), device=targets.device, generator=generator)
        items = targets[at]
        if not self.correct:
            return Draw(items, None)
        if self.log_share is None:
            own = torch.bincount(targets, minlength=n_items)[items]
            return Draw(items, (own / len(targets)).log() + math.log(k))
        if len(self.log_share) != n_items:
            raise ValueError(
                f"in-batch counts are for {len(self.log_share)} items, the catalogue has {n_items}"
            )
        self.log_share = self.log_share.to(targets.device)
        return Draw(items, self.log_share[items] + math.log(k))


Negatives = UniformNegatives | PopularityNegatives | InBatchNegatives


def _share(counts: Tensor, power: float) -> Tensor:
    if counts.dim() != 1:
        raise ValueError(f"counts must be [items], got shape {tuple(counts.shape)}")
    counts = counts.to(torch.float64)
    if not counts.isfinite().all() or (counts < 0).any() or counts.sum() == 0:
        raise ValueError("counts must be finite, not negative, and not all zero")
    weights = torch.where(counts > 0, counts**power, 0.0)
    return weights / weights.sum()


def _draw_distinct(
    rows: int, k: int, n_items: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Draw k different items for each row, every set of k alike."""
    if 4 * k >= n_items:
        noise = torch.rand((rows, n_items), device=device, generator=generator)
        return noise.topk(k, dim=1).indices
    # The first k different items of a sequence of independent draws. Twice k draws hold fewer than
    # k different ones only if half of them repeat, of at least 4 k items: then draw longer.
    length = 2 * k + 16
    while True:
        drawn = torch.randint(n_items, (rows, length), device=device, generator=generator)
        by_item = drawn.sort(dim=1, stable=True)
        again = torch.zeros_like(drawn, dtype=torch.bool)
        again[:, 1:] = by_item.values[:, 1:] == by_item.values[:, :-1]
        first = torch.ones_like(again).scatter_(1, by_item.indices, again.logical_not_())
        if bool((first.sum(dim=1) >= k).all()):
            break
        length *= 2
    chosen = first & (first.cumsum(dim=1) <= k)
    return drawn[chosen].view(rows, k)
