"""Files about items: lists of those that may be recommended, or may not, and titles."""

from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray

from sce.cli import say
from sce.data.columns import ITEM, TitleColumns
from sce.data.formats import COMPRESSIONS, ENDINGS, choose_format
from sce.data.lines import name_of, read_lines
from sce.data.requests import Id
from sce.data.titles import given_titles, match_titles, tell_titles
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, needing
from sce.units import plural

MAY_BE_STDIN = Parameter(allow_leading_hyphen=True)


def read_items(path: Path | None, option: str, column: str | None = None) -> list[Id] | None:
    """Ids of a file: one a line, or the column of items where its name tells a table.

    `column` is what the items of the log were said to be called; the file may call them so too.
    """
    if path is None:
        return None
    name = path.name.lower()
    ending = Path(name.removesuffix(next(filter(name.endswith, COMPRESSIONS), ""))).suffix
    if ending not in ENDINGS:
        listed: list[Id] = [text for _, text in read_lines(path)]
    else:
        remedy = ", or write one id a line into a .txt file"
        with needing("prepare", f"reading {path}", remedy):
            from sce.data.reading import read_item_column
        listed = read_item_column(path, column)
        if option == "--allow":
            _tell_zeros(path, column)
    if not listed:
        raise InputError(f"{name_of(path)} ({option}) names no item")
    return listed


def _tell_zeros(path: Path, column: str | None) -> None:
    """Say so where a table has a stock of 0 in some rows, which count as all others do."""
    from sce.data.reading import read_file

    for item, name in product({column, None}, ("stock", "qty", "quantity")):
        with suppress(InputError):  # it has no such columns
            table = read_file(path, choose_format(path), TitleColumns(item, name), True)
            if zeros := sum(str(one) in ("0", "0.0") for one in table.rows[ITEM].to_list()):
                rows = f"{plural(zeros, 'row')} with {name} 0"
                say(f"{path}: every row counts as allowed, also {rows}; leave out what is not")
                return


def offered(
    item_ids: Vocabulary, allow: Path | None, block: Path | None
) -> NDArray[np.int64] | None:
    """Indices of the items that the lists leave, if any is given; and a line on how many."""
    if allow is None and block is None:
        return None
    kept, unknown = np.ones(len(item_ids), bool), 0
    for path, option in ((allow, "--allow"), (block, "--block")):
        if (listed := read_items(path, option)) is None:
            continue
        codes = item_ids.lookup(listed)
        named = np.zeros(len(item_ids), bool)
        named[codes[codes >= 0]] = True
        kept &= named if option == "--allow" else ~named
        unknown += int((codes < 0).sum())
    if not kept.any():
        raise InputError("no item of the catalogue is left by --allow and --block")
    others = f"; {plural(unknown, 'id')} of the lists not in the catalogue" if unknown else ""
    say(f"offers {int(kept.sum()):,} of {plural(len(item_ids), 'item')}{others}")
    return np.flatnonzero(kept)


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
