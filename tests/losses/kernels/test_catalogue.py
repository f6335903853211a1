"""The gradient of the catalogue: in groups of buckets, and as a sparse tensor."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sce.losses import ScalableCrossEntropy
from tests.losses.kernels.made_problem import DEVICE, GPU, problem

pytest.importorskip("triton")
from sce.losses.kernels import catalogue as catalogue_kernels

N, C, SIZE_Y = (60, 150, 70) if GPU else (20, 40, 8)


def gradient(**options: Any) -> Tensor:
    states, catalogue, targets = problem(5, N, C, 16)
    loss = ScalableCrossEntropy(
        n_buckets=3, bucket_size_x=8, bucket_size_y=SIZE_Y, backend="triton", **options
    )
    value = loss(states, catalogue, targets, generator=torch.Generator(DEVICE).manual_seed(0))
    return torch.autograd.grad(value, catalogue)[0]


def test_large_buckets_add_up_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gradient(reduction="sum")
    monkeypatch.setattr(catalogue_kernels, "MEMORY", 2 * SIZE_Y * 16 * 4)  # two buckets at a time
    torch.testing.assert_close(gradient(reduction="sum"), whole)


def test_a_sparse_gradient_holds_the_touched_rows() -> None:
    dense, found = gradient(), gradient(sparse_grad=True)
    assert found.is_sparse
    assert found.is_coalesced()
    rows = found.indices()[0]
    assert torch.equal(rows, rows.unique())
    assert torch.equal(rows, dense.abs().sum(dim=1).nonzero().squeeze(1))
    assert 0 < len(rows) < C
    assert torch.equal(found.to_dense(), dense)
