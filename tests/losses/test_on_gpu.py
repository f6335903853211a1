"""The losses on a GPU: the same results as on the CPU, in the memory that was promised."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    GeneralizedBinaryCrossEntropy,
    SampledCrossEntropy,
    ScalableCrossEntropy,
    cross_entropy,
    scalable_cross_entropy,
)
from sce.losses.buckets import top_rows
from sce.losses.reference import reference_scalable_cross_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def problem(
    seed: int, n: int, c: int, d: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(n, d, generator=g).to("cuda", dtype).requires_grad_()
    catalogue = torch.randn(c, d, generator=g).to("cuda", dtype).requires_grad_()
    targets = torch.randint(c, (n,), generator=g)
    targets[torch.rand(n, generator=g) < 0.3] = -100
    return states, catalogue, targets.cuda()


@pytest.mark.parametrize("seed", range(12))
def test_scalable_equals_the_reference(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    n, c, d, b, size_x, size_y = (int(torch.randint(1, 40, (), generator=g)) for _ in range(6))
    states, catalogue, targets = problem(seed, n, c, d)
    centres = torch.randn(b, d, generator=g)
    sizes: dict[str, Any] = {"bucket_size_x": size_x, "bucket_size_y": size_y}
    found = scalable_cross_entropy(states, catalogue, targets, centres=centres.cuda(), **sizes)
    exact_x = states.detach().cpu().double().requires_grad_()
    exact_y = catalogue.detach().cpu().double().requires_grad_()
    wanted = reference_scalable_cross_entropy(exact_x, exact_y, targets.cpu(), centres, **sizes)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
    if wanted.requires_grad:
        exact = torch.autograd.grad(wanted, (exact_x, exact_y))
        for g1, g2 in zip(torch.autograd.grad(found, (states, catalogue)), exact, strict=True):
            torch.testing.assert_close(g1.cpu().double(), g2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_scores", [1 << 12, 1 << 16, 1 << 23])
def test_exact_sets_with_ties(max_scores: int) -> None:
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(9, 3, generator=g).mul(2).round()
    rows = torch.randn(3000, 3, generator=g).round()
    found = top_rows(centres.cuda(), rows.cuda(), 100, max_scores=max_scores).cpu()
    assert torch.equal(found, top_rows(centres, rows, 100))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_generator_repeats_bit_for_bit(dtype: torch.dtype, deterministic: bool) -> None:
    states, catalogue, targets = problem(1, 2000, 5000, 32, dtype)
    torch.use_deterministic_algorithms(deterministic)
    try:
        runs = []
        for _ in range(2):
            g = torch.Generator("cuda").manual_seed(3)
            loss = ScalableCrossEntropy(bucket_size_y=64)(states, catalogue, targets, generator=g)
            runs.append((loss, *torch.autograd.grad(loss, (states, catalogue))))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    if deterministic:
        assert torch.equal(runs[0][2], runs[1][2])


@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(),
        CrossEntropy(chunk_size=100),
        SampledCrossEntropy(16),
        SampledCrossEntropy(16, shared="position"),
        SampledCrossEntropy(16, shared="batch"),
        BinaryCrossEntropy(),
        BinaryCrossEntropy(16),
        GeneralizedBinaryCrossEntropy(16),
        ScalableCrossEntropy(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_loss_runs_in_every_precision(loss: nn.Module, dtype: torch.dtype) -> None:
    states, catalogue, targets = problem(2, 600, 900, 16, dtype)
    shaped = states.view(6, 100, 16)
    value = loss(shaped, catalogue, targets.view(6, 100))
    for tensor in (value, *torch.autograd.grad(value, (states, catalogue))):
        assert tensor.isfinite().all()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert loss(shaped.float(), catalogue.float(), targets.view(6, 100)).isfinite()


def test_chunked_equals_plain() -> None:
    states, catalogue, targets = problem(3, 500, 700, 16)
    a = cross_entropy(states, catalogue, targets)
    b = cross_entropy(states, catalogue, targets, chunk_size=64)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for g, h in zip(
        torch.autograd.grad(a, (states, catalogue)),
        torch.autograd.grad(b, (states, catalogue)),
        strict=True,
    ):
        torch.testing.assert_close(g, h, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_beyond_inputs_and_gradients(dtype: torch.dtype) -> None:
    states = torch.randn(25_600, 64, device="cuda", dtype=dtype, requires_grad=True)
    catalogue = torch.randn(1_000_000, 64, device="cuda", dtype=dtype, requires_grad=True)
    targets = torch.randint(1_000_000, (25_600,), device="cuda")
    loss = ScalableCrossEntropy(n_buckets=320, bucket_size_x=320, bucket_size_y=256)
    torch.autograd.grad(loss(states, catalogue, targets), (states, catalogue))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(loss(states, catalogue, targets), (states, catalogue))
    peak = torch.cuda.max_memory_allocated() - before
    peak -= sum(grad.numel() * grad.element_size() for grad in grads)
    assert peak < 150 * 2**20
