from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sce.data.vocabulary import Vocabulary
from sce.errors import InputError

# Text that UTF-8 can hold; short and from a small alphabet too, so that prefixes are shared.
TEXT = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.text("ab\0é\U0001f600", max_size=12),
)
INTEGERS = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(TEXT, max_size=40), st.lists(TEXT, max_size=10))
def test_strings_round_trip(ids: list[str], others: list[str]) -> None:
    vocabulary = Vocabulary.from_strings(ids)
    expected = sorted(set(ids))
    vocabulary.check()
    assert vocabulary.kind == "string"
    assert [vocabulary[code] for code in range(len(vocabulary))] == expected
    assert vocabulary.decode(np.arange(len(expected))) == expected
    asked = ids + others
    rank = {text: code for code, text in enumerate(expected)}
    assert vocabulary.lookup(asked).tolist() == [rank.get(text, -1) for text in asked]


@settings(max_examples=50, deadline=None)
@given(st.lists(INTEGERS, max_size=40), st.lists(INTEGERS, max_size=10))
def test_integers_round_trip(ids: list[int], others: list[int]) -> None:
    vocabulary = Vocabulary.from_integers(ids)
    expected = sorted(set(ids))
    vocabulary.check()
    assert vocabulary.kind == "integer"
    assert vocabulary.decode(np.arange(len(expected))) == expected
    asked = ids + others
    rank = {number: code for code, number in enumerate(expected)}
    assert vocabulary.lookup(asked).tolist() == [rank.get(number, -1) for number in asked]
    as_array = np.array(asked, np.int64)
    assert vocabulary.lookup(as_array).tolist() == [rank.get(number, -1) for number in asked]


@settings(max_examples=30, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=30, unique=True), st.data())
def test_take_keeps_the_chosen_ids(ids: list[str], data: st.DataObject) -> None:
    chosen = np.flatnonzero(data.draw(arrays(bool, len(ids))))
    for vocabulary in (Vocabulary.from_strings(ids), Vocabulary.from_integers(range(len(ids)))):
        taken = vocabulary.take(chosen)
        assert taken.decode(range(len(taken))) == vocabulary.decode(chosen)
        assert taken.lookup(vocabulary.decode(chosen)).tolist() == list(range(len(chosen)))


def test_many_queries_with_a_shared_prefix() -> None:
    ids = [f"the-same-long-prefix-{number:05d}" for number in range(500)]
    vocabulary = Vocabulary.from_strings(ids)
    unknown = ["the-same-long-prefix-", "the-same", "the-same-long-prefix-00001x", "other"]
    codes = vocabulary.lookup(ids[::-1] + unknown)
    assert codes.tolist() == list(range(499, -1, -1)) + [-1] * 4


def test_an_integer_vocabulary_accepts_numbers_written_as_text() -> None:
    vocabulary = Vocabulary.from_integers([5, -7, 2**63 - 1])
    assert vocabulary.lookup(["5", "-7", str(2**63 - 1), 5]).tolist() == [1, 0, 2, 1]
    unknown: list[int | str] = ["05", "+5", " 5", "5.0", "x", "", str(2**63), 2**70]
    unknown += [10**5000, "9" * 5000]
    assert vocabulary.lookup(unknown).tolist() == [-1] * 10
    floats: Any = np.array([5, 5.7, 4.999, np.inf, -np.inf, np.nan, 2.0**63])
    assert vocabulary.lookup(floats).tolist() == [1] + [-1] * 6


def test_a_string_vocabulary_accepts_numbers() -> None:
    vocabulary = Vocabulary.from_strings(["5", "06", "x"])
    assert vocabulary.lookup([5, 6, "x"]).tolist() == [1, -1, 2]
    assert vocabulary.lookup(np.array([5, 6])).tolist() == [1, -1]


def test_unsigned_numbers_beyond_64_bits_are_unknown() -> None:
    vocabulary = Vocabulary.from_integers([-1, 3])
    assert vocabulary.lookup(np.array([2**64 - 1, 3], np.uint64)).tolist() == [-1, 1]
    with pytest.raises(OverflowError, match="18446744073709551615"):
        Vocabulary.from_integers(np.array([2**64 - 1], np.uint64))


def test_a_lone_surrogate_is_unknown_rather_than_an_error() -> None:
    assert Vocabulary.from_strings(["a"]).lookup(["\ud800", "a"]).tolist() == [-1, 0]


@pytest.mark.parametrize(
    "vocabulary", [Vocabulary.from_strings("ab"), Vocabulary.from_integers([])]
)
def test_minus_one_is_never_the_last_id(vocabulary: Vocabulary) -> None:
    with pytest.raises(IndexError, match="code -1"):
        vocabulary[-1]
    with pytest.raises(IndexError, match="code -1"):
        vocabulary.decode([0, -1] if len(vocabulary) else [-1])
    with pytest.raises(IndexError):
        vocabulary[len(vocabulary)]


@pytest.mark.parametrize("ids", [["b", "a"], ["a", "a"], ["same-prefix-b", "same-prefix-"]])
@pytest.mark.parametrize("at_once", [1, 100])
def test_text_out_of_order_is_refused(
    ids: list[str], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sce.data.vocabulary._IDS_AT_ONCE", at_once)
    text = ["0", "1", *ids, "t"]
    forged = Vocabulary.from_sorted_text("".join(text).encode(), np.array([*map(len, text)]))
    with pytest.raises(ValueError, match="ids must ascend"):
        forged.check()
    forged.check(titles=True)
    Vocabulary.from_strings(text).check()
    Vocabulary.from_strings([]).check()


def test_take_refuses_unsorted_codes() -> None:
    with pytest.raises(ValueError, match="ascending"):
        Vocabulary.from_strings("abc").take([1, 0])


def test_take_refuses_what_does_not_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sce.memory.free_memory", lambda: 20)
    with pytest.raises(InputError, match=r"choosing 1 of 3 ids needs about \d+ B of memory, and"):
        Vocabulary.from_strings("abc").take([1])


@pytest.mark.parametrize(
    "vocabulary",
    [
        Vocabulary.from_strings(["", "é", "zz"]),
        Vocabulary.from_integers([3, 1]),
        Vocabulary.from_strings([]),
        Vocabulary.from_integers([]),
    ],
    ids=repr,
)
def test_arrays_hold_everything_and_may_stay_on_disk(
    vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("vocabulary")
    for name, array in vocabulary.arrays().items():
        np.save(folder / f"{name}.npy", array)
    mode: Literal["r"] | None = "r" if len(vocabulary) else None  # nothing cannot be mapped
    loaded = {name: np.load(folder / f"{name}.npy", mmap_mode=mode) for name in vocabulary.arrays()}
    again = Vocabulary.from_arrays(vocabulary.kind, loaded)
    assert again == vocabulary
    assert again.values is loaded["values"]
    ids = vocabulary.decode(range(len(vocabulary)))
    assert again.lookup(ids).tolist() == list(range(len(ids)))


def test_arrays_of_something_else_are_refused() -> None:
    strings = Vocabulary.from_strings(["a", "b"]).arrays()
    with pytest.raises(ValueError, match="kind 'integer'"):
        Vocabulary.from_arrays("integer", strings)
    with pytest.raises(ValueError, match=r"'int32'. instead of"):
        Vocabulary.from_arrays("integer", {"values": np.zeros(3, np.int32)})
    for wrong in ({"offsets": strings["offsets"] + 1}, {"values": strings["values"][:-1]}):
        with pytest.raises(ValueError, match="do not fit"):
            Vocabulary.from_arrays("string", strings | wrong)


def test_bytes_that_are_no_text_are_said() -> None:
    broken = Vocabulary.from_sorted_text(b"a\xff", np.array([1, 1]))
    assert broken.decode([0]) == ["a"]
    with pytest.raises(InputError, match="the ids were altered: one of them is not UTF-8"):
        broken.decode([0, 1])


def test_vocabularies_are_equal_by_content() -> None:
    assert Vocabulary.from_strings("ba") == Vocabulary.from_strings("ab")
    assert Vocabulary.from_strings("ab") != Vocabulary.from_strings("ac")
    assert Vocabulary.from_strings(["1"]) != Vocabulary.from_integers([1])
    assert Vocabulary.from_strings("ab") != "ab"


def test_integers_must_be_integers() -> None:
    with pytest.raises(TypeError, match="float64"):
        Vocabulary.from_integers(np.array([1.5]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["integer", "string"])
def test_inserted_ids_are_where_sorting_puts_them(kind: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    numbers = random.choice(1000, size=60, replace=False).tolist()
    ids: Any = numbers if kind == "integer" else ["é" * (n % 12) + str(n) for n in numbers]
    make: Any = Vocabulary.from_integers if kind == "integer" else Vocabulary.from_strings
    for count in (0, 1, 30, 60):
        old, new = make(ids[:count]), ids[count:]
        united, codes = old.insert(new)
        assert united == make(ids)
        assert codes.tolist() == old.lookup(united.decode(range(60))).tolist()
        assert codes.tolist() == old.lookup_all(united).tolist()


@pytest.mark.parametrize("kinds", [("string", "string"), ("integer", "integer"),
                                   ("string", "integer"), ("integer", "string")])  # fmt: skip
def test_all_ids_of_another_vocabulary_are_found(
    kinds: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sce.data.vocabulary._STRIDE", 4)
    monkeypatch.setattr("sce.data.vocabulary._IDS_AT_ONCE", 50)
    random = np.random.default_rng(0)
    for sizes in ((0, 9), (9, 0), (1, 120), (120, 1), (120, 100), (200, 200)):
        numbers = [random.choice(300, size=size, replace=False).tolist() for size in sizes]
        one, other = (
            Vocabulary.from_integers(some)
            if kind == "integer"
            else Vocabulary.from_strings(map(str, some))
            for kind, some in zip(kinds, numbers, strict=True)
        )
        codes = {str(one[code]): code for code in range(len(one))}
        expected = [codes.get(str(other[code]), -1) for code in range(len(other))]
        assert one.lookup_all(other).tolist() == expected


def test_strings_are_spread_among_others() -> None:
    texts = ["é", "", "be", "c"]
    old = Vocabulary.from_sorted_text("".join(texts).encode(), np.array([2, 0, 2, 1]))
    codes = np.array([-1, 0, 1, -1, -1, 2, 3, -1])
    expected = ["", "é", "", "", "", "be", "c", ""]
    assert old.spread(codes).decode(range(8)) == expected
    for others in ({}, {0: "ö"}, {7: "x", 3: "yz"}, {1: "", 2: "new", 5: "b", 6: "ccc"}):
        wanted = [others.get(place, text) for place, text in enumerate(expected)]
        assert old.spread(codes, others).decode(range(8)) == wanted
    assert old.spread(np.array([3, -1, 0, 2, 0])).decode(range(5)) == ["c", "", "é", "be", "é"]


def test_the_closest_ids_to_one_that_is_not_there() -> None:
    words = Vocabulary.from_strings(["apple", "apricot", "pear", "plum"])
    assert words.closest("aple") == ["apple"]
    assert words.closest("zzz") == ["apricot", "pear", "plum"]  # nothing alike: its neighbours
    numbers = Vocabulary.from_integers(range(0, 100_000, 10))
    assert numbers.closest(60_001) == [60_000, 60_010, 60_020]
    assert numbers.closest("plum") == [0, 10, 20]
    assert Vocabulary.from_strings(["a"]).closest(10**20) == ["a"]
