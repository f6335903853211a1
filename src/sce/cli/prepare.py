"""`sce prepare`: from a log of interactions to the dataset that training reads."""

import shlex
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Unpack

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from sce.cli import say, telling
from sce.data.prepare import PrepareOptions, PrepareWarning
from sce.data.prepare import prepare as prepare_dataset
from sce.data.prepared import PreparedDataset


def prepare(
    *inputs: Annotated[str, Parameter(name="INPUT", required=True)],
    out: Path,
    **options: Unpack[PrepareOptions],
) -> None:
    """Turn a log of interactions into a filtered, split and indexed dataset.

    Args:
        inputs: csv, tsv, jsonl (each also as .gz or .zst) or parquet files, or patterns.
        out: Directory to write.
    """
    with _progress() as tell, warnings.catch_warnings():
        warnings.simplefilter("ignore", PrepareWarning)  # shown below
        dataset = prepare_dataset(inputs, out, report=tell, **options)
    with telling():
        _show(dataset)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show the step: a spinner on a terminal, else a line each."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda text: status.update(f"{escape(text)} ...")
    else:
        yield say


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
        "cut": counts["cut"] and f"{counts['cut']} (quantile {dataset.settings['quantile']})",
        "order": dataset.order["warning"],
        "written": f"{dataset.path} ({decimal(size)}, content {dataset.content_hash[:12]})",
        "next": f"sce train {shlex.quote(str(dataset.path))}",
    }
    for name, value in lines.items():
        if value is not None:
            console.print(f"{name:<11}{value}", soft_wrap=True, markup=False)
