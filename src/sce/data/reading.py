"""Files of any known format, or data frames, to one sorted and encoded log.

Only the columns that matter are read, as a stream. A csv file does not say what its values are, so
ids are taken as text unless every one of them is an integer written as integers are written: 007
and 7 stay two ids, and so do 2409.10 and 2409.1.
"""

import glob
import json
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import polars as pl
from polars import selectors

from sce.data import faults, values
from sce.data.columns import (
    ITEM,
    NO_TIME,
    TIME,
    USER,
    AnyColumns,
    Columns,
    ItemColumn,
    UnitName,
    find_columns,
)
from sce.data.formats import COMPRESSIONS, FORMATS, Format, choose_format, find_files
from sce.data.frames import open_frame
from sce.data.interactions import Interactions
from sce.data.values import Chosen, Table
from sce.errors import InputError, checked, named
from sce.memory import REMEDY, require_memory
from sce.units import plural, show_size

_NAMES = (USER, ITEM, TIME)
_REST = "\x00rest"  # what a csv row holds beyond its columns
_UNREADABLE = (
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,
    json.JSONDecodeError,
    RecursionError,
    OSError,
)
_SAMPLE = 1000  # rows that tell whether a csv column looks like integers


@checked
def read_interactions(
    source: Any,
    *,
    format: str = "auto",  # noqa: A002 - the name of the command's option
    user_column: str | None = None,
    item_column: str | None = None,
    time_column: str | None = None,
    time_unit: UnitName | None = None,
    order: Literal["time", "rows"] = "time",
    drop_incomplete: bool = False,
    report: Callable[[str], None] | None = None,
) -> Interactions:
    """Read a log from csv, tsv, jsonl or parquet files, plain or compressed, or from a data frame.

    `source` is a file or a pattern such as `logs/*.csv.gz`, or several, which together are one log;
    or a data frame of pandas, polars or another library that narwhals knows. `report` is called
    with a line of text at each step. The other options are those of `sce.PrepareOptions`.
    """
    report = report or (lambda text: None)
    given, time_unit = wanted_columns(user_column, item_column, time_column, time_unit, order)
    tables: list[Table] = []
    of_files = isinstance(source, str | Path | Sequence)
    if of_files:
        files = find_files(source)
        for number, path in enumerate(files, 1):
            of_all = f" ({number} of {len(files)})" if len(files) > 1 else ""
            report(f"reading {path}, {show_size(path.stat().st_size)}{of_all}")
            table = read_file(path, choose_format(path, format), given, drop_incomplete)
            if table.dropped:
                report(f"{path}: left out {table.dropped:,} rows without user, item or time")
            tables.append(table)
    else:
        tables.append(read_frame(open_frame(source), given, drop_incomplete))
    rows, unsure = values.concatenate(tables, time_unit)
    for name, role in unsure.items():
        values.check_fractions(role, rows[name])
    dropped = sum(table.dropped for table in tables)
    del tables
    doing = f"encoding the ids of {rows.height:,} rows"
    needed = rows.height * (90 if pl.String in rows.dtypes else 60)
    require_memory(needed, doing, _in_parts() if of_files else REMEDY)
    report(doing)
    ticks = values.to_ticks(rows[TIME], time_unit)
    with ThreadPoolExecutor(2) as pool:
        (users, user_ids), (items, item_ids) = pool.map(values.encode_ids, (rows[USER], rows[ITEM]))
    del rows  # else the log would be in memory twice while it is sorted
    report(f"sorting {len(users):,} rows by user{'' if order == 'rows' else ' and time'}")
    users, items, times = values.sort_rows(users, items, ticks.values)
    return Interactions(users, items, ticks.to_microseconds(times), user_ids, item_ids, dropped)


def wanted_columns(
    user_column: str | None = None,
    item_column: str | None = None,
    time_column: str | None = None,
    time_unit: UnitName | None = None,
    order: str = "time",
) -> tuple[Columns, UnitName | None]:
    """Columns to look for, and the unit of times: of rows in order there is no column."""
    if order == "time":
        return Columns(user_column, item_column, time_column), time_unit
    if time_column or time_unit:
        raise InputError(
            f"{named('order', 'rows')} reads no times; leave {named('time_column')}, "
            f"{named('time_unit')} out"
        )
    return Columns(user_column, item_column, NO_TIME), "us"


def read_item_column(path: Path, name: str | None = None) -> list[int | str]:
    """Items of a file that has a column of them, perhaps of this name."""
    [file] = find_files(path)
    table = read_file(file, choose_format(file), ItemColumn(name), drop_incomplete=True)
    return table.rows[USER].to_list()  # the first column


def read_file(path: Path, fmt: Format, given: AnyColumns, drop_incomplete: bool) -> Table:
    """Rows of one file; of a file of titles, its items are USER and its titles ITEM."""
    wanted = given.or_else(fmt.columns) if isinstance(given, Columns) else given
    readers = {"csv": _read_csv, "jsonl": _read_jsonl, "parquet": _read_parquet}
    with reading(path, fmt):
        _check_memory(path, fmt, log=isinstance(given, Columns))
        columns, raw = readers[fmt.layout](path, fmt, wanted)
    return complete_rows(path, fmt, columns, raw, drop_incomplete)


@contextmanager
def reading(path: Path, fmt: Format) -> Iterator[None]:
    """Refuse an empty file; explain why one cannot be read."""
    if not path.stat().st_size:
        raise InputError(f"{path}: the file is empty (0 bytes)")
    faults.check_compression(path)
    try:
        yield
    except pl.exceptions.NoDataError as error:
        raise InputError(f"{path}: the file is empty") from error
    except _UNREADABLE as error:
        raise faults.explain(path, fmt, error) from error


def _check_memory(path: Path, fmt: Format, *, log: bool) -> None:
    """Refuse a file of more rows than memory holds, by its size and the length of its lines."""
    if fmt.layout == "parquet":
        rows, length = pl.scan_parquet(path, glob=False).select(pl.len()).collect().item(), 24.0
    else:
        lines = faults.first_lines(path)
        length = max(1.0, sum(map(len, lines)) / max(1, len(lines)))
        packed = path.suffix.lower() in COMPRESSIONS
        rows = path.stat().st_size * (4 if packed else 1) / length
    needed = rows * min(length, 40) * 3.5  # 20 M rows take 1.6 to 3 GB
    doing, remedy = f"preparing {rows:,.0f} rows of {path}", _in_parts() if log else REMEDY
    require_memory(needed, doing, remedy)


def _in_parts() -> str:
    return f"read it in parts with {named('memory', 'SIZE')}, {REMEDY}"


def read_frame(table: Any, given: Columns, drop_incomplete: bool | None = None) -> Table:
    """Rows of a data frame that was opened, treated as those of a parquet file."""
    where = Path("the data frame")
    columns = find_columns(table.columns, given, where)
    raw = {}
    for name, column in zip(_NAMES, columns, strict=False):
        cells = table[column]
        if cells.implementation.is_polars():
            raw[name] = cells.to_native()
            continue
        numbers = cells.dtype.is_numeric() and not cells.null_count()
        try:
            if cells.dtype == "Datetime" or numbers:
                raw[name] = pl.Series(cells.to_numpy())
            else:  # without pyarrow, polars reads nothing else of pandas
                listed = cells.to_list()
                kinds = set(map(type, listed))
                if bool in kinds and not kinds.isdisjoint((int, float)):  # it would be a number too
                    raise ValueError("True or False among numbers")
                pairs = zip(listed, cells.is_null().to_list(), strict=True)
                raw[name] = pl.Series([None if missing else value for value, missing in pairs])
        except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(f"{where}, column {column!r}: {reason}") from error
    return complete_rows(where, FORMATS["parquet"], columns, pl.DataFrame(raw), drop_incomplete)


def seconds_of(rows: pl.DataFrame, unit: UnitName | None = None) -> list[int]:
    """Times of rows that were read, in seconds, rounded down; the unit is that of numbers."""
    numbers = rows[TIME].dtype.is_numeric()
    ticks = values.to_ticks(rows[TIME], unit if numbers else None)
    found: list[int] = (ticks.to_microseconds(ticks.values) // 10**6).tolist()
    return found


def complete_rows(
    path: Path,
    fmt: Format,
    columns: Chosen,
    raw: pl.DataFrame,
    drop_incomplete: bool | None,
    first_row: int | None = None,
) -> Table:
    """Ids and times of raw values; rows that lack one are refused or dropped.

    These are all rows of the file, or some, of which the first has a number. None for
    `drop_incomplete`: nobody can choose it.
    """
    read = []
    parsers = (values.read_ids, values.read_ids, values.read_times)
    for name, column, parse in zip(_NAMES, columns, parsers, strict=False):
        try:
            read.append(parse(raw[name]).alias(name))
        except TypeError as error:
            raise InputError(f"{path}, column {column!r}: {error}") from error
    rows = pl.DataFrame(read)
    binary = (name for name in (USER, ITEM) if raw.schema.get(name) == pl.Binary)
    text = {name: values.is_text(raw[name]) for name in binary}
    missing = rows.select(pl.any_horizontal(pl.all().is_null())).to_series()
    if not missing.any():
        return Table(path, fmt, columns, rows, 0, text)
    kept = rows.drop_nulls()
    table = Table(path, fmt, columns, kept, rows.height - kept.height, text)
    if fmt.layout == "csv":
        # polars takes a blank line for a row without any value; to people it is nothing.
        missing &= ~raw.select(pl.all_horizontal(pl.all().is_null())).to_series()
    bad = missing.arg_true()
    if drop_incomplete or fmt.drop_incomplete or not len(bad):
        return table
    place = rows.row(bad[0]).index(None)
    value, column = raw.row(bad[0])[place], columns[place]
    how = ""
    if _NAMES[place] == TIME and value not in (None, ""):
        fault = f"cannot read {value!r} in column {column!r} as a time"
        how = "; times are all numbers, such as seconds since 1970, or all like 2020-03-31 23:59:59"
    else:
        fault = f"no {Columns._fields[place]}, column {column!r} is empty"
    least = "" if first_row is None else "at least "
    raise InputError(
        f"{path}, {faults.place_of_row(path, fmt, (first_row or 0) + bad[0])}: {fault}; "
        f"{least}{plural(len(bad), 'row')} of it must be mended or removed"
        + (
            ""
            if drop_incomplete is None or len(bad) > kept.height  # hardly meant
            else f", or left out with {named('drop_incomplete', True)}"
        )
        + how
    )


def scan_csv(path: Path, fmt: Format, wanted: AnyColumns) -> tuple[Chosen, pl.LazyFrame]:
    """Columns of a csv file as text, and the rest of each line."""

    def scan(schema: dict[str, type[pl.String]] | None) -> pl.LazyFrame:
        return pl.scan_csv(
            path,
            has_header=fmt.fields is None,
            separator=fmt.separator,
            quote_char=fmt.quote,
            infer_schema=False,
            schema=schema,
            missing_columns="insert",
            glob=False,
        )

    names = scan(None).collect_schema().names()
    if fmt.fields is not None:
        if len(names) != len(fmt.fields):
            raise InputError(
                f"{path}: not the format {fmt.name}: its first line has {len(names)} fields where "
                f"{len(fmt.fields)} are expected"
            )
        names = list(fmt.fields)
    columns = find_columns(names, wanted, path)
    for column in columns:
        if f"{column}_duplicated_0" in names:  # so polars calls it
            raise InputError(f"{path}: two columns are called {column!r}; rename or remove one")
    # Reading only some columns, polars overlooks what lies beyond the last; one more column does
    # not. A row with too many fields is a row whose values stand in the wrong columns.
    lines = scan(dict.fromkeys([*names, _REST], pl.String))
    return columns, _select(lines, columns, pl.col(_REST).is_not_null())


def _read_csv(path: Path, fmt: Format, wanted: AnyColumns) -> tuple[Chosen, pl.DataFrame]:
    columns, text = scan_csv(path, fmt, wanted)
    sample = text.head(_SAMPLE).collect(engine="streaming")
    # Parsed while the file is still being read where the first rows are integers; should a later
    # one not be, everything is read once more, as text.
    known = _NAMES[: len(columns)]
    quick = [n for n in known if sample.select(_plain_integer(n)).to_series().null_count() == 0]
    frame = text.with_columns(_plain_integer(n) for n in quick).collect(engine="streaming")
    if any(frame[name].null_count() for name in quick):
        frame = text.collect(engine="streaming")
    return columns, type_csv(frame)


def type_csv(frame: pl.DataFrame, text: Container[str] = ()) -> pl.DataFrame:
    """Lines of `scan_csv` with integers for ids, if all are, in columns other than `text`."""
    if frame.drop_in_place(_REST).any():
        raise pl.exceptions.ComputeError("some row has more fields than columns")
    return frame.with_columns(
        values.integers_if_all(frame[name], fractions=True)
        for name in (USER, ITEM)
        if frame.schema.get(name) == pl.String and name not in text
    )


def _plain_integer(name: str) -> pl.Expr:
    """Text as Int64, null unless it is 0 or begins with 1 to 9: a fast and sufficient test."""
    text = pl.col(name)
    number = text.cast(pl.Int64, strict=False)
    return pl.when((text >= "1") | (text == "0")).then(number).alias(name)


def _read_jsonl(path: Path, fmt: Format, wanted: AnyColumns) -> tuple[Chosen, pl.DataFrame]:
    first = faults.first_objects(path)
    columns = find_columns([*dict.fromkeys(name for one in first for name in one)], wanted, path)
    # As text, since later lines may well have other types than the first.
    schema = dict.fromkeys(columns, pl.String)
    source: str | bytes = glob.escape(str(path))
    with faults.open_log(path, 1) as file:
        marked = file.tell() > 0  # which polars takes for a fault
    if marked:
        require_memory(path.stat().st_size, f"reading {path}, which has a byte order mark,")
        with faults.open_log(path) as file:
            source = file.read()
    with ThreadPoolExecutor(1) as pool:
        counting = pool.submit(faults.count_names, path, columns)
        frame = _select(pl.scan_ndjson(source, schema=schema), columns).collect(engine="streaming")
    known = [frame[name].count() for name in frame.columns]
    if any(count > least for count, least in zip(counting.result(), known, strict=True)):
        faults.check_json_keys(path, columns)  # else the first would count, silently
    for name, column in zip((USER, ITEM), columns, strict=False):
        kinds = {type(one.get(column)) for one in first}
        # A list, an object, a truth value, a fraction, half a character: or text that looks so.
        odd = r"\x00|^([\[{]|true$|false$"
        if numbers := not kinds.isdisjoint((int, float)):
            odd += rf"|-?\d+(\.|e)|-?\d{{{16 if float in kinds else 20},}}"
        if frame[name].str.contains(odd + ")").any():
            faults.check_json_ids(path, column)
        if numbers:
            frame = frame.with_columns(values.integers_if_all(frame[name]))
    return columns, frame


def scan_parquet(path: Path, fmt: Format, wanted: AnyColumns) -> tuple[Chosen, pl.LazyFrame]:
    """Columns of a Parquet file."""
    scan = pl.scan_parquet(path, glob=False)
    columns = find_columns(scan.collect_schema().names(), wanted, path)
    return columns, _select(scan, columns)


def _read_parquet(path: Path, fmt: Format, wanted: AnyColumns) -> tuple[Chosen, pl.DataFrame]:
    columns, lines = scan_parquet(path, fmt, wanted)
    return columns, lines.collect(engine="streaming")


def _select(table: pl.LazyFrame, columns: Chosen, *more: pl.Expr) -> pl.LazyFrame:
    return table.select(
        # By name and no pattern: pl.col would take ^name$ for a regular expression.
        *(
            selectors.by_name(column).as_expr().alias(name)
            for column, name in zip(columns, _NAMES, strict=False)
        ),
        *more,
    )
