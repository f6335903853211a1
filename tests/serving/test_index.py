from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import voyager

from sce.data.vocabulary import Vocabulary
from sce.serving.engine import Engine, Request
from sce.serving.index import Index
from tests.serving.tiny_export import make_engine

RANDOM = np.random.default_rng(0)
ITEMS = 1500
TABLE = RANDOM.standard_normal((ITEMS, 8)).astype(np.float32) * RANDOM.random(
    (ITEMS, 1), np.float32
)
TABLE.setflags(write=False)  # as that of an export is
EXACT = make_engine(table=TABLE, item_ids=Vocabulary.from_integers(range(ITEMS)), titles=None)
INDEX = Index.build(TABLE)
SEARCHING = replace(EXACT, index=INDEX)


def shared(requests: list[Request], engine: Engine = SEARCHING) -> float:
    """The part of the exact ranking that is found; what is found, has the exact scores."""
    found = total = 0
    exact = EXACT.recommend(requests)
    for mine, best in zip(engine.recommend(requests), exact, strict=True):
        assert len(mine.items) == len(best.items)
        scores = dict(zip(best.items, best.scores.tolist(), strict=True))
        same = [item for item in mine.items if item in scores]
        assert [scores[item] for item in same] == [
            score
            for item, score in zip(mine.items, mine.scores.tolist(), strict=True)
            if item in scores
        ]
        assert sorted(mine.scores.tolist(), reverse=True) == mine.scores.tolist()
        found, total = found + len(same), total + len(scores)
    return found / total


def ask(**options: Any) -> list[Request]:
    return [Request(RANDOM.integers(0, ITEMS, 3).tolist(), **options) for _ in range(30)]


def test_it_finds_nearly_all_of_the_best() -> None:
    assert shared(ask()) > 0.98
    assert shared([*ask(k=3), *ask(k=50, keep_seen=True)]) > 0.98


def test_nothing_hidden_is_found() -> None:
    for request in ask(k=20):
        (best,) = EXACT.recommend([request])
        blocked = replace(request, block=best.items)
        (found,) = SEARCHING.recommend([blocked])
        assert not {*found.items} & {*best.items, *request.history}
        assert shared([blocked]) > 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"allow": [*range(0, ITEMS, 5)]},  # only these are scored
        {"k": 1200},
        {"block": [*range(1200)]},
        {"k": 700, "block": [*range(600)]},
    ],
)
def test_it_is_exact_where_the_index_is_of_no_use(options: dict[str, Any]) -> None:
    assert shared(ask(**options)) == 1
    few: list[Request] = [*ask(k=5), *ask(**options)]  # together
    assert shared(few) > 0.98

    class Graph:
        def __len__(self) -> int:
            return ITEMS

        def query(self, *_: Any, **__: Any) -> Any:
            raise voyager.RecallError("fewer than expected")

    assert shared(few, replace(EXACT, index=Index(Graph()))) == 1


def test_too_few_are_left() -> None:
    class Same:
        """A graph that names an item many times, of which all but one are hidden."""

        def __len__(self) -> int:
            return ITEMS

        def query(self, vectors: Any, k: int, **_: Any) -> Any:
            return np.full((len(vectors), k), 7, np.uint64), None

    assert shared([Request([7])], replace(EXACT, index=Index(Same()))) == 1


def test_an_index_is_read_from_its_bytes() -> None:
    again = Index.read(INDEX.graph.as_bytes(), INDEX.effort)
    states, depths = TABLE[:9].copy(), np.full(9, 10)
    nothing = [np.empty(0, np.int64)] * 9
    found, before = (one.near(states, depths, nothing) for one in (again, INDEX))
    assert [*found] == [*before] == [*range(9)]
    for row, items in found.items():
        assert items.tolist() == before[row].tolist()
