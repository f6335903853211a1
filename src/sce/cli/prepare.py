"""`sce prepare`: from a log of interactions to the dataset that training reads."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from sce.data.prepare import prepare as prepare_dataset
from sce.data.prepared import PreparedDataset
from sce.data.splitting import Kind, TestHistory


def prepare(
    *inputs: Annotated[str, Parameter(name="INPUT", required=True)],
    out: Path,
    format: str = "auto",  # noqa: A002 - the name of the option
    user_column: str | None = None,
    item_column: str | None = None,
    time_column: str | None = None,
    time_unit: Literal["s", "ms", "us", "ns"] | None = None,
    drop_incomplete: Annotated[bool, Parameter(show_default=False)] = False,
    preset: Literal["paper"] | None = None,
    min_item_users: int | None = None,
    min_user_items: int | None = None,
    iterate: bool | None = None,
    drop_repeats: bool | None = None,
    split: Kind | None = None,
    quantile: float | None = None,
    test_history: TestHistory | None = None,
    force: Annotated[bool, Parameter(show_default=False)] = False,
) -> None:
    """Turn a log of interactions into a filtered, split and indexed dataset.

    Args:
        inputs: csv, tsv, jsonl (each also as .gz or .zst) or parquet files, or patterns.
        out: Directory to write.
        format: Layout of the files, if their names do not tell; see "sce datasets".
        user_column: Column of user ids, if it has no usual name (user_id, userid, user ...).
        item_column: Column of item ids, if it has no usual name.
        time_column: Column of timestamps, if it has no usual name.
        time_unit: Unit of timestamps that are numbers, if their size does not tell.
        drop_incomplete: Leave out rows without user, item or readable time, instead of refusing.
        preset: "paper": filters 5 and 20, temporal split at 0.95; other options have precedence.
        min_item_users: Leave out items with fewer distinct users. [default: 1, keeps all]
        min_user_items: Then leave out users with fewer distinct items. [default: 1, keeps all]
        iterate: Repeat both filters until nothing changes.
        drop_repeats: Keep only a user's first interaction with each item.
        split: Test on users active after an instant, or on all last events. [default: temporal]
        quantile: Temporal: the share of events before the cut. [default: 0.95]
        test_history: Temporal: what a test user's history holds. [default: after-cut]
        force: Replace a prepared dataset that is there already.
    """
    options = {name: value for name, value in locals().items() if name not in ("inputs", "out")}
    with _progress() as tell:
        dataset = prepare_dataset(inputs, out, **options, report=tell)
    _show(dataset)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show the step: a spinner on a terminal, else a line each."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda text: status.update(f"{escape(text)} ...")
    else:
        yield lambda text: print(f"sce: {text}", file=sys.stderr, flush=True)


def _show(dataset: PreparedDataset) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a pipe has no edge to wrap at
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    columns = ("users", "items", "interactions")
    for heading in (*columns, "density"):
        table.add_column(heading, justify="right", no_wrap=True)
    counts = dataset.counts
    for group in (counts["steps"], [counts["train"], counts["test"]], counts["left_out"]):
        for row in group:
            if not row["users"] and not row["interactions"]:
                continue  # nothing was left out for this reason
            cells = [f"{row[name]:,}" if row[name] else "" for name in columns]
            pairs = row["users"] * row["items"] if group is not counts["left_out"] else 0
            density = f"{row['interactions'] / pairs:.4%}" if pairs else ""
            table.add_row(row["name"], *cells, density)
        table.add_section()
    console.print(table)
    console.print()
    size = sum(file.stat().st_size for file in dataset.path.iterdir())
    lines = {
        "catalogue": f"{dataset.n_items:,} items",
        "cut": f"{counts['cut']} (quantile {dataset.settings.get('quantile')})",
        "written": f"{dataset.path} ({decimal(size)}, content {dataset.content_hash[:12]})",
        "next": f"sce train {shlex.quote(str(dataset.path))}",
    }
    for name, value in lines.items():
        if name != "cut" or counts["cut"] is not None:
            console.print(f"{name:<11}{value}", soft_wrap=True, markup=False)
