"""`--titles` of commands that show items."""

from pathlib import Path

from sce.cli import say
from sce.data.titles import match_titles, read_titles, tell_titles
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError


def titles_for(
    item_ids: Vocabulary, file: Path | None, columns: tuple[str, str] | None
) -> Vocabulary | None:
    """Titles by catalogue index, if a file is given; and a line on what it has."""
    if file is None:
        if columns is not None:
            raise InputError("--titles-columns are those of --titles, which is not given")
        return None
    titles = match_titles(read_titles(file, columns), item_ids)
    say(f"titles: {tell_titles(titles.counts)}")
    return titles.texts
