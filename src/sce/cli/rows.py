"""Recommendations as csv or parquet, a row for each item, or as jsonl, a line for each user.

A file appears only when all of it is written. Until then its rows lie in a hidden directory, with
the state of the command that writes them: the same command goes on from there.
"""

import csv
import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from itertools import count, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from sce.cli import say
from sce.data.columns import ITEM, USER
from sce.data.storage import atomic_file, empty, read_json, write_json
from sce.errors import InputError, needing
from sce.memory import require_memory
from sce.recommended import SIMILAR
from sce.training.signals import as_ctrl_c

if TYPE_CHECKING:
    from sce.recommended import Recommended
    from sce.requests import Id

Format = Literal["csv", "jsonl", "parquet"]
STATE = "state.json"
_SAVED = {"key": str, "position": int, "text": [str], "state": {"given": int}}
_INT64 = range(-(2**63), 2**63)


def columns_of(whose: str, *, titles: bool = False) -> tuple[str, ...]:
    """Columns of rows: of items for users, or of similar ones for items."""
    what = (ITEM, "score", "rank", "source") if whose == USER else (SIMILAR, "score", "rank")
    return (whose, *what, *(["title"] if titles else []))


class Rows:
    """Where recommendations go; parquet is made of lines of JSON, one for each item, at the end."""

    state: Mapping[str, Any] | None = None
    """The last one saved by the interrupted command that this one goes on with."""

    def __init__(
        self, stream: TextIO, format_: str, whose: str = USER, *, titles: bool = False
    ) -> None:
        self._stream, self._format, self._whose = stream, format_, whose
        self._columns = columns_of(whose, titles=titles)
        self._csv = csv.writer(stream, lineterminator="\n")
        self._lacks_header = format_ == "csv"
        self._state_file: Path | None = None
        self._key: str | None = None
        self.text: set[str] = set()
        """Columns with an id that is no integer of 64 bits, for parquet."""

    def resume(self, state_file: Path, key: str | None, saved: Mapping[str, Any]) -> None:
        """Save in this file from now on, where there is a key; begin with what was saved there."""
        self._state_file, self._key, self.state = state_file, key, saved["state"]
        self._lacks_header = self._lacks_header and not saved["position"]
        self.text = set(saved["text"])

    def add(self, user: "Id", found: "Recommended") -> None:
        """Write one user's, best first: a row for each item, or one line of JSON."""
        # str of a float32: the fewest digits that give the same number again.
        scores: Iterable[str] = map(str, found.scores)
        if self._format == "csv":
            self._write_header()
            rows = (repeat(user), found.items, scores, count(1), *self._more(found).values())
            self._csv.writerows(zip(*rows, strict=False))  # some have no end
            return
        ids = [user, *found.items]
        if self._format == "parquet":  # all of it as text, and scores with the digits of a float64
            for column, some in ((USER, ids[:1]), (ITEM, ids[1:])):
                if not all(isinstance(one, int) and one in _INT64 for one in some):
                    self.text.add(column)
            ids, scores = [str(one) for one in ids], map(str, found.scores.tolist())
        whose, *items = (json.dumps(one, ensure_ascii=False) for one in ids)
        if self._format == "jsonl":
            listed = f'"items": [{", ".join(items)}], "scores": [{", ".join(scores)}]'
            if "source" in self._columns:
                listed += f', "source": "{found.source}"'
            if "title" in self._columns:
                listed += f', "titles": {json.dumps(found.titles or [], ensure_ascii=False)}'
            self._stream.write(f'{{"{self._whose}": {whose}, {listed}}}\n')
            return
        more = self._more(found)
        for n, (item, score) in enumerate(zip(items, scores, strict=True)):
            columns = f'"{USER}": {whose}, "{ITEM}": {item}, "score": {score}, "rank": {n + 1}'
            for name, values in more.items():
                columns += f', "{name}": {json.dumps(values[n], ensure_ascii=False)}'
            self._stream.write(f"{{{columns}}}\n")

    def _more(self, found: "Recommended") -> dict[str, list[str]]:
        """Values of the columns behind the rank, one for each item."""
        values: dict[str, list[Any]] = {"source": [found.source] * len(found)}
        values["title"] = found.titles or []
        return {name: some for name, some in values.items() if name in self._columns}

    def save(self, state: Mapping[str, Any]) -> None:
        """Keep the rows so far, and a state, for a command that goes on after them."""
        if self._key is None or self._state_file is None:
            return
        self._stream.flush()
        os.fsync(self._stream.fileno())
        position = os.fstat(self._stream.fileno()).st_size
        record = {"key": self._key, "position": position, "text": [*self.text], "state": state}
        with suppress(InputError):  # a full disk: the state before holds
            write_json(self._state_file, record)

    def finish(self) -> None:
        """Write what belongs at the end; not called when something went wrong."""
        self._write_header()
        self._stream.flush()

    def _write_header(self) -> None:
        # The header comes with the first row: where nothing can be recommended, nothing is printed.
        if self._lacks_header:
            self._csv.writerow(self._columns)
            self._lacks_header = False


@contextmanager
def open_rows(
    out: Path | None,
    format_: Format | None,
    *,
    force: bool = False,
    key: str | None = None,
    whose: str = USER,
    titles: bool = False,
) -> Iterator[Rows]:
    """Open a file, or standard output, for rows.

    Args:
        out: The file; None is standard output.
        format_: How it is written; by default as the file's name says, on standard output csv.
        force: Replace a file that is there already; begin anew what was interrupted.
        key: All that decides about the rows: an interrupted command with the same key is gone on
            with. None: it is not.
        whose: Column of those whose items they are: users, or items.
        titles: Write titles too.

    Raises:
        InputError: When it cannot be written, or not in this format.
    """
    if out is None:
        if format_ == "parquet":
            raise InputError("parquet is written to a file: name one with --out FILE.parquet")
        if sys.stdout is None:
            raise InputError("standard output is closed; name a file with --out")
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # whatever the terminal shows
        rows = Rows(sys.stdout, format_ or "csv", whose, titles=titles)
        yield rows
        rows.finish()
        return
    chosen = _choose(out, format_, force=force)
    with as_ctrl_c(), atomic_file(out, keep=STATE) as partial:
        state_file = partial.with_name(STATE)
        saved = None
        with suppress(InputError, FileNotFoundError):
            saved = read_json(state_file, _SAVED)
        if saved is None or force or saved["key"] != key:
            if saved is not None and saved["position"] and not force:
                say("beginning anew: what was interrupted here had other settings")
            saved = {"position": 0, "text": [], "state": None}
            empty(partial.parent)
        text = partial.with_name("rows.jsonl") if chosen == "parquet" else partial
        with text.open("a", encoding="utf-8", newline="") as stream:
            if stream.tell() < saved["position"]:
                raise InputError(f"{text} was altered; begin anew with the same command")
            stream.truncate(saved["position"])
            rows = Rows(stream, chosen, whose, titles=titles)
            rows.resume(state_file, key, saved)
            try:
                yield rows
                rows.finish()
                if chosen == "parquet":
                    _write_parquet(text, partial, rows.text, columns_of(whose, titles=titles))
                if out.exists() and not force:
                    raise FileExistsError(errno.EEXIST, "it was written meanwhile; move it away")
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
    if chosen == "parquet":
        str(out).encode()  # polars takes no other names; refused by `main`
        require_memory(0, f"writing {out}", mapped=1e9)
        with needing("prepare", "writing parquet", ", or write .csv or .jsonl"):
            import polars  # noqa: F401 - rather now than at the end
    return chosen


def _write_parquet(
    text: Path, path: Path, text_columns: set[str], columns: tuple[str, ...]
) -> None:
    """Turn lines of JSON into parquet; ids are integers where all of a column are."""
    import polars as pl

    given: dict[str, Any] = {USER: pl.String, ITEM: pl.String}
    given |= {"score": pl.Float64, "rank": pl.Int32} | dict.fromkeys(columns[4:], pl.String)
    rows = pl.scan_ndjson(text, schema=given).cast({"score": pl.Float32})
    rows = rows.cast({name: pl.Int64 for name in (USER, ITEM) if name not in text_columns})
    rows = rows.rename(dict(zip((USER, ITEM), columns, strict=False)))
    try:
        rows.sink_parquet(path)
    except pl.exceptions.PolarsError as error:
        raise OSError(errno.EIO, str(error)) from error
