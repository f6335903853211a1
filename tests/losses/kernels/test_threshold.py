"""The best rows by a threshold, against the plain function."""

import numpy as np
import pytest
import torch
from torch import Tensor

from sce.losses import buckets
from tests.losses.kernels.made_problem import DEVICE, GPU

pytest.importorskip("triton")
from sce.losses.kernels import selection, threshold
from sce.losses.kernels.groups import Rows
from sce.losses.kernels.selection import spare, top_rows
from sce.losses.kernels.threshold import top_rows_by_threshold
from sce.losses.kernels.tiles import ROWS

KINDS = ["as drawn", "by norm", "duplicates", "all equal", "zeros"]
SIZES = [(3, 1000, 8, 17), (2, 1111, 24, 60), (70, 600, 8, 20)]
if GPU:
    SIZES += [(320, 100_000, 64, 2048), (70, 50_000, 200, 1500), (9, 300_000, 16, 20_000)]


def drawn(n: int, m: int, d: int, kind: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    centres, rows = torch.randn(n, d, generator=g), torch.randn(m, d, generator=g)
    if kind == "by norm":
        rows = rows * torch.rand(m, 1, generator=g)
        rows = rows[rows.norm(dim=1).argsort()]
    elif kind != "as drawn":  # whole numbers: no sum is rounded
        centres, rows = centres.round(), rows.round()
        rows = rows if kind == "duplicates" else torch.full_like(rows, kind == "all equal")
    return centres, rows


def found(centres: Tensor, rows: Tensor, k: int, room: int | None = None) -> Tensor:
    out = torch.empty(len(centres), k, dtype=torch.int32, device=DEVICE)
    given = Rows(rows.to(DEVICE), None, rows.dtype)
    top_rows_by_threshold(centres.to(DEVICE), given, k, spare(k), out, room)
    return out.long().sort(dim=1).values.cpu()


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        for name, value in (("_GROUP_TILES", 2), ("_SAMPLED", (16, 16)), ("_DEVIATIONS", 1.0)):
            monkeypatch.setattr(threshold, name, value)


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES if GPU else SIZES[:1], ids=str)
def test_exact_top_rows(size: tuple[int, int, int, int], kind: str) -> None:
    n, m, d, k = size
    centres, rows = drawn(n, m, d, kind)
    assert torch.equal(
        found(centres, rows, k), buckets.top_rows(centres.double(), rows.double(), k)
    )


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kilobytes", [8, 64])
def test_slabs_of_rows_and_centres(
    size: tuple[int, int, int, int], kilobytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        threshold, "score_bytes", lambda *_: kilobytes << (20 if size[1] > 9999 else 10)
    )
    centres, rows = drawn(*size[:3], "as drawn")
    expected = buckets.top_rows(centres.double(), rows.double(), size[3])
    assert torch.equal(found(centres, rows, size[3]), expected)


@pytest.mark.parametrize("kind", ["as drawn", "duplicates"])
def test_a_list_that_is_too_short(kind: str) -> None:
    centres, rows = drawn(2, 900, 8, kind)
    expected = buckets.top_rows(centres.double(), rows.double(), 40)
    assert torch.equal(found(centres, rows, 40, room=40), expected)


@pytest.mark.parametrize("kind", ["as drawn", "by norm"])
def test_a_sample_is_enough(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "_search", lambda *_: None)
    centres, rows = drawn(2, 12_000, 8, kind)
    expected = buckets.top_rows(centres.double(), rows.double(), 1200)
    assert torch.equal(found(centres, rows, 1200), expected)


@pytest.mark.parametrize("k", [1025, 2048, 6000, 16_384, 65_536, 250_000])
@pytest.mark.parametrize("times", [8, 40])
def test_so_many_pass_whatever_is_wanted(k: int, times: int) -> None:
    """In draws without kernels: all that are wanted, and no more than the list has room for."""
    m, rng = k * times, np.random.default_rng(k + times)
    every, tiles, rank, most = threshold.sample(m, k)
    assert most < 2 * k
    stretches, width = m // every, tiles * ROWS
    for _ in range(5):
        scores = rng.random(m, dtype=np.float32)
        best = scores[np.arange(stretches) * every + rng.integers(every, size=stretches)]
        groups = np.append(best, np.zeros(-stretches % width)).reshape(-1, width).max(axis=0)
        limit = np.partition(groups, width - rank)[width - rank]
        assert k <= (scores >= limit).sum() <= most


@pytest.mark.usefixtures("small_sample")
def test_a_sample_that_misleads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "_DEVIATIONS", -1.0)
    monkeypatch.setattr(threshold, "_SAMPLED", (16, 16))
    centres, rows = drawn(2, 900, 8, "as drawn")
    expected = buckets.top_rows(centres.double(), rows.double(), 40)
    assert torch.equal(found(centres, rows, 40), expected)


def test_what_is_not_a_number_is_found() -> None:
    centres, rows = drawn(2, 900, 8, "as drawn")
    rows[[3, 700]] = torch.nan
    assert all({3, 700} <= set(row) for row in found(centres, rows, 40).tolist())


def test_many_of_few_rows_are_found_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "LARGE_K", 16)
    taken: list[int] = []

    def spy(*arguments: object) -> None:
        taken.append(1)
        top_rows_by_threshold(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(selection, "top_rows_by_threshold", spy)
    centres, rows = (tensor.to(DEVICE) for tensor in drawn(2, 300, 8, "as drawn"))
    for k, passes in ((16, 0), (17, 1), (37, 2), (38, 2)):
        rows_found = top_rows(centres, rows, k).long().sort(dim=1).values.cpu()
        assert torch.equal(rows_found, buckets.top_rows(centres.cpu(), rows.cpu(), k))
        assert len(taken) == passes
