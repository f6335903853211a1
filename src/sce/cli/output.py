"""Rows of recommendations as csv, jsonl or parquet: streamed, and in files whole or not at all."""

import csv
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, repeat
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO, get_args

from sce.data.columns import ITEM, USER
from sce.data.storage import atomic_file, partial_directory
from sce.errors import InputError
from sce.recommend import Id, Recommended

Format = Literal["csv", "jsonl", "parquet"]
COLUMNS = (USER, ITEM, "score", "rank")

_ROWS_AT_ONCE = 1 << 18  # of parquet, held in memory
_INT64 = range(-(2**63), 2**63)


class Rows(Protocol):
    """Where recommendations go."""

    def add(self, user: Id, found: Recommended) -> None:
        """Write one user's, best first."""

    def finish(self) -> None:
        """Write what belongs at the end; not called when something went wrong."""


@contextmanager
def open_rows(out: Path | None, format_: Format | None, *, force: bool = False) -> Iterator[Rows]:
    """Open a file, or standard output, for rows; a file appears only when all is written.

    Args:
        out: The file; None is standard output.
        format_: How it is written; by default as the file's name says, on standard output csv.
        force: Replace a file that is there already.

    Raises:
        InputError: When it cannot be written, or not in this format.
    """
    if out is not None:
        _check(out, force=force)
    chosen = _choose(out, format_)
    if out is None:
        yield from _finished(_text_rows(chosen, sys.stdout))
        sys.stdout.flush()
        return
    try:
        with atomic_file(out) as partial:
            if chosen == "parquet":
                yield from _finished(ParquetRows(partial))
            else:
                with partial.open("x", encoding="utf-8", newline="") as stream:
                    yield from _finished(_text_rows(chosen, stream))
    finally:
        shutil.rmtree(partial_directory(out), ignore_errors=True)


def _finished(rows: Rows) -> Iterator[Rows]:
    yield rows
    rows.finish()


def _choose(out: Path | None, format_: Format | None) -> Format:
    if out is None:
        if format_ == "parquet":
            raise InputError("parquet is written to a file: name one with --out FILE.parquet")
        return format_ or "csv"
    known: dict[str, Format] = {f".{name}": name for name in get_args(Format)}
    chosen = format_ or known.get(out.suffix.lower())
    if chosen is None:
        raise InputError(
            f"{out} ends in none of {', '.join(known)}; name it so, or choose with --format"
        )
    return chosen


def _check(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_file():
        raise InputError(f"{out} is not a file; name one, such as recommendations.csv")
    if out.exists() and not force:
        raise InputError(f"{out} exists; choose another name, or replace it with --force")
    if not out.parent.is_dir():
        raise InputError(f"cannot write {out}: there is no directory {out.parent}")


def _text_rows(format_: Format, stream: TextIO) -> "CsvRows | JsonlRows":
    return CsvRows(stream) if format_ == "csv" else JsonlRows(stream)


class CsvRows:
    """One line per recommendation under a header."""

    def __init__(self, stream: TextIO) -> None:
        self._writer = csv.writer(stream, lineterminator="\n")
        self._begun = False

    def add(self, user: Id, found: Recommended) -> None:
        """Write one user's, best first."""
        self._begin()
        # str of a float32: the fewest digits that give the same number again.
        rows = zip(repeat(user), found.items, map(str, found.scores), count(1))
        self._writer.writerows(rows)

    def finish(self) -> None:
        """Write the header, if there was nothing to write under it."""
        self._begin()

    def _begin(self) -> None:
        # With the first row, not before: where nothing can be recommended, nothing is printed.
        if not self._begun:
            self._writer.writerow(COLUMNS)
            self._begun = True


class JsonlRows:
    """One object per recommendation and line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def add(self, user: Id, found: Recommended) -> None:
        """Write one user's, best first."""
        whose = json.dumps(user, ensure_ascii=False)
        for rank, (item, score) in enumerate(zip(found.items, found.scores, strict=True), 1):
            what = json.dumps(item, ensure_ascii=False)
            # The score as str: json would write a float32 with the digits of a float64.
            self._stream.write(
                f'{{"{USER}": {whose}, "{ITEM}": {what}, "score": {score!s}, "rank": {rank}}}\n'
            )

    def finish(self) -> None:
        """Nothing belongs at the end."""


class ParquetRows:
    """A parquet file, put together from parts of bounded size.

    Users' ids are integers in the file when all of them are, and text otherwise.
    """

    def __init__(self, path: Path) -> None:
        try:
            import polars
        except ModuleNotFoundError as error:
            raise InputError(
                "writing parquet needs polars, which is not installed; install it with: "
                "pip install 'scalable-cross-entropy[prepare]', or write .csv or .jsonl"
            ) from error
        self._polars: Any = polars
        self._path = path
        self._parts = path.with_name(f"{path.name}-parts")
        self._parts.mkdir()
        self._written: list[Path] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}

    def add(self, user: Id, found: Recommended) -> None:
        """Write one user's, best first."""
        values = ([user] * len(found), found.items, found.scores.tolist(), found.ranks.tolist())
        for column, more in zip(self._columns.values(), values, strict=True):
            column.extend(more)
        if len(self._columns["rank"]) >= _ROWS_AT_ONCE:
            self._write_part()

    def finish(self) -> None:
        """Put the parts together."""
        if self._columns["rank"] or not self._written:
            self._write_part()
        pl = self._polars
        parts = [pl.scan_parquet(part) for part in self._written]
        for name in (USER, ITEM):
            kinds = {part.collect_schema()[name] for part in parts}
            if len(kinds) > 1:
                parts = [part.with_columns(pl.col(name).cast(pl.String)) for part in parts]
        try:
            pl.concat(parts).sink_parquet(self._path)
        except pl.exceptions.PolarsError as error:
            raise InputError(f"cannot write parquet: {error}") from error
        shutil.rmtree(self._parts)

    def _write_part(self) -> None:
        pl = self._polars
        ids = {name: self._ids(self._columns[name]) for name in COLUMNS[:2]}
        frame = pl.DataFrame(
            ids | {name: self._columns[name] for name in COLUMNS[2:]},
            schema_overrides={"score": pl.Float32, "rank": pl.Int32},
        )
        part = self._parts / f"{len(self._written)}.parquet"
        frame.write_parquet(part)
        self._written.append(part)
        for column in self._columns.values():
            column.clear()

    def _ids(self, ids: list[Id]) -> Any:
        pl = self._polars
        if all(isinstance(one, int) and one in _INT64 for one in ids):
            return pl.Series(ids, dtype=pl.Int64)
        return pl.Series([str(one) for one in ids], dtype=pl.String)
