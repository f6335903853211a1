"""Where the negatives of the sampled losses come from. All are drawn on the device of the loss.

`Negatives` says what a sampler is; a sampler of your own is anything of that form.
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sce.losses.inputs import check_flag, check_number, check_tensor


class Draw(NamedTuple):
    """Drawn items, and the correction to subtract from their logits."""

    items: Tensor  # [rows, k]
    log_expected: Tensor | None  # [rows, k]: log of the expected count of each item among the k


class Negatives(Protocol):
    """What draws negatives: a callable with an attribute `correct`.

    >>> class LastItems:
    ...     correct = False
    ...
    ...     def __call__(self, rows, k, n_items, targets, *, generator=None):
    ...         last = torch.arange(n_items - k, n_items, device=targets.device)
    ...         return Draw(last.expand(rows, k), None)
    >>> check_negatives(LastItems())
    """

    @property
    def correct(self) -> bool:
        """Whether it corrects the logits of what it draws (logQ), which only a softmax can use."""

    def __call__(
        self,
        rows: int,
        k: int,
        n_items: int,
        targets: Tensor,  # [v] of the batch's valid positions
        *,
        generator: torch.Generator | None = None,
    ) -> Draw:
        """Draw k items of 0 ... n_items - 1 for each row, on the device of the targets.

        Fewer than k are fine. With `correct`, the draw also holds the logarithm of how often each
        drawn item is expected among the k.
        """


def check_negatives(negatives: Negatives) -> None:
    """Refuse what is no sampler."""
    wanted = "negatives must be a sampler such as UniformNegatives() (see sce.losses.negatives)"
    if isinstance(negatives, type) or not callable(negatives):
        raise TypeError(f"{wanted}, got {negatives!r}")
    if not isinstance(getattr(negatives, "correct", None), bool):
        raise TypeError(
            f"{wanted}: {type(negatives).__name__} must have an attribute `correct`, which is True "
            "when it corrects the logits for how it draws, and False otherwise"
        )


class UniformNegatives(nn.Module):
    """Every item of the catalogue alike.

    Args:
        replacement: Whether an item may be drawn twice in a row of k. Without replacement, a k
            beyond the catalogue means all of it.
    """

    correct = False

    def __init__(self, *, replacement: bool = True) -> None:
        super().__init__()
        check_flag("replacement", replacement)
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

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return f"replacement={self.replacement}"


class PopularityNegatives(nn.Module):
    """Items in proportion to their counts, raised to a power, with replacement.

    Args:
        counts: How often each item of the catalogue occurs: [items], not negative, not all zero.
        power: 1 draws by popularity, 0 uniformly among the items that occur, 0.75 as word2vec does.
        correct: Correct the logits of the negatives for how often they are drawn (logQ).
    """

    def __init__(self, counts: Tensor, *, power: float = 1.0, correct: bool = False) -> None:
        super().__init__()
        check_flag("correct", correct)
        weights = _share(counts, power)
        self.power = power
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

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return f"items={len(self.cumulative)}, power={self.power}, correct={self.correct}"


class InBatchNegatives(nn.Module):
    """Targets of other positions of the batch: popular items come often, so they are corrected.

    Args:
        counts: How often each item occurs in training, for the correction: [items]. Without them
            the share of an item among the batch's own targets is used.
        correct: Correct the logits of the negatives for how often they are drawn (logQ).
    """

    def __init__(self, counts: Tensor | None = None, *, correct: bool = True) -> None:
        super().__init__()
        check_flag("correct", correct)
        self.correct = correct
        # What is in a batch occurs: an item that the counts never saw is taken to occur once.
        self.log_share = None if counts is None else _share(counts, 1.0, least=1.0).log().float()

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

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        counts = "of the batch" if self.log_share is None else "given"
        return f"counts={counts}, correct={self.correct}"


def _share(counts: Tensor, power: float, least: float = -math.inf) -> Tensor:
    check_tensor("counts", counts)
    check_number("power", power)
    if not math.isfinite(power):
        raise ValueError(f"power must be finite, got {power}")
    if counts.dim() != 1:
        raise ValueError(f"counts must be [items], got shape {tuple(counts.shape)}")
    counts = counts.to(torch.float64).clamp(min=least)
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
