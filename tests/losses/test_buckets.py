import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from sce.losses import buckets
from sce.losses.buckets import (
    MAX_SEARCH,
    Buckets,
    auto_alpha,
    count_buckets,
    draw_centres,
    group_by_bucket,
    nearest_centres,
    of_equal_size,
    round_centres,
    suggest_sizes,
    top_rows,
)


def naive_top_rows(centres: Tensor, rows: Tensor, k: int) -> list[list[int]]:
    scores = (centres.double() @ rows.double().T).tolist()
    return [sorted(sorted(range(len(rows)), key=lambda j: (-line[j], j))[:k]) for line in scores]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 6),
    m=st.integers(1, 400),
    k=st.integers(1, 420),
    d=st.integers(1, 5),
    max_scores=st.sampled_from([1, 64, 200, 1024, 1 << 20]),
    spread=st.sampled_from([0.4, 1.0, 30.0]),
    order=st.sampled_from(["as drawn", "ascending norm", "descending norm", "all equal"]),
)
def test_exact_sets_for_every_chunk_size_with_ties_to_the_lower_index(
    seed: int, n: int, m: int, k: int, d: int, max_scores: int, spread: float, order: str
) -> None:
    # Whole numbers make every product exact, and a small spread makes most scores equal.
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(n, d, generator=g).mul(2).round()
    rows = torch.randn(m, d, generator=g).mul(spread).round()
    if order == "all equal":
        rows = torch.ones_like(rows)
    elif order != "as drawn":
        rows = rows[rows.norm(dim=1).argsort(descending=order == "descending norm")]
    found = top_rows(centres, rows, k, max_scores=max_scores)
    assert found.tolist() == naive_top_rows(centres, rows, k)


def test_chunk_sizes_agree_on_real_numbers_and_half_precision() -> None:
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(7, 16, generator=g)
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(5000, 16, generator=g).to(dtype)
        expected = (centres @ rows.float().T).topk(33, dim=1).indices.sort(dim=1).values
        for max_scores in (7 * 64, 7 * 640, 1 << 20):
            assert torch.equal(top_rows(centres, rows, 33, max_scores=max_scores), expected)


def test_rows_are_rounded_chunk_by_chunk() -> None:
    # Of six rows that are equal once they are rounded, the first are the best.
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 8, generator=g).bfloat16().float().repeat(6, 1)
    rows *= 1 + 1e-4 * torch.rand(1200, 8, generator=g)
    centres = torch.randn(5, 8, generator=g)
    expected = top_rows(centres, rows.bfloat16(), 33)
    assert not torch.equal(top_rows(centres, rows, 33), expected)
    for max_scores in (5 * 64, 5 * 640, 1 << 20):
        found = top_rows(centres, rows, 33, max_scores=max_scores, autocast_dtype=torch.bfloat16)
        assert torch.equal(found, expected)


# With fewer states than dimensions XᵀX is singular in float64 as well.
@pytest.mark.parametrize(("v", "rank"), [(50, 6), (50, 3), (3, 3), (1, 1)])
def test_mix_centres_have_the_covariance_of_the_states(v: int, rank: int) -> None:
    g = torch.Generator().manual_seed(1)
    states = torch.randn(v, rank, generator=g) @ torch.randn(rank, 6, generator=g)
    n = 200_000
    centres = draw_centres(states, n, "mix", generator=g).double()
    expected = (states.T @ states).double()
    assert torch.linalg.matrix_rank(expected, rtol=1e-5) == rank
    found = centres.T @ centres / n
    # The standard error of an entry of a covariance of n normal vectors.
    diagonal = expected.diagonal()
    error = ((expected**2 + diagonal.outer(diagonal)) / n).sqrt()
    assert ((found - expected).abs() < 5 * error).all()
    assert (centres.mean(dim=0).abs() < 5 * (diagonal / n).sqrt()).all()
    # No part of a centre lies outside the span of the states.
    basis = torch.linalg.svd(states.double(), full_matrices=False).Vh[:rank]
    outside = centres - centres @ basis.T @ basis
    assert outside.norm() < 1e-4 * centres.norm()


@pytest.mark.parametrize("states", [torch.zeros(5, 3), torch.zeros(0, 3), torch.ones(1, 3)])
def test_mix_of_degenerate_states_is_finite(states: Tensor) -> None:
    assert draw_centres(states, 4, "mix").isfinite().all()


def test_without_mix_centres_are_standard_normal() -> None:
    g = torch.Generator().manual_seed(3)
    centres = draw_centres(torch.full((4, 3), 7.0), 100_000, "random", generator=g)
    torch.testing.assert_close(centres.T @ centres / 100_000, torch.eye(3), rtol=0.02, atol=0.02)


def test_sizes_are_the_papers() -> None:
    assert suggest_sizes(128, 200) == (320, 320)
    assert suggest_sizes(128, 200, alpha=4) == (640, 640)
    assert suggest_sizes(128, 200, beta=4) == (160, 640)
    assert suggest_sizes(1, 0) == (1, 1)
    with pytest.raises(ValueError, match="mean_length must be finite, not negative, got nan"):
        suggest_sizes(1, float("nan"))


def test_nan_in_a_later_chunk_is_selected_so_that_the_loss_notices() -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(1000, 4, generator=g)
    rows[777, 2] = float("nan")
    found = top_rows(torch.randn(3, 4, generator=g), rows, 5, max_scores=3 * 64)
    assert (found == 777).any(dim=1).all()


def test_mix_counts_all_states_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    whole = draw_centres(states, 8, "mix", generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(buckets, "MAX_SCORES", 16 * 30)
    parts = draw_centres(states, 8, "mix", generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(parts, whole)


def test_nan_beside_ties_and_minus_infinity() -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[-inf], [-inf], [nan], [nan], [nan]])
    assert top_rows(torch.ones(1, 1), rows, 4).tolist() == [[0, 2, 3, 4]]
    assert top_rows(torch.ones(1, 1), rows, 2).min() >= 2
    rows = torch.zeros(50, 1)
    rows[20] = nan
    assert 20 in top_rows(torch.ones(1, 1), rows, 4).tolist()[0]


def test_long_centres_in_half_precision_point_where_they_did() -> None:
    centres = 1e5 * torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float16, torch.bfloat16):
        rounded = round_centres(centres, dtype)
        assert rounded.dtype == dtype
        torch.testing.assert_close(
            rounded.float(), normalize(centres, dim=1), rtol=2**-8, atol=2**-10
        )
    torch.testing.assert_close(
        round_centres(centres, torch.float32).norm(dim=1), torch.ones(len(centres))
    )


def test_buckets_become_fewer_as_the_search_for_items_grows() -> None:
    found = [auto_alpha(items, 10_000) for items in (1, 300_000, 600_000, 1_200_000, 10**9)]
    assert found[0] == found[1] == 8.0
    assert 2.0 < found[2] < 8.0
    assert round(100 * found[2]) * 600_000 <= MAX_SEARCH
    assert found[3] > found[4] == 2.0
    assert auto_alpha(600_000, 10_000, beta=4.0) > found[2]


@pytest.mark.parametrize(("alpha", "beta"), [(1e30, 1.0), (2.0, 1e-30)])
def test_sizes_that_nobody_has_are_refused(alpha: float, beta: float) -> None:
    with pytest.raises(ValueError, match=r"make .* buckets of"):
        suggest_sizes(1, 100, alpha=alpha, beta=beta)


def test_centres_of_states_are_sums_of_four_with_positive_weights_and_as_much_noise() -> None:
    g = torch.Generator().manual_seed(0)
    n, d = 200_000, 8
    states = 7 * torch.eye(d, dtype=torch.float64)[:5]  # orthogonal: a centre tells its parts
    centres = draw_centres(states, n, "states", generator=g)
    assert centres.dtype == torch.float64
    sums = torch.zeros(n, d, dtype=torch.float64)
    for _ in range(4):
        drawn = torch.randint(5, (n, 1), generator=g)
        sums.scatter_add_(1, drawn, torch.randn(n, 1, generator=g).double().abs())
    part = normalize(sums)
    torch.testing.assert_close(centres.mean(dim=0), part.mean(dim=0), rtol=0, atol=0.01)
    expected = part.T @ part / n + torch.eye(d).double() / d  # noise is independent of it
    torch.testing.assert_close(centres.T @ centres / n, expected, rtol=0, atol=0.01)
    assert draw_centres(states[:0], 3, "states").tolist() == [[0.0] * d] * 3


def test_statistics_of_a_worked_example() -> None:
    members = of_equal_size(torch.tensor([[0, 1], [1, 2], [1, 3]]))
    example = Buckets(members, items=torch.tensor([[9, 5], [7, 4], [0, 7]]))
    found = count_buckets(example, torch.tensor([5, 7, 8, -1, 3]))
    assert found.picked_once == 2 / 4  # states 0 and 2; 3 has no target, 4 is nowhere
    assert found.placed == 3 / 4
    assert found.correct_in_bucket == 3 / 5  # 5 in the first, 7 in the second and in the third
    assert found.occupied == 1


def test_statistics_of_states_that_choose_their_bucket() -> None:
    members = group_by_bucket(torch.tensor([2, 0, 2, 3, 0]), 3)
    assert members.states.tolist() == [1, 4, 0, 2, 3]
    assert members.offsets.tolist() == [0, 2, 2, 4]
    found = count_buckets(
        Buckets(members, torch.tensor([[7, 4], [5, 6], [1, 2]])), torch.tensor([1, 7, 3, -1, 4])
    )
    assert [value.item() for value in found] == pytest.approx([1, 1, 3 / 4, 2 / 3])


def test_the_nearest_centre_is_the_lowest_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "MAX_SCORES", 6)  # two states at a time
    centres = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    states = torch.tensor([[2.0, 1.0], [1.0, 3.0], [1.0, 1.0], [0.0, 0.0], [-1.0, -2.0]])
    assert nearest_centres(states, centres).tolist() == [1, 0, 0, 0, 1]


@pytest.mark.parametrize("at_once", [1, 13, 1 << 18])
def test_statistics_do_not_depend_on_how_many_items_are_sorted_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    items = torch.stack([torch.randperm(30, generator=generator)[:6] for _ in range(7)]).int()
    states = torch.randint(40, (7, 9), generator=generator).int()
    targets = torch.randint(-1, 30, (40,), generator=generator)
    monkeypatch.setattr(buckets, "_SORTED", at_once)
    found = count_buckets(Buckets(of_equal_size(states), items), targets)
    rows = [(s, b) for b in range(7) for s in states[b].tolist() if targets[s] >= 0]
    correct = sum(int(targets[s]) in items[b].tolist() for s, b in rows)
    assert found.correct_in_bucket == pytest.approx(correct / len(rows))
