"""`--titles` of commands that show items."""

from pathlib import Path

from sce.cli import say
from sce.data.titles import given_titles, match_titles, tell_titles
from sce.data.vocabulary import Vocabulary


def titles_for(
    item_ids: Vocabulary, file: Path | None, columns: tuple[str, str] | None
) -> Vocabulary | None:
    """Titles by catalogue index, if a file is given; and a line on what it has."""
    rows = given_titles(file, columns)
    if rows is None:
        return None
    titles = match_titles(rows, item_ids)
    say(f"titles: {tell_titles(titles.counts)}")
    return titles.texts
