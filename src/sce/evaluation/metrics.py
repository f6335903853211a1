"""Ranking metrics: pure functions of where each user's target stood.

Each user has one target, so NDCG@k is 1 / log2(rank + 2) for a rank (from 0) below k, else 0, MRR@k
is 1 / (rank + 1), and HR@k is 1. All of them depend on the ranks only through how many users have
which, so that is what is kept: it does not grow with the users.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sce.data.prepared import FEW_USERS


@dataclass(frozen=True, eq=False)
class RankCounts:
    """Counts over the rankings of all users, which every metric follows from."""

    at: NDArray[np.int64]  # [depth], how many users' targets stood at each rank, from 0
    users: int  # all of them, with or without the target in the ranking
    covered: Mapping[int, float] = field(default_factory=dict)  # for each k, as a share of items


def too_few(users: float, value: float, other: float) -> bool:
    """True if users are few, and two means over them no further apart than chance could bring.

    A metric between 0 and 1 varies at most as hit or miss would.
    """
    spread = math.sqrt((value * (1 - value) + other * (1 - other)) / max(1, users))
    return users < FEW_USERS and abs(value - other) < 3 * spread


def ndcg(counts: RankCounts, k: int) -> float:
    """NDCG@k: a hit counts 1 at the first rank, and less the lower it stands."""
    gains = 1 / np.log2(np.arange(k) + 2)
    return float(counts.at[:k] @ gains) / counts.users


def hit_rate(counts: RankCounts, k: int) -> float:
    """HR@k: the share of users whose target is among the first k."""
    return float(counts.at[:k].sum()) / counts.users


def mrr(counts: RankCounts, k: int) -> float:
    """MRR@k: a hit at the n-th rank counts 1 / n."""
    gains = 1 / (np.arange(k) + 1)
    return float(counts.at[:k] @ gains) / counts.users


def coverage(counts: RankCounts, k: int) -> float:
    """COV@k: the share of the catalogue that was among the first k for somebody."""
    return counts.covered[k]


class Metric(NamedTuple):
    """A metric that every evaluation computes, at each depth k."""

    compute: Callable[[RankCounts, int], float]
    label: str  # its name in tables and charts
    of_users: bool = True  # whether it is a mean over users


# By name, as in "ndcg@10": evaluation, tables and charts iterate over it.
METRICS: dict[str, Metric] = {
    "ndcg": Metric(ndcg, "NDCG"),
    "hr": Metric(hit_rate, "HR"),
    "mrr": Metric(mrr, "MRR"),
    "cov": Metric(coverage, "COV", of_users=False),
}


def compute(
    ranks: NDArray[np.int32], ks: Sequence[int], covered: Mapping[int, float] | None = None
) -> dict[str, float]:
    """Every metric at each depth; where coverage was not counted, every mean over users.

    Ranks are those of each user's target, from 1; 0 where it was not among the first max(ks).
    """
    counts = RankCounts(np.bincount(ranks, minlength=max(ks) + 1)[1:], len(ranks), covered or {})
    return {
        f"{name}@{k}": metric.compute(counts, k)
        for k in ks
        for name, metric in METRICS.items()
        if metric.of_users or counts.covered
    }


def by_popularity(
    ranks: NDArray[np.int32], popular: NDArray[np.bool_], ks: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Metrics of users with "popular" targets, and with "rare" ones, and how many "users" each are.

    `popular` says it of each user's target; the others are as for `compute`.
    """
    parts = {"popular": ranks[popular], "rare": ranks[~popular]}
    return {
        name: {"users": len(part), **(compute(part, ks) if len(part) else {})}
        for name, part in parts.items()
    }
