from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sce.losses import gradients
from sce.losses.gradients import CatalogueGradient, add_rows

Add = Callable[[Tensor, Tensor, Tensor], None]
# What a CPU takes, what CUDA takes, and what it takes while it records.
ADDERS: list[Add] = [add_rows, gradients._add_sorted, gradients._add_captured]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31), n=st.integers(0, 60), rows=st.integers(1, 20), d=st.integers(1, 5)
)
@pytest.mark.parametrize("add", ADDERS)
def test_rows_are_added_as_a_loop_adds_them(add: Add, seed: int, n: int, rows: int, d: int) -> None:
    g = torch.Generator().manual_seed(seed)
    total = torch.randn(rows, d, generator=g, dtype=torch.float64)
    index = torch.randint(rows, (n,), generator=g)
    values = torch.randn(n, d, generator=g, dtype=torch.float64)
    expected = total.clone()
    for row, value in zip(index.tolist(), values, strict=True):
        expected[row] += value
    add(total, index, values)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("add", ADDERS)
def test_the_same_bits_in_every_run(add: Add, threads: int) -> None:
    # Adding floats in another order gives other bits: 10,000 values a row leave no doubt.
    g = torch.Generator().manual_seed(0)
    index = torch.randint(4, (40_000,), generator=g)
    values = torch.randn(40_000, 16, generator=g) * torch.randn(40_000, 1, generator=g).exp()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runs = [torch.zeros(4, 16) for _ in range(3)]
        for total in runs:
            add(total, index, values)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    shuffled = torch.zeros(4, 16)
    order = torch.randperm(40_000, generator=g)
    add(shuffled, index[order], values[order])
    assert not torch.equal(runs[0], shuffled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_has_the_precision_of_the_catalogue_and_touches_nothing_else(
    dtype: torch.dtype,
) -> None:
    catalogue = torch.randn(6, 3).to(dtype)
    items = torch.tensor([4, 1, 4])
    accumulator = CatalogueGradient(catalogue, [items], torch.float32)
    accumulator.add(items, torch.ones(3, 3))
    accumulator.add(items[:1], torch.ones(1, 3))
    found = accumulator.finish()
    assert found.dtype == dtype
    assert found[:, 0].tolist() == [0, 1, 0, 0, 3, 0]
