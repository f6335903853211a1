"""The kernels against the plain functions: on a GPU, or in Triton's interpreter without one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sce.losses import ScalableCrossEntropy, bucketed, buckets, scalable_cross_entropy
from sce.losses.reference import reference_scalable_cross_entropy

pytest.importorskip("triton")
from sce.losses import kernels
from sce.losses.kernels import selection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes bfloat16 products wrongly: precisions are tested on a GPU.
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
FUZZ = 300 if DEVICE == "cuda" else 12


def integers(seed: int, *low_high: tuple[int, int]) -> tuple[int, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(int(torch.randint(low, high + 1, (), generator=g)) for low, high in low_high)


def problem(seed: int, n: int, c: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(n, d, generator=g).to(DEVICE, dtype).requires_grad_()
    catalogue = torch.randn(c, d, generator=g).to(DEVICE, dtype).requires_grad_()
    targets = torch.randint(c, (n,), generator=g)
    targets[torch.rand(n, generator=g) < 0.3] = -100
    return states, catalogue, targets.to(DEVICE)


@pytest.mark.parametrize("order", ["as drawn", "by norm, falling", "by norm, rising", "clustered"])
@pytest.mark.parametrize(
    ("n", "m", "d", "k", "max_maxima"),
    [
        (5, 1000, 8, 17, 1 << 22),
        (3, 3001, 16, 10, 64),
        (7, 777, 24, 50, 100),
        (2, 5000, 40, 3, 16),
        (4, 300, 8, 299, 50),
        (4, 300, 8, 300, 50),
        (1, 129, 64, 1, 4),
    ],
)
def test_exact_top_rows(
    n: int, m: int, d: int, k: int, max_maxima: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "MAX_MAXIMA", max_maxima)
    g = torch.Generator().manual_seed(0)
    centres, rows = torch.randn(n, d, generator=g), torch.randn(m, d, generator=g)
    if order == "clustered":
        rows = rows * 0.1 + torch.randn(7, d, generator=g)[torch.randint(7, (m,), generator=g)]
    elif order != "as drawn":
        rows = rows * torch.rand(m, 1, generator=g)
        rows = rows[rows.norm(dim=1).argsort(descending="falling" in order)]
    wanted = buckets.top_rows(centres.double(), rows.double(), k)
    found = kernels.top_rows(centres.to(DEVICE), rows.to(DEVICE), k)
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("kind", ["duplicates", "all equal"])
def test_equal_scores_go_to_the_lower_index(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 8, generator=g).round()
    if kind == "all equal":
        rows = torch.ones_like(rows)
    centres = torch.randn(3, 8, generator=g).round()
    found = kernels.top_rows(centres.to(DEVICE), rows.to(DEVICE), 100)
    assert torch.equal(found.cpu(), buckets.top_rows(centres, rows, 100))


def test_rows_that_are_not_valid_come_last() -> None:
    g = torch.Generator().manual_seed(0)
    rows, valid = torch.randn(500, 8, generator=g), torch.rand(500, generator=g) < 0.4
    centres = torch.randn(6, 8, generator=g)
    index = valid.nonzero().squeeze(1)
    wanted = index[buckets.top_rows(centres, rows[valid], 30)]
    found = kernels.top_rows(centres.to(DEVICE), rows.to(DEVICE), 30, valid=valid.to(DEVICE))
    assert torch.equal(found.cpu(), wanted)
    few = kernels.top_rows(centres.to(DEVICE), rows.to(DEVICE), 300, valid=valid.to(DEVICE)).cpu()
    for row in few.tolist():
        assert set(index.tolist()) <= set(row)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(FUZZ))
def test_fuzz_against_the_plain_path(seed: int, dtype: torch.dtype) -> None:
    n, c, d8, b, size_x, size_y = integers(
        seed, (1, 90), (1, 200), (1, 8), (1, 6), (1, 100), (1, 210)
    )
    d = 8 * d8
    states, catalogue, targets = problem(seed, n, c, d, dtype)
    valid = targets >= 0
    marked = targets.masked_fill(~valid, -1)
    with torch.no_grad():
        centres = buckets.draw_centres(states[valid], b, mix=True).float()
        sizes: dict[str, Any] = {"bucket_size_x": size_x, "bucket_size_y": size_y}
        plain = buckets.fill_buckets(states[valid], catalogue, centres, **sizes)
        fused = kernels.fill_buckets(states, catalogue, centres, valid=valid, **sizes)
    assert torch.equal(fused.items, plain.items)
    index = valid.nonzero().squeeze(1)
    if plain.states.shape[1] == fused.states.shape[1]:
        assert torch.equal(fused.states, index[plain.states])
    found, placed = kernels.bucketed_cross_entropy(states, catalogue, marked, fused)
    wanted, plain_placed = bucketed.bucketed_cross_entropy(
        states[valid], catalogue, targets[valid], plain
    )
    assert torch.equal(placed[valid], plain_placed)
    assert not placed[~valid].any()
    assert (found[~valid] == 0).all()
    scale = d**0.5
    torch.testing.assert_close(found[valid], wanted, rtol=1e-5, atol=1e-5 * scale)
    weights = torch.linspace(-1, 1, len(states), device=DEVICE)
    inputs = (states, catalogue)
    grads = torch.autograd.grad((found * weights).sum(), inputs)
    plain_grads = torch.autograd.grad((wanted * weights[valid]).sum(), inputs)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for g, h in zip(grads, plain_grads, strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g, h, rtol=tolerance, atol=tolerance * scale / 4)


@pytest.mark.parametrize("mix", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_front_door_gives_the_same_with_either_backend(mix: bool, reduction: str) -> None:
    states, catalogue, targets = problem(1, 60, 150, 16, torch.float32)
    results = []
    for backend in ("triton", "torch"):
        g = torch.Generator(DEVICE).manual_seed(0)
        loss = ScalableCrossEntropy(
            n_buckets=5,
            bucket_size_x=20,
            bucket_size_y=30,
            mix=mix,
            reduction=reduction,
            backend=backend,
        )
        value, stats = loss(states, catalogue, targets, generator=g, with_stats=True)
        grads = torch.autograd.grad(value.sum(), (states, catalogue))
        results.append((value, *grads, stats.picked_once, stats.placed, stats.correct_in_bucket))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_front_door_equals_the_reference() -> None:
    states, catalogue, targets = problem(2, 30, 50, 8, torch.float32)
    centres = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    sizes: dict[str, Any] = {"bucket_size_x": 9, "bucket_size_y": 12}
    found = scalable_cross_entropy(
        states, catalogue, targets, centres=centres, backend="triton", **sizes
    )
    wanted = reference_scalable_cross_entropy(states, catalogue, targets, centres, **sizes)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_no_valid_position_and_strided_inputs() -> None:
    states, catalogue, targets = problem(3, 30, 50, 8, torch.float32)
    loss = ScalableCrossEntropy(n_buckets=3, bucket_size_x=5, bucket_size_y=6, backend="triton")
    nothing = loss(states, catalogue, torch.full_like(targets, -100))
    assert nothing == 0
    for grad in torch.autograd.grad(nothing, (states, catalogue)):
        assert (grad == 0).all()
    wide = torch.randn(30, 16, device=DEVICE)[:, ::2]
    turned = torch.randn(8, 50, device=DEVICE).T
    g = torch.Generator(DEVICE)
    a = loss(wide, turned, targets, generator=g.manual_seed(0))
    b = loss(wide.contiguous(), turned.contiguous(), targets, generator=g.manual_seed(0))
    torch.testing.assert_close(a, b)


def test_on_a_tie_the_gradient_flows_through_the_lowest_bucket_only() -> None:
    # Items 1 and 2 have the same logit for the state but lie in different buckets.
    states = torch.zeros(1, 16, device=DEVICE)
    states[0, 0] = 1
    catalogue = torch.zeros(3, 16, device=DEVICE)
    catalogue[1, :2] = torch.tensor([1.0, 1.0])
    catalogue[2, :2] = torch.tensor([1.0, -1.0])
    catalogue.requires_grad_()
    centres = torch.zeros(2, 16, device=DEVICE)
    centres[:, 1] = torch.tensor([-1.0, 1.0])
    loss = scalable_cross_entropy(
        states, catalogue, torch.zeros(1, dtype=torch.long, device=DEVICE), centres=centres,
        bucket_size_x=1, bucket_size_y=1, backend="triton",
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, catalogue)
    assert grad[2].abs().sum() > 0  # bucket 0 holds item 2
    assert grad[1].abs().sum() == 0


def test_ignored_positions_hold_anything() -> None:
    states = torch.randn(8, 16, device=DEVICE)
    states[3:] = float("nan")
    states.requires_grad_()
    catalogue = torch.randn(12, 16, device=DEVICE, requires_grad=True)
    targets = torch.tensor([1, 2, 3, -100, -100, -100, -100, -100], device=DEVICE)
    loss = ScalableCrossEntropy(n_buckets=2, bucket_size_x=6, bucket_size_y=5, backend="triton")
    value = loss(states, catalogue, targets)
    for tensor in (value, *torch.autograd.grad(value, (states, catalogue))):
        assert tensor.isfinite().all()


def test_nan_is_never_swallowed() -> None:
    for where in (0, 1):
        inputs = problem(4, 30, 50, 8, torch.float32)
        with torch.no_grad():
            inputs[where][7, 2] = float("nan")
        inputs[2][7] = 3
        loss = ScalableCrossEntropy(n_buckets=3, bucket_size_x=5, bucket_size_y=6, backend="triton")
        assert loss(*inputs).isnan()
