"""Data frames of pandas, polars and other libraries that narwhals knows."""

import warnings
from typing import TYPE_CHECKING, Any

from sce.data.columns import ITEM, TIME, USER, usual_columns
from sce.errors import InputError

if TYPE_CHECKING:
    import narwhals as nw

USUAL = {"user": USER, "item": ITEM, "time": TIME}


def open_frame(frame: Any) -> "nw.DataFrame[Any]":
    """A data frame as narwhals wraps it, in memory."""
    try:
        import narwhals as nw

        table = nw.from_native(frame)
    except ModuleNotFoundError as error:
        raise InputError(
            "data frames need narwhals, which is not installed; install it with: "
            "pip install 'scalable-cross-entropy[prepare]'"
        ) from error
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


def histories_of(frame: Any) -> tuple[dict[Any, list[Any]], Any]:
    """Histories by user, users in the order of their first rows, and the frame's library."""
    events = open_frame(frame)
    columns = {role: usual_columns(role, events.columns) for role in ("user", "item", "time")}
    for role, names in columns.items():
        if len(names) != 1 and (names or role != "time"):
            raise InputError(
                f"the data frame needs one column of the {role}, such as {USUAL[role]}; it has "
                f"{names or events.columns}"
            )
    [user], [item], times = columns.values()
    if not times and (others := [name for name in events.columns if name not in (user, item)]):
        warnings.warn(
            f"no column of the data frame is known as the time ({', '.join(others)}): rows count "
            f"as in order; {USUAL['time']} would be the time",
            stacklevel=3,
        )
    users = events[user].to_list()
    if events[user].null_count() or any(kind.__hash__ is None for kind in set(map(type, users))):
        raise InputError(f"column {user!r} must hold an id, an integer or a string, in every row")
    histories: dict[Any, list[Any]] = {one: [] for one in users}
    if times:
        column = events[times[0]]
        if column.null_count() or not (column.dtype.is_numeric() or column.dtype.is_temporal()):
            raise InputError(f"column {times[0]!r} must hold a number or a date in every row")
        # By row too: not every library keeps the order of ties.
        events = events.with_row_index("\x00row").sort(times[0], "\x00row")
    for one, event in zip(events[user].to_list(), events[item].to_list(), strict=True):
        histories[one].append(event)
    return histories, events.implementation
