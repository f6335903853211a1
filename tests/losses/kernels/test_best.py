"""The k largest of each row, by each of the ways there are, against a sort."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.losses.kernels.made_problem import DEVICE, GPU

pytest.importorskip("triton")
from sce.losses.kernels import best, wide
from sce.losses.kernels.groups import Cut
from sce.losses.kernels.launch import launch

N, WIDTH = 2 if GPU else 1, 331  # the interpreter is slow
NEVER = 1 << 30
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "held, bits": ("_best_kernel", {"FOLDED_WIDTH": NEVER, "DIGITS": False}),
    "held, digits": ("_best_kernel", {"FOLDED_WIDTH": NEVER, "DIGITS": True}),
    "folded, bits": ("_best_folded_kernel", {"FOLDED_WIDTH": 16, "DIGITS": False}),
    "folded, digits": ("_best_folded_kernel", {"FOLDED_WIDTH": 16, "DIGITS": True}),
    "read again": ("best_wide_kernel", {"FOLDED_WIDTH": NEVER, "MAX_WIDTH": 128, "SAMPLE": 0}),
    "sampled": (
        "best_wide_kernel",
        {"FOLDED_WIDTH": NEVER, "MAX_WIDTH": 128, "SAMPLE": 64, "WIDE_BLOCK": 128},
    ),
}


def near(bits: int) -> Callable[[], Tensor]:
    """Floats that differ in their last bits, around a change of several digits."""
    return lambda: (bits + torch.randint(-300, 300, (N, WIDTH))).int().view(torch.float32)


KINDS: dict[str, Callable[[], Tensor]] = {
    "as drawn": lambda: torch.randn(N, WIDTH),
    "all equal": lambda: torch.full((N, WIDTH), -1.5),
    "many ties": lambda: torch.randint(-2, 3, (N, WIDTH)).float(),
    "one tie": lambda: torch.randn(N, WIDTH // 2 + 1).repeat(1, 2)[:, :WIDTH],
    "all sizes": lambda: torch.randn(N, WIDTH) * 10.0 ** torch.randint(-37, 37, (N, WIDTH)),
    "subnormal": lambda: torch.randint(-400, 400, (N, WIDTH)) * 2.0**-149,
    "zeros of both signs": lambda: torch.randint(-1, 2, (N, WIDTH)) * 0.0,
    "special": lambda: torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0])[
        torch.randint(6, (N, WIDTH))
    ],
    "around one": near(0x3F800000),
    "around minus two": near(0xC0000000 - (1 << 32)),
    "rising": lambda: torch.arange(N * WIDTH).view(N, WIDTH).float(),
    "falling": lambda: -torch.arange(N * WIDTH).view(N, WIDTH).float(),
}


def found(
    values: Tensor, k: int, groups: Tensor | None = None, cut: Cut | None = None
) -> list[list[int]]:
    wider = torch.full((len(values), k + 3), -7, dtype=torch.int32, device=DEVICE)
    best.best(
        values.to(DEVICE),
        values.shape[1],
        k,
        wider[:, :k],
        groups if groups is None else groups.to(DEVICE),
        cut,
    )
    assert (wider[:, k:] == -7).all()  # nothing is written behind a row
    return wider[:, :k].cpu().sort(dim=1).values.tolist()


def by_sorting(values: Tensor, k: int, numbers: list[list[int]]) -> list[list[int]]:
    """The numbers of the k largest; NaN is as large as infinity, and the lower of equals wins."""
    rows = []
    for row, its in zip(values.tolist(), numbers, strict=True):
        keys = [(-math.inf if math.isnan(x) else -x, i) for x, i in zip(row, its, strict=True)]
        rows.append(sorted(i for _, i in sorted(keys)[:k]))
    return rows


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make rows be searched in one way, and return the names of the kernels launched from then."""
    launched = []

    def spy(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.fn.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(best, "launch", spy)
    for name, value in WAYS[way][1].items():
        monkeypatch.setattr(best, name, value)
    return launched


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_columns_of_the_largest(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = use(way, monkeypatch)
    values = KINDS[kind]()
    columns = [list(range(WIDTH))] * N
    for k in (5,) if "folded" in way else (40, WIDTH - 1):
        assert found(values, k) == by_sorting(values, k, columns), k
    assert set(launched) == {WAYS[way][0]}


@pytest.mark.parametrize("kind", ["as drawn", "many ties"])
@pytest.mark.parametrize("way", WAYS)
def test_one_and_all(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    values = KINDS[kind]()
    for k in (1,) if "folded" in way else (1, WIDTH):
        assert found(values, k) == by_sorting(values, k, [list(range(WIDTH))] * N), k


@pytest.mark.parametrize("cut", [Cut(4, 1, True), Cut(8, 2, True), Cut(8, 2, False)], ids=str)
@pytest.mark.parametrize("kind", ["as drawn", "many ties"])
@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_of_the_largest(
    way: str, kind: str, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = use(way, monkeypatch)
    parts = cut.group // cut.part
    n_groups = WIDTH // parts
    values = KINDS[kind]()[:, : n_groups * parts].contiguous()
    # As they come: ascending, though with interleaving the numbers of their parts do not ascend.
    groups = torch.stack([torch.randperm(2000)[:n_groups].sort().values for _ in range(N)]).int()
    numbers = [[number(int(g), p, cut) for g in row for p in range(parts)] for row in groups]
    k = 5 if "folded" in way else 50
    assert found(values, k, groups, cut) == by_sorting(values, k, numbers)
    assert set(launched) == {WAYS[way][0]}


def number(group: int, part: int, cut: Cut) -> int:
    """The number of a part among parts of its size, or of a row."""
    parts = cut.group // cut.part
    if not cut.interleaved:
        return group * parts + part
    if cut.part > 1:
        return (group // 4 * parts + part) * 4 + group % 4
    return group // 4 * 4 * cut.group + part // 2 * 8 + group % 4 * 2 + part % 2


@pytest.mark.skipif(GPU, reason="looks into the interpreter")
@pytest.mark.parametrize("k", [200, 500])
def test_a_sample_spares_the_search(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use("sampled", monkeypatch)
    monkeypatch.setattr(best, "MAX_WIDTH", 256)
    monkeypatch.setattr(best, "SAMPLE", 256)
    monkeypatch.setattr(wide, "_search", None)  # it cannot be called
    values = torch.randperm(2 * 601).view(2, 601).float()
    assert found(values, k) == by_sorting(values, k, [list(range(601))] * 2)


@pytest.mark.parametrize("k", [40, 290])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_sample_may_mislead(sign: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use("sampled", monkeypatch)
    values = torch.randn(2, WIDTH)
    sampled = torch.arange(64) // 32 * (WIDTH // 64) * 32 + torch.arange(64) % 32
    values[:, sampled] += 100 * sign
    assert found(values, k) == by_sorting(values, k, [list(range(WIDTH))] * 2)
