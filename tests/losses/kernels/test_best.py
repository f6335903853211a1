"""The k largest of each row, by each of the ways there are, against a sort."""

import math
from collections.abc import Callable
from itertools import pairwise
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
WIDE = ["_bracket_kernel", "_count_kernel", "_part_kernel", "_finish_kernel"]
SMALL = {"SAMPLE": 128, "DEVIATIONS": 2.0, "BLOCK": 128, "BLOCK_ALONE": 256}
WAYS: dict[str, tuple[list[str], dict[Any, dict[str, Any]]]] = {
    "held": (["_best_kernel"], {best: {"FOLDED_WIDTH": NEVER}}),
    "folded": (["_best_folded_kernel"], {best: {"FOLDED_WIDTH": 16}}),
    "in chunks": (WIDE, {best: {"FOLDED_WIDTH": NEVER, "MAX_WIDTH": 128}, wide: SMALL}),
    "by digits": (  # as if a sample were always wrong: all lies above
        WIDE,
        {
            best: {"FOLDED_WIDTH": NEVER, "MAX_WIDTH": 128},
            wide: {**SMALL, "bracket": lambda width, k: (NEVER, NEVER, 16)},
        },
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
    "just below one": lambda: 1 - 2.0**-24 * (torch.rand(N, WIDTH) < 0.8),
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
    return wider[:, :k].cpu().tolist()


def by_sorting(values: Tensor, k: int, numbers: list[list[int]] | None = None) -> list[list[int]]:
    """The numbers of the k largest; NaN is as large as infinity, and the lower of equals wins."""
    numbers = numbers or [list(range(values.shape[1]))] * len(values)
    rows = []
    for row, its in zip(values.tolist(), numbers, strict=True):
        keys = [(-math.inf if math.isnan(x) else -x, i) for x, i in zip(row, its, strict=True)]
        rows.append(sorted(i for _, i in sorted(keys)[:k]))
    return rows


def check(values: Tensor, k: int) -> None:
    assert [sorted(row) for row in found(values, k)] == by_sorting(values, k)


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make rows be searched in one way, and return the names of the kernels launched from then."""
    torch.manual_seed(0)
    launched = []

    def spy(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.fn.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(best, "launch", spy)
    monkeypatch.setattr(wide, "launch", spy)
    for module, values in WAYS[way][1].items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    return launched


def count_searches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that grows with each search by digits, in the interpreter."""
    searches: list[bool] = []
    search = wide._search

    def spy(*arguments: Any) -> Any:
        searches.append(arguments[5])  # by number
        return search(*arguments)

    if not GPU:
        monkeypatch.setattr(wide, "_search", spy)
    return searches


# All ways share the search in a program and the numbers: one stands for others in the interpreter.
KINDS_OF = {
    "held": list(KINDS),
    "folded": ["many ties", "falling"],
    "in chunks": ["one tie", "special", "subnormal", "around minus two", "rising", "falling"],
    "by digits": ["all sizes", "special", "around minus two", "just below one", "falling"],
}
CASES = [(way, kind) for way in WAYS for kind in (KINDS if GPU else KINDS_OF[way])]
CUTS = [Cut(4, 1, True), Cut(8, 2, True), Cut(8, 2, False)]
CUT_CASES = [("held", "many ties", cut) for cut in CUTS] + [
    (way, kind, cut)
    for way in ("folded", "in chunks", "by digits")
    for kind in ("as drawn", "many ties")
    for cut in CUTS
    if GPU
    or (cut == CUTS[0] and (way, kind) in (("in chunks", "as drawn"), ("by digits", "many ties")))
]


@pytest.mark.parametrize(("way", "kind"), CASES)
def test_the_columns_of_the_largest(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = use(way, monkeypatch)
    check(KINDS[kind](), 5 if way == "folded" else 90)
    assert launched == WAYS[way][0]


@pytest.mark.parametrize("way", WAYS)
def test_one_and_all(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    values = torch.randint(-2, 3, (N if way in ("in chunks", "by digits") else 2, WIDTH)).float()
    for k in (1,) if way == "folded" else (1, WIDTH):
        check(values, k)


@pytest.mark.parametrize(("way", "kind", "cut"), CUT_CASES, ids=str)
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
    k = 5 if way == "folded" else 50
    rows = found(values, k, groups, cut)
    assert [sorted(row) for row in rows] == by_sorting(values, k, numbers)
    assert launched == WAYS[way][0]


def number(group: int, part: int, cut: Cut) -> int:
    """The number of a part among parts of its size, or of a row."""
    parts = cut.group // cut.part
    if not cut.interleaved:
        return group * parts + part
    if cut.part > 1:
        return (group // 4 * parts + part) * 4 + group % 4
    return group // 4 * 4 * cut.group + part // 2 * 8 + group % 4 * 2 + part % 2


@pytest.mark.parametrize(
    ("equal", "max_chunks"),
    [(range(0), 2), (range(0), 256), (range(500, 600), 256), (range(450, 520), 256)],
)
def test_a_sample_spares_the_search(
    equal: range, max_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("in chunks", monkeypatch)
    monkeypatch.setattr(wide, "MAX_CHUNKS", max_chunks)  # of several blocks each, if few
    searches = count_searches(monkeypatch)
    values = torch.stack([torch.randperm(600) for _ in range(N)]).float()
    values[(values >= equal.start) & (values < equal.stop)] = equal.start  # at an end of candidates
    rows = found(values, 90)
    assert [sorted(row) for row in rows] == by_sorting(values, 90)
    assert not searches
    # What is above all candidates comes first, and both are in order.
    descents = [sum(a > b for a, b in pairwise(row)) for row in rows]
    assert descents == [0 if equal.stop == 600 else 1] * N


def sampled() -> Tensor:
    """The columns that a sample consists of."""
    j = torch.arange(128)
    return (j * 128 + j * 5063 % 128) * WIDTH // 128**2


@pytest.mark.parametrize("shift", [100, -100, 0])
def test_a_sample_may_mislead(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use("in chunks", monkeypatch)
    searches = count_searches(monkeypatch)
    values = torch.randn(2, WIDTH)
    values[1, sampled()] += shift
    if shift == 0:  # exactly k are above, so that no candidate is needed
        values[1] = -1.0
        values[1, sampled()] = 0.0
        values[1, (values[1] < 0).nonzero()[:90, 0]] = 1.0
    check(values, 90)
    assert GPU or searches == [False]  # for the other row, none


@pytest.mark.parametrize("ties", [False, True])
def test_candidates_may_be_too_many(ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use("in chunks", monkeypatch)
    searches = count_searches(monkeypatch)
    values = torch.randperm(2 * WIDTH).view(2, WIDTH).float()
    k, (*_, capacity) = 150, wide.bracket(WIDTH, 150)
    values[1] = 58.0 if ties else 58 + torch.rand(WIDTH)
    values[1, sampled()] = torch.arange(128.0).flip(0)  # of which about as many are above as below
    assert capacity < WIDTH - 128
    check(values, k)
    assert GPU or searches == ([False, True] if ties else [False])


@pytest.mark.parametrize(
    ("width", "k", "cut", "way"),
    [
        (6256, 272, None, ("_best_folded_kernel", 2)),
        (4352, 256, Cut(16, 1, True), ("_best_folded_kernel", 2)),
        (15_625, 272, None, ("_best_folded_kernel", 4)),
        (39_063, 272, None, ("_best_folded_kernel", 16)),
        (139_264, 272, Cut(1024, 2, False), ("_best_folded_kernel", 32)),
        (544, 256, Cut(2, 1, False), ("_best_kernel", None)),
        (8704, 4096, Cut(2, 1, True), ("_best_kernel", None)),
        (34_816, 4096, Cut(8, 1, True), ("_finish_kernel", None)),
        (125_008, 2176, None, ("_finish_kernel", None)),
        (250_000, 17_408, None, ("_finish_kernel", None)),
    ],
)
def test_ways_of_usual_sizes(
    width: int, k: int, cut: Cut | None, way: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    def spy(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append((kernel.fn.__name__, constants.get("FOLD")))
        # What a program holds is in registers up to here.
        assert (
            max(constants.get(name, 0) for name in ("BLOCK", "BLOCK_FOLDS", "CAPACITY")) <= 1 << 14
        )

    monkeypatch.setattr(best, "launch", spy)
    monkeypatch.setattr(wide, "launch", spy)
    values, out = torch.empty(0), torch.empty(320, k, dtype=torch.int32)
    best.best(values, width, k, out, None if cut is None else out, cut)
    assert launched[-1] == way
