import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sce.data import popular
from sce.evaluation import ranking as ranking_module
from sce.evaluation.ranking import NOTHING, Popularity, Rows, last_states, top_k
from sce.models.sasrec import SASRec
from tests.cycle_data import lay_out


def small_integers(seed: int, *shape: int, most: int = 2) -> Tensor:
    # Products of small integers are exact in float32, whatever the order of additions, and tie.
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def naive_top_k(
    states: Tensor, catalogue: Tensor, k: int, seen: list[set[int]]
) -> tuple[list[list[float]], list[list[int]]]:
    all_scores, all_items = [], []
    for row, state in enumerate(states):
        scored = [
            (-float(state @ vector), item)
            for item, vector in enumerate(catalogue)
            if item not in seen[row]
        ]
        best = sorted(scored)[:k]
        best += [(math.inf, NOTHING)] * (k - len(best))
        all_scores.append([-score for score, _ in best])
        all_items.append([item for _, item in best])
    return all_scores, all_items


@given(
    rows=st.integers(0, 5),
    n_items=st.integers(1, 300),
    k=st.integers(1, 12),
    chunk_size=st.none() | st.integers(1, 310),
    seen_share=st.sampled_from([0.0, 0.2, 0.95, 1.0]),
    left_share=st.none() | st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    most=st.sampled_from([0, 1, 40]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_equals_a_loop_with_ties_by_item_id(
    rows: int,
    n_items: int,
    k: int,
    chunk_size: int | None,
    seen_share: float,
    left_share: float | None,
    most: int,
    seed: int,
) -> None:
    states, catalogue = small_integers(seed, rows, 3, most=most), small_integers(seed, n_items, 3)
    generator = torch.Generator().manual_seed(seed)
    pairs = (torch.rand(rows, n_items, generator=generator) < seen_share).nonzero()
    pairs = torch.cat([pairs, pairs[::2]])  # an item may be seen more than once
    seen: list[set[int]] = [set() for _ in range(rows)]
    for row, item in pairs.tolist():
        seen[row].add(item)

    options: dict[str, Any] = {"seen": (pairs[:, 1], pairs[:, 0]), "chunk_size": chunk_size}
    if left_share is None:
        results = [top_k(states, catalogue, k, **options)]
    else:  # some items are ranked: gathered, or the others masked
        left = torch.rand(n_items, generator=generator) < left_share
        blocked, chosen = (~left).nonzero().squeeze(1), Rows(catalogue, left.nonzero().squeeze(1))
        results = [top_k(states, catalogue, k, blocked=blocked, **options)]
        results.append(top_k(states, chosen, k, **options))
        seen = [had | set(blocked.tolist()) for had in seen]

    scores, items = naive_top_k(states, catalogue, k, seen)
    for found in results:
        assert found.items.tolist() == items
        assert found.scores.tolist() == scores


@pytest.mark.parametrize("chunk_size", [None, 1024])
def test_equals_sorting_on_a_wide_catalogue(chunk_size: int | None) -> None:
    torch.manual_seed(0)
    states, catalogue = torch.randn(20, 8), torch.randn(9000, 8)
    scores, items = (states @ catalogue.T).sort(dim=1, descending=True, stable=True)
    found = top_k(states, catalogue, 30, chunk_size=chunk_size)
    assert torch.equal(found.items, items[:, :30])
    torch.testing.assert_close(found.scores, scores[:, :30])


def test_ties_on_a_wide_catalogue_go_to_the_lower_id() -> None:
    states, catalogue = small_integers(1, 20, 3), small_integers(2, 9000, 3)
    _, items = (states @ catalogue.T).sort(dim=1, descending=True, stable=True)
    assert torch.equal(top_k(states, catalogue, 30).items, items[:, :30])


def test_rows_in_doubt_are_settled_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking_module, "_SCORES_AT_ONCE", 1 << 10)
    monkeypatch.setattr(ranking_module, "_PRODUCTS_AT_ONCE", 1 << 8)
    states, catalogue = torch.ones(7, 2), torch.ones(500, 2)
    seen = torch.tensor([1, 3]), torch.tensor([5, 5])
    found = top_k(states, catalogue, 4, seen=seen, chunk_size=300).items.tolist()
    assert found == [[0, 1, 2, 3]] * 5 + [[0, 2, 4, 5]] + [[0, 1, 2, 3]]


@pytest.mark.parametrize("spread", [1.0, 1e-6])  # 1e-6: scores closer than a product's error
@pytest.mark.parametrize("dim", [1, 48])
def test_a_row_has_the_same_scores_and_order_in_any_batch(spread: float, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(64, dim, generator=generator)
    catalogue = 1 + spread * torch.randn(3000, dim, generator=generator)
    products = (states[:, None].double() * catalogue.double()).sum(2).float()
    expected = products.sort(dim=1, descending=True, stable=True)
    for size, chunk_size in ((64, None), (64, 700), (3, None), (1, None)):
        parts = [top_k(part, catalogue, 30, chunk_size=chunk_size) for part in states.split(size)]
        assert torch.equal(torch.cat([one.items for one in parts]), expected.indices[:, :30])
        assert torch.equal(torch.cat([one.scores for one in parts]), expected.values[:, :30])


@pytest.mark.parametrize("dim", [16, 50])
def test_a_history_has_the_same_state_in_any_batch(dim: int) -> None:
    torch.manual_seed(0)
    model = SASRec(100, dim=dim, max_length=50).eval()
    lengths = torch.arange(1, 51)
    histories = torch.randint(100, (50, 50)).masked_fill(torch.arange(50) >= lengths[:, None], -1)
    with torch.no_grad():
        together = last_states(model, histories, 50)
        torch.testing.assert_close(together, model(histories)[torch.arange(50), lengths - 1])
        for order in (torch.arange(50), torch.randperm(50)):
            for rows in order.split(7):
                some = histories[rows, : int(lengths[rows].max())]
                assert torch.equal(last_states(model, some, 50), together[rows])


def test_the_two_zeros_tie() -> None:
    states, catalogue = torch.tensor([[1.0]]), torch.tensor([[-0.0], [0.0], [-0.0], [-1.0]])
    found = top_k(states, catalogue, 3)
    assert found.items.tolist() == [[0, 1, 2]]
    assert not found.scores.signbit().any()


def test_scores_that_are_not_numbers_never_rank() -> None:
    catalogue = torch.tensor([[1.0], [math.nan], [3.0], [2.0]])
    found = top_k(torch.tensor([[1.0], [math.nan]]), catalogue, 2)
    assert found.items.tolist() == [[2, 3], [NOTHING, NOTHING]]
    found = top_k(torch.tensor([[1.0], [math.nan]]), catalogue, 9)
    assert found.items.tolist() == [[2, 3, 0] + [NOTHING] * 6, [NOTHING] * 9]


def test_low_precision_is_scored_in_float32() -> None:
    torch.manual_seed(0)
    states, catalogue = torch.randn(5, 64).bfloat16(), torch.randn(300, 64).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = top_k(states, catalogue, 10)
    expected = (states.float() @ catalogue.float().T).topk(10)
    assert found.scores.dtype == torch.float32
    assert torch.equal(found.items, expected.indices)


def test_popularity_ranks_by_count_then_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(popular, "_EVENTS_AT_ONCE", 2)
    train = lay_out([[3, 1, 3, 1], [4, 2, 3]], [0, 1])
    popularity = Popularity(train, n_items=6)
    assert popularity.counts.tolist() == [0, 2, 1, 3, 1, 0]
    states = popularity(torch.zeros(2, 5, dtype=torch.int64))
    assert states.shape == (2, 5, 1)
    found = top_k(
        states[:, -1], popularity.catalogue, 6, seen=(torch.tensor([1]), torch.tensor([1]))
    )
    assert found.items.tolist() == [[3, 1, 2, 4, 0, 5], [3, 2, 4, 0, 5, NOTHING]]


@pytest.mark.parametrize("how", ["seen", "blocked"])
def test_what_may_not_be_ranked_is_not_where_a_score_is_not_a_number(how: str) -> None:
    catalogue, hidden = torch.tensor([[1.0], [math.nan], [3.0], [2.0]]), torch.tensor([2])
    options: dict[str, Any] = {"seen": (hidden, hidden * 0), "blocked": hidden}
    found = top_k(torch.ones(1, 1), catalogue, 4, **{how: options[how]})
    assert found.items.tolist() == [[3, 0, NOTHING, NOTHING]]
