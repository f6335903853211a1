from pathlib import Path

import numpy as np
import pytest

from sce.data.items import Items
from sce.data.vocabulary import Vocabulary

IDS = Vocabulary.from_integers([3, 9])
TITLES = Vocabulary.from_sorted_text(b"pear", np.array([4, 0]))
COUNTS = np.array([5, 7])


@pytest.mark.parametrize("items", [Items(IDS), Items(IDS, TITLES, COUNTS)])
def test_what_is_written_is_read(items: Items, tmp_path: Path) -> None:
    arrays = {file.name: np.load(file) for file in items.write(tmp_path)}
    assert {*arrays} == {file.name for file in tmp_path.iterdir()}
    found = Items.read("integer", arrays)
    assert (found.ids, found.titles) == (items.ids, items.titles)
    assert np.array_equal(found.popularity, items.popularity)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (Items(IDS, TITLES.spread(np.array([0]))), "there are 1 titles of 2 items"),
        (Items(IDS, popularity=COUNTS[:1]), "popularity.npy is not a count of 2 items"),
        (Items(IDS, popularity=COUNTS.astype(float)), "popularity.npy is not a count"),
        (Items(Vocabulary.from_strings(["3"])), "no vocabulary of kind 'integer'"),
    ],
)
def test_what_does_not_fit_is_refused(items: Items, message: str, tmp_path: Path) -> None:
    arrays = {file.name: np.load(file) for file in items.write(tmp_path)}
    with pytest.raises(ValueError, match=message):
        Items.read("integer", arrays)


def test_new_items_have_places_titles_and_no_events() -> None:
    grown, sources = Items(IDS, TITLES, COUNTS).insert([12, 5], {5: "plum", 9: "fig"})
    assert sources.tolist() == [0, -1, 1, -1]
    assert grown.ids.decode(range(4)) == [3, 5, 9, 12]
    assert grown.titles is not None
    assert grown.titles.decode(range(4)) == ["pear", "plum", "fig", ""]
    assert grown.popularity is not None
    assert grown.popularity.tolist() == [5, 0, 7, 0]
    none, _ = Items(IDS).insert([5], {})
    assert none[1:] == (None, None)
