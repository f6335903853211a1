"""Times of any kind, to one kind: whole ticks of one unit, for the whole log.

Numbers count from 1970 in seconds, milliseconds, microseconds or nanoseconds. Where the unit is not
said, the largest absolute value tells: below 1e11 seconds (until the year 5138), below 1e14
milliseconds, below 1e17 microseconds, else nanoseconds; each rule is right for times after 1973.
Numbers that merely say an order (1, 2, 3 ...) thus are seconds, which keeps the order. Dates and
times without a zone are taken as UTC.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sce.errors import InputError

UnitName: TypeAlias = Literal["s", "ms", "us", "ns"]

# Per unit: the largest number that is guessed to be of it, and its length in nanoseconds.
_UNITS: dict[UnitName, tuple[float, int]] = {
    "s": (1e11, 1_000_000_000),
    "ms": (1e14, 1_000_000),
    "us": (1e17, 1_000),
    "ns": (float("inf"), 1),
}
_INT64 = np.iinfo(np.int64)

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
)


@dataclass(frozen=True)
class Ticks:
    """Times as whole numbers of one unit."""

    values: NDArray[np.int64]
    unit: UnitName

    def to_microseconds(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """These values of the same unit, in microseconds, rounded down."""
        length = _UNITS[self.unit][1]
        return values * (length // 1000) if length >= 1000 else values // 1000


def read_times(column: pl.Series) -> pl.Series:
    """Numbers (Int64 or Float64) or instants (Datetime, UTC), null where a value is no time.

    Raises:
        TypeError: When a column of this type cannot hold times.
    """
    if column.dtype == pl.String:
        return _read_text(column)
    if column.dtype.is_integer():
        return column.cast(pl.Int64, strict=False)
    if column.dtype.is_float() or column.dtype.is_decimal():
        return _as_integers_if_whole(column.cast(pl.Float64))
    if column.dtype == pl.Date:
        return column.cast(pl.Datetime("us"))
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
    if _is_finer(trimmed, instants):
        instants = _read_iso(trimmed, "ns")
    # What fewer values contradict is what was meant: the caller reports those that do.
    return instants if instants.null_count() < numbers.null_count() else numbers


def _read_iso(text: pl.Series, unit: Literal["us", "ns"]) -> pl.Series:
    instants = pl.Series(text.name, [None], pl.Datetime(unit)).new_from_index(0, len(text))
    for form in _ISO_8601:
        if instants.null_count() == text.null_count():
            break
        # Only what is still unread: most columns have one form, and most forms fail at once.
        unread = text.set(instants.is_not_null(), None)
        read = unread.str.to_datetime(form, time_unit=unit, strict=False)
        instants = instants.zip_with(instants.is_not_null(), read.dt.replace_time_zone(None))
    return instants


def _is_finer(text: pl.Series, instants: pl.Series) -> bool:
    """Whether microseconds lose what is written, and 64 bits of nanoseconds hold all of it."""
    lengths = text.str.len_bytes().max()
    if not isinstance(lengths, int) or lengths <= len("2024-01-01 00:00:00.000000"):
        return False
    years = instants.dt.year().drop_nulls()
    held = not len(years) or bool(years.is_between(1678, 2261).all())
    return held and bool(text.str.contains(r"\.\d{7}").any())


def _as_integers_if_whole(numbers: pl.Series) -> pl.Series:
    finite = numbers.set(~numbers.is_finite(), None)
    whole = (finite == finite.floor()).all() and (finite.abs() < 2.0**53).all()
    return finite.cast(pl.Int64) if whole else finite


def to_ticks(times: pl.Series, unit: UnitName | None = None) -> Ticks:
    """The ticks of a column that `read_times` gave, without nulls; the unit guessed if not said.

    Raises:
        InputError: When a unit is said but not needed, or times do not fit 64 bits.
    """
    if isinstance(times.dtype, pl.Datetime):
        if unit is not None:
            raise InputError(f"the times are dates, yet --time-unit {unit} was given; leave it out")
        values = times.to_physical().to_numpy()
        # Fewer bits to sort by: almost every log has whole seconds.
        second = 1_000_000_000 // _UNITS[times.dtype.time_unit][1]
        if not np.any(values % second):
            return Ticks(values // second, "s")
        return Ticks(values, times.dtype.time_unit)
    numbers = times.to_numpy()
    if not len(numbers):
        return Ticks(numbers.astype(np.int64), unit or "s")
    low, high = numbers.min().item(), numbers.max().item()
    largest = max(-low, high)
    unit = unit or guess_unit(times)
    length = _UNITS[unit][1]
    if largest * (length / 1000) > _INT64.max:
        raise InputError(
            f"time {high if high == largest else low} in the unit {unit} is beyond what 64 bits of "
            "microseconds hold; is the unit right (--time-unit)?"
        )
    if times.dtype == pl.Int64:
        return Ticks(numbers, unit)
    return Ticks(np.rint(numbers * (length / 1000)).astype(np.int64), "us")


def guess_unit(times: pl.Series) -> UnitName:
    """The unit that numbers seem to be of, by the largest of them."""
    low, high = times.min(), times.max()
    largest = max(-float(low), float(high))  # type: ignore[arg-type]
    return next(name for name, (limit, _) in _UNITS.items() if largest < limit)
