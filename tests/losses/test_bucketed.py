import pytest
import torch
from torch import Tensor

from sce.losses import ScalableCrossEntropy
from sce.losses.bucketed import bucketed_cross_entropy
from sce.losses.buckets import Buckets, fill_buckets


def problem(
    dtype: torch.dtype = torch.float64, n: int = 20
) -> tuple[Tensor, Tensor, Tensor, Buckets]:
    g = torch.Generator().manual_seed(0)
    states = torch.randn(n, 5, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    catalogue = torch.randn(30, 5, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(30, (n,), generator=g)
    centres = torch.randn(6, 5, generator=g, dtype=torch.float64)
    with torch.no_grad():
        buckets = fill_buckets(
            states.double(), catalogue.double(), centres, bucket_size_x=7, bucket_size_y=11
        )
    return states, catalogue, targets, buckets


def test_gradcheck_with_frozen_buckets() -> None:
    states, catalogue, targets, buckets = problem()

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return bucketed_cross_entropy(x, y, targets, buckets)[0]

    assert torch.autograd.gradcheck(losses, (states, catalogue))


@pytest.mark.parametrize("max_logits", [1, 8, 50, 300])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_size_of_the_tiles_changes_nothing(max_logits: int, dtype: torch.dtype) -> None:
    states, catalogue, targets, buckets = problem(dtype)
    weights = torch.linspace(-1, 1, len(states))
    results = []
    for size in (max_logits, 1 << 20):
        losses, placed = bucketed_cross_entropy(
            states, catalogue, targets, buckets, max_logits=size
        )
        grads = torch.autograd.grad((losses * weights).sum(), (states, catalogue))
        results.append((losses, placed, *grads))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_second_derivative_is_refused_not_wrong() -> None:
    states, catalogue, targets, buckets = problem()
    losses, _ = bucketed_cross_entropy(states, catalogue, targets, buckets)
    (grad,) = torch.autograd.grad(losses.square().sum(), states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_what_is_kept_for_backward_does_not_grow_with_the_logits() -> None:
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    states, catalogue, targets, buckets = problem()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        bucketed_cross_entropy(states, catalogue, targets, buckets)
    assert max(kept) <= max(states.numel(), catalogue.numel(), buckets.items.numel())


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
