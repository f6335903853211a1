import pytest
from hypothesis import given
from hypothesis import strategies as st

from sce.data.vocabulary import Vocabulary
from sce.serving import search as module
from sce.serving.search import Search
from tests.serving.tiny_export import listed

IDS = Vocabulary.from_strings(["b-ash", "p1", "p2", "p3", "p4", "p5"])
TITLES = listed(["Oak", "Mountain ASH", "washed\nout", "Ash tree", "", "Ärger"])


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("ash", [3, 1, 0, 2]),  # the beginning of a title, of a word, inside an id, inside a title
        (" aSh ", [3, 1, 0, 2]),
        ("p", [1, 2, 3, 4, 5]),
        ("P4", [4]),
        ("ÄRG", [5]),
        ("washed out", [2]),
        ("tree\tp3", []),
        ("nothing", []),
        ("\udc80", []),
        ("\0", []),
        (" ", [0, 1, 2, 3, 4, 5]),
        ("", [0, 1, 2, 3, 4, 5]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_beginnings_come_first(
    query: str, expected: list[int], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", size)
    monkeypatch.setattr(module, "_FEW", size)
    search = Search(IDS, TITLES)
    assert search.find(query, 10) == expected
    assert search.find(query, 2) == expected[:2]


def test_items_without_titles_are_found_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 7)
    search = Search(Vocabulary.from_integers(range(-10, 30)))
    assert search.find("2", 3) == [12, 30, 31]
    assert search.find("-1", 99) == [0, 9]


@given(st.lists(st.text("ab ", max_size=6), min_size=1, max_size=9), st.text("ab", min_size=1))
def test_all_that_have_it_are_found_once(titles: list[str], query: str) -> None:
    ids = Vocabulary.from_integers(range(len(titles)))
    found = Search(ids, listed(titles)).find(query, 99)
    assert sorted(found) == [code for code, title in enumerate(titles) if query in title]
    begins = [titles[code].startswith(query) for code in found]
    assert begins == sorted(begins, reverse=True)
