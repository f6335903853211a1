from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sce.data.requests import NONE, Query
from sce.evaluation import queries as module
from sce.evaluation.queries import (
    ItemFilter,
    inverse_norms,
    rank_queries,
    rank_similar,
)
from sce.evaluation.ranking import Ranking, Rows, largest_norm, last_states, top_k

N = 60
CODES = st.lists(st.integers(0, N - 1), max_size=2 * N)  # with duplicates, in any order
SHORT = st.lists(st.integers(0, N - 1), max_size=5)


class Sums:
    """A state is the sum of the last two events' vectors: small integers, so that scores tie."""

    max_length: int | None = 2

    def __init__(self, catalogue: Tensor) -> None:
        self.catalogue = catalogue

    def __call__(self, histories: Tensor) -> Tensor:
        events = self.catalogue[histories.clamp(min=0)] * (histories >= 0)[..., None]
        return events.cumsum(1)


def vectors(n: int = N) -> Tensor:
    return torch.randint(-2, 3, (n, 3), generator=torch.Generator().manual_seed(0)).float()


def oracle(
    query: Query, catalogue: Any, allow: list[int] | None, block: list[int]
) -> tuple[list[int], list[float]]:
    """Score everything, sort, and leave out."""
    scores = catalogue @ catalogue[query.history[-2:]].sum(0)
    left = [n for n in range(len(catalogue)) if n not in block and n not in query.block]
    for allowed in (allow, query.allow):
        left = [n for n in left if allowed is None or n in allowed]
    if not query.keep_seen:
        left = [n for n in left if n not in query.history]
    best = sorted(left, key=lambda n: (-scores[n], n))[: query.k]
    return best, [float(scores[n]) for n in best]


QUERIES = st.builds(
    Query,
    st.lists(st.integers(0, N - 1), min_size=1, max_size=5).map(np.array),
    k=st.sampled_from([1, 4, N]),
    keep_seen=st.booleans(),
    allow=st.none() | (CODES | SHORT).map(lambda some: np.array(some, np.int64)),
    block=(CODES | SHORT).map(lambda some: np.array(some, np.int64)),
    times=st.none(),
)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(QUERIES, min_size=1, max_size=6),
    st.none() | CODES | SHORT | st.just(list(range(N))),
    CODES | SHORT | st.just(list(range(N))),
)
def test_as_scoring_everything_and_sorting(
    queries: list[Query], allow: list[int] | None, block: list[int]
) -> None:
    model = Sums(vectors())
    arrays = None if allow is None else np.array(allow, np.int64), np.array(block, np.int64)
    among = ItemFilter.choose(N, *arrays)
    found = rank_queries(model, queries, among, largest_norm(model.catalogue), 4)
    for query, (items, scores) in zip(queries, found, strict=True):
        expected = oracle(query, model.catalogue.numpy(), allow, block)
        assert (items.tolist(), scores.tolist()) == expected


@pytest.mark.parametrize(
    ("allow", "block", "scored"),
    [(range(10), (), 10), (None, range(97), 3), (None, range(5), 100), (range(80), (), 100)],
)
def test_few_items_alone_are_scored(
    allow: range | None, block: range, scored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []

    def count(states: Tensor, rows: Tensor | Rows, *args: Any, **options: Any) -> Ranking:
        counted.append(len(rows))
        return top_k(states, rows, *args, **options)

    monkeypatch.setattr(module, "top_k", count)
    given = None if allow is None else np.array(allow)
    among = ItemFilter.choose(100, given, np.array(block, np.int64))
    model = Sums(vectors(100))
    rank_queries(model, [Query(np.array([1]), 3, False)], among, largest_norm(model.catalogue), 1)
    assert counted == [scored]


@pytest.mark.parametrize("share", [0.05, 0.9])
def test_scores_are_the_same_bits_filtered_or_not_alone_or_together(share: float) -> None:
    random = np.random.default_rng(0)
    model = Sums(torch.randn(3000, 48, generator=torch.Generator().manual_seed(0)))
    norm = largest_norm(model.catalogue)
    allow = np.flatnonzero(random.random(3000) < share)
    queries = [Query(random.integers(3000, size=n % 4 + 1), 20, False) for n in range(30)]
    every = rank_queries(model, [one._replace(k=3000) for one in queries], ItemFilter(), norm, 30)
    among = ItemFilter.choose(3000, allow, NONE)
    own = [one._replace(allow=allow) for one in queries]
    together = rank_queries(model, queries, among, norm, 4)
    alone = [rank_queries(model, [one], among, norm, 4)[0] for one in queries]
    for ranked in (together, alone, rank_queries(model, own, ItemFilter(), norm, 4)):
        for (items, scores), (all_items, all_scores) in zip(ranked, every, strict=True):
            left = np.isin(all_items, allow)
            assert items.tolist() == all_items[left][:20].tolist()
            assert scores.tobytes() == all_scores[left][:20].tobytes()


@pytest.mark.parametrize(("most", "shapes"), [(2, [(6, 2)]), (None, [(4, 2), (2, 90)])])
def test_states_are_computed_together_but_none_as_wide_as_the_longest_of_all(
    most: int | None, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def note(model: Any, histories: Tensor, *others: Any) -> Tensor:
        given.append(tuple(histories.shape))
        return last_states(model, histories, *others)

    monkeypatch.setattr(module, "last_states", note)
    model = Sums(vectors())
    model.max_length = most
    queries = [Query(np.arange(n) % 50, 3, False) for n in (1, 1, 2, 2, 3, 90)]
    found = rank_queries(model, queries, ItemFilter(), largest_norm(model.catalogue), 4)
    assert given == shapes
    assert [len(items) for items, _ in found] == [3] * 6


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, N - 1), min_size=1, max_size=6),
    st.sampled_from([1, 4, N]),
    st.none() | CODES | SHORT,
    CODES | SHORT,
)
def test_similar_is_by_cosine_without_itself(
    items: list[int], k: int, allow: list[int] | None, block: list[int]
) -> None:
    catalogue = vectors()
    catalogue[7] = 0
    arrays = None if allow is None else np.array(allow, np.int64), np.array(block, np.int64)
    scale = inverse_norms(catalogue)
    found = rank_similar(catalogue, scale, np.array(items), k, ItemFilter.choose(N, *arrays))
    exact = catalogue.double().numpy()
    norms = np.linalg.norm(exact, axis=1)
    cosines = exact @ exact.T / np.maximum(norms[:, None] * norms, 1e-9)
    for item, (others, scores) in zip(items, found, strict=True):
        left = [n for n in range(N) if n != item and n not in block]
        left = [n for n in left if allow is None or n in allow]
        best = sorted(left, key=lambda n: (-round(cosines[item, n], 5), n))[:k]
        np.testing.assert_allclose(scores, cosines[item, best], atol=1e-6)
        assert set(others) <= set(left)
        np.testing.assert_allclose(scores, cosines[item, others], atol=1e-6)


def test_similar_items_have_the_same_bits_in_any_batch() -> None:
    catalogue = torch.randn(3000, 48, generator=torch.Generator().manual_seed(0))
    scale, items = inverse_norms(catalogue), np.arange(40)
    together = rank_similar(catalogue, scale, items, 10, ItemFilter())
    for item, (others, scores) in zip(items, together, strict=True):
        ((alone, own),) = rank_similar(catalogue, scale, np.array([item]), 10, ItemFilter())
        assert (alone.tolist(), own.tobytes()) == (others.tolist(), scores.tobytes())
