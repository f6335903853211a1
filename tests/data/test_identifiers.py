from datetime import date

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.data.values import encode_ids, integers_if_all, read_ids

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def check_encoding(ids: pl.Series) -> None:
    codes, vocabulary = encode_ids(ids)
    assert codes.dtype == np.int32
    assert vocabulary.decode(codes) == ids.to_list()
    assert vocabulary.decode(range(len(vocabulary))) == sorted(set(ids.to_list()))


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=60))
def test_strings_are_encoded_by_rank(ids: list[str]) -> None:
    check_encoding(pl.Series(ids))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=60))
def test_integers_are_encoded_by_rank(ids: list[int]) -> None:
    check_encoding(pl.Series(ids, dtype=pl.Int64))


@pytest.mark.parametrize("low", [-1000, 0, 2**62])
def test_close_integers_are_encoded_by_rank(low: int) -> None:
    ids = low + np.random.default_rng(0).integers(0, 300, 1000) * 3
    check_encoding(pl.Series(ids))


@pytest.mark.parametrize("kind", [pl.Int64, pl.String])
def test_many_ids_in_several_chunks(kind: type[pl.DataType]) -> None:
    numbers = np.random.default_rng(0).integers(0, 10**15, 3000)
    ids = pl.Series(np.concatenate([numbers, numbers[::-1]])).cast(kind)
    check_encoding(pl.concat([ids[:100], ids[100:2000], ids[2000:]], rechunk=False))


@pytest.mark.parametrize("kind", [pl.Int64, pl.String])
def test_ids_that_share_a_hash_stay_apart(
    kind: type[pl.DataType], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pl.Series.hash

    def poor_hash(self: pl.Series) -> pl.Series:
        return (real(self) % 7) * 2**60

    monkeypatch.setattr(pl.Series, "hash", poor_hash)
    check_encoding(pl.Series(np.random.default_rng(0).integers(0, 10**15, 200)).cast(kind))


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pl.Series([3, None], dtype=pl.Int16), [3, None]),
        (pl.Series([2**64 - 1, 5], dtype=pl.UInt64), ["18446744073709551615", "5"]),
        (pl.Series([2**63 - 1, 5], dtype=pl.UInt64), [2**63 - 1, 5]),
        (pl.Series([3.0, float("nan"), None, -2.0]), [3, None, None, -2]),
        (pl.Series(["a", "", None, "é"]), ["a", None, None, "é"]),
        (pl.Series(["b", "a"], dtype=pl.Categorical), ["b", "a"]),
        (pl.Series(["b", "a"], dtype=pl.Enum(["b", "a"])), ["b", "a"]),
        (pl.Series([b"b", b"\xc3\xa9", b""]), ["b", "é", None]),
        (pl.Series([b"\xff\x00", b"ab"]), ["ff00", "6162"]),
        (pl.Series([None, None]), [None, None]),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, pl.Series) else "",
)
def test_ids_of_any_type(column: pl.Series, expected: list[int | str | None]) -> None:
    ids = read_ids(column)
    assert ids.to_list() == expected
    assert ids.dtype in (pl.Int64, pl.String)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pl.Series([1.0, 2.5]), "fractions such as 2.5"),
        (pl.Series([2.0**60]), "fractions such as"),
        (pl.Series([float("inf")]), "fractions such as inf"),
        (pl.Series([True]), "not Boolean"),
        (pl.Series([date(2020, 1, 1)]), "not Date"),
        (pl.Series([[1]]), r"not List\(Int64\)"),
        (pl.Series([{"a": 1}]), "not Struct"),
    ],
)
def test_types_that_identify_nothing(column: pl.Series, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        read_ids(column)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (["5", "0", "-7"], [5, 0, -7]),
        (["5", None], [5, None]),
        (["12.0", "7.0", None], [12, 7, None]),
        (["007", "7"], ["007", "7"]),
        (["+5", "6"], ["+5", "6"]),
        (["-0", "6"], ["-0", "6"]),
        ([" 5", "6"], [" 5", "6"]),
        (["5", "x"], ["5", "x"]),
        (["2409.10", "2409.1"], ["2409.10", "2409.1"]),
        (["1.0.0", "2.0"], ["1.0.0", "2.0"]),
        ([str(2**63), "1"], [str(2**63), "1"]),
        (["1e5", "7"], ["1e5", "7"]),
    ],
)
def test_text_becomes_integers_only_if_nothing_is_lost(
    text: list[str | None], expected: list[int | str | None]
) -> None:
    assert integers_if_all(pl.Series(text), fractions=True).to_list() == expected
    assert integers_if_all(pl.Series(["12.0", "7"])).to_list() == ["12.0", "7"]
