"""From a data frame to a data frame."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import sce
from sce.data.columns import NO_TIME, Columns
from sce.data.vocabulary import Vocabulary
from sce.models.hstu import HSTU
from sce.models.sasrec import SASRec
from sce.recommend import Request

LIBRARIES: list[Any] = [pd, pl]


@pytest.mark.parametrize("library", LIBRARIES)
def test_from_frame_to_frame(library: Any, tmp_path: Path) -> None:
    events = [(f"user {u}", f"item {(u + n) % 9}", n) for u in range(30) for n in range(5)]
    log = library.DataFrame(
        dict(zip(("user", "item", "time"), zip(*events, strict=True), strict=True))
    )

    data = sce.prepare(log, tmp_path / "data", split="leave-one-out")
    model = sce.SASRec(data.n_items)
    settings = sce.TrainingSettings(epochs=1, device="cpu")
    sce.fit(model, sce.ScalableCrossEntropy(), data, settings=settings, progress=False)
    best = sce.Recommender(model, data.item_ids).recommend(log, k=3).to_frame()

    assert type(best) is type(log)
    assert list(best.columns) == ["user_id", "item_id", "score", "rank", "source"]
    assert best["user_id"].to_list() == [f"user {u}" for u in range(30) for _ in range(3)]
    assert best["rank"].to_list() == [1, 2, 3] * 30
    seen = set(zip(log["user"].to_list(), log["item"].to_list(), strict=True))
    assert not seen & set(zip(best["user_id"].to_list(), best["item_id"].to_list(), strict=True))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_frame_is_read_as_prepare_read_its_like(library: Any, tmp_path: Path) -> None:
    rows = [(float(u), float((u + n) % 9), f"2025-01-1{n}") for u in range(30) for n in range(5)]
    names = ("who", "what", "when")
    log = library.DataFrame(dict(zip(names, zip(*rows[::-1], strict=True), strict=True)))
    given: Any = {f"{r}_column": name for r, name in zip(Columns._fields, names, strict=True)}
    data = sce.prepare(log, tmp_path / "data", split="leave-one-out", **given)
    settings = sce.TrainingSettings(epochs=1, device="cpu")
    train: Any = {"settings": settings, "out": tmp_path / "run", "progress": False}
    sce.fit(sce.SASRec(data.n_items), sce.CrossEntropy(), data, **train)

    recommender = sce.Recommender.load(tmp_path / "run", "cpu")
    found = recommender.recommend(log, k=3)
    wanted = recommender.recommend([[(u + n) % 9 for n in range(5)] for u in range(30)], k=3)
    assert [one.items for one in found[::-1]] == [one.items for one in wanted]
    assert found.to_frame()["user_id"].to_list()[:4] == [29, 29, 29, 28]

    by_row = replace(recommender, columns=Columns("who", "what", NO_TIME)).recommend(log, k=3)
    backwards = [[(u + n) % 9 for n in range(4, -1, -1)] for u in range(30)]
    assert [one.items for one in by_row[::-1]] == [
        one.items for one in recommender.recommend(backwards, k=3)
    ]


def test_times_of_a_frame_have_the_unit_that_was_told_of_the_log(tmp_path: Path) -> None:
    events = [(u, (u + n) % 9, 1000 * (n * n + u)) for u in range(30) for n in range(5)]
    columns = dict(zip(("user", "item", "time"), zip(*events, strict=True), strict=True))
    log = pl.DataFrame(columns)
    data = sce.prepare(log, tmp_path / "data", split="none", time_unit="ms")
    settings = sce.TrainingSettings(epochs=1, device="cpu")
    train: Any = {"settings": settings, "out": tmp_path / "run", "progress": False}
    sce.fit(HSTU(data.n_items), sce.CrossEntropy(), data, **train)
    recommender = sce.Recommender.load(tmp_path / "run", "cpu")
    told = [
        Request([(u + n) % 9 for n in range(5)], times=[n * n + u for n in range(5)])
        for u in range(30)
    ]
    wanted = [one.scores.tolist() for one in recommender.recommend(told, k=3)]
    dated = log.with_columns(pl.col("time").cast(pl.Datetime("ms")))
    for frame in (log, pd.DataFrame(columns), dated):
        assert [one.scores.tolist() for one in recommender.recommend(frame, k=3)] == wanted
    guessed = replace(recommender, time_unit=None).recommend(log, k=3)  # seconds, by their size
    assert [one.scores.tolist() for one in guessed] != wanted


@pytest.fixture(scope="module")
def recommender() -> sce.Recommender:
    return sce.Recommender(SASRec(9), Vocabulary.from_integers(range(9)))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_frame_of_histories_is_sorted_by_time_and_grouped_by_user(
    library: Any, recommender: sce.Recommender
) -> None:
    columns = {"user": ["b", "a", "b", "b"], "item": [1, 2, 3, 4], "time": [5, 5, 5, 1]}
    found = recommender.recommend(library.DataFrame(columns), k=2)
    wanted = recommender.recommend([[4, 1, 3], [2]], k=2)
    assert [one.items for one in found] == [one.items for one in wanted]
    assert found.to_frame()["user_id"].to_list() == ["b", "b", "a", "a"]
    del columns["time"]
    in_order = recommender.recommend(library.DataFrame(columns), k=2)
    assert [one.items for one in in_order] == [
        one.items for one in recommender.recommend([[1, 3, 4], [2]], k=2)
    ]
    with pytest.warns(UserWarning, match=r"known as the time \(bought\): rows count as in order"):
        recommender.recommend(library.DataFrame(columns | {"bought": [4, 3, 2, 1]}), k=2)


def test_a_frame_of_what_was_given_as_lists(recommender: sce.Recommender) -> None:
    found = recommender.recommend([[1], [], [2, 3]], k=2)
    assert isinstance(found.to_frame(), pl.DataFrame)
    frame = found.to_frame("pandas")
    assert isinstance(frame, pd.DataFrame)
    assert frame["user_id"].tolist() == [0, 0, 2, 2]
    assert frame["item_id"].tolist() == [*found[0].items, *found[2].items]
    assert recommender.recommend([], k=1).to_frame().shape == (0, 5)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"who": [1], "item": [2]}, "needs one column of the user, .* it has"),
        ({"user": [1], "item": [2], "sku": [3]}, "item', 'sku'.; leave out the others"),
        ({"user": [1], "item": [1.5]}, "'item': ids must be .*, not fractions such as 1.5"),
        ({"user": [1], "item": [2], "time": ["x"]}, "row 1: cannot read 'x' in column 'time'"),
        ({"user": [1, 2], "item": [2, 3], "time": [1, None]}, "row 2: .* 'time' .* removed$"),
        ({"user": [None], "item": [2]}, "row 1: no user, column 'user' is empty"),
        ({"user": [1.0, None], "item": [2, 3]}, "row 2: no user, column 'user' is empty"),
        ({"user": [[1]], "item": [2]}, "'user': ids must be integers or strings"),
    ],
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_frame_that_holds_no_histories(
    library: Any, columns: Any, message: str, recommender: sce.Recommender
) -> None:
    with pytest.raises(sce.InputError, match=message):
        recommender.recommend(library.DataFrame(columns), k=1)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([1, True, 2], "True or False among numbers"),
        ([1.0, 2.0, False], "True or False among numbers"),
        (list(np.array(["2020-01-01"] * 3, "M8[D]")), "cannot cast 'Object' type"),
    ],
)
def test_objects_that_are_no_ids(item: list[Any], message: str) -> None:
    frame = pd.DataFrame({"user": 1, "item": pd.Series(item, dtype=object), "time": [1, 2, 3]})
    with pytest.raises(sce.InputError, match=f"column 'item': {message}"):
        sce.read_interactions(frame)
