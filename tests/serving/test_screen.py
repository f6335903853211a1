"""Ruling out by integers changes nothing: the ranking is that of all scores."""

from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from sce.data.vocabulary import Vocabulary
from sce.serving import engine as module
from sce.serving.engine import Request
from sce.serving.ranking import Codes, Floats, rank, top_k
from sce.serving.screen import GROUP, Screen, exact_here, largest_products
from tests.serving.tiny_export import make_engine

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _random_numbers_of_its_own(request: pytest.FixtureRequest) -> None:
    seed = crc32(request.node.name.encode())
    RANDOM.bit_generator.state = np.random.PCG64(seed).state


def normal(*shape: int) -> Floats:
    return RANDOM.standard_normal(shape).astype(np.float32)


def skewed(items: int) -> Floats:
    """Norms that differ by a thousand, a row of zeros, equal rows, and some that nearly are."""
    table = normal(items, 16) * np.geomspace(1, 1e-3, items, dtype=np.float32)[:, None]
    table[7] = 0
    table[50:90] = table[40]
    table[90:130] = table[41] * (1 + np.float32(2e-7) * np.arange(40, dtype=np.float32)[:, None])
    return table


def hide(rows: int, items: int, most: int) -> tuple[Codes, Codes]:
    of = np.repeat(np.arange(rows), RANDOM.integers(0, most + 1, rows))
    return RANDOM.integers(0, items, len(of)), of


@pytest.mark.parametrize("table", [normal(5000, 16), normal(20_001, 40), skewed(3007)])
@pytest.mark.parametrize("hidden", [0, 5, 30])
@pytest.mark.parametrize("rows", [1, 17])
def test_candidates_have_all_of_the_best(table: Floats, hidden: int, rows: int) -> None:
    norm = float(np.linalg.norm(table, axis=1).max())
    screen, screened = Screen(table), 0
    for _ in range(40):
        states, depths = normal(rows, table.shape[1]), RANDOM.integers(1, 20, rows)
        states[0] = table[45]
        hides = hide(rows, len(table), hidden)
        wanted = top_k(states, table, depths, hides, norm)
        found = screen.candidates(states, depths, hides)
        if found is None:
            continue
        screened += 1
        for mine, theirs in zip(rank(states, table, depths, found, norm), wanted, strict=True):
            assert np.array_equal(mine[0], theirs[0])
            assert np.array_equal(mine[1], theirs[1])
    assert screened


def test_what_rules_out_nothing_is_given_up() -> None:
    screen, nobody = Screen(normal(1000, 8)), hide(1, 1000, 0)
    assert screen.candidates(normal(1, 8), np.array([1]), nobody) is not None
    for states, depth in [(np.zeros((1, 8), np.float32), 1), (normal(1, 8), 1000)]:
        assert screen.candidates(states, np.array([depth]), nobody) is None
    assert screen.candidates(normal(1, 8) * np.float32(np.nan), np.array([1]), nobody) is None
    one_is_huge = normal(1000, 8)
    one_is_huge[3] *= 1e6
    assert Screen(one_is_huge).candidates(normal(1, 8), np.array([2]), nobody) is None
    hidden = np.arange(0, 1000, GROUP), np.zeros(32, np.int64)  # one of every group
    assert screen.candidates(normal(1, 8), np.array([1]), hidden) is None


def test_products_are_those_of_integers() -> None:
    assert exact_here()
    items, states = (RANDOM.integers(-127, 128, (n, 24)).astype(np.int8) for n in (20_000, 3))
    products = states.astype(np.int64) @ items.T.astype(np.int64)
    largest = products.reshape(3, -1, GROUP).max(axis=2)
    assert np.array_equal(largest_products(items)(states), largest)


def test_an_engine_ranks_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = Vocabulary.from_integers(range(3000))
    plain = make_engine(table=normal(3000, 8), item_ids=ids, titles=None)
    screened = replace(plain, screened=True)
    assert screened._screen is None  # so few are scored sooner
    monkeypatch.setattr(module, "_SCREENED", 3000)
    screened = replace(plain, screened=True)
    requests = [
        Request(RANDOM.integers(0, 3000, 4).tolist(), k, allow, block)
        for k in (1, 10, 3000)
        for allow in (None, [*range(50)])
        for block in (None, [*range(0, 3000, 7)])
    ]
    calls: list[Any] = []

    def counted(*given: Any) -> Any:
        calls.append(given)
        return top_k(*given)

    monkeypatch.setattr(module, "top_k", counted)
    for batch in (requests[:1], requests):
        found = screened.recommend(batch)
        assert bool(calls) == (len(batch) > 1)
        for mine, theirs in zip(found, plain.recommend(batch), strict=True):
            assert mine.items == theirs.items
            assert np.array_equal(mine.scores, theirs.scores)
        calls.clear()
