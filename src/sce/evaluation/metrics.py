"""Ranking metrics, from where each user's target stood.

Each user has one target: a metric is the mean over users of what a hit at its rank counts, 0 below
the depth k. All depend on the ranks only through how many users have which.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sce.data.prepared import FEW_USERS


class Metric(NamedTuple):
    """A metric that every evaluation computes, at each depth k."""

    label: str  # its name in tables and charts
    gain: Callable[[NDArray[np.int64]], Any] | None = None
    """What a hit counts at some ranks, from 1; None: it is no mean over users."""


# By name, as in "ndcg@10": evaluation, tables and charts iterate over it.
METRICS = {
    "ndcg": Metric("NDCG", lambda ranks: 1 / np.log2(ranks + 1)),
    "hr": Metric("HR", np.ones_like),
    "mrr": Metric("MRR", lambda ranks: 1 / ranks),
    "cov": Metric("COV"),  # the share of the catalogue that was among the first k for somebody
}


def compute(
    ranks: NDArray[np.int32], ks: Sequence[int], covered: Mapping[int, float] | None = None
) -> dict[str, float]:
    """Every metric at each depth; where coverage was not counted, every mean over users.

    Ranks are those of each user's target, from 1; 0 where it was not among the first max(ks).
    """
    at, found = np.bincount(ranks, minlength=max(ks) + 1)[1:], {}
    for k in ks:
        for name, metric in METRICS.items():
            if metric.gain is not None:
                gains = metric.gain(np.arange(1, k + 1))
                found[f"{name}@{k}"] = float(at[:k] @ gains) / len(ranks)
            elif covered:
                found[f"{name}@{k}"] = covered[k]
    return found


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


def too_few(users: float, value: float, other: float) -> bool:
    """True if users are few, and two means over them no further apart than chance could bring.

    A metric between 0 and 1 varies at most as hit or miss would.
    """
    spread = math.sqrt((value * (1 - value) + other * (1 - other)) / max(1, users))
    return users < FEW_USERS and abs(value - other) < 3 * spread
