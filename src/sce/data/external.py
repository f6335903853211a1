"""Logs beyond memory: an external sort by ranges of users.

The files are read twice, in batches. The first time finds the types of their values, all items and
a sample of users, which cuts the users into ranges of about equally many rows. The second time
writes the rows of each range apart. Sorted one by one, these parts follow one another in the order
of the whole log. What remains in memory is one batch or one part, and what each item takes.
"""

import itertools
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl

from sce.data.columns import ITEM, TIME, USER, Columns
from sce.data.faults import explain
from sce.data.formats import Format, choose_format, find_files
from sce.data.interactions import Interactions
from sce.data.parts import DiskList, stored_log
from sce.data.reading import (
    UNREADABLE,
    complete_rows,
    scan_csv,
    scan_parquet,
    type_csv,
    wanted_columns,
)
from sce.data.tables import Table, check_fractions, concatenate
from sce.data.values import (
    Ticks,
    UnitName,
    encode_ids,
    fit_nanoseconds,
    guess_unit,
    sort_rows,
    to_ticks,
)
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, named
from sce.units import plural, show_size

_BATCH_ROWS = 1 << 22  # at most
_BATCH_BYTES = 1000  # of the memory that is allowed, for each row of a batch
_SAMPLE = 1 << 18  # users, at most twice as many
_BASE_BYTES = 500 << 20  # the process with its libraries, and the batches under way
_ITEM_BYTES, _ROW_BYTES = 100, 110  # in memory, for each item and each row of a part
_LEAST_ROWS = 1 << 20  # of a part
_DISK_BYTES = 40  # beside the output, for each row of the log
_TABLE_PER_ITEM = 8  # integers are looked up in a table of their range if it is not much longer
_CODE, _PART = "\x00code", "\x00part"


class _File(NamedTuple):
    path: Path
    format: Format
    wanted: Columns
    drop_incomplete: bool
    batch_rows: int


class _Survey(NamedTuple):
    """What must be known of a file before its rows can be stored."""

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


def read_parts(
    source: Any,
    directory: Path,
    memory: int,
    *,
    format: str = "auto",  # noqa: A002 - the name of the command's option
    user_column: str | None = None,
    item_column: str | None = None,
    time_column: str | None = None,
    time_unit: UnitName | None = None,
    order: Literal["time", "rows"] = "time",
    drop_incomplete: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[DiskList[Interactions], int]:
    """Read a log as `read_interactions` does, into parts that are stored in a directory.

    Args:
        source: Files or patterns, of csv or Parquet.
        directory: An empty directory.
        memory: Bytes that this may take, about.
        format: This and the others as in `sce.data.prepare.PrepareOptions`.
        user_column: Likewise.
        item_column: Likewise.
        time_column: Likewise.
        time_unit: Likewise.
        order: Likewise.
        drop_incomplete: Likewise.
        report: Called with a line of text at each step, for showing progress.

    Returns:
        The parts, and how many rows were left out as they lack a user, item or time.
    """
    if not isinstance(source, str | Path | Sequence):
        raise InputError(f"{named('memory')} is for files; a data frame is in memory already")
    columns = Columns(user_column, item_column, time_column)
    columns, time_unit = wanted_columns(columns, time_unit, order)
    batch_rows = max(1, min(_BATCH_ROWS, memory // _BATCH_BYTES))
    files = []
    for path in find_files(source):
        fmt = choose_format(path, format)
        wanted = columns.or_else(fmt.columns)
        files.append(_File(path, fmt, wanted, drop_incomplete, batch_rows))
    surveys: list[_Survey] = []
    sample, items = _Sample(), _Distinct()
    for number, file in enumerate(files, 1):
        _tell(report, "reading", file, number, len(files))
        survey, of_file = _survey(file, sample)
        items.add(of_file)
        surveys.append(survey)
    ends = concatenate([survey.ends for survey in surveys], time_unit)
    types = {name: ends.schema[name] for name in (USER, ITEM, TIME)}
    to_ticks(ends[TIME], time_unit)  # refuses times out of range
    kind = types[TIME]
    unit = kind.time_unit if isinstance(kind, pl.Datetime) else time_unit or guess_unit(ends[TIME])

    distinct = items.take(types[ITEM]).sort()
    users = sample.take(types[USER]).sort()
    rows = sum(survey.rows for survey in surveys)
    text = [name for name in (USER, ITEM) if types[name] == pl.String]
    # Where ids have no type of their own, or files have several: is 12.0 another id than 12?
    unsure = [
        name
        for name in text
        if any(file.format.layout == "csv" for file in files)
        or len({survey.ends.rows.schema[name] for survey in surveys if survey.rows}) > 1
    ]
    if ITEM in unsure:
        check_fractions("item", distinct)
    n_parts = _count_parts(rows, users, distinct, memory)
    needed = rows * (_DISK_BYTES + _mean_bytes(users))
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise InputError(
            f"sorting {rows:,} rows in parts needs about {show_size(needed)} of disk beside the "
            f"output, and {show_size(free)} is free there; free some, or write elsewhere"
        )
    places = [len(users) * number // n_parts for number in range(1, n_parts)]
    bounds = users.gather(places).unique(maintain_order=True)
    stored = directory / "rows"
    stored.mkdir()
    encode = _encoder(distinct)
    done, pending = 0, []
    for number, (file, survey) in enumerate(zip(files, surveys, strict=True), 1):
        _tell(report, "dividing", file, number, len(files))
        for table in _batches(file, survey.text):
            if table.rows.height:
                pending.append(_encode(table.rows, survey, types, encode, unit, done))
                done += table.rows.height
            if sum(batch.height for batch in pending) >= batch_rows:
                _store(pl.concat(pending), bounds, stored, done)
                pending.clear()
    if pending:
        _store(pl.concat(pending), bounds, stored, done)
    item_ids = encode_ids(distinct)[1]
    del distinct, encode
    log = stored_log(directory / "log", "string" if USER in text else "integer", item_ids)
    ticks_unit = "us" if kind == pl.Float64 else unit
    for part in range(len(bounds) + 1):
        if paths := sorted(stored.glob(f"{part:06}-*")):
            report(f"sorting part {part + 1} of {len(bounds) + 1}")
            log.append(_sort(paths, ticks_unit, item_ids))
    if USER in unsure:
        _check_user_fractions(log)
    return log, sum(survey.ends.dropped for survey in surveys)


def _tell(report: Callable[[str], None], doing: str, file: _File, number: int, count: int) -> None:
    """Report a file, and of many about every twentieth part of them."""
    if (number - 1) % math.ceil(count / 20) == 0:
        of_all = f" ({number} of {count})" if count > 1 else ""
        report(f"{doing} {file.path}, {show_size(file.path.stat().st_size)}{of_all}")


def _batches(file: _File, text: frozenset[str] = frozenset()) -> Iterator[Table]:
    """Rows of a file in order, some at a time; ids of the columns `text` stay text."""
    path, fmt = file.path, file.format
    if fmt.layout == "jsonl":
        raise InputError(
            f"{path}: jsonl is read whole, and not within {named('memory')}; convert it to "
            "Parquet or csv first"
        )
    if not path.stat().st_size:
        raise InputError(f"{path}: the file is empty (0 bytes)")
    try:
        scan = scan_csv if fmt.layout == "csv" else scan_parquet
        columns, lines = scan(path, fmt, file.wanted)
        row = 0
        batches = lines.collect_batches(chunk_size=file.batch_rows, engine="streaming")
        # First none at all: of an empty file the types are known too.
        for raw in itertools.chain([lines.head(0).collect()], batches):
            typed = type_csv(raw, text) if fmt.layout == "csv" else _as_text(path, raw)
            yield complete_rows(path, fmt, columns, typed, file.drop_incomplete, first_row=row)
            row += raw.height
    except pl.exceptions.NoDataError as error:
        raise InputError(f"{path}: the file is empty") from error
    except UNREADABLE as error:
        raise explain(path, fmt, error) from error


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


def _survey(file: _File, sample: "_Sample") -> tuple[_Survey, pl.Series]:
    """Types of a file, and its items; adds to the sample of users."""
    text: frozenset[str] = frozenset()
    while True:
        kinds: dict[str, set[pl.DataType]] = {USER: set(), ITEM: set(), TIME: set()}
        items, rows, dropped = _Distinct(), 0, 0
        ends: list[pl.DataFrame] = []
        for table in _batches(file, text):
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
    return _Survey(summary, text, rows), items.take(found.schema[ITEM])


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


def _encode(
    rows: pl.DataFrame,
    survey: _Survey,
    types: Mapping[str, pl.DataType],
    encode: Callable[[pl.Series], pl.Series],
    unit: UnitName,
    first_row: int,
) -> pl.DataFrame:
    """Users, codes of items, and ticks."""
    if TIME in rows.columns:
        times = rows[TIME].cast(survey.ends.rows.schema[TIME]).cast(types[TIME]).to_physical()
    else:
        times = pl.int_range(first_row, first_row + rows.height, dtype=pl.Int64, eager=True)
    columns = {USER: rows[USER].cast(types[USER]), ITEM: encode(rows[ITEM].cast(types[ITEM]))}
    return pl.DataFrame(columns | {TIME: to_ticks(times, unit).values})


def _store(batch: pl.DataFrame, bounds: pl.Series, directory: Path, number: int) -> None:
    """Write a batch to files, one for each range of users."""
    part = bounds.search_sorted(batch[USER], side="right").alias(_PART)
    parts = batch.with_columns(part).partition_by(_PART, as_dict=True, include_key=False)
    for (place,), rows in parts.items():
        with (directory / f"{place:06}-{number:015}").open("wb") as file:
            rows.write_ipc(file)


def _encoder(distinct: pl.Series) -> Callable[[pl.Series], pl.Series]:
    """Codes of ids that are all among these: places in the sorted list."""
    codes = pl.Series(_CODE, np.arange(len(distinct), dtype=np.int32))
    if distinct.dtype == pl.Int64 and distinct[-1] - distinct[0] < _TABLE_PER_ITEM * len(distinct):
        table = np.zeros(distinct[-1] - distinct[0] + 1, np.int32)
        table[distinct.to_numpy() - distinct[0]] = codes
        return lambda ids: pl.Series(table[ids.to_numpy() - distinct[0]])
    both = pl.DataFrame({ITEM: distinct, _CODE: codes})
    join = partial(pl.DataFrame.join, other=both, on=ITEM, how="left", maintain_order="left")
    return lambda ids: join(ids.to_frame(ITEM))[_CODE]


def _sort(paths: Sequence[Path], unit: UnitName, item_ids: Vocabulary) -> Interactions:
    """Rows of one range of users, in their order."""
    rows = pl.concat([pl.read_ipc(path) for path in paths])
    for path in paths:
        path.unlink()
    users, user_ids = encode_ids(rows.drop_in_place(USER))
    users, items, times = sort_rows(users, rows[ITEM].to_numpy(), rows[TIME].to_numpy())
    times = Ticks(times, unit).to_microseconds(times)
    return Interactions(users, items, times, user_ids, item_ids)


def _count_parts(rows: int, users: pl.Series, items: pl.Series, memory: int) -> int:
    """Number of parts, each of which fits into memory beside what all items take."""
    fixed = _BASE_BYTES + len(items) * (_ITEM_BYTES + 4 * _mean_bytes(items))
    per_row = _ROW_BYTES + 3 * _mean_bytes(users)
    least = fixed + _LEAST_ROWS * per_row
    if memory < least:
        raise InputError(
            f"{plural(len(items), 'item')} and the program itself take "
            f"{show_size(least)}; give {named('memory')} at least that"
        )
    return math.ceil(rows * per_row / (memory - fixed))


def _mean_bytes(ids: pl.Series) -> float:
    """Mean length of ids that are text; 0 for integers."""
    return float(ids.str.len_bytes().mean()) if ids.dtype == pl.String else 0.0  # type: ignore[arg-type]


def _check_user_fractions(log: DiskList[Interactions]) -> None:
    """`check_fractions` of the users, of whom no list has all."""
    fractions: list[str] = []
    for part in log:
        ids = part.user_ids
        assert ids.offsets is not None
        ends = ids.offsets[1:]
        zeros = (ids.values[ends - 1] == ord("0")) & (ids.values[ends - 2] == ord("."))
        fractions += map(str, ids.decode(np.flatnonzero(zeros)))
    whole = [fraction.removesuffix(".0") for fraction in fractions]
    for part in log if whole else ():
        found = np.flatnonzero(part.user_ids.lookup(whole) >= 0)
        both = [text for place in found for text in (whole[place], fractions[place])]
        check_fractions("user", pl.Series(both, dtype=pl.String))


class _Distinct:
    """Ids, each once; of several types, until it is known of which all are."""

    def __init__(self) -> None:
        self._found: dict[pl.DataType, list[pl.Series]] = {}

    def add(self, ids: pl.Series) -> None:
        found = self._found.setdefault(ids.dtype, [])
        found.append(ids.unique())
        if sum(map(len, found)) > 2 * len(found[0]) + _BATCH_ROWS:
            found[:] = [pl.concat(found).unique()]

    def take(self, kind: pl.DataType) -> pl.Series:
        found = [ids.cast(kind) for of_kind in self._found.values() for ids in of_kind]
        return pl.concat([pl.Series(ITEM, [], kind), *found]).unique()


class _Sample:
    """Users of rows chosen at random, each with the same chance."""

    def __init__(self) -> None:
        self._users: list[pl.Series] = []
        self._share, self._random = 1.0, np.random.default_rng(0)

    def add(self, users: pl.Series) -> None:
        self._users.append(self._draw(users, self._share))
        while sum(map(len, self._users)) > 2 * _SAMPLE:
            self._users = [self._draw(users, 0.5) for users in self._users]
            self._share /= 2

    def take(self, kind: pl.DataType) -> pl.Series:
        return pl.concat([users.cast(kind) for users in self._users])

    def _draw(self, users: pl.Series, share: float) -> pl.Series:
        return users.sample(self._random.binomial(len(users), share), seed=0)
