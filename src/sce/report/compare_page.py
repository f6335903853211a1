"""The page of sweeps, and their figures as files."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from sce.experiments.figure_spec import FigureSpec
from sce.experiments.store import FAILED, Row
from sce.report.charts import make_figures
from sce.report.comparison import (
    Comparison,
    all_rows,
    compares_losses,
    count_runs,
    name_failed,
)
from sce.report.drawing import Figure
from sce.report.frame import (
    SeedGroup,
    comparable,
    datasets_of,
    describe,
    group_seeds,
    is_resident,
    left_out,
    name_loss,
    relative,
    show_change,
    varied,
)
from sce.report.pages import render
from sce.report.tables import caveats, chosen_lines, make_table, show_score
from sce.units import plural, show_duration, show_memory, show_metric

_EVERYTHING = ("data", "setting", "seeds", "test NDCG@10", "validation", "peak memory", "time")


def make_page(comparisons: Sequence[Comparison], *, written: datetime) -> str:
    """Make the page of comparisons, in their order.

    Args:
        comparisons: The sections.
        written: The time in the footer.
    """
    rows = all_rows(comparisons)
    everything, apart = _everything(rows)
    failed = [
        (name, row["failure"]["kind"], row["failure"]["message"]) for name, row in name_failed(rows)
    ]
    many = f"All {len(everything):,} settings, best validation first"
    return render(
        "compare.html",
        comparisons[0].sweep.title if len(comparisons) == 1 else "Losses side by side",
        written=written,
        lead=count_runs(comparisons),
        verdicts=list(_verdicts(comparisons)),
        parts=[_part(comparison) for comparison in comparisons],
        failed=failed,
        failed_title=f"{plural(len(failed), 'run')} that failed",
        everything=everything,
        everything_heads=_EVERYTHING,
        everything_title=many if len(everything) != 1 else "The one setting",
        apart=" ".join(apart),
        circumstances=_circumstances(rows),
    )


def make_files(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """The figures as SVG, by the names of files."""
    found: dict[str, str] = {}
    for comparison in comparisons:
        for view in comparison.sweep.figures:
            for figure in _figures_of(comparison, view):
                key = re.sub(r"[^a-z0-9]+", "-", figure.title.lower()).strip("-")
                name, count = f"{comparison.sweep.name}-{key}", 1
                while (file := f"{name}{f'-{count}' if count > 1 else ''}.svg") in found:
                    count += 1  # two figures may have one title
                found[file] = figure.file
    return found


def _figures_of(comparison: Comparison, view: FigureSpec) -> list[Figure]:
    return [] if view.kind == "table" else list(make_figures(comparison.groups, view))


def _part(comparison: Comparison) -> dict[str, Any]:
    """One section: its tables, then its figures, those of one view side by side."""
    views = comparison.sweep.figures
    tables = [
        _table(comparison, view) for view in views
        if view.kind == "table" and comparison.groups_of(view)
    ]  # fmt: skip
    figures: list[list[Figure]] = []
    alone: list[Figure] = []  # views of a single figure stand side by side
    for view in views:
        drawn = _figures_of(comparison, view)
        if len(drawn) == 1:
            alone += drawn
        elif drawn:
            figures += [alone, drawn] if alone else [drawn]
            alone = []
    figures += [alone] if alone else []
    timed = any(view.kind == "pareto" and view.x == "time" for view in views)
    notice = ""
    if not (tables or figures):
        notice = "No run of this sweep has finished yet."
        if comparison.groups:
            notice = "No run of this sweep has measured what its figures show."
    return {
        "title": comparison.sweep.title,
        "tables": tables,
        "figures": figures,
        "about_time": _about_time(comparison.rows) if timed and not notice else "",
        "notice": notice,
    }


def _table(comparison: Comparison, view: FigureSpec) -> dict[str, Any]:
    made = make_table(comparison.groups_of(view), view)
    about = (
        "Test events; mean over seeds ± standard deviation. Best bold, second underlined. "
        "Validation NDCG@10 chose each column's setting, among those with the most seeds."
    )
    return {
        "table": made,
        "name": view.title or comparison.sweep.title,
        "about": " ".join([about, *caveats(made), *_popularity(comparison.rows)]),
        "chosen": list(chosen_lines(made)),
    }


def _popularity(rows: Sequence[Row]) -> Iterator[str]:
    """NDCG@10 of recommending the most popular items."""
    found = {
        row["dataset"]["name"]: row["popularity"]["test"]["ndcg@10"]
        for row in rows
        if row.get("popularity")
    }
    told = ", ".join(f"{show_metric(value)} on {name}" for name, value in found.items())
    if told:
        yield f"Popularity reaches NDCG@10 {told}."


def _about_time(rows: Sequence[Row]) -> str:
    most = [row.get("at_once") for row in rows if row["status"] != FAILED]
    known = [count for count in most if count is not None]
    if len(known) == len(most) and max(known, default=1) == 1:
        return "Every run had the device to itself."
    if not known:
        return "It is not known how many runs shared the device: these times compare only roughly."
    return (
        f"Up to {max(known)} runs shared the device: these times are longer than those of a run "
        "alone, and compare only roughly."
    )


def _verdicts(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, str]]:
    """SCE against the best other loss by validation, on each dataset."""
    for comparison in comparisons:
        view = next(filter(compares_losses, comparison.sweep.figures), None)
        groups = [] if view is None else comparison.groups_of(view)
        if view is None or not groups:
            continue
        for dataset, ours, other in make_table(groups, view).duels:
            text = f"{dataset}: NDCG@10 of SCE ({ours.show('test.ndcg@10', show_score)}) "
            text += f"over {name_loss(other.loss)} ({other.show('test.ndcg@10', show_score)}), "
            text += f"the best other by validation{_how_sure(ours, other)}"
            saved = relative(ours.mean("memory"), other.mean("memory"))
            if saved is not None and not is_resident([ours, other]):
                text += f"; memory {show_change(saved)}"
            means = [one.mean("test.ndcg@10") for one in (ours, other)]
            yield text, show_change(relative(*means))
        return


def _how_sure(ours: SeedGroup, other: SeedGroup) -> str:
    """The difference beside the spread over seeds, in words."""
    means = [one.mean("test.ndcg@10") for one in (ours, other)]
    spreads = [one.spread("test.ndcg@10") for one in (ours, other)]
    if means[0] is None or means[1] is None:
        return ""
    known = [spread for spread in spreads if spread is not None]
    if len(known) < len(spreads):
        return "; a single seed has no spread"
    within = abs(means[0] - means[1]) < max(known)
    return "; the difference is within the spread of seeds" if within else ""


def _everything(rows: Sequence[Row]) -> tuple[list[list[str]], list[str]]:
    """A row for each setting, and sentences about memory and time that are left out."""
    groups = group_seeds(rows)
    names = varied(groups)
    body, apart = [], []
    for dataset in datasets_of(groups):
        here = [group for group in groups if group.dataset == dataset]
        apart += [f"{dataset}: {sentence}" for sentence in left_out(here)]
        body += [
            [
                *(dataset, describe(group, names), str(len(group.rows))),
                group.show("test.ndcg@10", show_score),
                group.show("validation.ndcg@10", show_score),
                group.show("memory", show_memory),
                group.show("time", show_duration),
            ]
            for group in sorted(comparable(here), key=lambda group: -group.score)
        ]
    return body, apart


def _circumstances(rows: Sequence[Row]) -> str:
    devices = sorted({str(row["device"]) for row in rows if row.get("device")})
    measured = sorted({str(row["memory_measured"]) for row in rows if row.get("memory_measured")})
    versions = sorted(
        {
            ", ".join(f"{name} {value}" for name, value in row["versions"].items() if value)
            for row in rows
        }
    )
    words = [f"Measured on {' and '.join(devices)}." if devices else ""]
    words += [f"Memory is the {' or the '.join(measured)}." if measured else ""]
    words += [f"With {'; or '.join(versions)}." if versions else ""]
    return " ".join(filter(None, words))
