"""From a log of interactions to the dataset that training reads: read, filter, split, write."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_type_hints

import numpy as np

from sce.data import splitting
from sce.data.columns import NO_TIME, Columns, UnitName
from sce.data.filtering import Pairs, drop_repeats, keep_active_parts
from sce.data.formats import FORMATS
from sce.data.interactions import DiskList, Interactions, Parts, Tally, tally_parts
from sce.data.order import count_duplicates, describe_order, order_warning, shuffle_ties
from sce.data.prepared import FEW_USERS, PreparedDataset, Sequences, check_target
from sce.data.storage import atomic_directory
from sce.data.titles import given_titles, match_titles
from sce.documented import documented
from sce.errors import InputError, check_types, named, needing
from sce.memory import free_memory
from sce.units import parse_size, plural

_FILTERS: dict[str, Any] = {
    "drop_repeats": False,
    "min_item_users": 1,
    "min_user_items": 1,
    "iterate": False,
}
_SPLITS: dict[splitting.Kind, Callable[..., splitting.Split]] = {
    "temporal": splitting.split_temporal,
    "leave-one-out": splitting.split_leave_one_out,
    "none": splitting.split_none,
}
_EVENTS_AT_ONCE = 1 << 22  # of test sequences
_MISSING = ("NULL", "Null", "null", "NA", "N/A", "NaN", "nan", "None", "none", "undefined", "\\N")
_MEMORY = 4 * 10**9  # of partitions, unless another is given
_PRESETS = {None: _FILTERS, "paper": _FILTERS | {"min_item_users": 5, "min_user_items": 20}}


class PrepareWarning(UserWarning):
    """Data that deceives: see `remarks`."""


@documented
class PrepareOptions(TypedDict, total=False):
    """Options of `prepare` and of the command, whose --help explains them; None: not given."""

    format: str
    """Layout of the files, if their names do not tell; see "sce datasets". [default: auto]"""
    user_column: str | None
    """Column of user ids, if it has no usual name (user_id, userid, user ...)."""
    item_column: str | None
    """Column of item ids, if it has no usual name."""
    time_column: str | None
    """Column of timestamps, if it has no usual name."""
    time_unit: UnitName | None
    """Unit of timestamps that are numbers, if their size does not tell."""
    order: Literal["time", "rows"] | None
    """Order of events: by time, or by row in a log without times, which is split leave-one-out.
    [default: time]"""
    ties: Literal["keep", "shuffle"] | None
    """A user's events of one time: keep the order of their rows, or shuffle. [default: keep]"""
    seed: int | None
    """Of the shuffled ties. [default: 0]"""
    drop_incomplete: bool
    """Leave out rows without user, item or readable time, instead of refusing."""
    preset: Literal["paper"] | None
    """"paper": filters 5 and 20, temporal split at 0.95; other options have precedence."""
    min_item_users: int | None
    """Leave out items with fewer distinct users. [default: 1, keeps all]"""
    min_user_items: int | None
    """Then leave out users with fewer distinct items. [default: 1, keeps all]"""
    iterate: bool | None
    """Repeat both filters until nothing changes."""
    drop_repeats: bool | None
    """Keep only a user's first interaction with each item."""
    split: splitting.Kind | None
    """Test on users active after an instant, on all last events, or on none: train on everything.
    [default: temporal]"""
    quantile: float | None
    """Temporal: the share of events before the cut. [default: 0.95]"""
    test_history: splitting.TestHistory | None
    """Temporal: what a test user's history holds, events from the cut on, or also those before it.
    Neither is trained on. [default: after-cut]"""
    titles: Path | str | None
    """File of item ids and titles: csv, tsv, jsonl or parquet. Reports and recommendations show
    them."""
    titles_columns: tuple[str, str] | None
    """Its columns of ids and titles, if they have no usual names."""
    memory: str | None
    """Read files of any size within about so much memory, such as 4GB: parts of the log are sorted
    one by one, on disk beside --out. The result is the same."""
    partitions: bool
    """INPUTs are directories of Parquet files, as Spark, DuckDB and polars write them; they are
    read within --memory: unless given, 4GB, or half of what is free if that is less."""
    force: bool
    """Replace a prepared dataset that is there already."""


def prepare(
    source: Any,
    out: Path | str,
    *,
    report: Callable[[str], None] | None = None,
    **options: Unpack[PrepareOptions],
) -> PreparedDataset:
    """Turn a log of interactions into a filtered, split and indexed dataset on disk.

    >>> import pandas as pd
    >>> log = pd.DataFrame({"user": [1] * 3, "item": ["a", "b", "c"], "time": [1, 2, 3]})
    >>> prepare(log, "data/log", split="leave-one-out").n_items         # doctest: +SKIP
    3

    Args:
        source: A data frame of pandas or polars; or a csv, tsv, jsonl (each also as .gz or .zst) or
            parquet file, or a pattern, or several of them; with `partitions`, directories.
        out: Directory to write.
        report: Called with a line of text at each step, for showing progress.
        options: Those of `sce prepare --help`, under the same names: `time_column="date"`,
            `min_user_items=5`. `help(sce.PrepareOptions)` lists them.

    Raises:
        InputError: When options contradict each other, the log is malformed, or the directory
            cannot be written.
    """
    check_types({"out": out, "report": report}, {"out": Path | str, "report": Callable | None})
    report = report or (lambda text: None)
    given = check_types(
        {name: value for name, value in options.items() if value is not None},
        get_type_hints(PrepareOptions),
    )
    filters = dict(_PRESETS[given.pop("preset", None)])
    filters |= {name: given.pop(name) for name in filters if name in given}
    by_row, ties = given.get("order") == "rows", given.pop("ties", "keep")
    seed, force = given.pop("seed", None), given.pop("force", False)
    split = given.pop("split", "leave-one-out" if by_row else "temporal")
    temporal: dict[str, Any] = {n: given.pop(n) for n in ("quantile", "test_history") if n in given}
    if by_row and split == "temporal":
        raise InputError(
            f"a temporal split needs times; with {named('order', 'rows')} use leave-one-out"
        )
    if seed is not None and (ties != "shuffle" or seed < 0):
        raise InputError(
            f"{named('seed')} is that of {named('ties', 'shuffle')}, 0 or more; got {seed}, "
            f"{named('ties', ties)}"
        )
    if split != "temporal" and temporal:
        raise InputError(
            f"{named(next(iter(temporal)))} belongs to the temporal split, and the "
            f"split is {split}; leave one of the two out"
        )
    if filters["iterate"] and filters["min_item_users"] == filters["min_user_items"] == 1:
        raise InputError(
            f"{named('iterate')} repeats the filters, and none is set; add "
            f"{named('min_item_users')} or {named('min_user_items')}"
        )
    memory, partitions = given.pop("memory", None), given.pop("partitions", False)
    columns = Columns(*(given.get(f"{role}_column") for role in Columns._fields))
    if given.get("format") in FORMATS:
        columns = columns.or_else(FORMATS[given["format"]].columns)
    columns = columns._replace(time=NO_TIME) if by_row else columns
    exists = check_target(out, force=force)
    with needing("prepare", "reading logs"):
        from sce.data.external import read_parts
        from sce.data.reading import read_interactions
        from sce.data.survey import find_partitions

    titles = given_titles(given.pop("titles", None), given.pop("titles_columns", None))
    unit = given.get("time_unit")
    recipe = _Recipe(columns, unit, ties, seed or 0, filters, report, _SPLITS[split], temporal)
    if memory is None and not partitions:
        parts = [read_interactions(source, report=report, **given)]
        in_memory: list[Pairs] = []
        sequences, description = recipe.follow(parts, in_memory, parts[0].dropped)
        parts.clear()
        if titles is not None:
            description["titles"] = match_titles(titles, sequences.item_ids)
        report(f"writing {out}")
        dataset = sequences.save(out, **description, force=force)
    else:
        files = find_partitions(source) if partitions else source
        with atomic_directory(Path(out), replace=exists) as directory:
            with TemporaryDirectory(dir=directory) as scratch:
                some = min(_MEMORY, (free_memory() or 2 * _MEMORY) // 2)
                budget = some if memory is None else parse_size(memory)
                log, dropped = read_parts(files, Path(scratch), budget, report=report, **given)
                pairs: DiskList[Pairs] = DiskList(Path(scratch, "pairs"), dict, dict)
                sequences, description = recipe.follow(log, pairs, dropped, directory)
            if titles is not None:
                description["titles"] = match_titles(titles, sequences.item_ids)
            report(f"writing {out}")
            dataset = sequences.save(out, **description, directory=directory)
        dataset = replace(dataset, path=Path(out))
    for text in remarks(dataset).values():
        warnings.warn(text, PrepareWarning, stacklevel=2)
    return dataset


class _Recipe(NamedTuple):
    """How a log is filtered and split."""

    columns: Columns
    time_unit: str | None
    ties: str
    seed: int
    filters: dict[str, Any]
    report: Callable[[str], None]
    divide: Callable[..., splitting.Split]
    temporal: dict[str, Any]

    def follow(
        self,
        parts: Parts[Interactions],
        pairs: Parts[Pairs],
        dropped: int,
        directory: Path | None = None,
    ) -> tuple[splitting.Split, dict[str, Any]]:
        """Filter and split a log, all of its parts; and what `Split.save` wants to know of it."""
        columns, unit, ties, seed, filters, report, divide, temporal = self
        found = describe_order(parts)
        warning = order_warning(found, ties=ties)
        if ties == "shuffle":
            shuffle_ties(parts, seed)
        order = {
            "by": "rows" if columns.time == NO_TIME else "time",
            "ties": ties,
            "seed": seed if ties == "shuffle" else None,
            "found": found,
            "warning": warning,
            "duplicates": sum(map(count_duplicates, parts)),
        }
        steps = [tally_parts("read", parts)]
        report(f"filtering {steps[0].interactions:,} interactions")
        if dropped:
            steps.insert(0, Tally("rows without user, item or time: left out", 0, 0, dropped))
        named_ones = {role: name for role, name in columns._asdict().items() if name is not None}
        settings = {**filters, **({"columns": named_ones} if named_ones else {})}
        settings |= {"time_unit": unit} if unit else {}
        if filters.pop("drop_repeats"):
            for number, part in enumerate(parts):
                parts[number] = drop_repeats(part)
            steps.append(tally_parts("first interaction of each user with each item", parts))
        everyone = parts.copy()
        keep_active_parts(parts, pairs, **filters, report=steps.append)
        report(f"splitting {sum(map(len, parts)):,} interactions")
        kept: Any = {"everyone": everyone, "directory": directory, "times": order["by"] == "time"}
        sequences = divide(parts, **temporal, **kept)
        return sequences, {"settings": settings, "steps": steps, "order": order}


def remarks(dataset: PreparedDataset) -> dict[str, str]:
    """Sentences about a dataset that was prepared as asked, and perhaps not as it was meant."""
    counts, found = dataset.counts, {}
    if dataset.order["warning"] is not None:
        found["order"] = dataset.order["warning"]
    if duplicates := dataset.order["duplicates"]:
        found["duplicates"] = (
            f"{plural(duplicates, 'row')} with user, item and time of an earlier one: kept; "
            f"{named('drop_repeats', True)} keeps a user's first event with each item"
        )
    if missing := ", ".join(_missing_ids(dataset)):
        found["missing ids"] = (
            f"ids that look like missing values count as any other: {missing}; if they are none, "
            f"leave these fields empty, and such rows out with {named('drop_incomplete', True)}"
        )
    had, tested = _targets_had_before(dataset.test), counts["test"]["users"]
    if had > tested / 20:
        found["repeated targets"] = (
            f"{had:,} of {tested:,} test targets are in the user's history, and count as misses: "
            f"what was had is not recommended again; {named('drop_repeats', True)} keeps a user's "
            "first event with each item"
        )
    users = counts["steps"][-1]["users"]
    # Beyond a thousand users a small share of them will do.
    few = tested < FEW_USERS or tested < min(1000, users / 10)
    if few and dataset.settings["split"] != "none":
        found["test users"] = (
            f"{tested:,} of {plural(users, 'user')} are left to test on, so that metrics are noisy"
        )
        if dataset.settings["split"] != "leave-one-out":
            advice = f"; {named('split', 'leave-one-out')} tests on every user with three events"
            found["test users"] += advice
    return found


def _missing_ids(dataset: PreparedDataset) -> Iterator[str]:
    """Ids that are names of nothing, with the number of training events of each."""
    train = dataset.train
    for role, ids in (("user", dataset.user_ids), ("item", dataset.item_ids)):
        for name, code in zip(_MISSING, ids.lookup(_MISSING).tolist(), strict=True):
            if code < 0:
                continue
            if role == "user":
                events = int(train.lengths[train.users == code].sum())
            else:
                starts = range(0, len(train.items), _EVENTS_AT_ONCE)
                parts = (train.items[start : start + _EVENTS_AT_ONCE] for start in starts)
                events = sum(int((part == code).sum()) for part in parts)
            yield f"the {role} {name!r} ({plural(events, 'training event')})"


def _targets_had_before(test: Sequences) -> int:
    """Number of test sequences whose last item occurs in them before."""
    had, size = 0, len(test.items)
    # Some whole sequences at a time: all may be more than memory holds.
    edges = np.searchsorted(test.offsets, [*range(0, size, _EVENTS_AT_ONCE), size])
    for begin, end in pairwise(np.unique(edges)):
        offsets = test.offsets[begin : end + 1]
        items = test.items[offsets[0] : offsets[-1]]
        first, last = offsets[:-1] - offsets[0], offsets[1:] - offsets[0] - 1
        same = items == np.repeat(items[last], np.diff(offsets))
        had += int((np.add.reduceat(same.astype(np.int64), first) > 1).sum())
    return had
