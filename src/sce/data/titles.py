"""Titles of items, from a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sce.data.columns import ITEM, USER, TitleColumns
from sce.data.formats import choose_format, find_files
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, named, needing
from sce.units import plural

if TYPE_CHECKING:
    import polars as pl

_IDS_AT_ONCE = 1 << 16


class Titles(NamedTuple):
    """Titles of the items of a catalogue."""

    texts: Vocabulary
    """By catalogue index, empty where there is none; unsorted: to decode, not to look up."""
    counts: dict[str, int]
    """Items with a title ("named") of all ("items"); ids of the file that are not in the catalogue
    ("unknown"), or have different titles ("several")."""


def given_titles(path: Path | str | None, columns: tuple[str, str] | None) -> "pl.DataFrame | None":
    """Read the titles of a file, if one is given."""
    if path is None and columns is not None:
        options = f"{named('titles_columns')} are those of {named('titles')}"
        raise InputError(f"{options}, which is not given")
    return None if path is None else read_titles(path, columns)


def read_titles(path: Path | str, columns: tuple[str, str] | None = None) -> "pl.DataFrame":
    """Columns "id" and "title" of a file, in the order of its rows, of those that have both.

    `columns` are those of ids and titles, if they have no usual names.
    """
    with needing("prepare", "reading titles"):
        import polars as pl

        from sce.data.reading import read_file
    [file, *others] = find_files(path)
    if others:
        raise InputError(f"titles are read from one file; {path} are {len(others) + 1}")
    wanted = TitleColumns(*(columns or ()))
    rows = read_file(file, choose_format(file), wanted, drop_incomplete=True).rows
    title = pl.col(ITEM).cast(pl.String).str.strip_chars()
    return rows.select(id=USER, title=title).filter(pl.col("title") != "")


def match_titles(rows: "pl.DataFrame", item_ids: Vocabulary) -> Titles:
    """Titles for the items of a catalogue, of `read_titles`; of several of one the first counts."""
    import polars as pl

    ids = rows["id"]
    starts = range(0, len(ids), _IDS_AT_ONCE)
    found = [item_ids.lookup(ids[start : start + _IDS_AT_ONCE].to_list()) for start in starts]
    codes = np.concatenate([np.empty(0, np.int64), *found])
    known = rows.select("title", code=pl.Series(codes)).filter(pl.col("code") >= 0)
    by_item = known.group_by("code").agg(
        pl.col("title").first(), several=pl.col("title").n_unique() > 1
    )
    every = pl.DataFrame({"code": np.arange(len(item_ids))}).join(
        by_item, on="code", how="left", maintain_order="left"
    )
    texts = every["title"].fill_null("")
    joined = texts.str.join("").item().encode()
    counts = {
        "items": len(item_ids),
        "named": by_item.height,
        "unknown": ids.filter(codes < 0).n_unique(),
        "several": int(by_item["several"].sum()),
    }
    return Titles(Vocabulary.from_sorted_text(joined, texts.str.len_bytes().to_numpy()), counts)


def tell_titles(counts: Mapping[str, int]) -> str:
    """What was found in a file of titles, in words."""
    told = f"{counts['named']:,} of {plural(counts['items'], 'item')} have one"
    if unknown := counts["unknown"]:
        told += f"; {plural(unknown, 'id')} of the file not in the catalogue"
    if several := counts["several"]:
        told += f"; {plural(several, 'id')} with different titles, of which the first counts"
    return told
