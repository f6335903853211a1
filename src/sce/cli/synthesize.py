"""`sce synthesize`: a log to try everything with, of any size."""

import math
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from sce.data.synthetic import SyntheticSettings, write_parquet
from sce.errors import InputError


def synthesize(
    *,
    out: Path,
    items: int = 100_000,
    users: int = 20_000,
    seed: int = 0,
    mean_events: float = 40.0,
    force: Annotated[bool, Parameter(show_default=False)] = False,
) -> None:
    """Write a synthetic log of interactions with popular items and sequences worth learning.

    Args:
        out: Parquet file to write, with the ending .parquet.
        items: Items in the catalogue; the rarest may not occur in a small log.
        users: Users, each with one sequence of 20 events or more (or half of --mean-events).
        seed: Equal options and seed give equal logs.
        mean_events: Events per user, on average.
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
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        print(f"sce: writing {out}", file=sys.stderr, flush=True)
    bar = Progress(console=console, transient=True)
    task = bar.add_task("users", total=users)
    with bar if console.is_terminal else nullcontext():
        events = write_parquet(
            settings, out, replace=force, progress=lambda done: bar.update(task, completed=done)
        )
    print(f"{out}: {events:,} interactions of {users:,} users with up to {items:,} items")
    dataset = shlex.quote(str(out.with_suffix("")))
    print(f"next: sce prepare {shlex.quote(str(out))} --out {dataset}")
