"""Recommendations as csv, jsonl or parquet.

A file appears only when all of it is written. Until then its rows lie in a hidden directory, with
the state of the command that writes them: the same command goes on from there.
"""

import csv
import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper
from itertools import count, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from sce.cli import say
from sce.data.columns import ITEM, USER
from sce.data.storage import atomic_file, read_json, write_json
from sce.errors import InputError

if TYPE_CHECKING:
    from sce.recommend import Id, Recommended

Format = Literal["csv", "jsonl", "parquet"]
COLUMNS = (USER, ITEM, "score", "rank")
STATE = "state.json"

_ROWS_AT_ONCE = 1 << 18  # of parquet, held in memory
_INT64 = range(-(2**63), 2**63)


class Rows:
    """Where recommendations go."""

    state: Mapping[str, Any] | None = None
    """The last one that was saved by the interrupted command that this one goes on with."""
    _state_file: Path | None = None
    _key = ""

    def add(self, user: "Id", found: "Recommended") -> None:
        """Write one user's, best first."""
        raise NotImplementedError

    def save(self, state: Mapping[str, Any]) -> None:
        """Keep the rows so far, and a state, for a command that goes on after them."""
        if self._state_file is not None:
            record = {"key": self._key, "position": self.flush(), "state": state}
            with suppress(InputError):  # a full disk: the state before holds
                write_json(self._state_file, record)

    def flush(self) -> int:
        """Put the rows so far on the disk; return where they end."""
        raise NotImplementedError

    def finish(self) -> None:
        """Write what belongs at the end; not called when something went wrong."""


@contextmanager
def open_rows(
    out: Path | None, format_: Format | None, *, force: bool = False, key: str | None = None
) -> Iterator[Rows]:
    """Open a file, or standard output, for rows.

    Args:
        out: The file; None is standard output.
        format_: How it is written; by default as the file's name says, on standard output csv.
        force: Replace a file that is there already; begin anew what was interrupted.
        key: All that decides about the rows: an interrupted command with the same key is gone on
            with. None: it is not.

    Raises:
        InputError: When it cannot be written, or not in this format.
    """
    if out is None:
        if format_ == "parquet":
            raise InputError("parquet is written to a file: name one with --out FILE.parquet")
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # whatever the terminal shows
        rows: Rows = _TextRows(sys.stdout, format_ or "csv")
        yield rows
        rows.finish()
        return
    chosen = _choose(out, format_, force=force)
    with atomic_file(out, keep=STATE) as partial, ExitStack() as stack:
        state_file = partial.with_name(STATE)
        saved = None
        with suppress(InputError, FileNotFoundError):
            saved = read_json(state_file)
        if saved is None or force or saved["key"] != key:
            saved = {"position": 0, "state": None}
            for left in partial.parent.iterdir():
                left.unlink()
        position = saved["position"]
        if chosen == "parquet":
            rows = _ParquetRows(partial, position)
        else:
            stream = stack.enter_context(partial.open("a", encoding="utf-8", newline=""))
            if stream.tell() < position:
                raise InputError(f"{partial} was altered; begin anew with the same command")
            stream.truncate(position)
            rows = _TextRows(stream, chosen, begun=position > 0)
        rows.state = saved["state"]
        if key is not None:
            rows._state_file, rows._key = state_file, key
        try:
            yield rows
            rows.finish()
        except (KeyboardInterrupt, OSError):
            if state_file.exists():
                say("what was written is kept: the same command goes on with it")
            raise


def _choose(out: Path, format_: Format | None, *, force: bool) -> str:
    if out.exists() and not out.is_file():
        raise InputError(f"{out} is not a file; name one, such as recommendations.csv")
    if out.exists() and not force:
        raise InputError(f"{out} exists; choose another name, or replace it with --force")
    if not out.parent.is_dir():
        raise InputError(f"cannot write {out}: there is no directory {out.parent}")
    chosen = format_ or out.suffix.lower().removeprefix(".")
    if chosen not in get_args(Format):
        known = ", ".join(f".{name}" for name in get_args(Format))
        raise InputError(f"{out} ends in none of {known}; name it so, or choose with --format")
    return chosen


class _TextRows(Rows):
    def __init__(self, stream: TextIO, format_: str, *, begun: bool = False) -> None:
        self._stream, self._writer = stream, csv.writer(stream, lineterminator="\n")
        self._is_csv = format_ == "csv"
        self._lacks_header = self._is_csv and not begun

    def add(self, user: "Id", found: "Recommended") -> None:
        self._write_header()
        # str of a float32: the fewest digits that give the same number again.
        rows = zip(repeat(user), found.items, map(str, found.scores), count(1))
        if self._is_csv:
            self._writer.writerows(rows)
            return
        for user, item, score, rank in rows:
            ids = json.dumps({USER: user, ITEM: item}, ensure_ascii=False).removesuffix("}")
            self._stream.write(f'{ids}, "score": {score}, "rank": {rank}}}\n')

    def flush(self) -> int:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return os.fstat(self._stream.fileno()).st_size

    def finish(self) -> None:
        self._write_header()
        self._stream.flush()

    def _write_header(self) -> None:
        # The header comes with the first row: where nothing can be recommended, nothing is printed.
        if self._lacks_header:
            self._writer.writerow(COLUMNS)
            self._lacks_header = False


class _ParquetRows(Rows):
    """A parquet file, put together from parts of bounded size.

    Ids are integers in the file when all of them are, and text otherwise.
    """

    def __init__(self, path: Path, parts: int) -> None:
        try:
            import polars
        except ModuleNotFoundError as error:
            raise InputError(
                "writing parquet needs polars, which is not installed; install it with: "
                "pip install 'scalable-cross-entropy[prepare]', or write .csv or .jsonl"
            ) from error
        self._polars: Any = polars
        self._path, self._parts = path, parts
        self._columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}

    def add(self, user: "Id", found: "Recommended") -> None:
        values = ([user] * len(found), found.items, found.scores.tolist(), found.ranks.tolist())
        for column, more in zip(self._columns.values(), values, strict=True):
            column.extend(more)
        if len(self._columns["rank"]) >= _ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> int:
        pl = self._polars
        schema = {"score": pl.Float32, "rank": pl.Int32}
        for name in (USER, ITEM):
            ids = self._columns[name]
            schema[name] = pl.Int64
            if not all(isinstance(one, int) and one in _INT64 for one in ids):
                self._columns[name], schema[name] = [str(one) for one in ids], pl.String
        frame = pl.DataFrame(self._columns, schema_overrides=schema)
        with self._errors_of_the_system(), self._part(self._parts).open("wb") as file:
            frame.write_parquet(file)
            file.flush()
            os.fsync(file.fileno())
        self._parts += 1
        self._columns = {name: [] for name in COLUMNS}
        return self._parts

    def finish(self) -> None:
        self.flush()
        pl = self._polars
        parts = [pl.scan_parquet(self._part(number)) for number in range(self._parts)]
        for name in (USER, ITEM):
            if len({part.collect_schema()[name] for part in parts}) > 1:
                parts = [part.with_columns(pl.col(name).cast(pl.String)) for part in parts]
        with self._errors_of_the_system():
            pl.concat(parts).sink_parquet(self._path)

    def _part(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}-{number}")

    @contextmanager
    def _errors_of_the_system(self) -> Iterator[None]:
        try:
            yield
        except self._polars.exceptions.PolarsError as error:
            raise OSError(errno.EIO, str(error)) from error
