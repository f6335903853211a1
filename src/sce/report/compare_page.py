"""The page of sweeps, and their figures as files."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sce.experiments.figure_spec import FigureSpec
from sce.experiments.store import Row
from sce.report.charts import make_figures
from sce.report.comparison import Comparison, all_rows, count_runs, name_failed
from sce.report.drawing import Figure
from sce.report.frame import (
    TEST,
    SeedGroup,
    above,
    comparable,
    group_seeds,
    is_resident,
    number,
    relative,
    show_change,
)
from sce.report.pages import render
from sce.report.tables import NO_END, ComparisonTable, Duel, all_settings, make_table, show_score
from sce.training.run import read_ranks
from sce.units import plural, show_count, show_metric

Ranks = Sequence[NDArray[np.int32]]  # for each seed the ranks of targets, from 1; 0: not ranked

RESAMPLES = 1000
DEPTH = 10  # of NDCG
LEAST = 20  # users that differ: with fewer, who they are decides the ends of an interval
_AT_ONCE = 10**7  # weights in memory
_ABOUT = (
    "Test events; mean over seeds ± standard deviation. Best bold, second underlined. "
    "Validation NDCG@10 chose the setting of each column, among those with the most seeds."
)
_NO_RANKS = "¹ The ranks of the test users are not stored; sce evaluate RUN stores them."


def make_page(comparisons: Sequence[Comparison], *, written: datetime) -> str:
    """Make the page of comparisons, in their order; `written` is the time in the footer."""
    rows, told = comparable(all_rows(comparisons))
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
        everything=all_settings(group_seeds(rows)),
        circumstances=" ".join([*told, *_circumstances(rows)]),
    )


def make_markdown(comparisons: Sequence[Comparison]) -> str:
    """The headlines and tables of all comparisons as Markdown."""
    parts = map(_part, comparisons)
    headlines = _headlines(comparisons)
    return render("compare.md", "", written=datetime.now(), parts=parts, **headlines)


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
    change = relative(ours.mean(TEST), theirs.mean(TEST))
    text = f"{ours.dataset}: test NDCG@10 of {duel.name} ({ours.show(TEST, show_score)}) against "
    text += f"{duel.rival} ({theirs.show(TEST, show_score)}), the best other by validation"
    text += f"; also differ in: {duel.differ}" if duel.differ else ""
    for name, one in duel.sides:
        if popular := above(one):
            text += f"; {name} is worse than popularity ({show_score(popular)})"
    spreads = [one.spread(TEST) for one in (ours, theirs)]
    known = [spread for spread in spreads if spread is not None]
    within = abs((ours.mean(TEST) or 0.0) - (theirs.mean(TEST) or 0.0)) < max(known, default=0.0)
    if len(known) < len(spreads):
        text += "; a single seed has no spread"
    elif within:
        text += "; the difference is within the spread of seeds"
    seeds = [{row["seed"] for row in one.rows} for one in (ours, theirs)]
    if seeds[0] != seeds[1]:
        text += "; their seeds differ"
    users = number(ours.rows[0], "users", "test")
    among = f"{show_count(users)} test users" if users else "test users"
    ranks = _ranks(ours), _ranks(theirs)
    interval = relative_interval(*ranks) if all(ranks) else None
    text += f"; over {among} "
    if isinstance(interval, tuple):
        text += f"{' to '.join(map(show_change, interval))} (95%)"
    else:
        text += f"no interval: {interval}" if interval else "no interval¹"
    saved = relative(ours.mean("memory"), theirs.mean("memory"))
    if saved is not None and not is_resident([*ours.rows, *theirs.rows]):
        text += f"; memory {show_change(saved)}"
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
    return text, "too few users" if isinstance(interval, str) else show_change(change)


def _ranks(group: SeedGroup) -> list[NDArray[np.int32]]:
    """The ranks of the test users in each run; empty if any run has not stored them."""
    found = [
        read_ranks(Path(row["directory"]), row["test_ranks"])
        for row in group.rows
        if row.get("test_ranks") and row.get("directory")
    ]
    real = [ranks for ranks in found if ranks is not None]
    return real if len(real) == len(group.rows) else []


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


def relative_interval(ours: Ranks, theirs: Ranks, seed: int = 0) -> tuple[float, float] | str:
    """95 % interval of the relative change in NDCG@10, over the same users drawn again and again.

    Why there is none, where fewer than 20 users have another NDCG@10 with one side than with the
    other, or the others have no hit.
    """
    # Users with the same gains are interchangeable: there are few kinds, however many users.
    mine, my_kinds = np.unique(_gains(ours), return_inverse=True)
    yours, your_kinds = np.unique(_gains(theirs), return_inverse=True)
    pairs, counts = np.unique(my_kinds * len(yours) + your_kinds, return_counts=True)
    gains = mine[pairs // len(yours)], yours[pairs % len(yours)]
    if (differ := counts[gains[0] != gains[1]].sum()) < LEAST:
        return f"NDCG@10 differs for {differ} of them, fewer than {LEAST}"
    random, changes = np.random.default_rng(seed), np.empty(RESAMPLES)
    step = max(1, _AT_ONCE // len(pairs))
    for first in range(0, RESAMPLES, step):
        part = changes[first : first + step]
        weights = random.multinomial(counts.sum(), counts / counts.sum(), size=len(part))
        one, other = (weights @ gain for gain in gains)
        if not other.all():
            return f"{counts[gains[1] > 0].sum()} of them have a hit with the other, too few"
        part[:] = one / other - 1
    low, high = np.percentile(changes, [2.5, 97.5])
    return float(low), float(high)


def _gains(ranks: Ranks) -> NDArray[np.float64]:
    """NDCG@10 of each user, averaged over seeds."""
    table = np.append(0.0, 1 / np.log2(np.arange(2, DEPTH + 2)))
    total = sum(table[np.where(one <= DEPTH, one, 0)] for one in ranks)
    return np.asarray(total / len(ranks)).round(12)  # sums in another order are the same
