import math
from collections.abc import Iterable

import numpy as np
import pytest

from sce.evaluation.metrics import (
    METRICS,
    RankCounts,
    coverage,
    hit_rate,
    mrr,
    ndcg,
)

# Five users: the target stood first, second, fourth, eleventh, and nowhere.
MISSING = -1
RANKS = [0, 1, 3, 10, MISSING]


def count_ranks(ranks: Iterable[int], depth: int) -> RankCounts:
    all_ranks = np.fromiter(ranks, np.int64)
    ranked = all_ranks[(all_ranks != MISSING) & (all_ranks < depth)]
    return RankCounts(np.bincount(ranked, minlength=depth), len(all_ranks))


def test_counts_by_hand() -> None:
    counts = count_ranks(RANKS, depth=5)
    assert counts.at.tolist() == [1, 1, 0, 1, 0]
    assert counts.users == 5


def test_hit_rate_by_hand() -> None:
    counts = count_ranks(RANKS, depth=20)
    assert [hit_rate(counts, k) for k in (1, 2, 3, 4, 10, 11)] == [0.2, 0.4, 0.4, 0.6, 0.6, 0.8]


def test_ndcg_by_hand() -> None:
    counts = count_ranks(RANKS, depth=20)
    assert ndcg(counts, 1) == 1 / 5
    assert ndcg(counts, 4) == pytest.approx((1 + 1 / math.log2(3) + 1 / math.log2(5)) / 5)
    assert ndcg(counts, 11) - ndcg(counts, 10) == pytest.approx(1 / math.log2(12) / 5)


def test_mrr_by_hand() -> None:
    counts = count_ranks(RANKS, depth=20)
    assert mrr(counts, 1) == 1 / 5
    assert mrr(counts, 10) == pytest.approx((1 + 1 / 2 + 1 / 4) / 5)
    assert mrr(counts, 20) == pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 11) / 5)


def test_all_first_is_perfect_and_all_missing_is_nothing() -> None:
    perfect, nothing = count_ranks([0, 0, 0], depth=3), count_ranks([MISSING] * 3, depth=3)
    for metric in (hit_rate, ndcg, mrr):
        assert metric(perfect, 3) == 1
        assert metric(nothing, 3) == 0


def test_coverage_by_hand() -> None:
    counts = RankCounts(np.zeros(1, np.int64), users=1, covered={1: 0.5})
    assert coverage(counts, 1) == 0.5
    assert {name: metric.label for name, metric in METRICS.items()} == {
        "ndcg": "NDCG",
        "hr": "HR",
        "mrr": "MRR",
        "cov": "COV",
    }
