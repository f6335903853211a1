"""Logs beyond memory: an external sort by ranges of users.

The files are read twice, in batches. The first time finds the types of their values, all items and
a sample of users, which cuts the users into ranges of about equally many rows. The second time
writes the rows of each range apart. Sorted one by one, these parts follow one another in the order
of the whole log. What remains in memory is one batch or one part, and what each item takes.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from sce.data import values
from sce.data.columns import ITEM, TIME, USER, UnitName
from sce.data.formats import choose_format, find_files
from sce.data.interactions import DiskList, Interactions, stored_log
from sce.data.reading import wanted_columns
from sce.data.survey import Distinct, LogFile, Sample, Survey, read_batches, survey_file
from sce.data.vocabulary import Kind, Vocabulary
from sce.errors import InputError, named
from sce.memory import REMEDY, free_memory
from sce.units import plural, show_size

_BATCH_ROWS = 1 << 22  # at most
_BATCH_BYTES = 1000  # of the memory that is allowed, for each row of a batch
_BASE_BYTES = 500 << 20  # the process with its libraries, and the batches under way
_ITEM_BYTES, _ROW_BYTES = 100, 110  # in memory, for each item and each row of a part
_LEAST_ROWS = 1 << 20  # of a part
_DISK_BYTES = 40  # beside the output, for each row of the log
_TABLE_PER_ITEM = 8  # integers are looked up in a table of their range if it is not much longer
_CODE, _PART = "\x00code", "\x00part"


def read_parts(
    source: Any,
    directory: Path,
    memory: int,
    *,
    format: str = "auto",  # noqa: A002 - the name of the command's option
    drop_incomplete: bool = False,
    report: Callable[[str], None] = lambda text: None,
    **columns: Any,
) -> tuple[DiskList[Interactions], int]:
    """Read a log as `read_interactions` does, into parts that are stored in an empty directory.

    This takes about `memory` bytes. `columns` are the other options of `read_interactions`.

    Returns:
        The parts, and how many rows were left out as they lack a user, item or time.
    """
    if not isinstance(source, str | Path | Sequence):
        raise InputError(f"{named('memory')} is for files; a data frame is in memory already")
    wanted, time_unit = wanted_columns(**columns)
    batch_rows = max(1, min(_BATCH_ROWS, memory // _BATCH_BYTES))
    files = []
    for path in find_files(source):
        fmt = choose_format(path, format)
        files.append(LogFile(path, fmt, wanted.or_else(fmt.columns), drop_incomplete, batch_rows))
    _check_memory(memory)
    surveys: list[Survey] = []
    sample, items = Sample(), Distinct()
    for number, file in enumerate(files, 1):
        _tell(report, "reading", file.path, number, len(files))
        survey, of_file = survey_file(file, sample)
        items.add(of_file)
        surveys.append(survey)
    ends, unsure = values.concatenate([survey.ends for survey in surveys], time_unit)
    types = {name: ends.schema[name] for name in (USER, ITEM, TIME)}
    values.to_ticks(ends[TIME], time_unit)  # refuses times out of range
    kind = types[TIME]
    unit = (
        kind.time_unit
        if isinstance(kind, pl.Datetime)
        else time_unit or values.guess_unit(ends[TIME])
    )

    distinct = items.take(types[ITEM]).sort()
    users = sample.take(types[USER]).sort()
    rows = sum(survey.rows for survey in surveys)
    if ITEM in unsure:
        values.check_fractions("item", distinct)
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
        _tell(report, "dividing", file.path, number, len(files))
        for table in read_batches(file, survey.text):
            if table.rows.height:
                pending.append(_encode(table.rows, survey, types, encode, unit, done))
                done += table.rows.height
            if sum(batch.height for batch in pending) >= batch_rows:
                _store(pl.concat(pending), bounds, stored, done)
                pending.clear()
    if pending:
        _store(pl.concat(pending), bounds, stored, done)
    item_ids = values.encode_ids(distinct)[1]
    del distinct, encode
    user_kind: Kind = "string" if types[USER] == pl.String else "integer"
    log = stored_log(directory / "log", user_kind, item_ids)
    ticks_unit = "us" if kind == pl.Float64 else unit
    for part in range(len(bounds) + 1):
        if paths := sorted(stored.glob(f"{part:06}-*")):
            report(f"sorting part {part + 1} of {len(bounds) + 1}")
            log.append(_sort(paths, ticks_unit, item_ids))
    if USER in unsure:
        _check_user_fractions(log)
    return log, sum(survey.ends.dropped for survey in surveys)


def _check_memory(memory: int) -> None:
    """Refuse an amount that is too little or not free: without memory polars ends the process."""
    least, free = _BASE_BYTES + _LEAST_ROWS * _ROW_BYTES, free_memory()
    given, remedy = named("memory"), REMEDY
    if memory < least:
        raise InputError(f"the program itself takes {show_size(least)}; give {given} at least that")
    if memory > 1.5 * least:
        remedy = f"give it less, at least {show_size(least)}, {remedy}"
    given = f"{given} of {show_size(memory)}"
    if free is not None and memory > free:
        raise InputError(f"{given} is more than the {show_size(free)} free here; {remedy}")


def _tell(report: Callable[[str], None], doing: str, path: Path, number: int, count: int) -> None:
    """Report a file, and of many about every twentieth part of them."""
    if (number - 1) % math.ceil(count / 20) == 0:
        of_all = f" ({number} of {count})" if count > 1 else ""
        report(f"{doing} {path}, {show_size(path.stat().st_size)}{of_all}")


def _encode(
    rows: pl.DataFrame,
    survey: Survey,
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
    return pl.DataFrame(columns | {TIME: values.to_ticks(times, unit).values})


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
    users, user_ids = values.encode_ids(rows.drop_in_place(USER))
    users, items, times = values.sort_rows(users, rows[ITEM].to_numpy(), rows[TIME].to_numpy())
    times = values.Ticks(times, unit).to_microseconds(times)
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
        values.check_fractions("user", pl.Series(both, dtype=pl.String))
