"""The engine, with an encoder that is known: the mean of a history's vectors."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import threadpoolctl

from sce.data.requests import Id, Recommended, Request
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError
from sce.serving.engine import Engine, one_core_a_call
from sce.serving.onnx_graph import onnx_function
from sce.serving.ranking import Codes, Floats

NAMES = [f"item {n:03d}" for n in range(200)]
TABLE = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
TABLE[150] = TABLE[50]  # a tie
MAX_LENGTH = 5


def mean(embedded: Floats, lengths: Codes) -> Floats:
    assert embedded.shape[1] == lengths.max() <= MAX_LENGTH
    return np.stack([row[:n].mean(0) for row, n in zip(embedded, lengths, strict=True)])


ENGINE = Engine(mean, TABLE, Vocabulary.from_strings(NAMES), MAX_LENGTH, "version")


def expected(request: Request) -> list[str]:
    known = [NAMES.index(one) for one in request.history if one in NAMES]
    if not known:
        return []
    state = TABLE[known[-MAX_LENGTH:]].mean(0)
    scores = (TABLE.astype(np.float64) * state).sum(1).astype(np.float32)
    left = NAMES if request.allow is None else [one for one in NAMES if one in request.allow]
    left = [one for one in left if one not in (request.block or ())]
    left = [one for one in left if request.keep_seen or one not in request.history]
    left.sort(key=lambda one: (-scores[NAMES.index(one)], one))
    return left[: request.k]


def some_requests() -> list[Request]:
    random = np.random.default_rng(1)

    def draw(most: int) -> list[Id]:
        return [NAMES[n] for n in random.integers(0, 200, random.integers(1, most))]

    found = []
    for number in range(40):
        allow = [*draw(60), "nowhere"] if number % 3 == 0 else None
        block = [*draw(60), "nowhere"] if number % 2 == 0 else None
        history = [*draw(9), "unknown"]
        found.append(Request(history, int(random.integers(1, 30)), allow, block, number % 5 == 0))
    return [*found, Request([]), Request(["unknown", 7]), Request(["item 001"], allow=[])]


REQUESTS = some_requests()


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_it_is_every_item_sorted_whatever_else_is_asked(batch: int) -> None:
    for first in range(0, len(REQUESTS), batch):
        requests = REQUESTS[first : first + batch]
        for request, found in zip(requests, ENGINE.recommend(requests), strict=True):
            assert found.items == expected(request)
            assert found.scores.dtype == np.float32
            assert len(found.scores) == len(found.items)
            assert found.unknown == tuple(i for i in request.history if i not in NAMES)
            assert found.known == len([*request.history]) - len(found.unknown)


def test_who_is_not_known_gets_what_is_popular() -> None:
    counts = np.random.default_rng(2).integers(0, 20, 200)
    engine = replace(ENGINE, popularity=counts)
    for request, found in zip(REQUESTS, engine.recommend(REQUESTS), strict=True):
        assert found.source == ("model" if found.known else "popular")
        assert not found.known or found.items == expected(request)
    order = sorted(range(200), key=lambda n: (-counts[n], n))
    asked = [Request(["?"], 3), Request([], 200, block=NAMES[:50], allow=NAMES[40:60])]
    best, some = engine.recommend(asked)
    assert best.items == [NAMES[n] for n in order[:3]]
    assert best.scores.tolist() == counts[order[:3]].tolist()
    assert some.items == [NAMES[n] for n in order if 50 <= n < 60]


def test_nothing_is_asked() -> None:
    assert ENGINE.recommend([]) == []


def test_an_allow_list_costs_its_own_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, product = [], np.matmul

    def matmul(left: Any, right: Any, **options: Any) -> Any:
        shapes.append((left.shape, right.shape))
        return product(left, right, **options)

    monkeypatch.setattr(np, "matmul", matmul)
    ENGINE.recommend([Request(NAMES[:2], allow=NAMES[3:6])])
    assert shapes == [((3, 8), (8, 1))]


def test_of_what_is_offered_alone_is_recommended_and_scored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered, counts = np.arange(0, 200, 3), np.random.default_rng(2).integers(0, 20, 200)
    names = [NAMES[n] for n in offered]
    engine = replace(ENGINE, offered=offered, popularity=counts)
    for first in range(0, len(REQUESTS), 7):
        requests = REQUESTS[first : first + 7]
        for request, found in zip(requests, engine.recommend(requests), strict=True):
            own = names if request.allow is None else [i for i in request.allow if i in names]
            if found.known:
                assert found.items == expected(replace(request, allow=own))
    (popular,) = engine.recommend([Request([], k=200)])
    assert popular.items == [NAMES[n] for n in sorted(offered, key=lambda n: (-counts[n], n))]
    for code in (0, 1):
        unit = TABLE / np.linalg.norm(TABLE, axis=1, keepdims=True)
        order = sorted({*offered.tolist()} - {code}, key=lambda n: -(unit @ unit[code])[n])
        for k in (5, 200):
            assert engine.similar(NAMES[code], k).items == [NAMES[n] for n in order[:k]]
    many = np.random.default_rng(3).standard_normal((70_000, 8)).astype(np.float32)
    ids, some = Vocabulary.from_integers(range(70_000)), np.arange(0, 70_000, 2)
    large = Engine(mean, many, ids, MAX_LENGTH, "version", screened=True, offered=some)
    asked = Request([4, 5, 7], block=[10, 11])
    (found,) = large.recommend([asked])
    plain = replace(large, screened=False, offered=None)
    (one_by_one,) = plain.recommend([replace(asked, allow=some.tolist())])
    assert found.items == one_by_one.items
    assert large._screen is not None


def test_many_threads_find_what_one_does() -> None:
    alone = ENGINE.recommend(REQUESTS)

    def ask(_: int) -> list[Recommended]:
        return ENGINE.recommend(REQUESTS)

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(ask, range(12)):
            assert [one.items for one in found] == [one.items for one in alone]
            assert all(
                np.array_equal(a.scores, b.scores) for a, b in zip(found, alone, strict=True)
            )


def test_one_core_a_call() -> None:
    before = threadpoolctl.threadpool_limits(2, "blas")
    try:
        one_core_a_call()
        assert {
            one["num_threads"]
            for one in threadpoolctl.threadpool_info()
            if one["user_api"] == "blas"
        } == {1}
        assert ENGINE.recommend(REQUESTS[:1])[0].items == expected(REQUESTS[0])
    finally:
        before.restore_original_limits()


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r"needs onnxruntime, .* pip install .*\[serve\]"):
        onnx_function(b"")


def test_similar_items_are_by_cosine() -> None:
    unit = TABLE / np.linalg.norm(TABLE, axis=1, keepdims=True)
    for code in (0, 50, 199):
        cosines = unit @ unit[code]
        wanted = sorted({*range(200)} - {code}, key=lambda n: (-round(float(cosines[n]), 6), n))
        for k in (1, 10, 200):
            found = ENGINE.similar(NAMES[code], k)
            assert found.items == [NAMES[n] for n in wanted[:k]]
            np.testing.assert_allclose(found.scores, cosines[wanted[:k]], atol=1e-6)


def test_an_item_of_zeros_is_similar_to_none() -> None:
    table = TABLE.copy()
    table[7] = 0
    engine = Engine(mean, table, ENGINE.item_ids, MAX_LENGTH, "other")
    assert engine.similar(NAMES[7]).items == [NAMES[n] for n in (0, 1, 2, 3, 4, 5, 6, 8, 9, 10)]
    assert engine.similar(NAMES[0], 200).scores.tolist().count(0.0) == 1


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(["item 001"], k=0), "k is a whole number from 1 to 200"),
        (Request(["item 001"], k=201), "got 201"),
        (Request(["item 001"], k=True), "got True"),
        (Request("item 001"), "history must be a list of ids; got 'item 001'"),
        (Request([1.5]), "history: ids are integers or strings; got 1.5"),  # type: ignore[list-item]
        (Request([True]), "got True"),
        (Request([["x"]]), r"got \['x'\]"),  # type: ignore[list-item]
        (Request([], allow={"a": 1}), "allow must be a list"),
        (Request([], block=[None]), "block: ids are integers"),  # type: ignore[list-item]
    ],
)
def test_wrong_requests_are_refused(request_: Request, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ENGINE.recommend([REQUESTS[0], request_])


def test_ids_of_any_kind_and_size_are_looked_up() -> None:
    integers = Engine(mean, TABLE, Vocabulary.from_integers(range(200)), MAX_LENGTH, "other")
    strange: list[Id] = ["5", 5, 10**30, -1, "\0", "\ud800", "ü", ""]
    (found,) = integers.recommend([Request(strange)])
    assert (found.known, found.unknown) == (2, tuple(strange[2:]))
    (found,) = ENGINE.recommend([Request([*strange, "item 005"], block=strange, allow=None)])
    assert found.unknown == tuple(strange)
    with pytest.raises(InputError, match="'nothing' is not in the catalogue"):
        ENGINE.similar("nothing")
    with pytest.raises(InputError, match="ids are integers or strings"):
        ENGINE.similar(1.5)  # type: ignore[arg-type]
