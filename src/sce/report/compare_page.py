"""The page of sweeps, and their figures as files."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from sce.experiments.figure_spec import FigureSpec
from sce.experiments.store import Row
from sce.report import frame
from sce.report.charts import make_figures
from sce.report.comparison import Comparison, all_rows, count_runs, name_failed
from sce.report.drawing import Figure
from sce.report.field import ABOUT, make_field
from sce.report.pages import render
from sce.report.pairs import chosen, ranks_of, relative_interval
from sce.report.tables import NO_END, ComparisonTable, Duel, all_settings, make_table, show_score
from sce.units import plural, show_count, show_metric

_ABOUT = (
    "Test events; mean over seeds ± standard deviation. Best bold, second underlined. "
    "Validation NDCG@10 chose the setting of each column, among those with the most seeds."
)
_NO_RANKS = "¹ The ranks of the test users are not stored; sce evaluate RUN stores them."


def make_page(comparisons: Sequence[Comparison], *, written: datetime) -> str:
    """Make the page of comparisons, in their order; `written` is the time in the footer."""
    rows, told = frame.comparable(all_rows(comparisons))
    failed = name_failed(rows)
    return render(
        "compare.html",
        comparisons[0].sweep.title if len(comparisons) == 1 else "Losses side by side",
        written=written,
        lead=count_runs(comparisons),
        **_headlines(comparisons),
        parts=[_part(comparison) for comparison in comparisons],
        failed=failed,
        failed_title=f"{plural(len(failed), 'run')} that failed",
        field=_field(trainings(comparisons)),
        everything=all_settings(frame.group_seeds(rows)),
        circumstances=" ".join([*told, *_circumstances(rows)]),
    )


def trainings(comparisons: Sequence[Comparison]) -> list[frame.SeedGroup]:
    """The groups of whole trainings that finished, of all comparisons."""
    rows = frame.comparable(all_rows(comparisons))[0]
    return [one for one in frame.group_seeds(rows) if one.value("measure") == "training"]


def make_markdown(comparisons: Sequence[Comparison]) -> str:
    """The headlines and tables of all comparisons as Markdown."""
    parts = map(_part, comparisons)
    headlines = _headlines(comparisons)
    field = _field(trainings(comparisons))
    return render("compare.md", "", written=datetime.now(), parts=parts, field=field, **headlines)


def _field(groups: Sequence[frame.SeedGroup]) -> dict[str, Any]:
    """A table of all settings over the datasets that have the reference, if it has several rows."""
    heads, rows = make_field(chosen(groups))
    several = len(rows) > 1 and any(int(row[2]) > 1 for row in rows)
    return {"heads": heads, "rows": rows if several else [], "about": ABOUT}


def make_summary(comparisons: Sequence[Comparison]) -> tuple[list[list[str]], Iterator[str]]:
    """For a terminal: the settings that were chosen under their heads, and paragraphs about them.

    They are those of the verdicts; where there is no table, all settings of the first comparison.
    """
    one, table = _headline_table(comparisons) or (comparisons[0], ComparisonTable([]))
    heads, rows = all_settings(table.groups or one.groups)

    def paragraphs() -> Iterator[str]:
        told = _headlines(comparisons)
        for text, word in told["verdicts"]:
            yield f"{word}\n  " + text.replace("; ", "\n  ")
        known = [told["note"], *table.caveats(), *_popularity(one), *one.caveats()]
        yield "\n".join(filter(None, known))

    return [heads, *rows], filter(None, paragraphs())


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
    tables = [
        _table(comparison, spec)
        for spec in comparison.sweep.figures
        if spec.kind == "table" and comparison.groups_of(spec)
    ]
    figures = _figures(comparison)
    notice = ""
    if not (tables or figures):
        done = "measured what its figures show" if comparison.groups else "finished yet"
        notice = f"No run of this sweep has {done}."
    return {
        "title": comparison.sweep.title,
        "lead": count_runs([comparison]),
        "tables": tables,
        "figures": figures,
        "caveats": " ".join(comparison.caveats()),
        "notice": notice,
        "settings": all_settings(comparison.groups),
        "failed": name_failed(comparison.rows),
    }


def _table(comparison: Comparison, spec: FigureSpec) -> dict[str, Any]:
    made = make_table(comparison.groups_of(spec), spec)
    return {
        "table": made,
        "rows": [
            [one.dataset, one.name, *one.cells, one.change][: len(made.heads)] for one in made.lines
        ],
        "name": spec.title or comparison.sweep.title,
        "about": " ".join([_ABOUT, *made.caveats(), *_popularity(comparison)]),
    }


def _popularity(comparison: Comparison) -> Iterator[str]:
    """A sentence on the baseline, if it was measured."""
    popular = {
        row["dataset"]["name"]: show_metric(row["popularity"]["test"]["ndcg@10"])
        for row in comparison.rows
        if row.get("popularity")
    }
    if popular:
        told = ", ".join(f"{value} on {name}" for name, value in popular.items())
        yield f"Popularity reaches test NDCG@10 {told}."


def _headlines(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The verdicts, in words and each in a few, and what the reader needs to know of them."""
    found = _headline_table(comparisons)
    verdicts = [_verdict(duel) for duel in found[1].duels] if found else []
    note = _NO_RANKS if any("no interval¹" in text for text, _ in verdicts) else ""
    return {"verdicts": verdicts, "note": note}


def _headline_table(comparisons: Sequence[Comparison]) -> tuple[Comparison, ComparisonTable] | None:
    """The first table that has duels, else the first."""
    tables = [
        (one, make_table(groups, spec))
        for one in comparisons
        for spec in one.sweep.figures
        if spec.kind == "table" and (groups := one.groups_of(spec))
    ]
    return next((pair for pair in tables if pair[1].duels), tables[0] if tables else None)


def _verdict(duel: Duel) -> tuple[str, str]:
    """A change only where it is more than chance, as far as seeds and users can tell."""
    ours, theirs = duel.ours, duel.theirs
    change = frame.relative(ours.mean(frame.TEST), theirs.mean(frame.TEST))
    mine, other = (one.show(frame.TEST, show_score) for one in (ours, theirs))
    text = f"{ours.dataset}: test NDCG@10 of {duel.name} ({mine}) against {duel.rival} ({other}), "
    text += "the best other by validation"
    text += f"; also differ in: {duel.differ}" if duel.differ else ""
    for name, one in duel.sides:
        if popular := frame.above(one):
            text += f"; {name} is worse than popularity ({show_score(popular)})"
    spreads = [one.spread(frame.TEST) for one in (ours, theirs)]
    known = [spread for spread in spreads if spread is not None]
    within = abs((ours.mean(frame.TEST) or 0.0) - (theirs.mean(frame.TEST) or 0.0)) < max(
        known, default=0.0
    )
    if len(known) < len(spreads):
        text += "; a single seed has no spread"
    elif within:
        text += "; the difference is within the spread of seeds"
    seeds = [{row["seed"] for row in one.rows} for one in (ours, theirs)]
    if seeds[0] != seeds[1]:
        text += "; their seeds differ"
    users = frame.number(ours.rows[0], "users", "test")
    among = f"{show_count(users)} test users" if users else "test users"
    ranks = ranks_of(ours), ranks_of(theirs)
    interval = relative_interval(*ranks) if all(ranks) else None
    text += f"; over {among} "
    if isinstance(interval, tuple):
        text += f"{' to '.join(map(frame.show_change, interval))} (95%)"
    else:
        text += f"no interval: {interval}" if interval else "no interval¹"
    saved = frame.relative(ours.mean("memory"), theirs.mean("memory"))
    if saved is not None and not frame.is_resident([*ours.rows, *theirs.rows]):
        text += f"; memory {frame.show_change(saved)}"
    if duel.unconverged:
        text += f"; of {plural(duel.unconverged, 'run')} {NO_END}"
    if doubt := duel.doubt():
        return text, doubt
    if seeds[0] != seeds[1]:
        return text, "other seeds"
    if within or (isinstance(interval, tuple) and interval[0] <= 0 <= interval[1]):
        return text, "no clear difference"
    if len(known) < len(spreads):
        return text, "one seed"
    return text, "too few users" if isinstance(interval, str) else frame.show_change(change)


def _circumstances(rows: Sequence[Row]) -> Iterator[str]:
    versions = {
        ", ".join(f"{name} {value}" for name, value in row["versions"].items() if value)
        for row in rows
    }
    devices, measured = (
        {str(row[name]) for row in rows if row.get(name)} for name in ("device", "memory_measured")
    )
    if devices:
        yield f"Measured on {' and '.join(sorted(devices))}."
    if measured:
        yield f"Memory is the {' or the '.join(sorted(measured))}."
    if any(versions):
        yield f"With {'; or '.join(sorted(versions))}."
