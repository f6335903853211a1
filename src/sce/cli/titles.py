"""`--titles` of commands that show items."""

from pathlib import Path
from typing import TYPE_CHECKING

from sce.cli import say
from sce.data.titles import match_titles, read_titles, tell_titles
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError

if TYPE_CHECKING:
    import polars as pl


def rows_of_titles(file: Path | None, columns: tuple[str, str] | None) -> "pl.DataFrame | None":
    """Rows of a file of titles, if one is given."""
    if file is None:
        if columns is not None:
            raise InputError("--titles-columns are those of --titles, which is not given")
        return None
    return read_titles(file, columns)


def titles_for(
    item_ids: Vocabulary, file: Path | None, columns: tuple[str, str] | None
) -> Vocabulary | None:
    """Titles by catalogue index, if a file is given; and a line on what it has."""
    rows = rows_of_titles(file, columns)
    if rows is None:
        return None
    titles = match_titles(rows, item_ids)
    say(f"titles: {tell_titles(titles.counts)}")
    return titles.texts
