"""Tables on the console, and recommendations as csv, jsonl or parquet."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import count, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from rich import box
from rich.console import Console
from rich.table import Table

from sce.data.columns import ITEM, USER
from sce.data.storage import atomic_file
from sce.errors import InputError
from sce.progress import PipedConsole

if TYPE_CHECKING:
    from sce.recommend import Id, Recommended

Format = Literal["csv", "jsonl", "parquet"]
COLUMNS = (USER, ITEM, "score", "rank")

_ROWS_AT_ONCE = 1 << 18  # of parquet, held in memory
_INT64 = range(-(2**63), 2**63)


def output_console() -> Console:
    """A console for what is meant to be read or piped on: plain, and unwrapped in a pipe."""
    console = PipedConsole(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a pipe has no edge to wrap at
    return console


def show_lines(lines: Iterable[tuple[str, str]], width: int) -> None:
    """Show facts by name, the names in a column of so many characters."""
    console = output_console()
    for name, value in lines:
        console.print(f"{name:<{width}}{value}", soft_wrap=True, markup=False)


def plain_table(*headings: str) -> Table:
    """A table without edges; columns are added, or named here and aligned to the left."""
    return Table(*headings, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


def show_metrics(rows: Mapping[str, Mapping[str, float]], *, title: str) -> None:
    """Compare a model with popularity, in one line, and then in a table of metric and depth."""
    names = list(next(iter(rows.values())))  # such as "ndcg@10"
    depths = [name.partition("@")[2] for name in names if name.startswith("ndcg@")]
    model, popularity = rows.values()
    name = f"ndcg@{'10' if '10' in depths else depths[-1]}"
    value, other = model[name], popularity[name]
    times = f": {value / other:.2f} times as much" if other else ""
    worse = ", worse than popularity" if value < other else ""
    table = plain_table(title, "")
    for depth in depths:
        table.add_column(f"@{depth}", justify="right", no_wrap=True)
    for metric in dict.fromkeys(name.partition("@")[0] for name in names):
        for number, (ranker, values) in enumerate(rows.items()):
            cells = [f"{values[f'{metric}@{depth}']:.4f}" for depth in depths]
            table.add_row("" if number else metric, ranker, *cells)
        table.add_section()
    console = output_console()
    console.print(
        f"{name.upper()} {value:.4f} against {other:.4f} of popularity{times}{worse}\n",
        soft_wrap=True,
        markup=False,
    )
    console.print(table)
    console.print()


class Rows:
    """Where recommendations go."""

    def add(self, user: "Id", found: "Recommended") -> None:
        """Write one user's, best first."""
        raise NotImplementedError

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
    if out is None:
        if format_ == "parquet":
            raise InputError("parquet is written to a file: name one with --out FILE.parquet")
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # whatever the terminal shows
        yield from _finished(_TextRows(sys.stdout, format_ or "csv"))
        sys.stdout.flush()
        return
    chosen = _choose(out, format_, force=force)
    with atomic_file(out) as partial:
        if chosen == "parquet":
            yield from _finished(_ParquetRows(partial))
        else:
            with partial.open("x", encoding="utf-8", newline="") as stream:
                yield from _finished(_TextRows(stream, chosen))


def _finished(rows: Rows) -> Iterator[Rows]:
    yield rows
    rows.finish()


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
    def __init__(self, stream: TextIO, format_: str) -> None:
        self._stream, self._writer = stream, csv.writer(stream, lineterminator="\n")
        self._is_csv = self._lacks_header = format_ == "csv"

    def add(self, user: "Id", found: "Recommended") -> None:
        self.finish()
        # str of a float32: the fewest digits that give the same number again.
        rows = zip(repeat(user), found.items, map(str, found.scores), count(1))
        if self._is_csv:
            self._writer.writerows(rows)
            return
        for user, item, score, rank in rows:
            ids = json.dumps({USER: user, ITEM: item}, ensure_ascii=False).removesuffix("}")
            self._stream.write(f'{ids}, "score": {score}, "rank": {rank}}}\n')

    def finish(self) -> None:
        # The header comes with the first row: where nothing can be recommended, nothing is printed.
        if self._lacks_header:
            self._writer.writerow(COLUMNS)
            self._lacks_header = False


class _ParquetRows(Rows):
    """A parquet file, put together from parts of bounded size.

    Ids are integers in the file when all of them are, and text otherwise.
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
        self._parts: list[Path] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}

    def add(self, user: "Id", found: "Recommended") -> None:
        values = ([user] * len(found), found.items, found.scores.tolist(), found.ranks.tolist())
        for column, more in zip(self._columns.values(), values, strict=True):
            column.extend(more)
        if len(self._columns["rank"]) >= _ROWS_AT_ONCE:
            self._write_part()

    def finish(self) -> None:
        self._write_part()
        pl = self._polars
        parts = [pl.scan_parquet(part) for part in self._parts]
        for name in (USER, ITEM):
            if len({part.collect_schema()[name] for part in parts}) > 1:
                parts = [part.with_columns(pl.col(name).cast(pl.String)) for part in parts]
        try:
            pl.concat(parts).sink_parquet(self._path)
        except pl.exceptions.PolarsError as error:
            raise InputError(f"cannot write parquet: {error}") from error

    def _write_part(self) -> None:
        pl = self._polars
        schema = {"score": pl.Float32, "rank": pl.Int32}
        for name in (USER, ITEM):
            ids = self._columns[name]
            schema[name] = pl.Int64
            if not all(isinstance(one, int) and one in _INT64 for one in ids):
                self._columns[name], schema[name] = [str(one) for one in ids], pl.String
        self._parts.append(self._path.with_name(f"{self._path.name}-{len(self._parts)}"))
        frame = pl.DataFrame(self._columns, schema_overrides=schema)
        frame.write_parquet(self._parts[-1])
        self._columns = {name: [] for name in COLUMNS}
