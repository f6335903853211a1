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
def _round_kernel(values_ptr: Any, out_ptr: Any, ROUND: tl.constexpr) -> None:
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
    wanted = values if dtype is None else values.to(dtype).float()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("plan", [Plan(3, 1, 1), Plan(3, 4, 1), Plan(3, 8, 2)], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_rounded_before_they_are_scored(plan: Plan, given: torch.dtype) -> None:
    # Of six rows that are equal once they are rounded, the first are the best.
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 8, generator=g).bfloat16().float().repeat(6, 1)
    rows *= 1 + 1e-4 * torch.rand(240, 8, generator=g)
    centres = torch.randn(3, 8, generator=g).to(given)
    given_here = centres.to(DEVICE), rows.to(DEVICE), 11
    found = top_rows(*given_here, plan=plan, rounding=torch.bfloat16)
    found = found.long().sort(dim=1).values.cpu()
    assert torch.equal(found, buckets.top_rows(centres.float(), rows.bfloat16(), 11))
    assert torch.equal(found, buckets.top_rows(centres.float(), rows, 11, rounding=torch.bfloat16))
    left = top_rows(*given_here, plan=plan).long().sort(dim=1).values.cpu()
    assert torch.equal(left, buckets.top_rows(centres.float(), rows, 11))
    assert not torch.equal(found, left)


@pytest.mark.parametrize("settings", [{}, {"mix": False}, {"mix_of": 0}], ids=str)
def test_drawn_centres_are_those_of_states_in_half_precision(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def spy(centres: Tensor, *arguments: Any, **options: Any) -> Tensor:
        drawn.append(centres)
        return top_rows(centres, *arguments, **options)

    monkeypatch.setattr(function, "top_rows", spy)
    loss = ScalableCrossEntropy(
        n_buckets=9, bucket_size_x=3, bucket_size_y=4, backend="triton", **settings
    )
    *inputs, targets = problem(6, 12, 20, 8)
    for enabled in (True, False):
        if not enabled:
            inputs = [x.detach().half() for x in inputs]
        with torch.autocast(DEVICE, dtype=torch.float16, enabled=enabled):
            loss(*inputs, targets, generator=torch.Generator(DEVICE).manual_seed(0))
    assert drawn[0].dtype == torch.float16
    assert torch.equal(drawn[0], drawn[2])
