import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from sce.losses import CrossEntropy, cross_entropy


def problem(
    seed: int = 0, n: int = 12, c: int = 17, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(n, 5, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    catalogue = torch.randn(c, 5, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(c, (n,), generator=g)
    targets[::4] = -100
    return states, catalogue, targets


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 15),
    c=st.integers(1, 20),
    chunk_size=st.integers(1, 25) | st.none(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
def test_equals_torch(seed: int, n: int, c: int, chunk_size: int | None, reduction: str) -> None:
    states, catalogue, targets = problem(seed, n, c)
    ours = cross_entropy(states, catalogue, targets, chunk_size=chunk_size, reduction=reduction)
    theirs = functional.cross_entropy(states @ catalogue.T, targets, reduction=reduction)
    if (targets == -100).all() and reduction == "mean":
        assert ours == 0  # torch says NaN
        return
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 2, ours.numel(), dtype=torch.float64).view_as(ours)
    for g, h in zip(
        torch.autograd.grad((ours * weights).sum(), (states, catalogue)),
        torch.autograd.grad((theirs * weights).sum(), (states, catalogue)),
        strict=True,
    ):
        torch.testing.assert_close(g, h, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_valid_position_gives_zero_and_a_zero_gradient(
    chunk_size: int | None, reduction: str
) -> None:
    states, catalogue, targets = problem()
    loss = CrossEntropy(chunk_size=chunk_size, reduction=reduction)
    value = loss(states, catalogue, torch.full_like(targets, -100))
    assert (value == 0).all()
    for grad in torch.autograd.grad(value.sum(), (states, catalogue)):
        assert (grad == 0).all()


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_ignored_positions_hold_anything(chunk_size: int | None) -> None:
    states, catalogue, targets = problem()
    spoiled = states.detach().clone()
    spoiled[targets == -100] = float("nan")
    spoiled.requires_grad_()
    value = CrossEntropy(chunk_size=chunk_size)(spoiled, catalogue, targets)
    torch.testing.assert_close(
        value, CrossEntropy()(states, catalogue, targets), rtol=1e-12, atol=1e-12
    )
    for grad in torch.autograd.grad(value, (spoiled, catalogue)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_extreme_logits(chunk_size: int | None) -> None:
    states = torch.tensor([[100.0], [-100.0]], requires_grad=True)
    catalogue = torch.tensor([[100.0], [-100.0]], requires_grad=True)
    value = CrossEntropy(chunk_size=chunk_size)(states, catalogue, torch.tensor([1, 1]))
    torch.testing.assert_close(value, torch.tensor(10_000.0))
    for grad in torch.autograd.grad(value, (states, catalogue)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(chunk_size: int | None, dtype: torch.dtype) -> None:
    states, catalogue, targets = problem(dtype=dtype)
    value = CrossEntropy(chunk_size=chunk_size)(states, catalogue, targets)
    exact = functional.cross_entropy(states.double() @ catalogue.double().T, targets)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, exact.float(), rtol=1e-2, atol=1e-2)
    for g, x in zip(
        torch.autograd.grad(value, (states, catalogue)), (states, catalogue), strict=True
    ):
        assert g.dtype == x.dtype


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_autocast_and_mixed_precision(chunk_size: int | None) -> None:
    states, catalogue, targets = problem(dtype=torch.float32)
    loss = CrossEntropy(chunk_size=chunk_size)
    exact = loss(states, catalogue, targets)
    torch.testing.assert_close(
        loss(states.bfloat16(), catalogue, targets), exact, rtol=1e-2, atol=1e-2
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = loss(states, catalogue, targets)
        torch.autograd.grad(cast, (states, catalogue))
    assert cast.dtype == torch.float32
    torch.testing.assert_close(cast, exact, rtol=2e-2, atol=2e-2)


def test_in_chunks_never_more_than_a_chunk_of_logits(largest_tensor: Any) -> None:
    states, catalogue, targets = problem(n=64, c=1000)
    with largest_tensor() as largest:
        cross_entropy(states, catalogue, targets, chunk_size=50).backward()
    assert largest.numel <= max(64 * 50, catalogue.numel())


def test_torch_takes_over_where_it_is_as_good_and_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not hasattr(functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    rows: list[int] = []
    theirs = functional.linear_cross_entropy

    def watched(*args: Any, options: Any, **settings: Any) -> Tensor:
        rows.append(options.batch_chunk_size)
        return theirs(*args, options=options, **settings)

    monkeypatch.setattr(functional, "linear_cross_entropy", watched)
    states, catalogue, targets = problem(n=64, c=400)  # 48 valid positions of 5 dimensions
    exact = cross_entropy(states, catalogue, targets)
    for chunk_size, reduction in ((40, "mean"), (41, "none"), (42, "mean"), (400, "sum")):
        found = cross_entropy(
            states, catalogue, targets, chunk_size=chunk_size, reduction=reduction
        )
        found = found if reduction == "mean" else found.sum() / 48
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    assert rows == [5, 48]
    cross_entropy(states.bfloat16(), catalogue.bfloat16(), targets, chunk_size=400)
    assert len(rows) == 2


@pytest.mark.parametrize("chunk_size", [40, 400])
def test_in_chunks_gradients_can_be_taken_twice_but_not_of_gradients(chunk_size: int) -> None:
    states, catalogue, targets = problem(n=64, c=400)
    value = cross_entropy(states, catalogue, targets, chunk_size=chunk_size)
    first = torch.autograd.grad(value, (states, catalogue), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(value, (states, catalogue))))
    value = cross_entropy(states, catalogue, targets, chunk_size=chunk_size)
    (grad,) = torch.autograd.grad(value.square(), states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("chunk_size", [40, 400])
def test_in_chunks_without_gradients(chunk_size: int) -> None:
    states, catalogue, targets = problem(n=64, c=400)
    with torch.no_grad():
        value = cross_entropy(states, catalogue, targets, chunk_size=chunk_size)
    assert not value.requires_grad
    torch.testing.assert_close(value, cross_entropy(states, catalogue, targets).detach())


def test_chunk_size_is_checked() -> None:
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        CrossEntropy(chunk_size=0)


@pytest.mark.parametrize("size", [1e3, 1e5, 3e7])
def test_in_chunks_of_ours_large_logits_that_are_equal(size: float) -> None:
    # A loss for each position is not torch's to compute.
    states = torch.full((32, 1), size, requires_grad=True)
    catalogue = torch.ones(64, 1, requires_grad=True)
    losses = CrossEntropy(chunk_size=7, reduction="none")(states, catalogue, torch.arange(32))
    torch.testing.assert_close(losses, torch.full((32,), math.log(64)))
    found = torch.autograd.grad(losses.mean(), catalogue)[0].squeeze(1)
    wanted = torch.full((64,), size / 64)
    wanted[:32] -= size / 32
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0.0)


def test_in_chunks_no_gradient_of_the_catalogue_is_made_in_vain(largest_tensor: Any) -> None:
    states, catalogue = torch.randn(2, 3, requires_grad=True), torch.randn(5000, 3)
    losses = CrossEntropy(chunk_size=100, reduction="none")(states, catalogue, torch.arange(2))
    with largest_tensor() as watched:
        losses.sum().backward()
    assert watched.numel <= 300
