"""Samplers of negatives, which draw on the device of the loss.

A sampler of your own is anything of the form of `Negatives`.
"""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Generator, Tensor, nn

from sce.losses.inputs import Inputs, check_flag, check_number, check_tensor


class Draw(NamedTuple):
    """Drawn items, and the correction to subtract from their logits."""

    items: Tensor  # [rows, k]
    log_expected: Tensor | None  # [rows, k]: log of the expected count of each item among the k


class Negatives(Protocol):
    """A sampler: a callable with an attribute `correct`.

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
        """True if it corrects the logits of its negatives (logQ), which only a softmax can use."""

    def __call__(
        self,
        rows: int,
        k: int,
        n_items: int,
        targets: Tensor,
        *,
        generator: Generator | None = None,
    ) -> Draw:
        """Draw k items of 0 ... n_items - 1 for each row, on the device of the targets.

        The targets [v] are those of the batch's valid positions. Fewer than k items are fine. With
        `correct`, the draw has `log_expected`.
        """


def check_negatives(negatives: Negatives) -> None:
    """Refuse anything but a sampler."""
    accepted = "negatives must be a sampler such as UniformNegatives() (see sce.losses.negatives)"
    if isinstance(negatives, type) or not callable(negatives):
        raise TypeError(f"{accepted}, got {negatives!r}")
    if not isinstance(getattr(negatives, "correct", None), bool):
        raise TypeError(
            f"{accepted}: {type(negatives).__name__} must have an attribute `correct`, True if it "
            "corrects the logits for how it draws, and False otherwise"
        )


def check_draw(drawn: Any, rows: int, inputs: Inputs, *, corrected: bool) -> Draw:
    """Refuse anything but a draw of so many rows, with items of the catalogue, as int64."""
    asked = f"a sampler that is asked for {rows} rows must return"
    if not isinstance(drawn, tuple) or len(drawn) != 2:
        raise TypeError(f"{asked} Draw(items, log_expected), got {type(drawn).__name__}")
    items, log_expected = drawn
    check_tensor("items of a sampler", items)
    if items.dtype == torch.bool or items.is_floating_point() or items.is_complex():
        raise TypeError(f"{asked} items as integers, got {items.dtype}")
    if items.dim() != 2 or len(items) != rows:
        raise ValueError(f"{asked} items [{rows}, k], got shape {tuple(items.shape)}")
    device, n_items = inputs.targets.device, len(inputs.catalogue)
    if items.device != device:
        raise ValueError(f"{asked} items on {device}, got {items.device}")
    if device.type == "cpu" and items.numel():
        for end in items.aminmax():
            if not 0 <= end < n_items:
                raise ValueError(f"{asked} items from 0 to {n_items - 1}, got {int(end)}")
    if items.numel() and corrected != (log_expected is not None):
        what = "log_expected" if corrected else "no log_expected"
        raise ValueError(f"{asked} {what}, as its attribute `correct` is {corrected}")
    if log_expected is not None:
        check_tensor("log_expected of a sampler", log_expected)
        if log_expected.shape != items.shape or not log_expected.is_floating_point():
            raise ValueError(
                f"{asked} log_expected as floating point in the shape of items, "
                f"{tuple(items.shape)}, got {log_expected.dtype}, {tuple(log_expected.shape)}"
            )
    return Draw(items.long(), log_expected)


class UniformNegatives(nn.Module):
    """Every item of the catalogue alike, with replacement.

    Args:
        correct: Scale the sum over the negatives up to one over the catalogue: by items / k, all
            alike. That is scaled cross-entropy (arXiv 2408.14238, where it is called SCE too), with
            the factor at which the sum is right on average.
    """

    def __init__(self, *, correct: bool = False) -> None:
        super().__init__()
        check_flag("correct", correct)
        self.correct = correct

    def forward(
        self, rows: int, k: int, n_items: int, targets: Tensor, generator: Generator | None = None
    ) -> Draw:
        """Draw k items for each row."""
        items = torch.randint(n_items, (rows, k), device=targets.device, generator=generator)
        if not self.correct:
            return Draw(items, None)
        expected = targets.new_full((rows, k), math.log(k / n_items), dtype=torch.float32)
        return Draw(items, expected)

    def extra_repr(self) -> str:
        """Show the settings."""
        return "correct=True" if self.correct else ""


class PopularityNegatives(nn.Module):
    """Items in proportion to their counts, raised to a power, with replacement.

    Args:
        counts: Occurrences of each item of the catalogue, [items]: not negative, not all zero.
        power: 1 draws by popularity, 0 uniformly among the items that occur, 0.75 as word2vec does.
        correct: Correct the logits of the negatives for their frequency (logQ).
    """

    def __init__(self, counts: Tensor, *, power: float = 1.0, correct: bool = False) -> None:
        super().__init__()
        check_flag("correct", correct)
        weights = _share(counts, power)
        self.power = power
        self.correct = correct
        # No buffers: in half precision, which they would follow the model to, most items are lost.
        self.cumulative = weights.cumsum(0)
        self.log_share = weights.log().float()

    def forward(
        self, rows: int, k: int, n_items: int, targets: Tensor, generator: Generator | None = None
    ) -> Draw:
        """Draw k items for each row."""
        _check_items(self.cumulative, n_items)
        if self.cumulative.device != targets.device:
            self.cumulative = self.cumulative.to(targets.device)
            self.log_share = self.log_share.to(targets.device)
        device, wide = targets.device, torch.float64
        uniform = torch.rand((rows, k), dtype=wide, device=device, generator=generator)
        # The last entry is the sum of all, up to rounding: scaling by it keeps the search inside.
        items = torch.searchsorted(self.cumulative, uniform * self.cumulative[-1], right=True)
        items = items.clamp_(max=n_items - 1)
        return Draw(items, self.log_share[items] + math.log(k) if self.correct else None)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"items={len(self.cumulative)}, power={self.power}, correct={self.correct}"


class InBatchNegatives(nn.Module):
    """Targets of other positions of the batch: popular items come often, so they are corrected.

    Args:
        counts: Occurrences of each item in training, for the correction, [items]. None: those
            among the targets of the batch.
        correct: Correct the logits of the negatives for their frequency (logQ).
    """

    def __init__(self, counts: Tensor | None = None, *, correct: bool = True) -> None:
        super().__init__()
        check_flag("correct", correct)
        self.correct = correct
        # Items of a batch occur: one that the counts have not seen is taken to occur once.
        self.log_share = None if counts is None else _share(counts, 1.0, least=1.0).log().float()

    def forward(
        self, rows: int, k: int, n_items: int, targets: Tensor, generator: Generator | None = None
    ) -> Draw:
        """Draw k targets of the batch for each row."""
        if len(targets) == 0:
            return Draw(targets.new_zeros((rows, 0)), None)
        drawn = torch.randint(len(targets), (rows, k), device=targets.device, generator=generator)
        items = targets[drawn]
        if not self.correct:
            return Draw(items, None)
        return Draw(items, (k * self.share(items, n_items, targets)).log())

    def share(self, items: Tensor, n_items: int, targets: Tensor) -> Tensor:
        """Return the share of each item among all that may be drawn."""
        if self.log_share is None:
            return torch.bincount(targets, minlength=n_items)[items].float() / len(targets)
        _check_items(self.log_share, n_items)
        self.log_share = self.log_share.to(targets.device)
        return self.log_share[items].exp()

    def extra_repr(self) -> str:
        """Show the settings."""
        counts = "of the batch" if self.log_share is None else "given"
        return f"counts={counts}, correct={self.correct}"


class MixedNegatives(nn.Module):
    """Targets of the batch and uniform ones: half of each, and one more of these if k is odd.

    Args:
        counts: Occurrences of each item in training, for the correction, [items]. None: those
            among the targets of the batch.
        correct: Correct the logits of the negatives for how often both ways together draw an item
            (logQ).
    """

    def __init__(self, counts: Tensor | None = None, *, correct: bool = True) -> None:
        super().__init__()
        self.in_batch = InBatchNegatives(counts, correct=correct)
        self.correct = correct

    def forward(
        self, rows: int, k: int, n_items: int, targets: Tensor, generator: Generator | None = None
    ) -> Draw:
        """Draw k items for each row."""
        half = k // 2 if len(targets) else 0
        uniform = torch.randint(
            n_items, (rows, k - half), device=targets.device, generator=generator
        )
        drawn = self.in_batch(rows, half, n_items, targets, generator=generator).items
        items = torch.cat([drawn, uniform], dim=1)
        if not self.correct:
            return Draw(items, None)
        alike = targets.new_full((), (k - half) / n_items, dtype=torch.float32)
        if not half:
            return Draw(items, alike.log().expand(rows, k))
        return Draw(items, (half * self.in_batch.share(items, n_items, targets) + alike).log())

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"correct={self.correct}"


def _check_items(counts: Tensor, n_items: int) -> None:
    if len(counts) != n_items:
        raise ValueError(f"counts are for {len(counts)} items, the catalogue has {n_items}")


def _share(counts: Tensor, power: float, least: float = -math.inf) -> Tensor:
    check_tensor("counts", counts)
    check_number("power", power)
    if counts.dim() != 1:
        raise ValueError(f"counts must be [items], got shape {tuple(counts.shape)}")
    counts = counts.to(torch.float64).clamp(min=least)
    weights = torch.where(counts > 0, counts**power, 0.0)
    total = weights.sum()
    if not counts.isfinite().all() or (counts < 0).any() or not 0 < total < math.inf:
        raise ValueError(
            f"counts, to the power {power}, must be finite, not negative, not all zero"
        )
    return weights / total
