"""Inside buckets: which bucket wins a state, and what is not a number."""

from typing import Any

import pytest
import torch

from sce.losses import ScalableCrossEntropy
from tests.losses.kernels.made_problem import DEVICE, problem
from tests.losses.reference import scalable_cross_entropy

pytest.importorskip("triton")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_on_a_tie_the_gradient_flows_through_the_lowest_bucket_only(backend: Any) -> None:
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
        coverage=False, bucket_size_x=1, bucket_size_y=1, backend=backend,
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
    loss = ScalableCrossEntropy(
        n_buckets=2, coverage=False, bucket_size_x=6, bucket_size_y=5, backend="triton"
    )
    value = loss(states, catalogue, targets)
    for tensor in (value, *torch.autograd.grad(value, (states, catalogue))):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("where", [0, 1])
def test_nan_is_never_swallowed(where: int) -> None:
    inputs = problem(4, 15, 20, 8)
    with torch.no_grad():
        inputs[where][7, 2] = float("nan")
    inputs[2][7] = 3
    loss = ScalableCrossEntropy(
        n_buckets=2, coverage=False, bucket_size_x=3, bucket_size_y=4, backend="triton"
    )
    assert loss(*inputs).isnan()


def test_a_state_that_is_not_finite_spoils_the_losses_of_all_on_both_paths() -> None:
    states, catalogue, targets = problem(4, 15, 20, 8)
    with torch.no_grad():
        states[7, 2] = float("nan")
    targets[7] = 3
    centres = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rules: list[dict[str, Any]] = [{}, {"coverage": False, "bucket_size_x": 3}]
    for rule in rules:
        plain, fused = (
            ScalableCrossEntropy(bucket_size_y=4, backend=backend, reduction="none", **rule)(
                states, catalogue, targets, centres=centres
            )
            for backend in ("torch", "triton")
        )
        torch.testing.assert_close(plain, fused, equal_nan=True)
        assert 3 <= plain.isnan().sum() < 15  # those in no bucket are 0 still
