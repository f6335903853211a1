"""First pass over the files of a log beyond memory: what must be known before rows are stored."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from sce.data.columns import ITEM, TIME, USER, Columns
from sce.data.formats import Format
from sce.data.reading import complete_rows, reading, scan_csv, scan_parquet, type_csv
from sce.data.values import Table, fit_nanoseconds
from sce.errors import InputError, named

_SAMPLE_USERS = 1 << 18  # at least, of rows enough
_ITEMS_AT_ONCE = 1 << 22  # that are sought for duplicates, beside twice those that were found


class LogFile(NamedTuple):
    """A file of a log, and how it is read."""

    path: Path
    format: Format
    wanted: Columns
    drop_incomplete: bool
    batch_rows: int


class Survey(NamedTuple):
    """Types and size of a file."""

    ends: Table  # some rows, of the types of all; the least and the largest time are among them
    text: frozenset[str]  # columns of ids that are not all integers
    rows: int


def find_partitions(source: Any) -> list[Path]:
    """Parquet files in directories and below, sorted by their names in each."""
    files: list[Path] = []
    for given in [source] if isinstance(source, str | Path) else source:
        directory = Path(given).expanduser()
        if not directory.is_dir():
            raise InputError(
                f"{given} is no directory; {named('partitions', True)} reads directories of "
                "Parquet files, leave it out to read files"
            )
        found = sorted(
            file
            for file in directory.rglob("*.parquet")
            # As engines do: names that begin so are of work in progress or of bookkeeping.
            if not any(name[0] in "._" for name in file.relative_to(directory).parts)
            and file.is_file()
        )
        if not found:
            raise InputError(f"{given} holds no file that ends with .parquet")
        files += found
    return files


def read_batches(file: LogFile, text: frozenset[str] = frozenset()) -> Iterator[Table]:
    """Rows of a file in order, some at a time; ids of the columns `text` stay text."""
    path, fmt = file.path, file.format
    if fmt.layout == "jsonl":
        raise InputError(
            f"{path}: jsonl is read whole, and not within {named('memory')}; convert it to "
            "Parquet or csv first"
        )
    with reading(path, fmt):
        scan = scan_csv if fmt.layout == "csv" else scan_parquet
        columns, lines = scan(path, fmt, file.wanted)
        row = 0
        batches = lines.collect_batches(chunk_size=file.batch_rows, engine="streaming")
        # First none at all: of an empty file the types are known too.
        for raw in itertools.chain([lines.head(0).collect()], batches):
            typed = type_csv(raw, text) if fmt.layout == "csv" else _as_text(path, raw)
            yield complete_rows(path, fmt, columns, typed, file.drop_incomplete, first_row=row)
            row += raw.height


def _as_text(path: Path, raw: pl.DataFrame) -> pl.DataFrame:
    """Bytes as text, which all must be: one batch does not tell what the others hold."""
    for name in (USER, ITEM):
        if raw.schema[name] == pl.Binary:
            try:
                raw = raw.with_columns(pl.col(name).cast(pl.String))
            except pl.exceptions.PolarsError as error:
                raise InputError(
                    f"{path}: ids are bytes that are no text; write them as hexadecimal text, or "
                    f"leave {named('memory')} out"
                ) from error
    return raw


def survey_file(file: LogFile, sample: "Sample") -> tuple[Survey, pl.Series]:
    """Types of a file, and its items; adds to the sample of users."""
    text: frozenset[str] = frozenset()
    while True:
        kinds: dict[str, set[pl.DataType]] = {USER: set(), ITEM: set(), TIME: set()}
        items, rows, dropped = Distinct(), 0, 0
        ends: list[pl.DataFrame] = []
        for table in read_batches(file, text):
            rows, dropped = rows + table.rows.height, dropped + table.dropped
            if not table.rows.height:
                none = table
                continue
            for name, kind in table.rows.schema.items():
                kinds[name].add(kind)
            sample.add(table.rows[USER])
            items.add(table.rows[ITEM])
            times = table.rows[TIME] if TIME in table.rows.columns else pl.Series([0])
            ends.append(table.rows[[times.arg_min() or 0, times.arg_max() or 0]])
        mixed = frozenset(name for name in (USER, ITEM) if len(kinds[name]) > 1)
        if mixed <= text:
            break
        text |= mixed  # read again: what was the integer 12 may have been written as 12.0
    types: dict[Any, Any] = dict.fromkeys(text, pl.String)
    if len(kinds[TIME]) > 1:
        types[TIME] = _common_time(file.path, kinds[TIME], ends)
    found = pl.concat([end.cast(types) for end in ends]) if ends else none.rows
    summary = none._replace(rows=found, dropped=dropped)
    return Survey(summary, text, rows), items.take(found.schema[ITEM])


def _common_time(
    path: Path, kinds: set[pl.DataType], ends: Sequence[pl.DataFrame]
) -> type[pl.Float64] | pl.Datetime:
    """Type of times that had several, one in each batch; that of all of them read at once."""
    numeric = [kind.is_numeric() for kind in kinds]
    if all(numeric):
        return pl.Float64
    if any(numeric):
        raise InputError(
            f"{path}: times are numbers in some rows and dates in others; write them alike, or "
            f"leave {named('memory')} out to hear in which rows"
        )
    return pl.Datetime("ns" if all(fit_nanoseconds(end[TIME]) for end in ends) else "us")


class Distinct:
    """Ids, each once; of several types, until it is known of which all are."""

    def __init__(self) -> None:
        self._found: dict[pl.DataType, list[pl.Series]] = {}

    def add(self, ids: pl.Series) -> None:
        """Add ids, some of which may be there already."""
        found = self._found.setdefault(ids.dtype, [])
        found.append(ids.unique())
        if sum(map(len, found)) > 2 * len(found[0]) + _ITEMS_AT_ONCE:
            found[:] = [pl.concat(found).unique()]

    def take(self, kind: pl.DataType) -> pl.Series:
        """All ids as of one type, in any order."""
        found = [ids.cast(kind) for of_kind in self._found.values() for ids in of_kind]
        return pl.concat([pl.Series(ITEM, [], kind), *found]).unique()


class Sample:
    """Users of rows chosen at random, each with the same chance."""

    def __init__(self) -> None:
        self._users: list[pl.Series] = []
        self._share, self._random = 1.0, np.random.default_rng(0)

    def add(self, users: pl.Series) -> None:
        """Draw from the users of further rows."""
        self._users.append(self._draw(users, self._share))
        while sum(map(len, self._users)) > 2 * _SAMPLE_USERS:
            self._users = [self._draw(users, 0.5) for users in self._users]
            self._share /= 2

    def take(self, kind: pl.DataType) -> pl.Series:
        """The users that were drawn, as of one type."""
        return pl.concat([users.cast(kind) for users in self._users])

    def _draw(self, users: pl.Series, share: float) -> pl.Series:
        return users.sample(self._random.binomial(len(users), share), seed=0)
