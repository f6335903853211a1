import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from sce.losses import buckets
from sce.losses.buckets import (
    draw_centres,
    round_centres,
    suggest_bucket_size_y,
    suggest_sizes,
    top_rows,
)


def naive_top_rows(centres: torch.Tensor, rows: torch.Tensor, k: int) -> list[list[int]]:
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
        wanted = (centres @ rows.float().T).topk(33, dim=1).indices.sort(dim=1).values
        for max_scores in (7 * 64, 7 * 640, 1 << 20):
            assert torch.equal(top_rows(centres, rows, 33, max_scores=max_scores), wanted)


def test_rows_are_rounded_chunk_by_chunk() -> None:
    # Of six rows that are equal once they are rounded, the first are the best.
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 8, generator=g).bfloat16().float().repeat(6, 1)
    rows *= 1 + 1e-4 * torch.rand(1200, 8, generator=g)
    centres = torch.randn(5, 8, generator=g)
    wanted = top_rows(centres, rows.bfloat16(), 33)
    assert not torch.equal(top_rows(centres, rows, 33), wanted)
    for max_scores in (5 * 64, 5 * 640, 1 << 20):
        found = top_rows(centres, rows, 33, max_scores=max_scores, rounding=torch.bfloat16)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("rank", [6, 3])
def test_mix_centres_have_the_covariance_of_the_states(rank: int) -> None:
    g = torch.Generator().manual_seed(1)
    states = torch.randn(50, rank, generator=g) @ torch.randn(rank, 6, generator=g)
    n = 200_000
    centres = draw_centres(states, n, mix=True, generator=g).double()
    wanted = (states.T @ states).double()
    assert torch.linalg.matrix_rank(wanted, rtol=1e-5) == rank
    found = centres.T @ centres / n
    # The standard error of an entry of a covariance of n normal vectors.
    diagonal = wanted.diagonal()
    error = ((wanted**2 + diagonal.outer(diagonal)) / n).sqrt()
    assert ((found - wanted).abs() < 5 * error).all()
    assert (centres.mean(dim=0).abs() < 5 * (diagonal / n).sqrt()).all()
    # No part of a centre lies outside the span of the states.
    basis = torch.linalg.svd(states.double(), full_matrices=False).Vh[:rank]
    outside = centres - centres @ basis.T @ basis
    assert outside.norm() < 1e-4 * centres.norm()


def test_mix_is_distributed_as_omega_times_the_states() -> None:
    g = torch.Generator().manual_seed(2)
    states = torch.randn(30, 2, generator=g) * torch.tensor([3.0, 0.5])
    ours = draw_centres(states, 100_000, mix=True, generator=g)
    omega = torch.randn(100_000, 30, generator=g) @ states
    at = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    for direction in torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]]):
        a, b = (ours @ direction).quantile(at), (omega @ direction).quantile(at)
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02 * float((omega @ direction).std()))


@pytest.mark.parametrize("n", [1, 3])
def test_mix_of_fewer_states_than_dimensions_stays_in_their_span(n: int) -> None:
    # XᵀX is singular here in float64 as well, which a product of two thin matrices need not be.
    g = torch.Generator().manual_seed(1)
    states = torch.randn(n, 16, generator=g)
    centres = draw_centres(states, 100_000, mix=True, generator=g).double()
    basis = torch.linalg.svd(states.double(), full_matrices=False).Vh
    outside = centres - centres @ basis.T @ basis
    assert outside.norm() < 1e-2 * centres.norm()
    wanted = (states.T @ states).double()
    found = centres.T @ centres / len(centres)
    assert (found - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("states", [torch.zeros(5, 3), torch.zeros(0, 3), torch.ones(1, 3)])
def test_mix_of_degenerate_states_is_finite(states: torch.Tensor) -> None:
    assert draw_centres(states, 4, mix=True).isfinite().all()


def test_without_mix_centres_are_standard_normal() -> None:
    g = torch.Generator().manual_seed(3)
    centres = draw_centres(torch.full((4, 3), 7.0), 100_000, mix=False, generator=g)
    torch.testing.assert_close(centres.T @ centres / 100_000, torch.eye(3), rtol=0.02, atol=0.02)


def test_sizes_are_the_papers() -> None:
    assert suggest_sizes(128, 200) == (320, 320)
    assert suggest_sizes(128, 200, alpha=4) == (640, 640)
    assert suggest_sizes(128, 200, beta=4) == (160, 640)
    assert suggest_sizes(1, 0) == (1, 1)
    with pytest.raises(ValueError, match="mean_length must be finite"):
        suggest_sizes(1, float("nan"))


def test_nan_in_a_later_chunk_is_selected_so_that_the_loss_notices() -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(1000, 4, generator=g)
    rows[777, 2] = float("nan")
    found = top_rows(torch.randn(3, 4, generator=g), rows, 5, max_scores=3 * 64)
    assert (found == 777).any(dim=1).all()


def test_mix_counts_all_states_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    whole = draw_centres(states, 8, mix=True, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(buckets, "MAX_SCORES", 16 * 30)
    parts = draw_centres(states, 8, mix=True, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(parts, whole)


def test_nan_beside_ties_and_minus_infinity() -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[-inf], [-inf], [nan], [nan], [nan]])
    assert top_rows(torch.ones(1, 1), rows, 4).tolist() == [[0, 2, 3, 4]]
    rows = torch.zeros(50, 1)
    rows[20] = nan
    assert 20 in top_rows(torch.ones(1, 1), rows, 4).tolist()[0]


def test_a_mix_of_a_few_states_has_positive_weights_and_all_states_alike() -> None:
    g = torch.Generator().manual_seed(0)
    # Of orthogonal states, a centre tells which it is a sum of, and with which weights.
    centres = draw_centres(torch.eye(8), 50_000, mix=True, mix_of=3, generator=g)
    assert (centres >= 0).all()
    parts = (centres > 0).sum(dim=1)
    assert parts.min() == 1
    assert parts.max() == 3
    # Three draws of |normal| over eight states: mean 3/8 √(2/π), second moment 3/8 + 6/64 · 2/π.
    mean, square = 3 / 8 * (2 / math.pi) ** 0.5, 3 / 8 + 6 / 64 * 2 / math.pi
    torch.testing.assert_close(centres.mean(dim=0), torch.full((8,), mean), rtol=0.02, atol=0)
    torch.testing.assert_close(
        centres.square().mean(dim=0), torch.full((8,), square), rtol=0.04, atol=0
    )


@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_noise_is_normal_and_as_long_as_it_says(noise: float) -> None:
    g = torch.Generator().manual_seed(0)
    state = torch.zeros(1, 16, dtype=torch.float64)
    state[0, 3] = 7.0
    centres = draw_centres(state, 50_000, mix=True, mix_of=2, noise=noise, generator=g)
    added = (centres - state / 7) * math.sqrt(16) / noise
    assert added.mean(dim=0).abs().max() < 0.03
    torch.testing.assert_close(added.T.cov(), torch.eye(16).double(), rtol=0, atol=0.04)


def test_a_mix_of_one_state_is_that_state() -> None:
    states = torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centres = draw_centres(states, 200, mix=True, mix_of=1)
    assert centres.dtype == torch.float64
    cosines = torch.nn.functional.normalize(centres) @ torch.nn.functional.normalize(states).T
    assert torch.allclose(cosines.max(dim=1).values, torch.ones(200, dtype=torch.float64))
    assert len(cosines.argmax(dim=1).unique()) == 20
    assert draw_centres(states[:0], 3, mix=True, mix_of=4).tolist() == [[0.0] * 5] * 3


def test_long_centres_in_half_precision_point_where_they_did() -> None:
    centres = 1e5 * torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float16, torch.bfloat16):
        rounded = round_centres(centres, dtype)
        assert rounded.dtype == dtype
        torch.testing.assert_close(
            rounded.float(), normalize(centres, dim=1), rtol=2**-8, atol=2**-10
        )
    assert round_centres(centres, torch.float32) is centres


@pytest.mark.parametrize(("alpha", "beta"), [(1e30, 1.0), (2.0, 1e-30)])
def test_sizes_that_nobody_has_are_refused(alpha: float, beta: float) -> None:
    with pytest.raises(ValueError, match=r"make .* buckets of .* states"):
        suggest_sizes(1, 100, alpha=alpha, beta=beta)


@pytest.mark.parametrize("n_items", [0, -5])
def test_no_bucket_size_for_no_items(n_items: int) -> None:
    with pytest.raises(ValueError, match=f"at least one item, got {n_items}"):
        suggest_bucket_size_y(n_items)


@given(st.integers(1, 10**9), st.booleans())
def test_a_bucket_holds_no_more_than_the_catalogue(n_items: int, sparse: bool) -> None:
    size = suggest_bucket_size_y(n_items, sparse_grad=sparse)
    assert min(n_items, 64) <= size <= min(n_items, 256 if sparse else 4096)
