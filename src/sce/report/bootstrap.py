"""Paired bootstrap over test users: the part of a difference that is chance of who was tested."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ranks = Sequence[NDArray[np.int32]]  # for each seed the ranks of targets, from 1; 0: not ranked

RESAMPLES = 1000
DEPTH = 10  # of NDCG
LEAST = 20  # users that differ: with fewer, who they are decides the ends of an interval
_AT_ONCE = 10**7  # weights in memory


def relative_interval(ours: Ranks, theirs: Ranks, seed: int = 0) -> tuple[float, float] | str:
    """95 % interval of the relative change in NDCG@10, over the same users drawn again and again.

    Why there is none, where fewer than 20 users have another NDCG@10 with one side than with the
    other, or the others have no hit.
    """
    # Users with the same gains are interchangeable: there are few kinds, however many users.
    mine, my_kinds = np.unique(_gains(ours), return_inverse=True)
    yours, your_kinds = np.unique(_gains(theirs), return_inverse=True)
    pairs, counts = np.unique(my_kinds * len(yours) + your_kinds, return_counts=True)
    gains = mine[pairs // len(yours)], yours[pairs % len(yours)]
    if (differ := counts[gains[0] != gains[1]].sum()) < LEAST:
        return f"NDCG@10 differs for {differ} of them, fewer than {LEAST}"
    random, changes = np.random.default_rng(seed), np.empty(RESAMPLES)
    step = max(1, _AT_ONCE // len(pairs))
    for first in range(0, RESAMPLES, step):
        part = changes[first : first + step]
        weights = random.multinomial(counts.sum(), counts / counts.sum(), size=len(part))
        one, other = (weights @ gain for gain in gains)
        if not other.all():
            return f"{counts[gains[1] > 0].sum()} of them have a hit with the other, too few"
        part[:] = one / other - 1
    low, high = np.percentile(changes, [2.5, 97.5])
    return float(low), float(high)


def _gains(ranks: Ranks) -> NDArray[np.float64]:
    """NDCG@10 of each user, averaged over seeds."""
    table = np.append(0.0, 1 / np.log2(np.arange(2, DEPTH + 2)))
    total = sum(table[np.where(one <= DEPTH, one, 0)] for one in ranks)
    return np.asarray(total / len(ranks)).round(12)  # sums in another order are the same
