"""Rounding on the chip, which the interpreter must do as a GPU does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sce.losses import ScalableCrossEntropy, buckets
from tests.losses.kernels.made_problem import DEVICE, problem

pytest.importorskip("triton")
import triton
import triton.language as tl

from sce.losses.kernels import function
from sce.losses.kernels.precision import rounded
from sce.losses.kernels.selection import Plan, top_rows


@triton.jit
def _round_kernel(values_ptr, out_ptr, ROUND: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 1024)
    tl.store(out_ptr + i, rounded(tl.load(values_ptr + i), ROUND).to(tl.float32))


@pytest.mark.parametrize(
    ("name", "dtype"), [("", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_numbers_are_rounded_to_the_nearest_even(name: str, dtype: torch.dtype | None) -> None:
    g = torch.Generator().manual_seed(0)
    values = torch.randn(1024, generator=g) * torch.exp(3 * torch.randn(1024, generator=g))
    values[:512] = 4 + (torch.arange(512) + 0.5) / 64  # half way between two of bfloat16
    values[-5:] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    values = values.to(DEVICE)
    found = torch.empty_like(values)
    kernel: Any = _round_kernel
    kernel[(1,)](values, found, ROUND=name)
    expected = values if dtype is None else values.to(dtype).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("plan", [Plan(3, 1, 1), Plan(3, 4, 1), Plan(3, 8, 2)], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_rounded_before_they_are_scored(plan: Plan, given: torch.dtype) -> None:
    # Of six rows that are equal once they are rounded, the first are the best.
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 8, generator=g).bfloat16().float().repeat(6, 1)
    rows *= 1 + 1e-4 * torch.rand(240, 8, generator=g)
    centres = torch.randn(3, 8, generator=g).to(given)
    given_here = centres.to(DEVICE), rows.to(DEVICE), 11
    found = top_rows(*given_here, plan=plan, autocast_dtype=torch.bfloat16)
    found = found.long().sort(dim=1).values.cpu()
    assert torch.equal(found, buckets.top_rows(centres.float(), rows.bfloat16(), 11))
    assert torch.equal(
        found, buckets.top_rows(centres.float(), rows, 11, autocast_dtype=torch.bfloat16)
    )
    left = top_rows(*given_here, plan=plan).long().sort(dim=1).values.cpu()
    assert torch.equal(left, buckets.top_rows(centres.float(), rows, 11))
    assert not torch.equal(found, left)


@pytest.mark.parametrize("kind", ["random", "states", "mix"])
def test_drawn_centres_are_those_of_states_in_half_precision(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def spy(centres: Tensor, *arguments: Any, **options: Any) -> Tensor:
        drawn.append(centres)
        return top_rows(centres, *arguments, **options)

    monkeypatch.setattr(function, "top_rows", spy)
    loss = ScalableCrossEntropy(
        n_buckets=9,
        coverage=False,
        bucket_size_x=3,
        bucket_size_y=4,
        backend="triton",
        centres=kind,
    )
    *inputs, targets = problem(6, 12, 20, 8)
    for enabled in (True, False):
        if not enabled:
            inputs = [x.detach().half() for x in inputs]
        with torch.autocast(DEVICE, dtype=torch.float16, enabled=enabled):
            loss(*inputs, targets, generator=torch.Generator(DEVICE).manual_seed(0))
    assert drawn[0].dtype == torch.float16
    assert torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    ("d", "plan"),
    [*((d, Plan(2, 32, 1)) for d in (72, 136, 264, 512)), (512, Plan(2, 128, 64))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_wide_rows_are_selected(d: int, plan: Plan, dtype: torch.dtype | None) -> None:
    g = torch.Generator().manual_seed(d)
    rows, centres = torch.randn(290, d, generator=g), torch.randn(2, d, generator=g)
    rows[3, -1] = rows[280, -1] = 1e3  # the last columns count
    centres = centres if dtype is None else centres.to(dtype)
    found = top_rows(centres.to(DEVICE), rows.to(DEVICE), 2, plan=plan, autocast_dtype=dtype)
    expected = buckets.top_rows(centres.float(), rows, 2, autocast_dtype=dtype)
    assert torch.equal(found.long().sort(dim=1).values.cpu(), expected)


@pytest.mark.parametrize(
    ("d", "reduction"), [(72, "mean"), (136, "none"), (264, "mean"), (512, "none")]
)
def test_wide_rows_that_are_rounded_give_the_gradients_of_rounded_values(
    d: int, reduction: str
) -> None:
    *inputs, targets = problem(d, 24, 40, d)
    exact = [x.detach().half().double().requires_grad_() for x in inputs]
    centres = torch.randn(2, d, generator=torch.Generator().manual_seed(d)).to(DEVICE)
    options: dict[str, Any] = {
        "coverage": False,
        "bucket_size_x": 9,
        "bucket_size_y": 20,
        "reduction": reduction,
    }
    plain = ScalableCrossEntropy(backend="torch", **options)
    expected = plain(*exact, targets, centres=centres.double())
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = ScalableCrossEntropy(backend="triton", **options)
        found = loss(*inputs, targets, centres=centres)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * d**0.5)
    grads = torch.autograd.grad(found.sum(), inputs)
    for g, h in zip(grads, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert (g - h).norm() < 2e-5 * h.norm()
