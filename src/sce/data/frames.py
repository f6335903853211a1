"""Data frames of pandas, polars and other libraries that narwhals knows."""

import warnings
from typing import TYPE_CHECKING, Any

from sce.data.columns import ITEM, NO_TIME, TIME, USER, Columns, usual_columns
from sce.errors import InputError, needing

if TYPE_CHECKING:
    import narwhals as nw

USUAL = {"user": USER, "item": ITEM, "time": TIME}


def open_frame(frame: Any) -> "nw.DataFrame[Any]":
    """A data frame as narwhals wraps it, in memory."""
    with needing("prepare", "a data frame"):
        import narwhals as nw
    try:
        table = nw.from_native(frame)
    except nw.exceptions.DuplicateError as error:
        raise InputError("the data frame has two columns of one name; rename one") from error
    except TypeError as error:
        what = f"expected files or a data frame of pandas or polars; got {type(frame).__name__}"
        raise InputError(what) from error
    table = table.collect() if isinstance(table, nw.LazyFrame) else table
    for name in table.columns:
        if not isinstance(name, str):
            raise InputError(f"columns of the data frame must have text as names; got {name!r}")
    return table


def histories_of(
    frame: Any, known: Columns, *, timed: bool = False, unit: Any = None
) -> tuple[dict[Any, list[Any]], dict[Any, list[int]], Any]:
    """Histories by user, users in the order of their first rows, and the frame's library.

    Columns are those that are `known`, if they are there, else by their usual names; ids and times
    are read as `prepare` does. If `timed`, the seconds of all events come between, of a frame that
    has times; numbers have the unit, if there is one.
    """
    table = open_frame(frame)
    with needing("prepare", "a data frame"):
        from sce.data.reading import read_frame, seconds_of
    columns = {
        role: [name]
        if name in table.columns or name == NO_TIME
        else usual_columns(role, table.columns)
        for role, name in known._asdict().items()
    }
    for role, names in columns.items():
        if len(names) != 1 and (names or role != "time"):
            raise InputError(
                f"the data frame needs one column of the {role}, such as {USUAL[role]}; it has "
                f"{names or table.columns}{'; leave out the others' * bool(names)}"
            )
    [user], [item], times = columns.values()
    if not times and (others := [name for name in table.columns if name not in (user, item)]):
        warnings.warn(
            f"no column of the data frame is known as the time ({', '.join(others)}): rows count "
            f"as in order; {USUAL['time']} would be the time",
            stacklevel=3,
        )
    chosen = Columns(user, item, *(times or [NO_TIME]))
    rows = read_frame(table, chosen).rows
    histories: dict[Any, list[Any]] = {one: [] for one in rows[USER]}
    if TIME in rows.columns:
        rows = rows.sort(TIME, maintain_order=True)
    for one, event in zip(rows[USER], rows[ITEM], strict=True):
        histories[one].append(event)
    seconds: dict[Any, list[int]] = {}
    if timed and TIME in rows.columns and rows.height:
        for one, time in zip(rows[USER], seconds_of(rows, unit), strict=True):
            seconds.setdefault(one, []).append(time)
    return histories, seconds, table.implementation
