"""A batch cut by length, so that short histories are not padded to the longest.

The rows of a batch are sorted, the longest first, and cut into a few groups: rows with more than
half of the greatest length are computed in its full width, those with more than a quarter in half
of it, and so on. `LengthGroups` has the number of rows and the width of each group.

Where a step is compiled or captured, all batches must have the same groups. These are such that a
batch drawn at random nearly always fits: no row is longer than its group is wide.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

LengthGroups = tuple[tuple[int, int], ...]  # rows and width of each, the widest first

_HALVINGS = 3
# Standard deviations beyond which one batch in a million lies, for each width.
_DEVIATIONS = 4.75


def group_widths(longest: int) -> tuple[int, ...]:
    """Widths that groups have, the greatest length first.

    >>> group_widths(200), group_widths(3)
    ((200, 100, 50, 25), (3, 2, 1))
    """
    return tuple(dict.fromkeys(-(-longest // 2**halving) for halving in range(_HALVINGS + 1)))


def group_by_length(lengths: Tensor, longest: int) -> LengthGroups:
    """Groups of one batch, of its histories' lengths, [b], in any order."""
    longer = [int((lengths > width).sum()) for width in group_widths(longest)[1:]]
    return _cut(longer, len(lengths), longest)


def groups_for_all(
    shares: Sequence[float], rows: int, longest: int, among: int | None = None
) -> LengthGroups:
    """Groups into which nearly every batch fits, of `shares_longer` of all histories.

    There are so many histories to choose `among`: a batch has none of them twice.

    >>> groups_for_all([0.4, 0.7, 0.9], rows=128, longest=200)
    ((79, 200), (36, 100), (13, 50))
    """
    most = [rows if among is None else min(rows, round(share * among)) for share in shares]
    longer = [min(m, _at_most(rows, share)) for m, share in zip(most, shares, strict=True)]
    return _cut(longer, rows, longest)


def shares_longer(lengths: Tensor | NDArray[np.int64], longest: int) -> list[float]:
    """Shares of histories that are longer than each of the widths but the first."""
    return [int((lengths > width).sum()) / len(lengths) for width in group_widths(longest)[1:]]


def fits(lengths: Tensor, groups: LengthGroups) -> bool:
    """True if no history, the longest first, is longer than its group is wide."""
    starts = [0, *accumulate(rows for rows, _ in groups)]
    return starts.pop() == len(lengths) and all(
        int(lengths[start]) <= width for start, (_, width) in zip(starts, groups, strict=True)
    )


def _cut(longer: Sequence[int], rows: int, longest: int) -> LengthGroups:
    """Cut a batch where rows are no longer than the next width."""
    bounds = zip([0, *longer], [*longer, rows], group_widths(longest), strict=True)
    return tuple((end - start, width) for start, end, width in bounds if end > start)


def _at_most(rows: int, share: float) -> int:
    """Rows of a batch that may be of a kind with this share, but for one batch in a million.

    The quantile of a binomial distribution, by that of a normal one and its skewness.
    """
    if share == 0:
        return 0
    deviation = math.sqrt(rows * share * (1 - share))
    skewed = (_DEVIATIONS**2 - 1) * (1 - 2 * share) / 6
    return min(rows, math.ceil(rows * share + _DEVIATIONS * deviation + max(0.0, skewed)))
