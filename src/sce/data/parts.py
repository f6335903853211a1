"""A batch in parts by length, so that short histories are not padded to the longest.

The rows of a batch are sorted, the longest first, and cut into a few parts: those with more than
half of the greatest length are computed in its full width, those with more than a quarter in half
of it, and so on. `Parts` says how many rows each part has, and its width.

Where a step is compiled or recorded, all batches must have the same parts. These are such that a
batch drawn at random nearly always fits: no row is longer than its part is wide.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Parts = tuple[tuple[int, int], ...]  # rows and width of each, the widest first

_HALVINGS = 3
# Standard deviations beyond which one batch in a million lies, for each width.
_DEVIATIONS = 4.75


def part_widths(longest: int) -> tuple[int, ...]:
    """The widths that parts have, the greatest length first.

    >>> part_widths(200), part_widths(3)
    ((200, 100, 50, 25), (3, 2, 1))
    """
    return tuple(dict.fromkeys(-(-longest // 2**halving) for halving in range(_HALVINGS + 1)))


def parts_of(lengths: Tensor, longest: int) -> Parts:
    """The parts of one batch.

    Args:
        lengths: Of its histories, [b], in any order.
        longest: The width of the batch; no history is longer.
    """
    longer = [int((lengths > width).sum()) for width in part_widths(longest)[1:]]
    return _cut(longer, len(lengths), longest)


def parts_for_all(
    shares: Sequence[float], rows: int, longest: int, among: int | None = None
) -> Parts:
    """The parts into which nearly every batch fits.

    >>> parts_for_all([0.4, 0.7, 0.9], rows=128, longest=200)
    ((79, 200), (36, 100), (13, 50))

    Args:
        shares: Of all histories, those that are longer than each of the widths but the first.
        rows: In a batch.
        longest: The greatest length.
        among: How many histories there are; a batch has none of them twice.
    """
    most = [rows if among is None else min(rows, round(share * among)) for share in shares]
    longer = [min(m, _at_most(rows, share)) for m, share in zip(most, shares, strict=True)]
    return _cut(longer, rows, longest)


def shares_longer(lengths: Tensor | NDArray[np.int64], longest: int) -> list[float]:
    """The shares of histories that are longer than each of the widths but the first."""
    return [int((lengths > width).sum()) / len(lengths) for width in part_widths(longest)[1:]]


def fits(lengths: Tensor, parts: Parts) -> bool:
    """Whether histories, sorted by their lengths, the longest first, fit into parts."""
    if sum(rows for rows, _ in parts) != len(lengths):
        return False
    first = 0
    for rows, width in parts:
        if int(lengths[first]) > width:
            return False
        first += rows
    return True


def _cut(longer: Sequence[int], rows: int, longest: int) -> Parts:
    """Cut a batch where rows are no longer than the next width."""
    widths = part_widths(longest)
    ends = [*longer, rows]
    starts = [0, *longer]
    found = zip(starts, ends, widths, strict=True)
    return tuple((end - start, width) for start, end, width in found if end > start)


def _at_most(rows: int, share: float) -> int:
    """How many of the rows of a batch may be of a kind that has this share, but for rare batches.

    The quantile of a binomial distribution, by that of a normal one and its skewness.
    """
    if share == 0:
        return 0
    deviation = math.sqrt(rows * share * (1 - share))
    skewed = (_DEVIATIONS**2 - 1) * (1 - 2 * share) / 6
    return min(rows, math.ceil(rows * share + _DEVIATIONS * deviation + max(0.0, skewed)))
