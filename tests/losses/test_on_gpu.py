"""The losses on a GPU: the same results as on the CPU, in the memory that was promised."""

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    GeneralizedBinaryCrossEntropy,
    InBatchNegatives,
    Loss,
    PopularityNegatives,
    SampledCrossEntropy,
    ScalableCrossEntropy,
)
from sce.losses.buckets import top_rows
from sce.losses.gradients import add_rows
from tests.losses.kernels.made_problem import problem
from tests.losses.reference import reference_scalable_cross_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("coverage", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_scalable_equals_the_reference(seed: int, coverage: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    n, c, d, b, size_x, size_y = (int(torch.randint(1, 40, (), generator=g)) for _ in range(6))
    states, catalogue, targets = problem(seed, n, c, d)
    centres = torch.randn(b, d, generator=g)
    sizes: dict[str, Any] = {"coverage": coverage, "bucket_size_y": size_y}
    sizes["bucket_size_x"] = None if coverage else size_x
    loss = ScalableCrossEntropy(**sizes)
    found = loss(states, catalogue, targets, centres=centres.cuda())
    exact_x = states.detach().cpu().double().requires_grad_()
    exact_y = catalogue.detach().cpu().double().requires_grad_()
    expected = reference_scalable_cross_entropy(exact_x, exact_y, targets.cpu(), centres, **sizes)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=1e-4)
    if expected.requires_grad:
        exact = torch.autograd.grad(expected, (exact_x, exact_y))
        for g1, g2 in zip(torch.autograd.grad(found, (states, catalogue)), exact, strict=True):
            torch.testing.assert_close(g1.cpu().double(), g2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_scores", [1 << 12, 1 << 16, 1 << 23])
def test_exact_sets_with_ties(max_scores: int) -> None:
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(9, 3, generator=g).mul(2).round()
    rows = torch.randn(3000, 3, generator=g).round()
    found = top_rows(centres.cuda(), rows.cuda(), 100, max_scores=max_scores).cpu()
    assert torch.equal(found, top_rows(centres, rows, 100))


class Biased(nn.Module):
    """A loss with a bias for each of 900 items."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        bias = torch.linspace(-1, 1, 900, device="cuda", requires_grad=True)
        value: Tensor = self.loss(*inputs, bias=bias, **options)
        (grad,) = torch.autograd.grad(value, bias, retain_graph=True)
        assert grad.isfinite().all()
        return value + grad.abs().sum().detach()  # so that its bits are compared as well


LOSSES: dict[str, nn.Module] = {
    "sce": ScalableCrossEntropy(bucket_size_y=64),
    "sce, states": ScalableCrossEntropy(bucket_size_y=64, centres="states"),
    "sce, mix": ScalableCrossEntropy(bucket_size_y=64, centres="mix"),
    "sce, plain path": ScalableCrossEntropy(bucket_size_y=64, backend="torch"),
    "ce": CrossEntropy(),
    "ce, chunked": CrossEntropy(chunk_size=100),
    "ce-": SampledCrossEntropy(16),
    "ce-, by position": SampledCrossEntropy(16, shared="position"),
    "ce-, by batch": SampledCrossEntropy(16, shared="batch"),
    "ce-, in batch": SampledCrossEntropy(16, negatives=InBatchNegatives()),
    "ce-, popular": SampledCrossEntropy(
        16, negatives=PopularityNegatives(torch.arange(900) + 1, correct=True)
    ),
    "bce": BinaryCrossEntropy(),
    "bce+": BinaryCrossEntropy(16),
    "gbce": GeneralizedBinaryCrossEntropy(16),
    "ce, bias": Biased(CrossEntropy()),
    "ce, chunked, bias": Biased(CrossEntropy(chunk_size=100)),
    "ce-, bias": Biased(SampledCrossEntropy(16)),
    "ce-, by position, bias": Biased(SampledCrossEntropy(16, shared="position")),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.mark.parametrize("deterministic", [False, True])
@every_dtype
@every_loss
def test_a_generator_repeats_bit_for_bit(
    loss: nn.Module, dtype: torch.dtype, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without it torch refuses matrix products when only deterministic algorithms are allowed.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Few items, so that each gets many gradients: their order shows in the last bits.
    states, catalogue, targets = problem(1, 6000, 900, 32, dtype)
    targets = torch.where(targets >= 0, targets % 50, targets).view(60, 100)
    before = torch.cuda.get_rng_state()
    torch.use_deterministic_algorithms(deterministic)
    try:
        runs = []
        for _ in range(3):
            g = torch.Generator("cuda").manual_seed(3)
            value = loss(states.view(60, 100, 32), catalogue, targets, generator=g)
            runs.append((value, *torch.autograd.grad(value, (states, catalogue))))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        for name, a, b in zip(("value", "states", "catalogue"), runs[0], other, strict=True):
            assert torch.equal(a, b), name
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_rows_are_added_as_on_the_cpu() -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(40, (20_000,), generator=g)
    values = torch.randn(20_000, 16, generator=g)
    expected, found = torch.zeros(40, 16), torch.zeros(40, 16, device="cuda")
    add_rows(expected, rows, values)
    add_rows(found, rows.cuda(), values.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@every_dtype
@every_loss
def test_every_loss_runs_in_every_precision(loss: nn.Module, dtype: torch.dtype) -> None:
    states, catalogue, targets = problem(2, 600, 900, 16, dtype)
    shaped = states.view(6, 100, 16)
    value = loss(shaped, catalogue, targets.view(6, 100))
    for tensor in (value, *torch.autograd.grad(value, (states, catalogue))):
        assert tensor.isfinite().all()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert loss(shaped.float(), catalogue.float(), targets.view(6, 100)).isfinite()


@every_loss
def test_logits_beyond_the_range_of_float16(loss: nn.Module) -> None:
    signs = torch.tensor([[1.0], [-1.0]], device="cuda").repeat(450, 1)
    states = (400 * signs[:60].view(6, 10, 1)).half().requires_grad_()
    catalogue = (400 * signs).half().requires_grad_()
    value = loss(states, catalogue, torch.arange(60, device="cuda").view(6, 10) % 7)
    for tensor in (value, *torch.autograd.grad(value, (states, catalogue))):
        assert tensor.isfinite().all()


def test_a_target_outside_the_catalogue_is_loud() -> None:
    # Asserted on the device, which ends the process that asked.
    code = (
        "import torch; from sce.losses import CrossEntropy;"
        "CrossEntropy()(torch.randn(2, 4, device='cuda'), torch.randn(9, 4, device='cuda'),"
        "torch.tensor([1, 9], device='cuda')); torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "assert" in done.stderr.lower()


def test_chunked_equals_plain() -> None:
    states, catalogue, targets = problem(3, 500, 700, 16)
    a = CrossEntropy()(states, catalogue, targets)
    b = CrossEntropy(chunk_size=64)(states, catalogue, targets)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for g, h in zip(
        torch.autograd.grad(a, (states, catalogue)),
        torch.autograd.grad(b, (states, catalogue)),
        strict=True,
    ):
        torch.testing.assert_close(g, h, rtol=1e-4, atol=1e-5)


def start_measuring() -> int:
    """Return the memory in use; what earlier tests left is collected now, and not on the way."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize(
    ("backend", "size_y", "sparse", "mib"),
    [
        ("triton", 256, False, 32),
        ("triton", 16_384, False, 128),
        ("triton", 4_096, True, 192),  # its gradient is large, and so are the keys of its rows
        ("torch", 256, False, 150),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_beyond_inputs_and_gradients(
    dtype: torch.dtype, backend: Any, size_y: int, sparse: bool, mib: int
) -> None:
    states = torch.randn(25_600, 64, device="cuda", dtype=dtype, requires_grad=True)
    catalogue = torch.randn(1_000_000, 64, device="cuda", dtype=dtype, requires_grad=True)
    targets = torch.randint(1_000_000, (25_600,), device="cuda")
    loss = ScalableCrossEntropy(
        n_buckets=320,
        coverage=False,
        bucket_size_x=320,
        bucket_size_y=size_y,
        backend=backend,
        sparse_grad=sparse,
    )
    torch.autograd.grad(loss(states, catalogue, targets), (states, catalogue))
    before = start_measuring()
    value = loss(states, catalogue, targets)
    forward = torch.cuda.max_memory_allocated() - before  # there are no gradients yet
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(value, (states, catalogue))
    peak = torch.cuda.max_memory_allocated() - before
    values = [grad._values() if grad.is_sparse else grad for grad in grads]
    peak -= sum(value.numel() * value.element_size() for value in values)
    assert max(forward, peak) < mib * 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_cross_entropy_in_half_precision_keeps_no_logits(dtype: torch.dtype) -> None:
    states = torch.randn(25_600, 64, device="cuda", dtype=dtype, requires_grad=True)
    catalogue = torch.randn(300_000, 64, device="cuda", dtype=dtype, requires_grad=True)
    targets = torch.randint(300_000, (25_600,), device="cuda")
    before = start_measuring()
    with torch.autocast("cuda", torch.bfloat16):
        value = CrossEntropy(chunk_size=100_000)(states, catalogue, targets)
    grads = torch.autograd.grad(value, (states, catalogue))
    peak = torch.cuda.max_memory_allocated() - before
    peak -= sum(grad.numel() * grad.element_size() for grad in grads)
    assert peak < 64 * 2**20


def test_under_autocast_the_kernels_make_no_copy_of_the_catalogue() -> None:
    states = torch.randn(25_600, 64, device="cuda", requires_grad=True)
    catalogue = torch.randn(1_000_000, 64, device="cuda", requires_grad=True)
    targets = torch.randint(1_000_000, (25_600,), device="cuda")
    loss = ScalableCrossEntropy(n_buckets=320, coverage=False, bucket_size_x=320, bucket_size_y=256)
    peaks = []
    for enabled in (False, True, False, True):
        before = start_measuring()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled):
            value = loss(states, catalogue, targets)
        torch.autograd.grad(value, (states, catalogue))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del value
    assert peaks[3] <= peaks[2] + 2**20  # of 122 MiB
