"""The page of sweeps, and their figures as files."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from sce.experiments.store import Row
from sce.report import frame
from sce.report.charts import make_figures
from sce.report.comparison import Comparison, all_rows, count_runs, name_failed
from sce.report.drawing import Figure
from sce.report.field import ABOUT, make_field
from sce.report.pages import render
from sce.report.pairs import chosen, interval_of
from sce.report.tables import NO_END, ComparisonTable, Duel, all_settings, show_score
from sce.units import plural, show_count, show_metric

_ABOUT = (
    "Test events; mean over seeds ± standard deviation. Best bold, second underlined. "
    "Validation NDCG@10 chose the setting of each column, among those with the most seeds."
)


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
        field=_field(comparisons),
        everything=all_settings(frame.group_seeds(rows)),
        circumstances=" ".join([*told, *frame.measured_on(rows), *_versions(rows)]),
    )


def trainings(comparisons: Sequence[Comparison]) -> list[frame.SeedGroup]:
    """The groups of whole trainings that finished, of all comparisons."""
    rows = frame.comparable(all_rows(comparisons))[0]
    return [one for one in frame.group_seeds(rows) if one.value("measure") == "training"]


def make_markdown(comparisons: Sequence[Comparison]) -> str:
    """The headlines and tables of all comparisons as Markdown."""
    parts = map(_part, comparisons)
    headlines = _headlines(comparisons)
    field = _field(comparisons)
    return render("compare.md", "", written=datetime.now(), parts=parts, field=field, **headlines)


def _field(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """A table of all settings over the datasets that have the reference, if it has several rows."""
    heads, rows = make_field(chosen(trainings(comparisons)))
    several = len(rows) > 1 and any(int(row[2]) > 1 for row in rows)
    return {"heads": heads, "rows": rows if several else [], "about": ABOUT}


def make_summary(comparisons: Sequence[Comparison]) -> tuple[str, list[list[str]], list[str]]:
    """For a terminal: a lead, the chosen settings under their heads, and paragraphs about them.

    They are those of the verdicts; where there is no table, all settings of the first comparison.
    """
    one, table = _headline_table(comparisons) or (comparisons[0], ComparisonTable([]))
    lead = count_runs(comparisons)
    if len(comparisons) > 1:
        others = ", ".join(other.sweep.name for other in comparisons if other is not one)
        lead += f"\nOf {_name(one)}; --only tells of another: {others}."
    heads, rows = all_settings(table.groups or one.groups)
    told = _headlines(comparisons)
    verdicts = [f"{word}\n  " + text.replace("; ", "\n  ") for text, word in told["verdicts"]]
    notes = filter(None, [told["note"], *table.caveats, *_popularity(one), *one.caveats()])
    return lead, [heads, *rows], [one for one in (*verdicts, "\n".join(notes)) if one]


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
    figures = _figures(comparison)
    notice = ""
    if not (comparison.tables or figures):
        done = "measured what its figures show" if comparison.groups else "finished yet"
        notice = f"No run of this sweep has {done}."
    return {
        "title": comparison.sweep.title,
        "lead": count_runs([comparison]),
        "tables": [_table(comparison, *named) for named in comparison.tables],
        "figures": figures,
        "caveats": " ".join(comparison.caveats()),
        "notice": notice,
        "settings": all_settings(comparison.groups),
        "failed": name_failed(comparison.rows),
    }


def _table(comparison: Comparison, name: str, table: ComparisonTable) -> dict[str, Any]:
    width = len(table.heads)
    return {
        "table": table,
        "rows": [[one.dataset, one.name, *one.cells, one.change][:width] for one in table.lines],
        "name": name,
        "about": " ".join([_ABOUT, *table.caveats, *_popularity(comparison)]),
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
    note = ""
    if found and verdicts and len(comparisons) > 1:
        note = f"This is of {_name(found[0])} alone."
    return {"verdicts": verdicts, "note": note}


def _name(comparison: Comparison) -> str:
    return f"{comparison.sweep.name} ({comparison.sweep.title})"


def _headline_table(comparisons: Sequence[Comparison]) -> tuple[Comparison, ComparisonTable] | None:
    """The table with the most duels, of equals the first."""
    tables = [(one, table) for one in comparisons for _, table in one.tables]
    return max(tables, key=lambda pair: len(pair[1].duels), default=None)


def _verdict(duel: Duel) -> tuple[str, str]:
    """A change only where it is more than chance, as far as seeds and users can tell."""
    ours, theirs = sides = duel.ours, duel.theirs
    mine, other = (one.show(frame.TEST, show_score) for one in sides)
    means = [one.mean(frame.TEST) or 0.0 for one in sides]
    spreads = [spread for one in sides if (spread := one.spread(frame.TEST)) is not None]
    single, within = len(spreads) < len(sides), abs(means[0] - means[1]) < max(spreads, default=0.0)
    seeds = [{row["seed"] for row in one.rows} for one in sides]
    users = frame.number(ours.rows[0], "users", "test")
    interval = interval_of(ours, theirs)
    told = f"no interval: {interval or 'their ranks are not stored'}"
    if isinstance(interval, tuple):
        told = f"{' to '.join(map(frame.show_change, interval))} (95%)"
    saved = frame.relative(ours.mean("memory"), theirs.mean("memory"))
    whole_process = frame.is_resident([*ours.rows, *theirs.rows])
    clauses = [
        f"{ours.dataset}: test NDCG@10 of {duel.name} ({mine}) against {duel.rival} ({other}), "
        "the best other by validation",
        f"also differ in: {duel.differ}" if duel.differ else "",
        *(
            f"{name} is worse than popularity ({show_score(popular)})"
            for name, one in duel.sides
            if (popular := frame.above(one))
        ),
        "a single seed has no spread" if single else "",
        "the difference is within the spread of seeds" if within and not single else "",
        "their seeds differ" if seeds[0] != seeds[1] else "",
        f"over {f'{show_count(users)} ' if users else ''}test users {told}",
        f"memory {frame.show_change(saved)}" if saved is not None and not whole_process else "",
        f"of {plural(duel.unconverged, 'run')} {NO_END}" if duel.unconverged else "",
    ]
    word = frame.show_change(frame.relative(*means))
    if doubt := duel.doubt():
        word = doubt
    elif seeds[0] != seeds[1]:
        word = "other seeds"
    elif within or (isinstance(interval, tuple) and interval[0] <= 0 <= interval[1]):
        word = "no clear difference"
    elif single:
        word = "one seed"
    elif isinstance(interval, str):
        word = "too few users"
    return "; ".join(filter(None, clauses)), word


def _versions(rows: Sequence[Row]) -> Iterator[str]:
    found = {
        ", ".join(f"{name} {value}" for name, value in row["versions"].items() if value)
        for row in rows
    }
    if any(found):
        yield f"With {'; or '.join(sorted(found))}."
