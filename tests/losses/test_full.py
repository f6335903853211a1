from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from sce.losses import CrossEntropy


def problem(
    seed: int = 0, n: int = 12, c: int = 17, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(n, 5, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    catalogue = torch.randn(c, 5, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(c, (n,), generator=g)
    targets[::4] = -100
    return states, catalogue, targets


def assert_same(ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Compare values and gradients, both with the same weight for each loss."""
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 2, ours.numel(), dtype=torch.float64).view_as(ours)
    found = torch.autograd.grad((ours * weights).sum(), inputs)
    wanted = torch.autograd.grad((theirs * weights).sum(), inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 15),
    c=st.integers(1, 20),
    chunk_size=st.integers(1, 25) | st.none(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    biased=st.booleans(),
)
def test_equals_torch(
    seed: int, n: int, c: int, chunk_size: int | None, reduction: str, biased: bool
) -> None:
    states, catalogue, targets = problem(seed, n, c)
    bias = torch.randn(c, dtype=torch.float64, requires_grad=True) if biased else None
    loss = CrossEntropy(chunk_size=chunk_size, reduction=reduction)
    ours = loss(states, catalogue, targets, bias=bias)
    logits = functional.linear(states, catalogue, bias)
    theirs = functional.cross_entropy(logits, targets, reduction=reduction)
    if (targets == -100).all() and reduction == "mean":
        assert ours == 0  # torch says NaN
        return
    assert_same(ours, theirs, (states, catalogue) if bias is None else (states, catalogue, bias))


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("learned", ["states", "catalogue", "bias"])
def test_each_gradient_alone(chunk_size: int | None, learned: str) -> None:
    states, catalogue, targets = problem()
    bias = torch.randn(17, dtype=torch.float64, requires_grad=True)
    given = {"states": states, "catalogue": catalogue, "bias": bias}
    given = {name: x if name == learned else x.detach() for name, x in given.items()}
    ours = CrossEntropy(chunk_size=chunk_size)(targets=targets, **given)
    logits = functional.linear(given["states"], given["catalogue"], given["bias"])
    assert_same(ours, functional.cross_entropy(logits, targets), (given[learned],))


def test_in_chunks_never_more_than_a_chunk_of_logits(largest_tensor: Any) -> None:
    states, catalogue, targets = problem(n=64, c=1000)
    with largest_tensor() as largest:
        CrossEntropy(chunk_size=50)(states, catalogue, targets).backward()
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
    exact = CrossEntropy()(states, catalogue, targets)
    for chunk_size, reduction in ((40, "mean"), (41, "none"), (42, "mean"), (400, "sum")):
        found = CrossEntropy(chunk_size=chunk_size, reduction=reduction)(states, catalogue, targets)
        found = found if reduction == "mean" else found.sum() / 48
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    assert rows == [5, 48]
    CrossEntropy(chunk_size=400)(states.bfloat16(), catalogue.bfloat16(), targets)
    CrossEntropy(chunk_size=400)(states, catalogue, targets, bias=torch.zeros(400))
    assert len(rows) == 2


@pytest.mark.parametrize("chunk_size", [40, 400])
def test_in_chunks_gradients_can_be_taken_twice_but_not_of_gradients(chunk_size: int) -> None:
    states, catalogue, targets = problem(n=64, c=400)
    value = CrossEntropy(chunk_size=chunk_size)(states, catalogue, targets)
    first = torch.autograd.grad(value, (states, catalogue), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(value, (states, catalogue))))
    value = CrossEntropy(chunk_size=chunk_size)(states, catalogue, targets)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(value, states, create_graph=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("chunk_size", [40, 400])
def test_in_chunks_without_gradients(
    chunk_size: int, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, catalogue, targets = problem(n=64, c=400)
    monkeypatch.delattr(torch.autograd, "grad")  # nor is one computed
    with mode():
        value = CrossEntropy(chunk_size=chunk_size)(states, catalogue, targets)
    assert not value.requires_grad
    torch.testing.assert_close(value, CrossEntropy()(states, catalogue, targets).detach())


def test_in_chunks_no_gradient_of_the_catalogue_is_made_in_vain(largest_tensor: Any) -> None:
    states, catalogue = torch.randn(2, 3, requires_grad=True), torch.randn(5000, 3)
    losses = CrossEntropy(chunk_size=100, reduction="none")(states, catalogue, torch.arange(2))
    with largest_tensor() as watched:
        losses.sum().backward()
    assert watched.numel <= 300
