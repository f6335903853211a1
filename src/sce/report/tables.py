"""Tables of sweeps for pages, Markdown and CSV: the best in bold, the second underlined."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sce.experiments.figure_spec import FigureSpec
from sce.experiments.store import FAILED, Row
from sce.losses import LOSSES
from sce.report.comparison import Comparison, count_runs, name_failed
from sce.report.frame import (
    WHOLE_PROCESS,
    Group,
    SeedGroup,
    Show,
    best,
    comparable,
    conditions_of,
    datasets_of,
    describe,
    group_by,
    group_seeds,
    is_resident,
    left_out,
    lookup,
    name_group,
    name_metric,
    relative,
    shared_device,
    show_change,
    varied,
)
from sce.units import plural, show_duration, show_memory

FIRST, SECOND = 1, 2


@dataclass(frozen=True)
class Cell:
    """A value, its spread over seeds, and its place among the best."""

    text: str
    spread: str = ""
    place: int = 0  # FIRST, SECOND, or neither


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    dataset: str
    name: str
    cells: Sequence[Cell]
    change: str


@dataclass
class ComparisonTable:
    """The setting that validation chose for each column, and its test metrics."""

    columns: list[str]
    change: str  # the title of the last column
    lines: list[Line] = field(default_factory=list)
    chosen: list[tuple[SeedGroup, str]] = field(default_factory=list)  # and the same in words
    duels: list[tuple[SeedGroup, SeedGroup]] = field(default_factory=list)
    """For each dataset the compared column's setting, and its rival: of the others the best by
    validation. Every comparison that is drawn from the table is between these two."""
    left_out: list[str] = field(default_factory=list)
    """Sentences about runs whose memory and time are not in it."""

    @property
    def heads(self) -> list[str]:
        """The titles of all columns."""
        return ["data", "", *self.columns, *([self.change] if self.change else [])]


def make_table(groups: Sequence[SeedGroup], spec: FigureSpec) -> ComparisonTable:
    """Choose the setting of each column by validation, and put their test metrics side by side."""
    named = group_by(groups, spec.by)
    columns = [name_group(spec.by, group, named) for group in named]
    judged, differing = _judged(list(named), spec), varied(groups, across=True)
    datasets = datasets_of(groups)
    apart, rivals = [], {}
    picks: dict[str, list[SeedGroup | None]] = {}
    for dataset in datasets:
        here = [best(s for s in members if s.dataset == dataset) for members in named.values()]
        real = [one for one in here if one is not None]
        alike = iter(comparable(real))
        picks[dataset] = [None if one is None else next(alike) for one in here]
        rivals[dataset] = _rival(picks[dataset], judged)
        words = f"{dataset}: " if len(datasets) > 1 else ""
        apart += [words + sentence for sentence in left_out(real)]
    faced = {rival for rival in rivals.values() if rival is not None}
    over = columns[min(faced)] if len(faced) == 1 else "best other by validation"
    title = "" if judged is None else f"{columns[judged]} over {over}"
    # What others published is for the dataset that they had.
    published = [one for one in spec.published if one.get("dataset", datasets[0]) in datasets]
    columns += [str(one.get("name", "published")) for one in published]
    table = ComparisonTable(columns, title, left_out=apart)
    for dataset, picked in picks.items():
        real = [one for one in picked if one is not None]
        table.chosen += [(one, describe(one, differing)) for one in real]
        rival = rivals[dataset]
        ours = None if judged is None else picked[judged]
        theirs = None if rival is None else picked[rival]
        against = f" ({columns[rival]})" if rival is not None and len(faced) > 1 else ""
        if ours is not None and theirs is not None:
            table.duels.append((ours, theirs))
        for name, measure, show, higher in _measured(spec):
            fair = _is_fair(measure, real)
            cells = _rank(picked, measure, show, higher=higher, fair=fair)
            for one in published:
                known = one.get("dataset", dataset) == dataset
                cells.append(Cell(show(one.get(measure.removeprefix("test.")) if known else None)))
            change = ""
            if fair and ours is not None and theirs is not None:
                change = show_change(relative(ours.mean(measure), theirs.mean(measure))) + against
            table.lines.append(Line(dataset, name, cells, change))
    return table


def _judged(names: Sequence[Group], spec: FigureSpec) -> int | None:
    """The column that is compared with the others: SCE's, or the second of two."""
    if spec.by == ("loss.name",):
        return names.index(("sce",)) if ("sce",) in names and len(names) > 1 else None
    return 1 if len(names) == 2 else None


def _rival(picked: Sequence[SeedGroup | None], judged: int | None) -> int | None:
    """The column that is compared with: of the others the best by validation."""
    others = [(s.score, -n) for n, s in enumerate(picked) if s is not None and n != judged]
    return -max(others)[1] if others and judged is not None else None


def _is_fair(measure: str, groups: Sequence[SeedGroup]) -> bool:
    """True if the measure depends on the loss alone, so that it can be ranked."""
    if measure == "time":  # beside other runs, it is of the company as much as of the loss
        return not shared_device(groups)
    # Of a whole process, most is Python and its libraries.
    return measure != "memory" or not is_resident(groups)


def _measured(spec: FigureSpec) -> Iterator[tuple[str, str, Show, bool]]:
    """The rows of a table: title, what is measured, how it is shown, whether more is better."""
    for metric in spec.metrics:
        same = metric == "ndcg@1" and "hr@1" not in spec.metrics
        yield "NDCG@1, HR@1" if same else name_metric(metric), f"test.{metric}", show_score, True
    yield "peak training memory", "memory", show_memory, False
    yield "training time", "time", show_duration, False


def show_score(value: float | None) -> str:
    """To four places always, as what stands in one column is compared."""
    return "–" if value is None else f"{value:.4f}"


def _rank(
    picked: Sequence[SeedGroup | None], measure: str, show: Show, *, higher: bool, fair: bool
) -> list[Cell]:
    """The cells of a row; compared as they are shown: what looks equal is equal."""
    values = [None if one is None else one.mean(measure) for one in picked]
    spreads = [None if one is None else one.spread(measure) for one in picked]
    order = sorted({value for value in values if value is not None}, reverse=higher)
    shown = list(dict.fromkeys(map(show, order)))[:SECOND] if fair else []
    places = {text: place for place, text in enumerate(shown, FIRST)} if len(shown) > 1 else {}
    return [
        Cell(show(value), "" if spread is None else show(spread), places.get(show(value), 0))
        for value, spread in zip(values, spreads, strict=True)
    ]


def chosen_lines(table: ComparisonTable) -> list[str]:
    """The settings that validation chose, in words."""
    return [
        f"{one.dataset}: {words} ({plural(len(one.rows), 'seed')})" for one, words in table.chosen
    ]


def caveats(table: ComparisonTable) -> Iterator[str]:
    """Sentences that a reader of the table needs."""
    groups = [one for one, _ in table.chosen]
    counts = {len(one.rows) for one in groups}
    if len(counts) > 1:
        yield f"Not all columns have as many seeds: {min(counts)} to {max(counts)}."
    if shared_device(groups):
        yield "Runs shared the device, or may have: times compare only roughly, and are not ranked."
    if is_resident(groups):
        yield f"{WHOLE_PROCESS} It is not ranked."
    yield from table.left_out


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [heads, ["---"] * len(heads), *rows])


def to_markdown(table: ComparisonTable) -> str:
    """As Markdown."""
    marks = {FIRST: "**{}**", SECOND: "<u>{}</u>"}
    rows, before = [], ""
    for line in table.lines:
        cells = [
            marks.get(cell.place, "{}").format(cell.text) + (cell.spread and f" ± {cell.spread}")
            for cell in line.cells
        ]
        name = line.dataset if line.dataset != before else ""
        rows.append([name, line.name, *cells, *([line.change] if table.change else [])])
        before = line.dataset
    return _markdown(table.heads, rows)


def make_markdown(comparisons: Sequence[Comparison]) -> str:
    """The tables of all comparisons, with the settings that were chosen, as Markdown."""
    parts = []
    for comparison in comparisons:
        parts.append(f"## {comparison.sweep.title}\n\n{count_runs([comparison])}\n")
        tables = [spec for spec in comparison.sweep.figures if spec.kind == "table"]
        for spec in tables or [FigureSpec("table")]:
            if groups := comparison.groups_of(spec):
                made = make_table(groups, spec)
                chosen = f"Chosen by validation NDCG@10: {'; '.join(chosen_lines(made))}."
                parts += [to_markdown(made), " ".join([*caveats(made), chosen]) + "\n"]
        if comparison.sweep.measure == "steps":
            parts += _memory_markdown(comparison.groups)
        for name, row in name_failed(comparison.rows):
            parts.append(f"- {name}: {row['failure']['kind']}\n")
    return "\n".join(parts)


def _memory_markdown(groups: Sequence[SeedGroup]) -> Iterator[str]:
    """Peak memory of measured steps: rows for losses and their settings, columns for datasets."""
    names, alike = datasets_of(groups), comparable(groups)
    rows = []
    for loss in LOSSES:
        ours = [one for one in alike if one.loss == loss and one.mean("memory") is not None]
        found: dict[str, dict[str, str]] = {}
        for group in sorted(ours, key=lambda group: group.mean("memory") or 0.0):
            cells = found.setdefault(describe(group, varied(ours)), {})
            cells[group.dataset] = group.show("memory", show_memory)  # of one name, the larger
        rows += [
            [label, *(cells.get(name, "–") for name in names)]
            for label, cells in sorted(found.items())
        ]
    yield _markdown(["loss", *names], rows)
    told = [*([WHOLE_PROCESS] if is_resident(alike) else []), *left_out(groups)]
    if told:
        yield " ".join(told) + "\n"


def to_csv(rows: Sequence[Row]) -> str:
    """Every setting with its means and spreads, finished or failed: a line each, for other tools.

    Memory, time and speed are of the runs on the device that is named; how many of the seeds ran
    elsewhere is in the column `left_out`.
    """
    groups, failed = group_seeds(rows), group_seeds(rows, FAILED)
    settings = sorted({name for one in [*groups, *failed] for name in one.rows[0]["settings"]})
    metrics = sorted({name for one in groups for name in one.value("test") or {}})
    measured = [f"{split}.{name}" for split in ("validation", "test") for name in metrics]
    measured += ["memory", "time", "speed"]
    lines: list[dict[str, Any]] = []
    alike = {
        dataset: iter(comparable([one for one in groups if one.dataset == dataset]))
        for dataset in datasets_of(groups)
    }
    for one in [*(next(alike[group.dataset]) for group in groups), *failed]:
        first = one.rows[0]
        kept = [row for row in one.rows if conditions_of(row)]
        lines.append(
            {
                "dataset": one.dataset,
                "items": one.value("items"),
                "seeds": len(one.rows),
                "status": first["status"],
                "failure": lookup(first, "failure", "kind"),
                "at_once": max(row.get("at_once") or 0 for row in one.rows) or None,
                "device": kept[0].get("device") if kept else None,
                "memory_measured": kept[0].get("memory_measured") if kept else None,
                "left_out": None if first["status"] == FAILED else len(one.rows) - len(kept),
                **{name: one.value(name) for name in settings if name != "training.seed"},
                **{name: one.mean(name) for name in measured},
                **{f"{name}.std": one.spread(name) for name in measured},
            }
        )
    out = io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]) if lines else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()
