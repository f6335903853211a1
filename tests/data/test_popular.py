import numpy as np
import pytest

from sce.data.popular import MostPopular, popular_half

COUNTS = np.array([3, 9, 0, 9, 1, 3])


@pytest.mark.parametrize("kept", [None, [0], [5, 2, 5, 3, 0], [], range(6)])
@pytest.mark.parametrize("masked", [None, [1], [3, 0], range(6)])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_best_are_those_of_a_sort(
    kept: list[int] | None, masked: list[int] | None, k: int
) -> None:
    left = set(range(6) if kept is None else kept) - set(masked or ())
    wanted = sorted(left, key=lambda n: (-COUNTS[n], n))[:k]
    items, scores = MostPopular(COUNTS).best(
        k,
        kept=None if kept is None else np.array(kept, np.int32),
        masked=None if masked is None else np.array(masked, np.int64),
    )
    assert items.tolist() == wanted
    assert scores.tolist() == COUNTS[wanted].tolist()


@pytest.mark.parametrize(
    ("counts", "popular"),
    [
        ([3, 9, 0, 9, 1, 3], [1, 3]),  # 25 events: 9 are fewer than half, 18 are not
        ([4, 2, 1, 1], [0]),  # half of them exactly
        ([2, 2, 2, 2, 2], [0, 1, 2]),  # ties: the first of the catalogue
        ([0, 0], []),
        ([0, 5], [1]),
    ],
)
def test_popular_items_have_half_of_the_events(counts: list[int], popular: list[int]) -> None:
    assert popular_half(np.array(counts)).nonzero()[0].tolist() == popular
