"""A log of interactions: who met which item when, and in which order."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sce.data.formats import Columns
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError

USER, ITEM, TIME = "user_id", "item_id", "timestamp"


@dataclass(frozen=True, eq=False)
class Interactions:
    """A log of interactions, encoded.

    The rows are sorted by user code, then timestamp; rows of one user at the same time keep the
    order of the input: that of the files given, then of the lines in them.
    """

    users: NDArray[np.int32]  # [n] codes into user_ids
    items: NDArray[np.int32]  # [n] codes into item_ids
    timestamps: NDArray[np.int64]  # [n] microseconds since 1970-01-01 UTC
    user_ids: Vocabulary
    item_ids: Vocabulary
    dropped: int = 0  # rows of the files that were left out, as they lack a user, item or time

    def __len__(self) -> int:
        return len(self.users)

    @property
    def n_users(self) -> int:
        """How many distinct users occur."""
        # Sorted by user: every change begins another one.
        return int(np.count_nonzero(np.diff(self.users))) + 1 if len(self) else 0

    @property
    def n_items(self) -> int:
        """How many distinct items occur."""
        return int(np.count_nonzero(np.bincount(self.items, minlength=1)))

    @property
    def density(self) -> float:
        """Interactions per pair of user and item that occur."""
        return len(self) / (self.n_users * self.n_items) if len(self) else 0.0


def read_interactions(
    paths: str | Path | Sequence[str | Path],
    *,
    format: str = "auto",  # noqa: A002 - the name of the command's option
    user_column: str | None = None,
    item_column: str | None = None,
    time_column: str | None = None,
    time_unit: Literal["s", "ms", "us", "ns"] | None = None,
    drop_incomplete: bool = False,
    report: Callable[[str], None] | None = None,
) -> Interactions:
    """Read a log from csv, tsv, jsonl or parquet files, plain or compressed by gzip or zstd.

    Args:
        paths: A file or a pattern such as "logs/*.csv.gz", or several; together they are one log.
        format: A name from `sce.data.formats.FORMATS`, or "auto" to go by the files' endings.
        user_column: The column of user ids, if it has none of the usual names.
        item_column: The column of item ids, if it has none of the usual names.
        time_column: The column of times, if it has none of the usual names.
        time_unit: The unit of times that are numbers, if their size does not tell: see
            `sce.data.timestamps`.
        drop_incomplete: Leave out rows without user, item or readable time, rather than refuse.
        report: Called with a line of text at each step, for showing progress.

    Raises:
        InputError: When the files are not as they should be; says which, where, and what to do.
    """
    # Imported here, so that all else runs where polars is not installed.
    from sce.data.identifiers import encode_ids
    from sce.data.ordering import sort_rows
    from sce.data.reading import read_files
    from sce.data.timestamps import to_ticks

    if time_unit not in (None, "s", "ms", "us", "ns"):
        raise InputError(f"a time unit is s, ms, us or ns; got {time_unit!r}")
    say = report or (lambda text: None)
    table = read_files(
        paths,
        format_name=format,
        given=Columns(user_column, item_column, time_column),
        time_unit=time_unit,
        drop_incomplete=drop_incomplete,
        report=say,
    )
    rows, dropped = table.rows, table.dropped
    say(f"encoding the ids of {rows.height:,} rows")
    ticks = to_ticks(rows[TIME], time_unit)
    with ThreadPoolExecutor(2) as pool:
        (users, user_ids), (items, item_ids) = pool.map(encode_ids, (rows[USER], rows[ITEM]))
    del table, rows  # else the log would be in memory twice while it is sorted
    say(f"sorting {len(users):,} rows by user and time")
    users, items, times = sort_rows(users, items, ticks.values)
    return Interactions(users, items, ticks.to_microseconds(times), user_ids, item_ids, dropped)
