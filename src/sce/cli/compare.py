"""`sce compare`: what came of sweeps, side by side."""

from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sce.errors import InputError
from sce.experiments.comparison import Comparison, all_rows, is_verdict
from sce.experiments.markdown import make_markdown
from sce.experiments.page import make_files, make_page
from sce.experiments.place import Place
from sce.experiments.rows import read_rows
from sce.experiments.summary import group_settings, name_apart
from sce.experiments.tables import to_csv


def compare(
    *sweeps: Annotated[Path, Parameter(name="DIR", required=True)],
    out: Path | None = None,
    only: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    csv: Path | None = None,
    markdown: Path | None = None,
    svg: Path | None = None,
) -> None:
    """Put the runs of sweeps side by side: tables, Pareto fronts and curves, on one page.

    Validation NDCG@10 chooses the setting of each loss, test events report it.

    Args:
        sweeps: Directories that "sce sweep" wrote or is writing.
        out: Page to write; one that is there is replaced. [default: compare.html in the first DIR]
        only: Names of settings files, such as pareto, to show only these. [default: all]
        csv: File for every setting with its means and standard deviations.
        markdown: File for the tables.
        svg: Directory for the figures, each as a file.
    """
    comparisons = _read(sweeps, only or [])
    target = out or sweeps[0] / "compare.html"
    written = {target: make_page(comparisons, written=datetime.now())}
    if csv is not None:
        written[csv] = to_csv(group_settings(all_rows(comparisons)))
    if markdown is not None:
        written[markdown] = make_markdown(comparisons)
    if svg is not None:
        if svg.exists() and not svg.is_dir():
            raise InputError(f"{svg} is a file; name a directory for the figures")
        svg.mkdir(parents=True, exist_ok=True)
        written |= {svg / name: text for name, text in make_files(comparisons).items()}
    for path, text in written.items():
        if path.is_dir():
            raise InputError(f"{path} is a directory; name a file")
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error
        print(path)


def _read(places: tuple[Path, ...], only: list[str]) -> list[Comparison]:
    found: dict[str, Comparison] = {}
    written = {path: read_rows(Place(path).rows) for path in places}
    apart = iter(name_apart(row for rows in written.values() for row in rows))
    for path, there in written.items():
        rows = {row["key"]: row for row in islice(apart, len(there))}
        for sweep in Place(path).read_sweeps():
            if only and sweep.name not in only:
                continue
            before = found.get(sweep.name)
            if before is not None and len({before.sweep.variant, sweep.variant} - {""}) > 1:
                # Another file of the same name, or the same with other settings.
                before = None
                title = f"{sweep.title} ({path})"
                sweep = replace(sweep, name=f"{sweep.name}-{path.resolve().name}", title=title)
            here = [rows[key] for key in sweep.keys if key in rows]
            if before is not None:
                known = {row["key"] for row in before.rows}
                here = [*before.rows, *(row for row in here if row["key"] not in known)]
            found[sweep.name] = Comparison(sweep, here)
    if not found:
        raise InputError(f"there is no sweep called {' or '.join(only)} in {places[0]}")
    if not any(one.rows for one in found.values()):
        raise InputError(f"{places[0]} has no rows yet: no run has ended")
    # What compares the losses comes first.
    return sorted(found.values(), key=lambda one: not any(map(is_verdict, one.sweep.views)))
