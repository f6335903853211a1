"""Exact cross-entropy by kernels, against float64 on the same rounded inputs."""

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sce.losses import CrossEntropy, full
from tests.losses.kernels.made_problem import DEVICE, GPU, problem

pytest.importorskip("triton")
kernel: Any = importlib.import_module("sce.losses.kernels.full")

HALF = [torch.bfloat16, torch.float16]
# Of the gradients, relative to their lengths: rounded in half precision, and not under autocast.
ROUNDED = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:  # in the interpreter
        monkeypatch.setattr(full, "why_not_triton", lambda *_: None)


def run(
    inputs: tuple[Tensor, ...], half: torch.dtype, reduction: str = "mean", **options: Any
) -> tuple[Tensor, ...]:
    """Return value and gradients; float32 inputs are rounded by autocast, which is then over."""
    with torch.autocast(DEVICE, half, enabled=inputs[0].dtype == torch.float32):
        value = CrossEntropy(chunk_size=7, reduction=reduction)(*inputs, **options)
    weights = torch.linspace(-1, 2, value.numel(), device=DEVICE).view_as(value)
    return value.detach(), *torch.autograd.grad((value * weights).sum(), inputs[:2])


def exact(
    inputs: tuple[Tensor, ...], half: torch.dtype, reduction: str = "mean"
) -> tuple[Tensor, ...]:
    x, y = (tensor.detach().to(half).double().requires_grad_() for tensor in inputs[:2])
    value = functional.cross_entropy(x @ y.T, inputs[2], reduction=reduction)
    weights = torch.linspace(-1, 2, value.numel(), device=DEVICE).view_as(value)
    return value.detach(), *torch.autograd.grad((value * weights).sum(), (x, y))


def assert_close(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], error: float) -> None:
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=1e-5)
    for got, want in zip(found[1:], wanted[1:], strict=True):
        assert (got.double() - want).norm() <= error * want.norm()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("autocast", [False, True])
def test_value_and_gradients(reduction: str, half: torch.dtype, autocast: bool) -> None:
    inputs = problem(0, 70, 150, 24, torch.float32 if autocast else half)
    found = run(inputs, half, reduction)
    assert [tensor.dtype for tensor in found] == [torch.float32, *[inputs[0].dtype] * 2]
    assert_close(found, exact(inputs, half, reduction), 2e-6 if autocast else ROUNDED[half])


@pytest.mark.parametrize(
    ("n", "items", "d"), [(1, 1, 1), (3, 2, 5), (129, 65, 16), (20, 330, 8), (9, 40, 130)]
)
def test_sizes(n: int, items: int, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full, "_SHARE", 100)
    states, catalogue, targets = problem(1, n, items, d)
    targets = targets.clamp(min=0)
    inputs = (states, catalogue, targets)
    assert full.count_shares(n, items) == (3 if items == 330 else 1)
    assert_close(run(inputs, torch.float16), exact(inputs, torch.float16), 2e-6)


@pytest.mark.parametrize("d", [300, 512])
def test_wide_rows(d: int) -> None:
    inputs = problem(2, 40, 50, d)
    assert_close(run(inputs, torch.bfloat16), exact(inputs, torch.bfloat16), 5e-6)


def test_a_target_that_is_nearly_certain_keeps_its_digits() -> None:
    catalogue = torch.eye(16, device=DEVICE).mul_(4).requires_grad_()
    states = (catalogue.detach()[:8] * 1.25).requires_grad_()  # logits 20, and 0: losses 3e-8
    inputs = (states, catalogue, torch.arange(8, device=DEVICE))
    found, wanted = run(inputs, torch.bfloat16, "sum"), exact(inputs, torch.bfloat16, "sum")
    assert found[0].item() == pytest.approx(wanted[0].item(), rel=1e-5)
    assert_close(found, wanted, 1e-5)


def test_gradients_far_below_one() -> None:
    inputs = problem(3, 30, 40, 8)
    with torch.autocast(DEVICE, torch.float16):
        value = CrossEntropy(chunk_size=7)(*inputs)
    small, wanted = (torch.autograd.grad(value * s, inputs[:2], retain_graph=True) for s in (
        2.0**-40, 1.0
    ))  # fmt: skip
    for got, want in zip(small, wanted, strict=True):
        assert torch.equal(got * 2.0**40, want)
    zero = torch.autograd.grad(value * 0, inputs[:2])
    assert not any(grad.any() for grad in zero)


@pytest.mark.parametrize("learned", [0, 1])
def test_each_gradient_alone(learned: int) -> None:
    inputs = problem(4, 20, 30, 8, torch.bfloat16)
    wanted = run(inputs, torch.bfloat16)[1 + learned]
    given = [x.detach() for x in inputs]
    given[learned].requires_grad_()
    (found,) = torch.autograd.grad(CrossEntropy(chunk_size=7)(*given), given[learned])
    found = found * -1  # the weight that `run` gives a single number
    assert torch.equal(found, wanted)


def test_a_catalogue_whose_columns_lie_apart_and_places_not_in_use() -> None:
    states, catalogue, targets = problem(5, 20, 30, 8, torch.float16)
    wanted = run((states, catalogue, targets), torch.float16)
    apart = catalogue.detach().T.contiguous().T.requires_grad_()
    found = run((states, apart, targets), torch.float16, max_targets=20)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("spoiled", [0, 1])
def test_what_is_no_number_is_never_swallowed(spoiled: int) -> None:
    inputs = problem(6, 20, 30, 8, torch.bfloat16)
    with torch.no_grad():
        inputs[spoiled][7] = torch.nan
    inputs[2][7] = 3
    assert CrossEntropy(chunk_size=7)(*inputs).isnan()


def test_logits_beyond_the_range_of_float16() -> None:
    states, catalogue, targets = problem(7, 20, 30, 8, torch.float16)
    inputs = tuple((200 * x.detach()).requires_grad_() for x in (states, catalogue))
    found = run((*inputs, targets), torch.float16)
    assert found[0] > 65_504
    # Of logits in the hundred thousands float32 has two digits behind the point.
    assert_close(found, exact((*inputs, targets), torch.float16), 0.03)


@pytest.mark.parametrize("size", [2.0**10, 2.0**17, 2.0**25])
def test_large_logits_that_are_equal(size: float) -> None:
    states = torch.full((32, 1), size, device=DEVICE, requires_grad=True)
    catalogue = torch.ones(64, 1, device=DEVICE, requires_grad=True)
    found = run((states, catalogue, torch.arange(32, device=DEVICE)), torch.bfloat16, "sum")
    assert found[0].item() == pytest.approx(32 * math.log(64), rel=1e-5)
    wanted = torch.full_like(found[2], -size / 2)  # `run` weights a sum by -1
    wanted[:32] += size
    torch.testing.assert_close(found[2], wanted, rtol=1e-4, atol=0.0)


def test_no_logits_are_kept_and_without_gradients_no_sums(
    largest_tensor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = problem(8, 100, 400, 4, torch.bfloat16)
    with largest_tensor() as largest:
        CrossEntropy(chunk_size=200)(*inputs).backward()
    assert largest.numel <= 2 * 400 * 4  # the interpreter makes tensors of bytes
    asked: list[bool] = []
    monkeypatch.setattr(
        kernel, "launch", lambda *_, **constants: asked.append(constants["GRADIENT"])
    )
    CrossEntropy(chunk_size=200)(*inputs)
    with torch.no_grad():
        CrossEntropy(chunk_size=200)(*inputs)
    assert asked == [True, False]


def test_gradients_can_be_taken_twice_but_not_of_gradients() -> None:
    inputs = problem(9, 20, 30, 8, torch.bfloat16)
    value = CrossEntropy(chunk_size=7)(*inputs)
    first = torch.autograd.grad(value, inputs[:2], retain_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(value, inputs[:2], retain_graph=True, create_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(value, inputs[:2])))


def test_where_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    states, catalogue, _ = problem(10, 4, 5, 3)
    halves = states.half(), catalogue.half()
    assert full._fused_dtype(states, catalogue) is None
    assert full._fused_dtype(states.double(), catalogue.double()) is None
    assert full._fused_dtype(states.half(), catalogue.bfloat16()) is None
    assert full._fused_dtype(*halves) == torch.float16
    assert full._fused_dtype(states.half()[:0], catalogue.half()) is None
    with torch.autocast(DEVICE, torch.bfloat16):
        assert full._fused_dtype(states, catalogue) == torch.bfloat16
        assert full._fused_dtype(states, catalogue.bfloat16()) == torch.bfloat16
        assert full._fused_dtype(*halves) == torch.float16
        assert full._fused_dtype(states.double(), catalogue) is None
    monkeypatch.setattr(full, "why_not_triton", lambda *_: "no GPU")
    assert full._fused_dtype(*halves) is None
