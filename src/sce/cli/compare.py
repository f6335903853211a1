"""`sce compare`: runs and sweeps, side by side."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.markup import escape

from sce.cli import telling
from sce.cli.output import output_console, plain_table, show_lines
from sce.cli.report import check_page, needs_report, write_page
from sce.data.storage import json_line
from sce.errors import InputError


def compare(
    *places: Annotated[Path, Parameter(name="DIR", required=True)],
    out: Path | None = None,
    only: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    csv: Path | None = None,
    pairs: Path | None = None,
    markdown: Path | None = None,
    svg: Path | None = None,
) -> None:
    """Put runs side by side: tables, Pareto fronts and curves, on one page.

    Validation NDCG@10 chooses the setting of each loss, test events report it.

    Args:
        places: Directories of "sce train" and "sce sweep"; what differs in nothing but the seed is
            joined over seeds, and runs on other data stand apart.
        out: Page to write; one that is there is replaced. [default: compare.html in the first DIR,
            if it is of a sweep, else here]
        only: Names of settings files, such as pareto, to show only these. [default: all]
        csv: File for every setting: means and standard deviations, or the kind of its failure.
        pairs: New file for rows of JSON: on each dataset, each loss and backbone against exact CE
            with that backbone and against SCE with SASRec, with an interval over users.
        markdown: File for the tables.
        svg: Directory for the figures, each as a file.
    """
    page, tables, rows = map(needs_report, ("compare_page", "tables", "comparison"))
    swept = (places[0] / "sweeps").is_dir()  # a run's directory holds nothing of others
    page_file = (places[0] if swept else Path()) / "compare.html"
    target = out or page_file
    files = [path for path in (target, csv, markdown) if path is not None]
    for path in files:
        check_page(path)
    if pairs is not None:
        check_page(pairs, record=True)
        files.append(pairs)
    if len({path.resolve() for path in files}) < len(files):
        raise InputError("--out, --csv, --pairs and --markdown must be different files")
    comparisons = rows.gather(places, only or [])
    written = {target: page.make_page(comparisons, written=datetime.now())}
    if csv is not None:
        written[csv] = tables.to_csv(rows.all_rows(comparisons))
    if pairs is not None:
        found = needs_report("pairs").make_pairs(page.trainings(comparisons))
        written[pairs] = "".join(map(json_line, found))
    if markdown is not None:
        written[markdown] = page.make_markdown(comparisons)
    if svg is not None:
        if svg.exists() and not svg.is_dir():
            raise InputError(f"{svg} is a file; name a directory for the figures")
        figures = {svg / name: text for name, text in page.make_files(comparisons).items()}
        for path in figures if svg.exists() else ():
            check_page(path)
        written |= figures
        try:
            svg.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write {svg}: {error.strerror or error}") from error
    for path, text in written.items():
        write_page(path if path == page_file else path.resolve(), text)
    # Not before all are written: whoever reads this may stop reading after the first line.
    with telling():
        lead, (heads, *lines), paragraphs = page.make_summary(comparisons)
        console = output_console()
        console.print(f"{lead} Best validation NDCG@10 first:\n", soft_wrap=True, markup=False)
        table = plain_table(*heads)
        for line in lines:
            table.add_row(*map(escape, line))
        console.print(table)
        for paragraph in paragraphs:
            console.print(f"\n{paragraph}", soft_wrap=True, markup=False)
        names = ["written", *[""] * (len(written) - 1)]
        print()
        show_lines(zip(names, map(str, written), strict=True), width=9)
