"""`sce synthesize`: a log to try everything with, of any size."""

import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sce.cli import telling
from sce.data.columns import ITEM, TIME, USER
from sce.data.storage import atomic_file, reason
from sce.data.synthetic import SyntheticSettings, generate
from sce.data.synthetic import titles as make_titles
from sce.errors import InputError, needing
from sce.progress import ProgressDisplay

if TYPE_CHECKING:
    import polars as pl


def synthesize(
    *,
    out: Path,
    items: int = 100_000,
    users: int = 20_000,
    seed: int = 0,
    mean_events: float = 40.0,
    titles: Path | None = None,
    force: bool = False,
) -> None:
    """Write a synthetic log of interactions with popular items and sequences worth learning.

    Args:
        out: Parquet file to write, with the ending .parquet.
        items: Items in the catalogue; the rarest may not occur in a small log.
        users: Users, each with one sequence of 20 events or more (or half of --mean-events).
        seed: Equal options and seed give equal logs.
        mean_events: Events per user, on average.
        titles: csv file to write too: item_id and title of every item of the catalogue, with names
            that are alike where items follow each other.
        force: Replace a file that is there already.
    """
    if out.suffix != ".parquet":
        raise InputError(f"the log is written as parquet; give --out an ending .parquet, not {out}")
    if not math.isfinite(mean_events):
        raise InputError(f"--mean-events must be a number; got {mean_events}")
    shortest = min(SyntheticSettings.min_events, max(1, int(mean_events / 2)))
    settings = SyntheticSettings(
        items=items, users=users, seed=seed, mean_events=mean_events, min_events=shortest
    )
    for file, example in ((out, "log.parquet"), (titles, "titles.csv")):
        if file is not None and file.is_dir():
            raise InputError(f"{file} is a directory; name a file, such as {file / example}")
        if file is not None and file.exists() and not force:
            raise InputError(
                f"{file} exists already; choose another name, or --force to replace it"
            )
    if titles is not None and titles.resolve() == out.resolve():
        raise InputError(f"--out and --titles are both {out}; name two files")
    str(out).encode()  # polars takes no other names; refused by `main`
    with needing("prepare", "writing parquet"):
        import polars as pl
        from polars.io.plugins import register_io_source

    display, events, doing = ProgressDisplay(), 0, f"writing {out}"

    def frames(
        columns: list[str] | None, predicate: Any, rows: int | None, batch: int | None
    ) -> "Iterator[pl.DataFrame]":
        nonlocal events
        for block in generate(settings):
            events += len(block.users)
            yield pl.DataFrame({USER: block.users, ITEM: block.items, TIME: block.timestamps})
            display.update(doing, int(block.users[-1]) + 1, users, "users")

    schema = {USER: pl.Int64, ITEM: pl.Int64, TIME: pl.Int64}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with display, atomic_file(out) as partial:
            display.step(doing)
            register_io_source(frames, schema=schema).sink_parquet(partial)
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise InputError(f"cannot write {out}: {reason(error)}") from error
    if titles is not None:
        _write_titles(settings, titles)
    with telling():
        print(f"{out}: {events:,} interactions of {users:,} users with up to {items:,} items")
        dataset = shlex.quote(str(out.with_suffix("")))
        named = "" if titles is None else f" --titles {shlex.quote(str(titles))}"
        print(f"next: sce prepare {shlex.quote(str(out))}{named} --out {dataset}")


def _write_titles(settings: SyntheticSettings, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as partial, partial.open("w", encoding="utf-8") as file:
            file.write(f"{ITEM},title\n")
            for ids, names in make_titles(settings):
                file.writelines(f"{item},{name}\n" for item, name in zip(ids, names, strict=True))
    except OSError as error:
        raise InputError(f"cannot write {path}: {reason(error)}") from error
