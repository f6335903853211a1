"""Values of columns: ids to codes of a sorted vocabulary, times to whole ticks; rows in order.

A code is an id's rank, so that the same log gives the same codes in whatever order its rows come.

Times that are numbers count from 1970 in seconds, milliseconds, microseconds or nanoseconds. Where
the unit is not given, the largest absolute value tells: below 1e11 seconds (until the year 5138),
below 1e14 milliseconds, below 1e17 microseconds, else nanoseconds; right for times after 1973.
Numbers that merely give an order (1, 2, 3 ...) thus are seconds. Dates and times without a zone are
taken as UTC.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sce.data.columns import ITEM, TIME, USER, Columns, UnitName, fold
from sce.data.formats import Format
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, named

Chosen: TypeAlias = tuple[str, ...]  # columns of user, item and, if wanted, time, by a file's names

# Integers are looked up in a table of their whole range if it is at most so much longer than the
# log: it then takes less memory than the log, and no searching.
_RANGE_PER_ROW = 4
_SMALL_RANGE = 1 << 20
# Per unit: the largest number that is guessed to be of it, and its length in nanoseconds.
_UNITS: dict[UnitName, tuple[float, int]] = {
    "s": (1e11, 1_000_000_000),
    "ms": (1e14, 1_000_000),
    "us": (1e17, 1_000),
    "ns": (float("inf"), 1),
}

# Tried in turn on what the ones before could not read; the common ones first. "%.f" reads an
# absent fraction too; "%#z" reads Z, +02, +0200 and +02:00.
_ISO_8601 = (
    "%Y-%m-%d %H:%M:%S%.f",
    "%Y-%m-%dT%H:%M:%S%.f%#z",
    "%Y-%m-%dT%H:%M:%S%.f",
    "%Y-%m-%d",
    "%Y-%m-%d %H:%M:%S%.f%#z",
    "%Y-%m-%d %H:%M:%S%.f UTC",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%dT%H:%M",
    "%Y-%m-%dT%H:%M%#z",
    "%Y%m%dT%H%M%S",
    "%Y%m%dT%H%M%S%#z",
    "%Y/%m/%d %H:%M:%S%.f",  # not of the standard, yet with the year first there is one reading
    "%Y/%m/%d %H:%M",
    "%Y/%m/%d",
)


def read_ids(column: pl.Series) -> pl.Series:
    """Ids as Int64 or String, null where there is none; an empty string is none."""
    kind = column.dtype
    if kind == pl.Int64:
        return column
    if isinstance(kind, pl.Decimal) and not kind.scale:
        column = column.cast(pl.Int128)  # how some databases export integers
    elif not (
        kind.is_integer()
        or kind.is_float()
        or kind in (pl.String, pl.Binary, pl.Null)
        or isinstance(kind, pl.Categorical | pl.Enum)
    ):
        raise TypeError(f"ids must be integers or strings, not {kind}")
    if column.dtype.is_integer() or column.dtype == pl.Null:
        # Unsigned ones above 2**63 remain whole only as strings.
        fits = column.cast(pl.Int64, strict=False)
        return fits if fits.null_count() == column.null_count() else column.cast(pl.String)
    if column.dtype.is_float():
        known = column.cast(pl.Float64).fill_nan(None)
        bits = 53 if column.dtype == pl.Float64 else 24 if column.dtype == pl.Float32 else 11
        broken = known.filter((known != known.floor()) | (known.abs() >= 2.0**bits))
        if len(broken):
            raise TypeError(f"ids must be integers or strings, not fractions such as {broken[0]}")
        return known.cast(pl.Int64)
    if column.dtype == pl.Binary and not is_text(column):  # the bytes of a UUID or a digest
        return column.bin.encode("hex")
    text = column.cast(pl.String)
    empty = text == ""
    return text.set(empty, None) if empty.any() else text


def is_text(ids: pl.Series) -> bool:
    """True if all bytes are those of text."""
    try:
        ids.cast(pl.String)
    except pl.exceptions.PolarsError:
        return False
    return True


def integers_if_all(text: pl.Series, *, fractions: bool = False) -> pl.Series:
    """Text as Int64 if that loses nothing: every value is 0, or a number without leading zero.

    With `fractions`, 12.0 counts as 12: tables with gaps are often written so.
    """
    whole = text.str.strip_suffix(".0") if fractions else text
    numbers = whole.cast(pl.Int64, strict=False)
    if numbers.null_count() == text.null_count() and (numbers.cast(pl.String) == whole).all():
        return numbers
    return text


def encode_ids(ids: pl.Series) -> tuple[NDArray[np.int32], Vocabulary]:
    """Codes of ids without nulls, Int64 or String, and their vocabulary."""
    if ids.dtype == pl.Int64:
        low, high = int(ids.min()), int(ids.max())  # type: ignore[arg-type]
        if high - low <= max(_SMALL_RANGE, _RANGE_PER_ROW * len(ids)):
            places = ids.to_numpy() - low
            present = np.zeros(high - low + 1, bool)
            present[places] = True
            table = np.cumsum(present, dtype=np.int32)
            table -= 1
            return table[places], Vocabulary.from_integers(np.flatnonzero(present) + low)
        codes, distinct = _rank_by(ids, ids)
        return codes.to_numpy(), Vocabulary.from_integers(distinct.to_numpy())
    # Comparing hashes takes a third of the time that comparing strings takes; in the end every id
    # is compared once with the one that its code stands for.
    ids = ids.rechunk()
    codes, distinct = _rank_by(ids.hash(), ids)
    if not (distinct.gather(codes) == ids).all():
        # Two ids share a hash: about once in ten million logs of a million ids.
        codes, distinct = _rank_by(ids, ids)
    text = distinct.str.join("").item().encode()
    return codes.to_numpy(), Vocabulary.from_sorted_text(text, distinct.str.len_bytes().to_numpy())


def _rank_by(keys: pl.Series, ids: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Rank of each id among the distinct ones, and these, sorted; equal keys are equal ids."""
    first_rows = keys.arg_unique()
    distinct = pl.DataFrame({"key": keys.gather(first_rows), "id": ids.gather(first_rows)})
    distinct = distinct.sort("id")
    numbered = distinct.select("key", code=pl.int_range(pl.len(), dtype=pl.Int32))
    rows = keys.to_frame("key").join(numbered, on="key", how="left", maintain_order="left")
    return rows["code"], distinct["id"]


class Ticks(NamedTuple):
    """Times as whole numbers of one unit."""

    values: NDArray[np.int64]
    unit: UnitName

    def to_microseconds(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Values of this unit in microseconds, rounded down."""
        length = _UNITS[self.unit][1]
        return values * (length // 1000) if length >= 1000 else values // 1000


def read_times(column: pl.Series) -> pl.Series:
    """Numbers (Int64 or Float64) or instants (Datetime, UTC), null where a value is no time."""
    if column.dtype == pl.String:
        return _read_text(column)
    if column.dtype.is_integer():
        return column.cast(pl.Int64, strict=False)
    if column.dtype.is_float() or column.dtype.is_decimal():
        return _as_integers_if_whole(column.cast(pl.Float64))
    if column.dtype == pl.Date:
        return column.cast(pl.Datetime("ms"))  # which hold all days; too late ones of "us" wrap
    if isinstance(column.dtype, pl.Datetime):
        return column.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
    if column.dtype == pl.Null:
        return column.cast(pl.Int64)
    raise TypeError(f"a column of type {column.dtype} holds no times")


def _read_text(column: pl.Series) -> pl.Series:
    integers = column.cast(pl.Int64, strict=False)
    if integers.null_count() == column.null_count():
        return integers
    trimmed = column.str.strip_chars()
    numbers = _as_integers_if_whole(trimmed.cast(pl.Float64, strict=False))
    if numbers.null_count() == column.null_count():
        return numbers
    instants = _read_iso(trimmed, "us")
    if (
        trimmed.str.contains(r"\.\d{7}").any()  # microseconds lose digits,
        and fit_nanoseconds(instants)
    ):
        instants = _read_iso(trimmed, "ns")
    # What fewer values contradict is what was meant: the caller reports those that do.
    return instants if instants.null_count() < numbers.null_count() else numbers


def fit_nanoseconds(instants: pl.Series) -> bool:
    """True if 64 bits hold these instants in nanoseconds."""
    return instants.dt.year().is_between(1678, 2261).all()


def _read_iso(text: pl.Series, unit: Literal["us", "ns"]) -> pl.Series:
    # "%Y" takes one digit, too: 31/03/20 is no day of the year 31.
    text = text.set(~text.str.contains(r"^\d{4}"), None)
    instants = pl.Series(text.name, [None], pl.Datetime(unit)).new_from_index(0, len(text))
    for form in _ISO_8601:
        if instants.null_count() == text.null_count():
            break
        # Only what is still unread: most columns have one form, and most forms fail at once.
        unread = text.set(instants.is_not_null(), None)
        read = unread.str.to_datetime(form, time_unit=unit, strict=False)
        instants = instants.zip_with(instants.is_not_null(), read.dt.replace_time_zone(None))
    return instants


def _as_integers_if_whole(numbers: pl.Series) -> pl.Series:
    finite = numbers.set(~numbers.is_finite(), None)
    whole = (finite == finite.floor()).all() and (finite.abs() < 2.0**53).all()
    return finite.cast(pl.Int64) if whole else finite


def to_ticks(times: pl.Series, unit: UnitName | None = None) -> Ticks:
    """Ticks of a column that `read_times` gave, without nulls; the unit guessed if not given."""
    dated = isinstance(times.dtype, pl.Datetime)
    if isinstance(times.dtype, pl.Datetime):
        if unit is not None:
            raise InputError(
                f"the times are dates, yet {named('time_unit', unit)} was given; leave it out"
            )
        unit, times = times.dtype.time_unit, times.to_physical()
    numbers = times.to_numpy()
    if unit is None and all(map(_is_written_date, (numbers.min(), numbers.max()))):
        raise InputError(
            f"times such as {numbers.max()} look like dates, YYYYMMDD: write 2025-01-31, or "
            f"give {named('time_unit', 's')} if they are seconds since 1970"
        )
    extreme = max(numbers.min().item(), numbers.max().item(), key=abs)
    unit = unit or guess_unit(times)
    length = _UNITS[unit][1]
    # As numbers, not only as microseconds: beyond 64 bits they were rounded when they were read.
    if abs(extreme) * max(length / 1000, 1) >= 2.0**63:
        raise InputError(
            f"time {extreme} in the unit {unit} is beyond what 64 bits hold, in microseconds too; "
            + ("mend or remove it" if dated else f"is the unit right ({named('time_unit')})?")
        )
    if times.dtype != pl.Int64:
        return Ticks(np.rint(numbers * (length / 1000)).astype(np.int64), "us")
    # Fewer bits to sort by: almost every log of dates has whole seconds.
    second = 1_000_000_000 // length
    if dated and not np.any(numbers % second):
        return Ticks(numbers // second, "s")
    return Ticks(numbers, unit)


def _is_written_date(number: float) -> bool:
    """True if a number is a day of these centuries, its digits those of year, month and day.

    Hours, minutes, seconds and thousandths may follow.
    """
    text, form = f"{number:.0f}", "%Y%m%d%H%M%S%f"
    form = form[: len(text) - 2] if len(text) in (8, 10, 12, 14, 17) else ""
    try:
        return form != "" and 1900 <= datetime.strptime(text, form).year < 2100
    except ValueError:
        return False


def guess_unit(times: pl.Series) -> UnitName:
    """Unit of times that are numbers, by the largest of them."""
    largest = max(abs(float(end)) for end in (times.min(), times.max()))  # type: ignore[arg-type]
    return next(name for name, (limit, _) in _UNITS.items() if largest < limit)


def sort_rows(
    users: NDArray[np.int32], items: NDArray[np.int32], times: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Sort rows by user, then time; ties keep their order."""
    low, high = int(times.min()), int(times.max())
    time_bits = (high - low).bit_length()
    if int(users.max()).bit_length() + time_bits > 63:
        # Times so fine or far apart that no number holds them and the user.
        rows = pl.DataFrame({"user": users, "item": items, "time": times})
        rows = rows.sort("user", "time", maintain_order=True)
        return rows["user"].to_numpy(), rows["item"].to_numpy(), rows["time"].to_numpy()
    # User and time in one number: a single sort, and no gathering of either afterwards.
    keys = users.astype(np.int64) << time_bits
    keys |= times - low
    if np.all(keys[1:] >= keys[:-1]):
        return users, items, times
    by_key = pl.DataFrame({"key": keys, "item": items}).sort("key", maintain_order=True)
    keys = by_key["key"].to_numpy()
    return (
        (keys >> time_bits).astype(np.int32),
        by_key["item"].to_numpy(),
        (keys & ((1 << time_bits) - 1)) + low,
    )


class Table(NamedTuple):
    """Rows of one file or data frame, in their order."""

    source: Path
    format: Format
    columns: Chosen
    rows: pl.DataFrame  # USER and ITEM: Int64 or String; TIME: Int64, Float64 or Datetime; no nulls
    dropped: int  # rows left out: blank lines, and if wanted those without user, item or time
    text: dict[str, bool]  # of ids that were bytes: whether these were text


def concatenate(
    tables: Sequence[Table], time_unit: UnitName | None
) -> tuple[pl.DataFrame, dict[str, str]]:
    """Rows of all files, their columns of one type each; roles of columns to `check_fractions`."""
    _check_agreement(tables, time_unit)
    frames = [table.rows for table in tables if table.rows.height]
    if not frames:
        which = str(tables[0].source) if len(tables) == 1 else f"all {len(tables)} files"
        dropped = sum(table.dropped for table in tables)
        lack = f"all {dropped:,} rows lack a user, an item or a time" if dropped else "no rows"
        raise InputError(f"{which}: there are columns, but {lack}")
    untyped, unsure = any(table.format.layout == "csv" for table in tables), {}
    for role, name in zip(Columns._fields, (USER, ITEM), strict=False):
        mixed = len({frame.schema[name] for frame in frames}) > 1
        if len({table.text[name] for table in tables if name in table.text}) > 1:
            raise InputError(
                f"the {role} ids are bytes, which are text in some files and none in others; write "
                "them as hexadecimal text"
            )
        if mixed:
            frames = [frame.with_columns(pl.col(name).cast(pl.String)) for frame in frames]
        if (mixed or untyped) and frames[0].schema[name] == pl.String:
            unsure[name] = role
    if len({frame.schema.get(TIME) for frame in frames}) > 1:
        # Integers beside floats, or instants of two units; _check_agreement refused the rest.
        kind = pl.Float64 if frames[0].schema[TIME].is_numeric() else pl.Datetime("us")
        frames = [frame.with_columns(pl.col(TIME).cast(kind)) for frame in frames]
    rows = pl.concat(frames)
    if TIME not in rows.columns:
        rows = rows.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias(TIME))
    return rows, unsure


def check_fractions(role: str, ids: pl.Series) -> None:
    """Refuse 12.0 beside 12 where some ids are text: one id or two, no type tells."""
    whole = ids.filter(ids.str.ends_with(".0")).str.strip_suffix(".0")
    both = whole.filter(whole.is_in(ids.unique().implode())) if len(whole) else whole
    both = both.filter(both.str.contains(r"^-?\d+$"))
    if len(both):
        raise InputError(
            f"the {role} ids {both[0]} and {both[0]}.0 both occur, beside ids that are text: write "
            "them alike if they are one; if not, prepare files that tell text from numbers "
            "(parquet or jsonl)"
        )


def _check_agreement(tables: Sequence[Table], time_unit: UnitName | None) -> None:
    """Refuse files whose columns, kinds of time or units of time differ."""
    first = tables[0]
    for table in tables[1:]:
        for role, mine, theirs in zip(Columns._fields, first.columns, table.columns, strict=False):
            if fold(mine) != fold(theirs):
                raise InputError(
                    f"the files disagree: the {role} is {mine!r} in {first.source} and {theirs!r} "
                    f"in {table.source}; name the same column for all with "
                    f"{named(f'{role}_column')}"
                )
    found: dict[str, Path] = {}
    for table in tables if TIME in first.rows.columns else ():
        times = table.rows[TIME]
        kind = "numbers" if times.dtype.is_numeric() else "dates"
        if kind == "numbers" and time_unit is None and len(times):
            kind = f"numbers that look like {guess_unit(times)}"
        if len(times):
            found.setdefault(kind, table.source)
    if len(found) > 1:
        (kind, path), (other_kind, other) = list(found.items())[:2]
        raise InputError(
            f"the files disagree: times are {kind} in {path} and {other_kind} in {other}; convert "
            f"one of them, or say the unit of all with {named('time_unit')}"
        )
