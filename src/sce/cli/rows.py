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
from typing import Any, Literal, TextIO, get_args

from sce.cli import say
from sce.data.columns import ITEM, USER
from sce.data.requests import Id, Recommended
from sce.data.storage import atomic_file, empty, read_json, write_json
from sce.errors import InputError, needing
from sce.requests import SIMILAR
from sce.training.signals import as_ctrl_c

Format = Literal["csv", "jsonl", "parquet"]
STATE = "state.json"
_SAVED = {"key": str, "position": int, "text": [str], "state": {"given": int}}
_NOTHING: Mapping[str, Any] = {"position": 0, "text": [], "state": None}
_INT64 = range(-(2**63), 2**63)


class _Lines:
    """Ends lines by a line feed. Where the module csv does, it quotes no carriage return."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        self._stream.write(text.removesuffix("\r\n") + "\n")


class Rows:
    """Where recommendations go; parquet is made of csv at the end."""

    def __init__(
        self,
        stream: TextIO,
        format_: str,
        whose: str = USER,
        *,
        titles: bool = False,
        saved: Mapping[str, Any] = _NOTHING,
        state_file: Path | None = None,
        key: str | None = None,
    ) -> None:
        """Begin with what was saved, and save in this file from now on, where there is a key."""
        what = (ITEM, "score", "rank", "source") if whose == USER else (SIMILAR, "score", "rank")
        self.columns = (whose, *what, *(["title"] if titles else []))
        self.state: Mapping[str, Any] | None = saved["state"]
        """The last one saved by the interrupted command that this one goes on with."""
        self.text = set(saved["text"])
        """Columns with an id that is no integer of 64 bits, for parquet."""
        self._stream, self._format = stream, format_
        self._csv = csv.writer(_Lines(stream))
        self._lacks_header = format_ != "jsonl" and not saved["position"]
        self._state_file, self._key = state_file, key

    def add(self, user: Id, found: Recommended) -> None:
        """Write one user's, best first: a row for each item, or one line of JSON."""
        whose, what = self.columns[:2]
        # str of a float32: the fewest digits that give the same number again.
        scores = list(map(str, found.scores))
        if self._format == "jsonl":
            record: dict[str, Any] = {
                whose: user,
                "items": found.items,
                "scores": list(map(float, scores)),
            }
            record |= {"source": found.source} if "source" in self.columns else {}
            record |= {"titles": found.titles or []} if "title" in self.columns else {}
            self._stream.write(json.dumps(record, ensure_ascii=False) + "\n")
            return
        self._write_header()
        parquet = self._format == "parquet"
        for column, ids in ((whose, [user]), (what, found.items)) if parquet else ():
            if not all(isinstance(one, int) and one in _INT64 for one in ids):
                self.text.add(column)
        columns: list[Iterable[Any]] = [repeat(user), found.items, scores, count(1)]
        columns += [repeat(found.source)] if "source" in self.columns else []
        columns += [found.titles or []] if "title" in self.columns else []
        self._csv.writerows(zip(*columns, strict=False))  # some have no end

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
            self._csv.writerow(self.columns)
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
    """Open a file, or standard output, for rows, by default in the format that its name says.

    `force` replaces a file that is there, and begins anew what was interrupted. The `key` is all
    that decides about the rows: an interrupted command with the same is gone on with, if there is
    any. `whose` is the column of those whose items they are: users, or items.
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
        saved: Mapping[str, Any] | None = None
        with suppress(InputError, FileNotFoundError):
            saved = read_json(state_file, _SAVED)
        if saved is None or force or saved["key"] != key:
            if saved is not None and saved["position"] and not force:
                say("beginning anew: what was interrupted here had other settings")
            saved = _NOTHING
            empty(partial.parent)
        text = partial.with_name("rows.csv") if chosen == "parquet" else partial
        with text.open("a", encoding="utf-8", newline="") as stream:
            if stream.tell() < saved["position"]:
                raise InputError(f"{text} was altered; begin anew with the same command")
            stream.truncate(saved["position"])
            resumed: Any = {"saved": saved, "state_file": state_file, "key": key}
            rows = Rows(stream, chosen, whose, titles=titles, **resumed)
            try:
                yield rows
                rows.finish()
                if chosen == "parquet":
                    _write_parquet(text, partial, rows)
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
        with needing("prepare", "writing parquet", ", or write .csv or .jsonl"):
            import polars  # noqa: F401 - rather now than at the end
    return chosen


def _write_parquet(text: Path, path: Path, rows: Rows) -> None:
    """Turn csv into parquet; ids are integers where all of a column are."""
    import polars as pl

    ids = {name: pl.String if name in rows.text else pl.Int64 for name in rows.columns[:2]}
    kinds = dict.fromkeys(rows.columns, pl.String) | ids | {"score": pl.Float32, "rank": pl.Int32}
    scan = pl.scan_csv(text, schema=kinds, glob=False)
    try:
        scan.with_columns(pl.col(pl.String).fill_null("")).sink_parquet(path)
    except pl.exceptions.PolarsError as error:
        raise OSError(errno.EIO, str(error)) from error
