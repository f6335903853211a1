"""The best rows for each centre, against the plain function."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sce.losses import buckets
from tests.losses.kernels.made_problem import DEVICE, GPU

pytest.importorskip("triton")
from sce.losses.kernels import best, selection
from sce.losses.kernels.launch import launch
from sce.losses.kernels.selection import Plan, top_rows

ORDERS = ["clustered", "as drawn", "by norm, falling", "by norm, rising"]
CASES = [
    (5, 1000, 8, 17, None),
    (5, 1000, 8, 17, Plan(5, 1, 1)),
    (5, 1000, 8, 17, Plan(2, 2, 1)),
    (3, 3001, 16, 10, Plan(3, 8, 1)),
    (3, 3001, 16, 10, Plan(3, 16, 4)),
    (4, 777, 24, 50, Plan(3, 4, 2)),
    (2, 5000, 40, 3, Plan(2, 64, 8)),
    (2, 5000, 40, 3, Plan(2, 128, 32)),
    (17, 70, 264, 1, Plan(17, 64, 1)),  # groups larger than a tile, more centres than in one
    (4, 300, 8, 299, None),
    (4, 300, 8, 300, None),
    (1, 129, 64, 1, Plan(1, 4, 1)),
]
if GPU:
    CASES += [(70, 5000, 40, 3, Plan(70, 256, 2))]
# The interpreter is slow: there, one case stands for all in the other orders.
ORDERED = [(order, case) for order in ORDERS for case in CASES if GPU or order == ORDERS[0]]
if not GPU:
    ORDERED += [(order, CASES[4]) for order in ORDERS[1:]]


def sorted_rows(centres: Tensor, rows: Tensor, k: int, **options: Any) -> Tensor:
    found = top_rows(centres.to(DEVICE), rows.to(DEVICE), k, **options)
    return found.long().sort(dim=1).values.cpu()


def drawn(n: int, m: int, d: int, order: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    centres, rows = torch.randn(n, d, generator=g), torch.randn(m, d, generator=g)
    if order == "clustered":
        rows = rows * 0.1 + torch.randn(7, d, generator=g)[torch.randint(7, (m,), generator=g)]
    elif order != "as drawn":
        rows = rows * torch.rand(m, 1, generator=g)
        rows = rows[rows.norm(dim=1).argsort(descending="falling" in order)]
    return centres, rows


@pytest.mark.parametrize(("order", "case"), ORDERED, ids=str)
def test_exact_top_rows(order: str, case: tuple[int, int, int, int, Plan | None]) -> None:
    n, m, d, k, plan = case
    centres, rows = drawn(n, m, d, order)
    expected = buckets.top_rows(centres.double(), rows.double(), k)
    assert torch.equal(sorted_rows(centres, rows, k, plan=plan), expected)


@pytest.mark.parametrize("plan", [Plan(2, 1, 1), Plan(2, 8, 1), Plan(1, 16, 4)], ids=str)
@pytest.mark.parametrize("kind", ["duplicates", "all equal"])
@pytest.mark.parametrize("max_width", [1 << 14, 1 << 6])
def test_equal_scores_go_to_the_lower_index(
    kind: str, plan: Plan, max_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best, "MAX_WIDTH", max_width)
    m, k = (2000, 100) if GPU else (150, 12)
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(m, 8, generator=g).round()
    if kind == "all equal":
        rows = torch.ones_like(rows)
    centres = torch.randn(2, 8, generator=g).round()
    found = sorted_rows(centres, rows, k, plan=plan)
    assert torch.equal(found, buckets.top_rows(centres, rows, k))


def test_equal_scores_of_two_groups_go_to_the_lower_index() -> None:
    rows = torch.zeros(64, 8)
    rows[[2, 8], 0] = 1  # in groups of every sixteenth row, the one of row 8 comes before
    centre = torch.eye(8)[:1]
    for size in (4, 8):
        assert sorted_rows(centre, rows, 1, plan=Plan(1, size, 1)).tolist() == [[2]]


@pytest.mark.parametrize("plan", [Plan(2, 1, 1), Plan(2, 4, 1), Plan(2, 8, 2)], ids=str)
@pytest.mark.parametrize("kind", ["as drawn", "duplicates", "all equal"])
def test_long_rows_are_folded_first(kind: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best, "FOLDED_WIDTH", 16)
    launched: list[str] = []

    def spy(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.fn.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(best, "launch", spy)
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(1200, 8, generator=g)
    if kind != "as drawn":
        rows = rows.round() if kind == "duplicates" else torch.ones_like(rows)
    centres = torch.randn(2, 8, generator=g)
    if kind == "duplicates":
        centres = centres.round()
    found = sorted_rows(centres, rows, 5, plan=plan)
    assert torch.equal(found, buckets.top_rows(centres, rows, 5))
    assert "_best_folded_kernel" in launched


@pytest.mark.parametrize("plan", [None, Plan(6, 4, 1), Plan(6, 8, 2)], ids=str)
def test_rows_that_are_not_valid_come_last(plan: Plan | None) -> None:
    n, m, k = (6, 500, 30) if GPU else (2, 200, 12)
    g = torch.Generator().manual_seed(0)
    rows, valid = torch.randn(m, 8, generator=g), torch.rand(m, generator=g) < 0.4
    centres = torch.randn(n, 8, generator=g)
    index = valid.nonzero().squeeze(1)
    options: dict[str, Any] = {"targets": torch.where(valid, 7, -1).int().to(DEVICE), "plan": plan}
    expected = index[buckets.top_rows(centres, rows[valid], k)]
    assert torch.equal(sorted_rows(centres, rows, k, **options), expected)
    more = m * 3 // 5
    for row in sorted_rows(centres, rows, more, **options).tolist():
        assert set(index.tolist()) <= set(row)
        assert len(set(row)) == more
        assert max(row) < m


@pytest.mark.parametrize(
    ("n", "m", "d", "k", "megabytes", "expected"),
    [
        (320, 10**5, 64, 256, 32, Plan(320, 16, 1)),
        (320, 10**6, 64, 256, 32, Plan(320, 64, 1)),
        (320, 10**7, 64, 256, 64, Plan(320, 256, 2)),
        (320, 10**8, 64, 256, 256, Plan(320, 1024, 2)),
        (320, 25_600, 64, 320, 32, None),
        (715, 128_000, 64, 715, 32, None),
        (320, 10**6, 64, 500_000, 128, None),
        (1, 10**8, 512, 1, 256, None),
        (10**5, 20, 8, 5, 32, None),
    ],
)
def test_plans_stay_within_memory(
    n: int, m: int, d: int, k: int, megabytes: int, expected: Plan | None
) -> None:
    plan = selection.make_plan(n, m, d, k)
    assert expected is None or plan == expected
    taken = k + selection.spare(k)
    assert plan.group % plan.part == 0
    width = max(-(-m // plan.group), taken * (plan.group // plan.part) if plan.group > 1 else 0)
    assert plan.at_once >= 1
    assert plan.at_once == 1 or plan.at_once * width * 4 <= megabytes << 20


@pytest.mark.skipif(
    not GPU or torch.cuda.get_device_properties(0).total_memory < 40 << 30,
    reason="needs a GPU of 40 GiB",
)
def test_a_catalogue_of_more_numbers_than_32_bits_count() -> None:
    m, d, k = 40_000_000, 64, 20
    g = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(m, d, device="cuda", dtype=torch.bfloat16, generator=g)
    centres = torch.randn(6, d, device="cuda", dtype=torch.bfloat16, generator=g)
    best_values, best_rows = [], []
    for start in range(0, m, 1_000_000):
        scores = centres.double() @ rows[start : start + 1_000_000].double().T
        top = scores.topk(k, dim=1)
        best_values.append(top.values)
        best_rows.append(top.indices + start)
    keep = torch.cat(best_values, dim=1).topk(k, dim=1).indices
    expected = torch.cat(best_rows, dim=1).gather(1, keep).sort(dim=1).values
    assert expected.max() * d > 2**31
    assert torch.equal(sorted_rows(centres, rows, k), expected.cpu())
