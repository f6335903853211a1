"""The gradient of the catalogue: in groups of buckets, and as a sparse tensor."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sce.losses import ScalableCrossEntropy
from tests.losses.kernels.made_problem import DEVICE, GPU, problem

pytest.importorskip("triton")
from sce.losses.kernels import catalogue as catalogue_kernels
from tests.losses.reference import scalable_cross_entropy

N, C, SIZE_Y = (60, 150, 70) if GPU else (20, 40, 8)


def gradient(size_y: int = SIZE_Y, **options: Any) -> Tensor:
    states, catalogue, targets = problem(5, N, C, 16)
    loss = ScalableCrossEntropy(
        n_buckets=3,
        coverage=False,
        bucket_size_x=8,
        bucket_size_y=size_y,
        backend="triton",
        **options,
    )
    value = loss(states, catalogue, targets, generator=torch.Generator(DEVICE).manual_seed(0))
    return torch.autograd.grad(value, catalogue)[0]


@pytest.mark.parametrize("buckets", [1, 2])  # of a group
@pytest.mark.parametrize("groups", [0, 2, 9])  # that are sorted together; 0: one is too large
def test_large_buckets_add_up_in_groups(
    buckets: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gradient(reduction="sum")
    monkeypatch.setattr(catalogue_kernels, "MAX_PARTS", buckets * SIZE_Y * 16 * 4)
    monkeypatch.setattr(catalogue_kernels, "MAX_SORTED", groups * buckets * SIZE_Y)
    torch.testing.assert_close(gradient(reduction="sum"), whole)


def test_numbers_of_groups_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gradient(reduction="sum")
    monkeypatch.setattr(catalogue_kernels, "MAX_PARTS", SIZE_Y * 16 * 4)
    monkeypatch.setattr(catalogue_kernels, "_NO_ROW", 2 * (C + 1))  # of two groups at most
    sorts = catalogue_kernels._sort_in_groups
    together: list[int] = []

    def spy(*given: Any) -> tuple[Tensor, Tensor]:
        together.append(given[3])
        return sorts(*given)

    monkeypatch.setattr(catalogue_kernels, "_sort_in_groups", spy)
    torch.testing.assert_close(gradient(reduction="sum"), whole)
    assert together == [2, 1]


@pytest.mark.parametrize("recording", [False, True])
def test_a_sparse_gradient_of_large_buckets_adds_up_in_groups(
    recording: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = gradient(reduction="sum")
    monkeypatch.setattr(catalogue_kernels, "MAX_PARTS", 2 * SIZE_Y * 16 * 4)
    monkeypatch.setattr(catalogue_kernels, "_capturing", lambda: recording)
    found = gradient(reduction="sum", sparse_grad=True)
    rows = found._indices()[0]
    touched = dense.abs().sum(dim=1).nonzero().squeeze(1)
    torch.testing.assert_close(found.to_dense(), dense)
    if recording:  # as many rows as there can be
        assert not found.is_coalesced()
        assert len(rows) == min(C, 3 * SIZE_Y + N)
        assert torch.equal(
            rows.unique(), torch.cat([touched, touched.new_tensor([C - 1])]).unique()
        )
    else:
        assert found.is_coalesced()
        assert torch.equal(rows, touched)


@pytest.mark.parametrize("recording", [False, True])
def test_sparse_or_dense_it_has_the_same_bits(
    recording: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where items have many entries, but there are fewer than four for each of all."""
    monkeypatch.setattr(catalogue_kernels, "_capturing", lambda: recording)
    found = []
    for sparse in (False, True):
        states, catalogue, targets = problem(5, 100, 40, 16)
        loss = ScalableCrossEntropy(
            n_buckets=3, bucket_size_y=8, backend="triton", sparse_grad=sparse
        )
        generator = torch.Generator(DEVICE).manual_seed(0)
        value = loss(states, catalogue, targets % 9, generator=generator)
        found.append(torch.autograd.grad(value, catalogue)[0].to_dense())
    assert torch.equal(*found)


@pytest.mark.parametrize("sparse", [False, True])
def test_an_item_that_most_states_want(sparse: bool) -> None:
    states, catalogue, targets = problem(5, 90, C, 16)
    targets[::5], targets[1::5], targets[2::5] = 7, 7, 7
    centres = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = []
    for backend in ("triton", "torch"):
        value = scalable_cross_entropy(
            states, catalogue, targets, centres=centres, coverage=False, bucket_size_x=90,
            bucket_size_y=SIZE_Y, reduction="sum", backend=backend, sparse_grad=sparse,
        )  # fmt: skip
        found.append(torch.autograd.grad(value, catalogue)[0].to_dense())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size_y", [4, SIZE_Y])  # fewer entries than items, and more
def test_a_sparse_gradient_holds_the_touched_rows(size_y: int) -> None:
    dense, found = gradient(size_y), gradient(size_y, sparse_grad=True)
    assert found.is_sparse
    assert found.is_coalesced()
    rows = found.indices()[0]
    assert torch.equal(rows, rows.unique())
    assert torch.equal(rows, dense.abs().sum(dim=1).nonzero().squeeze(1))
    assert 0 < len(rows) < C
    assert torch.equal(found.to_dense(), dense)


@pytest.mark.parametrize("size_y", [4, SIZE_Y])  # fewer entries than items, and more
def test_a_captured_sparse_gradient_has_no_more_rows_than_items(
    size_y: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = gradient(size_y)
    monkeypatch.setattr(catalogue_kernels, "_capturing", lambda: True)
    found = gradient(size_y, sparse_grad=True)
    assert len(found._indices()[0]) == min(C, 3 * size_y + N)
    assert torch.equal(found.to_dense(), dense)
