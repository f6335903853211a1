"""The page of sweeps, and their figures as files."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from sce.experiments.figure_spec import FigureSpec
from sce.experiments.store import FAILED, Row
from sce.report.charts import make_figures
from sce.report.comparison import Comparison, all_rows, compares_losses, count_runs, name_failed
from sce.report.drawing import Figure
from sce.report.frame import (
    SCORE,
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

_TEST = "test.ndcg@10"
_ABOUT = (
    "Test events; mean over seeds ± standard deviation. Best bold, second underlined. "
    "Validation NDCG@10 chose each column's setting, among those with the most seeds."
)


def make_page(comparisons: Sequence[Comparison], *, written: datetime) -> str:
    """Make the page of comparisons, in their order; `written` is the time in the footer."""
    rows = all_rows(comparisons)
    groups = group_seeds(rows)
    failed = [
        (name, row["failure"]["kind"], row["failure"]["message"]) for name, row in name_failed(rows)
    ]
    return render(
        "compare.html",
        comparisons[0].sweep.title if len(comparisons) == 1 else "Losses side by side",
        written=written,
        lead=count_runs(comparisons),
        verdicts=list(_verdicts(comparisons)),
        parts=[_part(comparison) for comparison in comparisons],
        failed=failed,
        failed_title=f"{plural(len(failed), 'run')} that failed",
        everything=list(_everything(groups)),
        apart=" ".join(
            f"{dataset}: {sentence}"
            for dataset in datasets_of(groups)
            for sentence in left_out(one for one in groups if one.dataset == dataset)
        ),
        circumstances=_circumstances(rows),
    )


def make_files(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """The figures as SVG, by the names of files."""
    found: dict[str, str] = {}
    for comparison in comparisons:
        for figure in _figures(comparison):
            key = re.sub(r"[^a-z0-9]+", "-", figure.title.lower()).strip("-")
            name, count = f"{comparison.sweep.name}-{key}", 1
            while (file := f"{name}{f'-{count}' if count > 1 else ''}.svg") in found:
                count += 1  # two figures may have one title
            found[file] = figure.file
    return found


def _figures(comparison: Comparison) -> list[Figure]:
    specs = (spec for spec in comparison.sweep.figures if spec.kind != "table")
    return [figure for spec in specs for figure in make_figures(comparison.groups, spec)]


def _part(comparison: Comparison) -> dict[str, Any]:
    """One section: its tables, then its figures."""
    specs = comparison.sweep.figures
    tables = [
        _table(comparison, spec)
        for spec in specs
        if spec.kind == "table" and comparison.groups_of(spec)
    ]
    figures = _figures(comparison)
    notice = ""
    if not (tables or figures):
        done = "measured what its figures show" if comparison.groups else "finished yet"
        notice = f"No run of this sweep has {done}."
    timed = figures and any(spec.kind == "pareto" and spec.x == "time" for spec in specs)
    return {
        "title": comparison.sweep.title,
        "tables": tables,
        "figures": figures,
        "about_time": _about_time(comparison.rows) if timed else "",
        "notice": notice,
    }


def _table(comparison: Comparison, spec: FigureSpec) -> dict[str, Any]:
    made = make_table(comparison.groups_of(spec), spec)
    popular = {
        row["dataset"]["name"]: show_metric(row["popularity"]["test"]["ndcg@10"])
        for row in comparison.rows
        if row.get("popularity")
    }
    told = ", ".join(f"{value} on {name}" for name, value in popular.items())
    popularity = [f"Popularity reaches NDCG@10 {told}."] if told else []
    return {
        "table": made,
        "name": spec.title or comparison.sweep.title,
        "about": " ".join([_ABOUT, *caveats(made), *popularity]),
        "chosen": chosen_lines(made),
    }


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
    """SCE against the best other loss by validation, on each dataset of the first such table."""
    tables = (
        make_table(groups, spec)
        for one in comparisons
        for spec in one.sweep.figures
        if compares_losses(spec) and (groups := one.groups_of(spec))
    )
    first = next(tables, None)
    for ours, other in first.duels if first else ():
        text = f"{ours.dataset}: NDCG@10 of SCE ({ours.show(_TEST, show_score)}) "
        text += f"over {name_loss(other.loss)} ({other.show(_TEST, show_score)}), "
        text += f"the best other by validation{_how_sure(ours, other)}"
        saved = relative(ours.mean("memory"), other.mean("memory"))
        if saved is not None and not is_resident([ours, other]):
            text += f"; memory {show_change(saved)}"
        yield text, show_change(relative(ours.mean(_TEST), other.mean(_TEST)))


def _how_sure(ours: SeedGroup, other: SeedGroup) -> str:
    """The difference beside the spread over seeds, in words."""
    spreads = [one.spread(_TEST) for one in (ours, other)]
    known = [spread for spread in spreads if spread is not None]
    if len(known) < len(spreads):
        return "; a single seed has no spread"
    within = abs((ours.mean(_TEST) or 0.0) - (other.mean(_TEST) or 0.0)) < max(known)
    return "; the difference is within the spread of seeds" if within else ""


def _everything(groups: Sequence[SeedGroup]) -> Iterator[list[str]]:
    """A row for each setting, on each dataset the best by validation first."""
    names = varied(groups)
    for dataset in datasets_of(groups):
        here = comparable([group for group in groups if group.dataset == dataset])
        for group in sorted(here, key=lambda group: -group.score):
            yield [
                *(dataset, describe(group, names), str(len(group.rows))),
                *(group.show(name, show_score) for name in (_TEST, SCORE)),
                *(group.show("memory", show_memory), group.show("time", show_duration)),
            ]


def _circumstances(rows: Sequence[Row]) -> str:
    devices, measured = (
        sorted({str(row[name]) for row in rows if row.get(name)})
        for name in ("device", "memory_measured")
    )
    versions = {
        ", ".join(f"{name} {value}" for name, value in row["versions"].items() if value)
        for row in rows
    }
    words = [f"Measured on {' and '.join(devices)}."] if devices else []
    words += [f"Memory is the {' or the '.join(measured)}."] if measured else []
    words += [f"With {'; or '.join(sorted(versions))}."] if any(versions) else []
    return " ".join(words)
