"""The kernels against the plain functions: on a GPU, or in Triton's interpreter without one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sce.losses import ScalableCrossEntropy, bucketed, buckets, scalable_cross_entropy
from sce.losses.reference import reference_scalable_cross_entropy

pytest.importorskip("triton")
from sce.losses import kernels
from sce.losses.kernels import best as best_values
from sce.losses.kernels import selection
from sce.losses.kernels.centres import prepare

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


def best(centres: Tensor, rows: Tensor, k: int, **options: Any) -> Tensor:
    found = kernels.top_rows(centres.to(DEVICE), rows.to(DEVICE), k, **options)
    return found.long().sort(dim=1).values.cpu()


@pytest.mark.parametrize("order", ["as drawn", "by norm, falling", "by norm, rising", "clustered"])
@pytest.mark.parametrize(
    ("n", "m", "d", "k", "plan"),
    [
        (5, 1000, 8, 17, None),
        (5, 1000, 8, 17, (5, 1, 1)),
        (5, 1000, 8, 17, (2, 2, 1)),
        (3, 3001, 16, 10, (3, 8, 1)),
        (3, 3001, 16, 10, (3, 16, 4)),
        (7, 777, 24, 50, (3, 4, 2)),
        (2, 5000, 40, 3, (2, 64, 8)),
        (2, 5000, 40, 3, (2, 128, 32)),
        (70, 5000, 40, 3, (70, 256, 2)),
        (4, 300, 8, 299, None),
        (4, 300, 8, 300, None),
        (1, 129, 64, 1, (1, 4, 1)),
    ],
)
def test_exact_top_rows(
    n: int, m: int, d: int, k: int, plan: tuple[int, int, int] | None, order: str
) -> None:
    g = torch.Generator().manual_seed(0)
    centres, rows = torch.randn(n, d, generator=g), torch.randn(m, d, generator=g)
    if order == "clustered":
        rows = rows * 0.1 + torch.randn(7, d, generator=g)[torch.randint(7, (m,), generator=g)]
    elif order != "as drawn":
        rows = rows * torch.rand(m, 1, generator=g)
        rows = rows[rows.norm(dim=1).argsort(descending="falling" in order)]
    wanted = buckets.top_rows(centres.double(), rows.double(), k)
    found = best(centres, rows, k, plan=plan and selection.Plan(*plan))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("plan", [(3, 1, 1), (3, 8, 1), (2, 16, 4)])
@pytest.mark.parametrize("kind", ["duplicates", "all equal"])
@pytest.mark.parametrize("max_width", [1 << 14, 1 << 7])
def test_equal_scores_go_to_the_lower_index(
    kind: str, plan: tuple[int, int, int], max_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_values, "MAX_WIDTH", max_width)
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 8, generator=g).round()
    if kind == "all equal":
        rows = torch.ones_like(rows)
    centres = torch.randn(3, 8, generator=g).round()
    found = best(centres, rows, 100, plan=selection.Plan(*plan))
    assert torch.equal(found, buckets.top_rows(centres, rows, 100))


@pytest.mark.parametrize("plan", [None, (6, 4, 1), (6, 8, 2)])
def test_rows_that_are_not_valid_come_last(plan: tuple[int, int, int] | None) -> None:
    g = torch.Generator().manual_seed(0)
    rows, valid = torch.randn(500, 8, generator=g), torch.rand(500, generator=g) < 0.4
    centres = torch.randn(6, 8, generator=g)
    index = valid.nonzero().squeeze(1)
    options: dict[str, Any] = {
        "wanted": torch.where(valid, 7, -1).int().to(DEVICE),
        "plan": plan and selection.Plan(*plan),
    }
    wanted = index[buckets.top_rows(centres, rows[valid], 30)]
    assert torch.equal(best(centres, rows, 30, **options), wanted)
    for row in best(centres, rows, 300, **options).tolist():
        assert set(index.tolist()) <= set(row)
        assert len(set(row)) == 300
        assert max(row) < 500


@pytest.mark.parametrize(
    ("n", "m", "d", "k", "megabytes"),
    [
        (320, 10**5, 64, 256, 32),
        (320, 10**6, 64, 256, 32),
        (320, 10**7, 64, 256, 64),
        (320, 10**8, 64, 256, 256),
        (320, 10**6, 64, 4096, 128),
        (320, 10**6, 64, 16384, 128),
        (320, 25_600, 64, 320, 32),
        (715, 128_000, 64, 715, 32),
        (320, 10**6, 64, 500_000, 128),
        (1, 10**8, 512, 1, 256),
        (10**5, 20, 8, 5, 32),
    ],
)
def test_plans_stay_within_memory(n: int, m: int, d: int, k: int, megabytes: int) -> None:
    plan = selection.make_plan(n, m, d, k)
    taken = k + selection.spare(k)
    assert plan.group % plan.part == 0
    width = max(-(-m // plan.group), taken * (plan.group // plan.part) if plan.group > 1 else 0)
    assert plan.at_once >= 1
    assert plan.at_once == 1 or plan.at_once * width * 4 <= megabytes << 20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(FUZZ))
def test_fuzz_against_the_plain_path(seed: int, dtype: torch.dtype) -> None:
    n, c, d8, b, size_x, size_y = integers(
        seed, (1, 90), (1, 200), (1, 8), (1, 6), (1, 100), (1, 210)
    )
    d = 8 * d8
    states, catalogue, targets = problem(seed, n, c, d, dtype)
    valid = targets >= 0
    with torch.no_grad():
        centres = buckets.draw_centres(states[valid], b, mix=True).float()
        sizes: dict[str, Any] = {"bucket_size_x": size_x, "bucket_size_y": size_y}
        plain = buckets.fill_buckets(states[valid], catalogue, centres, **sizes)
    options = kernels.FusedOptions(n_buckets=b, reduction="none", **sizes)
    found, fused, marked, winner = kernels.fused_cross_entropy(
        states, catalogue, targets, centres, options
    )
    placed = winner != kernels.NOWHERE
    assert torch.equal(marked.long(), targets.masked_fill(~valid, -1))
    assert torch.equal(fused.items.long().sort(dim=1).values, plain.items)
    index = valid.nonzero().squeeze(1)
    if plain.states.shape[1] == fused.states.shape[1]:
        assert torch.equal(fused.states.long().sort(dim=1).values, index[plain.states])
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
    valid = targets >= 0
    centres = buckets.draw_centres(states[valid].detach(), 5, mix=mix)
    results = []
    for backend in ("triton", "torch"):
        loss = ScalableCrossEntropy(
            bucket_size_x=20, bucket_size_y=30, reduction=reduction, backend=backend
        )
        value, stats = loss(states, catalogue, targets, centres=centres, with_stats=True)
        assert value.shape == (targets.shape if reduction == "none" else ())
        grads = torch.autograd.grad(value.sum(), (states, catalogue))
        results.append((value, *grads, stats.picked_once, stats.placed, stats.correct_in_bucket))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [16, 3])
@pytest.mark.parametrize("mix", [True, False])
def test_centres_have_the_covariance_of_the_valid_states(mix: bool, rank: int) -> None:
    g = torch.Generator().manual_seed(0)
    states = torch.randn(100, rank, generator=g) @ torch.randn(rank, 16, generator=g)
    targets = torch.randint(50, (100,), generator=g)
    targets[70:] = -100
    states[70:] = float("nan")
    n = 4000
    found = prepare(
        states.to(DEVICE), targets.to(DEVICE), None, n_items=50, n_buckets=n, size_y=1, mix=mix,
        dtype=torch.float32, ignore_index=-100, generator=torch.Generator(DEVICE).manual_seed(0),
    )  # fmt: skip
    centres = found.centres.double().cpu()
    assert torch.allclose(centres.norm(dim=1), torch.ones(n, dtype=torch.float64), atol=1e-5)
    # Only directions are kept: compare with those of normal vectors of that covariance.
    covariance = states[:70].double().T @ states[:70].double() if mix else torch.eye(16).double()
    values, vectors = torch.linalg.eigh(covariance)
    factor = vectors * values.clamp(min=0).sqrt()
    normal = torch.randn(100 * n, 16, generator=g, dtype=torch.float64) @ factor.T
    normal = torch.nn.functional.normalize(normal, dim=1)
    expected = normal.T @ normal / len(normal)
    assert (centres.T @ centres / n - expected).abs().max() < 4 / n**0.5
    assert centres.mean(dim=0).abs().max() < 4 / n**0.5
    again = prepare(
        states.to(DEVICE), targets.to(DEVICE), None, n_items=50, n_buckets=n, size_y=1, mix=mix,
        dtype=torch.float32, ignore_index=-100, generator=torch.Generator(DEVICE).manual_seed(0),
    )  # fmt: skip
    assert torch.equal(found.centres, again.centres)
    assert found.status[:2].tolist() == [1, 1]


def test_large_buckets_add_up_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    states, catalogue, targets = problem(5, 60, 150, 16, torch.float32)
    loss = ScalableCrossEntropy(
        n_buckets=5, bucket_size_x=20, bucket_size_y=70, backend="triton", reduction="sum"
    )
    grads = []
    for memory in (1 << 25, 2 * 70 * 16 * 4):
        monkeypatch.setattr(kernels.catalogue, "MEMORY", memory)
        g = torch.Generator(DEVICE).manual_seed(0)
        value = loss(states, catalogue, targets, generator=g)
        grads.append(torch.autograd.grad(value, catalogue)[0])
    torch.testing.assert_close(*grads)


def test_a_sparse_gradient_holds_the_touched_rows() -> None:
    states, catalogue, targets = problem(6, 60, 400, 16, torch.float32)
    grads = []
    for sparse in (False, True):
        loss = ScalableCrossEntropy(
            n_buckets=3, bucket_size_x=20, bucket_size_y=30, backend="triton", sparse_grad=sparse
        )
        g = torch.Generator(DEVICE).manual_seed(0)
        value = loss(states, catalogue, targets, generator=g)
        grads.append(torch.autograd.grad(value, catalogue)[0])
    dense, found = grads
    assert found.is_sparse
    assert found.is_coalesced()
    rows = found.indices()[0]
    assert torch.equal(rows, rows.unique())
    assert len(rows) < 400
    assert torch.equal(found.to_dense(), dense)


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
