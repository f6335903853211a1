"""Rows of files, of one type for each column of all."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import polars as pl

from sce.data.columns import ITEM, TIME, USER, Columns, fold
from sce.data.formats import Format
from sce.data.values import UnitName, guess_unit
from sce.errors import InputError, named

Chosen: TypeAlias = tuple[str, ...]  # columns of user, item and, if wanted, time, by a file's names


class Table(NamedTuple):
    """Rows of one file or data frame, in their order."""

    source: Path
    format: Format
    columns: Chosen
    rows: pl.DataFrame  # USER and ITEM: Int64 or String; TIME: Int64, Float64 or Datetime; no nulls
    dropped: int  # rows left out: blank lines, and if wanted those without user, item or time


def concatenate(tables: Sequence[Table], time_unit: UnitName | None) -> pl.DataFrame:
    """Rows of all files, their columns of one type each."""
    _check_agreement(tables, time_unit)
    frames = [table.rows for table in tables if table.rows.height]
    if not frames:
        which = str(tables[0].source) if len(tables) == 1 else f"all {len(tables)} files"
        dropped = sum(table.dropped for table in tables)
        lack = f"all {dropped:,} rows lack a user, an item or a time" if dropped else "no rows"
        raise InputError(f"{which}: there are columns, but {lack}")
    untyped = any(table.format.layout == "csv" for table in tables)
    for role, name in zip(Columns._fields, (USER, ITEM), strict=False):
        mixed = len({frame.schema[name] for frame in frames}) > 1
        if mixed:
            frames = [frame.with_columns(pl.col(name).cast(pl.String)) for frame in frames]
        if (mixed or untyped) and frames[0].schema[name] == pl.String:
            check_fractions(role, pl.concat([frame[name] for frame in frames]))
    if len({frame.schema.get(TIME) for frame in frames}) > 1:
        # Integers beside floats, or instants of two units; _check_agreement refused the rest.
        kind = pl.Float64 if frames[0].schema[TIME].is_numeric() else pl.Datetime("us")
        frames = [frame.with_columns(pl.col(TIME).cast(kind)) for frame in frames]
    rows = pl.concat(frames)
    if TIME not in rows.columns:
        rows = rows.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias(TIME))
    return rows


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
