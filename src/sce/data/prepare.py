"""From a log of interactions to the dataset that training reads: read, filter, split, write."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from sce.data.filtering import drop_repeats as keep_first
from sce.data.filtering import keep_active
from sce.data.interactions import Tally
from sce.data.prepared import PreparedDataset, check_target
from sce.data.splitting import Kind, TestHistory, split_leave_one_out, split_temporal
from sce.errors import InputError

PRESETS: dict[str | None, dict[str, Any]] = {
    None: {},
    "paper": {"min_item_users": 5, "min_user_items": 20},
}


def prepare(
    source: Any,
    out: Path | str,
    *,
    format: str = "auto",  # noqa: A002 - the name of the command's option
    user_column: str | None = None,
    item_column: str | None = None,
    time_column: str | None = None,
    time_unit: Literal["s", "ms", "us", "ns"] | None = None,
    drop_incomplete: bool = False,
    preset: Literal["paper"] | None = None,
    min_item_users: int | None = None,
    min_user_items: int | None = None,
    iterate: bool | None = None,
    drop_repeats: bool | None = None,
    split: Kind | None = None,
    quantile: float | None = None,
    test_history: TestHistory | None = None,
    force: bool = False,
    report: Callable[[str], None] | None = None,
) -> PreparedDataset:
    """Turn a log of interactions into a filtered, split and indexed dataset on disk.

    >>> import pandas as pd
    >>> log = pd.DataFrame({"user": [1] * 3, "item": ["a", "b", "c"], "time": [1, 2, 3]})
    >>> prepare(log, "data/log", split="leave-one-out").n_items         # doctest: +SKIP
    3

    Args:
        source: A data frame of pandas or polars; or a csv, tsv, jsonl (each also as .gz or .zst) or
            parquet file, or a pattern, or several of them.
        out: Directory to write.
        format: Layout of the files, if their names do not tell: see `sce.data.formats.FORMATS`.
        user_column: Column of user ids, if it has no usual name (user_id, userid, user ...).
        item_column: Column of item ids, if it has no usual name.
        time_column: Column of timestamps, if it has no usual name.
        time_unit: Unit of timestamps that are numbers, if their size does not tell.
        drop_incomplete: Leave out rows without user, item or readable time, instead of refusing.
        preset: "paper": filters 5 and 20, temporal split at 0.95; other options have precedence.
        min_item_users: Leave out items with fewer distinct users; 1 by default, which keeps all.
        min_user_items: Then leave out users with fewer distinct items; 1 by default.
        iterate: Repeat both filters until nothing changes.
        drop_repeats: Keep only a user's first interaction with each item.
        split: "temporal" (by default): test on users active after an instant; "leave-one-out": on
            all users' last events.
        quantile: Temporal: the share of events before the cut; 0.95 by default.
        test_history: Temporal: what a test user's history holds; "after-cut" by default.
        force: Replace a prepared dataset that is there already.
        report: Called with a line of text at each step, for showing progress.

    Raises:
        InputError: When options contradict each other, the log is malformed, or the directory
            cannot be written.
    """
    filters: dict[str, Any] = {
        "drop_repeats": bool(drop_repeats),
        "min_item_users": 1 if min_item_users is None else min_item_users,
        "min_user_items": 1 if min_user_items is None else min_user_items,
        "iterate": bool(iterate),
    }
    given = {"min_item_users": min_item_users, "min_user_items": min_user_items}
    filters |= {name: value for name, value in PRESETS[preset].items() if given[name] is None}
    temporal: dict[str, Any] = {"quantile": quantile, "test_history": test_history}
    temporal = {name: value for name, value in temporal.items() if value is not None}
    if split == "leave-one-out" and temporal:
        raise InputError(
            f"--{next(iter(temporal)).replace('_', '-')} belongs to the temporal split, and the "
            "split is leave-one-out; leave one of the two out"
        )
    if iterate and filters["min_item_users"] == filters["min_user_items"] == 1:
        raise InputError(
            "--iterate repeats the filters, and none is set; add --min-item-users or "
            "--min-user-items"
        )
    check_target(out, force=force)
    try:
        from sce.data.reading import read_interactions
    except ModuleNotFoundError as error:
        if error.name != "polars":
            raise
        raise InputError(
            "reading logs needs polars, which is not installed; "
            "install it with: pip install 'scalable-cross-entropy[prepare]'"
        ) from error

    say = report or (lambda text: None)
    log = read_interactions(
        source,
        format=format,
        user_column=user_column,
        item_column=item_column,
        time_column=time_column,
        time_unit=time_unit,
        drop_incomplete=drop_incomplete,
        report=say,
    )
    steps = [log.tally("read")]
    if log.dropped:
        steps.insert(0, Tally("rows without user, item or time: left out", 0, 0, log.dropped))
    say(f"filtering {len(log):,} interactions")
    settings = dict(filters)
    if filters.pop("drop_repeats"):
        log = keep_first(log, report=steps.append)
    log = keep_active(log, **filters, report=steps.append)
    say(f"splitting {len(log):,} interactions")
    if split == "leave-one-out":
        sequences = split_leave_one_out(log)
    else:
        sequences = split_temporal(log, **temporal)
    del log
    say(f"writing {out}")
    return sequences.save(out, settings=settings, steps=steps, force=force)
