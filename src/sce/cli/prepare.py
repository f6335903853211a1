"""`sce prepare`: from a log of interactions to the dataset that training reads."""

import shlex
import warnings
from pathlib import Path
from typing import Annotated, Unpack

from cyclopts import Parameter
from rich.filesize import decimal

from sce.cli import telling
from sce.cli.output import output_console, plain_table, show_lines
from sce.data.prepare import PrepareOptions, PrepareWarning, remarks
from sce.data.prepare import prepare as prepare_dataset
from sce.data.prepared import PreparedDataset
from sce.data.titles import tell_titles
from sce.progress import ProgressDisplay


def prepare(
    *inputs: Annotated[str, Parameter(name="INPUT", required=True)],
    out: Path,
    **options: Unpack[PrepareOptions],
) -> None:
    """Turn a log of interactions into a filtered, split and indexed dataset.

    Args:
        inputs: csv, tsv, jsonl (each also as .gz or .zst) or parquet files, or patterns; with
            --partitions, directories.
        out: Directory to write.
    """
    with ProgressDisplay(animated=True) as display, warnings.catch_warnings():
        warnings.simplefilter("ignore", PrepareWarning)  # shown below
        dataset = prepare_dataset(inputs, out, report=display.step, **options)
    with telling():
        _show(dataset)


def _show(dataset: PreparedDataset) -> None:
    table = plain_table("")
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
    console = output_console()
    console.print(table)
    console.print()
    size = sum(file.stat().st_size for file in dataset.path.iterdir())
    titles = counts.get("titles")
    how_long = "" if len(dataset.test) else " --like RUN, or --from RUN --epochs N"
    lines = [
        ("catalogue", f"{dataset.n_items:,} items"),
        ("titles", titles and tell_titles(titles)),
        ("cut", counts["cut"] and f"{counts['cut']} (quantile {dataset.settings['quantile']})"),
        *remarks(dataset).items(),
        ("written", f"{dataset.path} ({decimal(size)}, content {dataset.content_hash[:12]})"),
        ("next", f"sce train {shlex.quote(str(dataset.path))}{how_long}"),
    ]
    show_lines(((name, value) for name, value in lines if value is not None), 11)
