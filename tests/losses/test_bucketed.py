from typing import Any

import pytest
import torch
from torch import Tensor

from sce.losses import ScalableCrossEntropy, bucketed
from sce.losses.bucketed import bucketed_cross_entropy
from sce.losses.buckets import Buckets, group_by_bucket, of_equal_size, top_rows
from tests.losses.test_autocast import Made


def problem(
    dtype: torch.dtype = torch.float64, n: int = 20
) -> tuple[Tensor, Tensor, Tensor, Buckets]:
    g = torch.Generator().manual_seed(0)
    states = torch.randn(n, 5, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    catalogue = torch.randn(30, 5, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(30, (n,), generator=g)
    centres = torch.randn(6, 5, generator=g, dtype=torch.float64)
    with torch.no_grad():
        members = of_equal_size(top_rows(centres, states.double(), 7))
        buckets = Buckets(members, top_rows(centres, catalogue.double(), 11))
    return states, catalogue, targets, buckets


@pytest.mark.parametrize("coverage", [False, True])
def test_gradcheck_with_frozen_buckets(coverage: bool) -> None:
    states, catalogue, targets, buckets = problem()
    if coverage:
        nearest = torch.randint(6, (20,), generator=torch.Generator().manual_seed(1))
        buckets = Buckets(group_by_bucket(nearest, 6), buckets.items)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return bucketed_cross_entropy(x, y, targets, buckets)[0]

    assert torch.autograd.gradcheck(losses, (states, catalogue))


@pytest.mark.parametrize("max_logits", [1, 8, 50, 300])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_size_of_the_tiles_changes_nothing(
    max_logits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, catalogue, targets, buckets = problem(dtype)
    weights = torch.linspace(-1, 1, len(states))
    results = []
    for size in (max_logits, 1 << 20):
        monkeypatch.setattr(bucketed, "MAX_LOGITS", size)
        losses, placed = bucketed_cross_entropy(states, catalogue, targets, buckets)
        grads = torch.autograd.grad((losses * weights).sum(), (states, catalogue))
        results.append((losses, placed, *grads))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_second_derivative_is_refused_not_wrong() -> None:
    states, catalogue, targets, buckets = problem()
    losses, _ = bucketed_cross_entropy(states, catalogue, targets, buckets)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(losses.sum(), states, create_graph=True)


def test_what_is_kept_for_backward_does_not_grow_with_the_logits() -> None:
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    states, catalogue, targets, buckets = problem()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        bucketed_cross_entropy(states, catalogue, targets, buckets)
    assert max(kept) <= max(states.numel(), catalogue.numel(), buckets.items.numel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sparse_gradient_is_the_dense_one_without_the_other_rows(dtype: torch.dtype) -> None:
    states, catalogue, targets, buckets = problem(dtype, n=6)
    grads = []
    for sparse in (False, True):
        losses, _ = bucketed_cross_entropy(states, catalogue, targets, buckets, sparse=sparse)
        grads.append(torch.autograd.grad(losses.sum(), (states, catalogue)))
    (of_states, dense), (same, found) = grads
    assert torch.equal(of_states, same)
    assert found.is_sparse
    assert found.is_coalesced()
    assert found.dtype == dtype
    touched = torch.cat([targets, buckets.items.flatten()])
    assert torch.isin(found.indices()[0], touched).all()
    assert torch.equal(found.to_dense(), dense)


def test_nothing_of_the_size_of_the_catalogue_is_made_for_a_sparse_gradient() -> None:
    catalogue = torch.randn(4000, 16, requires_grad=True)
    states, targets = torch.randn(10, 16, requires_grad=True), torch.randint(4000, (10,))
    buckets = Buckets(of_equal_size(torch.arange(10).view(2, 5)), torch.arange(12).view(2, 6))
    losses, _ = bucketed_cross_entropy(states, catalogue, targets, buckets, sparse=True)
    with Made(catalogue) as made:
        losses.sum().backward()
    assert 10 * 16 <= made.numel <= 4000  # one flag for each item


@pytest.mark.parametrize(("size_x", "size_y"), [(2, 400), (400, 2), (40, 40)])
def test_rows_gathered_for_many_buckets_are_bounded_as_logits_are(
    largest_tensor: Any, size_x: int, size_y: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Items of all buckets at once would be 50 × 400 rows of 16 numbers, 320,000.
    states, catalogue = torch.randn(500, 16), torch.randn(600, 16)
    centres = torch.randn(50, 16)
    members = of_equal_size(top_rows(centres, states, size_x))
    buckets = Buckets(members, top_rows(centres, catalogue, size_y))
    inputs = states.requires_grad_(), catalogue.requires_grad_(), torch.randint(600, (500,))
    monkeypatch.setattr(bucketed, "MAX_LOGITS", 1 << 14)
    with largest_tensor() as largest:
        losses, _ = bucketed_cross_entropy(*inputs, buckets)
        losses.sum().backward()
    assert largest.numel <= max(1 << 14, 50 * size_x + 1, 50 * size_y)  # and a place for padding


def test_a_bucket_of_all_states_is_computed_in_pieces(
    largest_tensor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, catalogue = (torch.randn(m, 16, dtype=torch.float64) for m in (3000, 600))
    members = group_by_bucket(torch.ones(3000, dtype=torch.int64), 3)
    buckets = Buckets(members, torch.arange(120).view(3, 40))
    inputs = states.requires_grad_(), catalogue.requires_grad_(), torch.randint(600, (3000,))
    results = []
    for size in (1 << 12, 1 << 24):
        monkeypatch.setattr(bucketed, "MAX_LOGITS", size)
        with largest_tensor() as largest:
            losses, placed = bucketed_cross_entropy(*inputs, buckets)
            grads = torch.autograd.grad(losses.sum(), inputs[:2])
        assert placed.all()
        assert size > 1 << 20 or largest.numel <= max(1 << 12, 3001 * 16)  # the gradient
        results.append((losses, *grads))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_logits_far_apart_give_no_nan() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(10):
        states = (10 * torch.randn(64, 16, generator=g)).requires_grad_()
        catalogue = (10 * torch.randn(200, 16, generator=g)).requires_grad_()
        loss = ScalableCrossEntropy(bucket_size_y=8)(
            states, catalogue, torch.randint(200, (64,), generator=g), generator=g
        )
        for grad in torch.autograd.grad(loss, (states, catalogue)):
            assert grad.isfinite().all()
