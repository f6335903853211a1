import math

import numpy as np
import pytest

from sce.evaluation.metrics import METRICS, compute

KS = (1, 2, 3, 4, 10, 11, 20)
# Five users: the target stood first, second, fourth, eleventh, and nowhere.
FOUND = compute(np.array([1, 2, 4, 11, 0], np.int32), KS)


def test_hit_rate_by_hand() -> None:
    assert [FOUND[f"hr@{k}"] for k in KS] == [0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8]


def test_ndcg_by_hand() -> None:
    assert FOUND["ndcg@1"] == 1 / 5
    assert FOUND["ndcg@4"] == pytest.approx((1 + 1 / math.log2(3) + 1 / math.log2(5)) / 5)
    assert FOUND["ndcg@11"] - FOUND["ndcg@10"] == pytest.approx(1 / math.log2(12) / 5)


def test_mrr_by_hand() -> None:
    assert FOUND["mrr@1"] == 1 / 5
    assert FOUND["mrr@10"] == pytest.approx((1 + 1 / 2 + 1 / 4) / 5)
    assert FOUND["mrr@20"] == pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 11) / 5)


@pytest.mark.parametrize("rank", [1, 0])
def test_all_first_is_perfect_and_all_missing_is_nothing(rank: int) -> None:
    found = compute(np.full(3, rank, np.int32), [3])
    assert found == {"ndcg@3": rank, "hr@3": rank, "mrr@3": rank}


def test_coverage_by_hand() -> None:
    assert compute(np.zeros(1, np.int32), [1], {1: 0.5})["cov@1"] == 0.5
    assert {name: metric.label for name, metric in METRICS.items()} == {
        "ndcg": "NDCG",
        "hr": "HR",
        "mrr": "MRR",
        "cov": "COV",
    }
