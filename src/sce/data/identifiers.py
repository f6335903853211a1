"""Ids of any type: first to integers or strings, then to codes of a sorted vocabulary.

A code is an id's rank, so that the same log gives the same codes in whatever order its rows come.
"""

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sce.data.vocabulary import Vocabulary

# Integers are looked up in a table of their whole range if it is at most so much longer than the
# log: it then takes less memory than the log, and no searching.
_RANGE_PER_ROW = 4
_SMALL_RANGE = 1 << 20


def check_type(kind: pl.DataType) -> None:
    """Refuse a type whose values identify nothing.

    Raises:
        TypeError: For truth values, times, lists and structures.
    """
    if not (
        kind.is_integer()
        or kind.is_float()
        or kind in (pl.String, pl.Binary, pl.Null)
        or isinstance(kind, pl.Categorical | pl.Enum)
        or (isinstance(kind, pl.Decimal) and not kind.scale)
    ):
        raise TypeError(f"ids must be integers or strings, not {kind}")


def read_ids(column: pl.Series) -> pl.Series:
    """Ids as Int64 or String, null where there is none; an empty string is none.

    Raises:
        TypeError: For numbers that are not whole, and for what `check_type` refuses.
    """
    check_type(column.dtype)
    if column.dtype == pl.Int64:
        return column
    if isinstance(column.dtype, pl.Decimal) and not column.dtype.scale:
        column = column.cast(pl.Int128)  # how some databases export integers
    if column.dtype.is_integer() or column.dtype == pl.Null:
        # Unsigned ones above 2**63 remain whole only as strings.
        fits = column.cast(pl.Int64, strict=False)
        return fits if fits.null_count() == column.null_count() else column.cast(pl.String)
    if column.dtype.is_float():
        known = column.cast(pl.Float64).fill_nan(None)
        broken = known.filter((known != known.floor()) | (known.abs() >= 2.0**53))
        if len(broken):
            raise TypeError(f"ids must be integers or strings, not fractions such as {broken[0]}")
        return known.cast(pl.Int64)
    if column.dtype == pl.Binary:
        try:
            column = column.cast(pl.String)
        except pl.exceptions.PolarsError:  # no text: the bytes of a UUID or a digest
            return column.bin.encode("hex")
    text = column.cast(pl.String)
    empty = text == ""
    return text.set(empty, None) if empty.any() else text


def integers_if_all(text: pl.Series) -> pl.Series:
    """Text as Int64 if that loses nothing: every value is 0, or a number without leading zero.

    Whole numbers with a fraction of zeros, as tables with gaps are often written (12.0), count.
    """
    whole = text.str.strip_suffix(".0") if text.str.ends_with(".0").any() else text
    numbers = whole.cast(pl.Int64, strict=False)
    if numbers.null_count() == text.null_count() and (numbers.cast(pl.String) == whole).all():
        return numbers
    return text


def encode_ids(ids: pl.Series) -> tuple[NDArray[np.int32], Vocabulary]:
    """The codes of ids without nulls, Int64 or String, and the vocabulary they point into."""
    if ids.dtype == pl.Int64:
        low, high = int(ids.min()), int(ids.max())  # type: ignore[arg-type]
        if high - low <= max(_SMALL_RANGE, _RANGE_PER_ROW * len(ids)):
            return _encode_range(ids.to_numpy(), low, high)
    codes, distinct = _encode_by_hash(ids.rechunk())
    if ids.dtype == pl.Int64:
        return codes, Vocabulary.from_integers(distinct.to_numpy())
    text = distinct.str.join("").item().encode()
    return codes, Vocabulary.from_sorted_text(text, distinct.str.len_bytes().to_numpy())


def _encode_range(
    values: NDArray[np.int64], low: int, high: int
) -> tuple[NDArray[np.int32], Vocabulary]:
    """For integers that lie close together: a table of all that could be."""
    places = values - low
    present = np.zeros(high - low + 1, bool)
    present[places] = True
    table = np.cumsum(present, dtype=np.int32)
    table -= 1
    return table[places], Vocabulary.from_integers(np.flatnonzero(present) + low)


def _encode_by_hash(ids: pl.Series) -> tuple[NDArray[np.int32], pl.Series]:
    """The rank of each id among the distinct ones, and these, sorted.

    Comparing hashes takes a third of the time that comparing strings takes; in the end every id is
    compared once with the one that its code stands for.
    """
    hashes = ids.hash()
    first_rows = hashes.arg_unique()
    distinct = pl.DataFrame({"id": ids.gather(first_rows), "hash": hashes.gather(first_rows)})
    distinct = distinct.sort("id")
    codes = _find(hashes.to_numpy(), distinct["hash"].to_numpy())
    if (distinct["id"].gather(codes) == ids).all():
        return codes, distinct["id"]
    # Two ids share a hash: about once in ten million logs of a million ids.
    known = ids.unique().sort()
    numbered = pl.DataFrame({"id": known, "code": np.arange(len(known), dtype=np.int32)})
    joined = ids.to_frame("id").join(numbered, on="id", how="left", maintain_order="left")
    return joined["code"].to_numpy(), known


def _find(hashes: NDArray[np.uint64], among: NDArray[np.uint64]) -> NDArray[np.int32]:
    """Where each hash stands among distinct ones that include it.

    Hashes are spread evenly, so their first bits tell almost where they are in sorted order; from
    there on it is a few steps.
    """
    order = np.argsort(among).astype(np.int32)
    ordered = among[order]
    bits = len(among).bit_length() + 2  # four places per hash: few share one
    shift = np.uint64(64 - bits)
    begins = np.searchsorted(ordered, np.arange(1 << bits, dtype=np.uint64) << shift)
    position = begins.astype(np.int32)[hashes >> shift]
    left = np.flatnonzero(ordered[position] != hashes)
    while len(left):
        position[left] += 1
        left = left[ordered[position[left]] != hashes[left]]
    found: NDArray[np.int32] = order[position]
    return found
