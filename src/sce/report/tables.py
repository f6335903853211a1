"""Tables of sweeps for pages, Markdown and CSV: the best in bold, the second underlined."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sce.experiments.figure_spec import FigureSpec
from sce.experiments.store import FAILED, Row
from sce.losses import LOSSES
from sce.report.comparison import Comparison, count_runs, name_failed
from sce.report.frame import (
    METRICS,
    WHOLE_PROCESS,
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
    name_group,
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
    cells: tuple[Cell, ...]
    change: str


@dataclass(frozen=True)
class ComparisonTable:
    """The setting that validation chose for each column, and its test metrics."""

    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    change: str  # the title of the last column
    chosen: tuple[tuple[str, SeedGroup, str], ...]  # dataset, setting, the same in words
    duels: tuple[tuple[str, SeedGroup, SeedGroup], ...]
    """For each dataset the compared column's setting, and its rival: of the others the best by
    validation. Every comparison that is drawn from the table is between these two."""
    left_out: tuple[str, ...]  # whose memory and time are not in it, in sentences

    @property
    def heads(self) -> list[str]:
        """The titles of all columns."""
        return ["data", "", *self.columns, *([self.change] if self.change else [])]


def make_table(settings: Sequence[SeedGroup], view: FigureSpec) -> ComparisonTable:
    """Choose the setting of each column by validation, and put their test metrics side by side."""
    names = list(group_by(settings, view.by))
    datasets = datasets_of(settings)
    columns = [name_group(view.by, group, names) for group in names]
    # What others published is for the dataset that they had.
    published = [one for one in view.published if one.get("dataset", datasets[0]) in datasets]
    judged, differing = _judged(names, view), varied(settings, across=True)
    picks: dict[str, list[SeedGroup | None]] = {}
    apart: list[str] = []
    for dataset in datasets:
        picked = [
            best(s for s in members if s.dataset == dataset)
            for members in group_by(settings, view.by).values()
        ]
        real = [one for one in picked if one is not None]
        alike = iter(comparable(real))
        picks[dataset] = [None if one is None else next(alike) for one in picked]
        words = f"{dataset}: " if len(datasets) > 1 else ""
        apart += [words + sentence for sentence in left_out(real)]
    rivals = {dataset: _rival(picked, judged) for dataset, picked in picks.items()}
    faced = {rival for rival in rivals.values() if rival is not None}
    lines: list[Line] = []
    chosen: list[tuple[str, SeedGroup, str]] = []
    duels: list[tuple[str, SeedGroup, SeedGroup]] = []
    for dataset, picked in picks.items():
        chosen += [(dataset, one, describe(one, differing)) for one in picked if one is not None]
        rival = rivals[dataset]
        ours = None if judged is None else picked[judged]
        theirs = None if rival is None else picked[rival]
        if ours is not None and theirs is not None:
            duels.append((dataset, ours, theirs))
        against = f" ({columns[rival]})" if rival is not None and len(faced) > 1 else ""
        for title, name, show, higher in _measured(view):
            values = [None if s is None else s.mean(name) for s in picked]
            spreads = [None if s is None else s.spread(name) for s in picked]
            fair = _is_fair(name, [s for s in picked if s is not None])
            cells = [*_rank(values, spreads, show, higher=higher, fair=fair)]
            for one in published:
                told = one.get(name.removeprefix("test."))
                known = told if one.get("dataset", dataset) == dataset else None
                cells.append(Cell(show(known)))
            change = ""
            if fair and ours is not None and theirs is not None:
                change = show_change(relative(ours.mean(name), theirs.mean(name))) + against
            lines.append(Line(dataset, title, tuple(cells), change))
    columns += [str(one.get("name", "published")) for one in published]
    title = _title_of_change([columns[n] for n in sorted(faced)], names, view)
    return ComparisonTable(
        tuple(columns), tuple(lines), title, tuple(chosen), tuple(duels), tuple(apart)
    )


def _is_fair(name: str, settings: Sequence[SeedGroup]) -> bool:
    """True if the measure depends on the loss alone, so that it can be ranked."""
    if name == "time":  # beside other runs, it is of the company as much as of the loss
        return not shared_device(settings)
    # Of a whole process, most is Python and its libraries.
    return name != "memory" or not is_resident(settings)


def _measured(view: FigureSpec) -> Iterator[tuple[str, str, Show, bool]]:
    """The rows of a table: title, what is measured, how it is shown, whether more is better."""
    for metric in view.metrics:
        kind, _, depth = metric.partition("@")
        name = f"{METRICS.get(kind, kind)}@{depth}"
        if metric == "ndcg@1" and "hr@1" not in view.metrics:
            name = "NDCG@1, HR@1"  # the same
        yield name, f"test.{metric}", show_score, True
    yield "peak training memory", "memory", show_memory, False
    yield "training time", "time", show_duration, False


def show_score(value: float | None) -> str:
    """To four places always, as what stands in one column is compared."""
    return "–" if value is None else f"{value:.4f}"


def _judged(names: Sequence[tuple[object, ...]], view: FigureSpec) -> int | None:
    """The column that is compared with the others: SCE's, or the second of two."""
    if view.by == ("loss.name",):
        return names.index(("sce",)) if ("sce",) in names and len(names) > 1 else None
    return 1 if len(names) == 2 else None


def _title_of_change(
    faced: Sequence[str], names: Sequence[tuple[object, ...]], view: FigureSpec
) -> str:
    judged = _judged(names, view)
    if judged is None:
        return ""
    rival = faced[0] if len(faced) == 1 else "best other by validation"
    return f"{name_group(view.by, names[judged], names)} over {rival}"


def _rival(picked: Sequence[SeedGroup | None], judged: int | None) -> int | None:
    """The column that is compared with: of the others the best by validation."""
    others = [(s.score, -n) for n, s in enumerate(picked) if s is not None and n != judged]
    return -max(others)[1] if others and judged is not None else None


def _rank(
    values: Sequence[float | None],
    spreads: Sequence[float | None],
    show: Show,
    *,
    higher: bool,
    fair: bool,
) -> Iterator[Cell]:
    # Compared as they are shown: what looks equal is equal.
    order = sorted({v for v in values if v is not None}, reverse=higher)
    shown: list[str] = list(dict.fromkeys(show(value) for value in order))
    for value, spread in zip(values, spreads, strict=True):
        text = show(value)
        place = shown.index(text) + 1 if value is not None and len(shown) > 1 and fair else 0
        wide = "" if spread is None else show(spread)
        yield Cell(text, wide, place if place <= SECOND else 0)


def to_markdown(table: ComparisonTable) -> str:
    """As Markdown."""
    rows = ["| " + " | ".join(table.heads) + " |", "|" + " --- |" * len(table.heads)]
    before = ""
    for line in table.lines:
        cells = [_mark(cell) + (f" ± {cell.spread}" if cell.spread else "") for cell in line.cells]
        change = [line.change] if table.change else []
        name = line.dataset if line.dataset != before else ""
        rows.append("| " + " | ".join([name, line.name, *cells, *change]) + " |")
        before = line.dataset
    return "\n".join(rows) + "\n"


def _mark(cell: Cell) -> str:
    if cell.place == FIRST:
        return f"**{cell.text}**"
    return f"<u>{cell.text}</u>" if cell.place == SECOND else cell.text


def to_csv(rows: Sequence[Row]) -> str:
    """Every setting with its means and spreads, finished or failed: a line each, for other tools.

    Memory, time and speed are of the runs on the device that is named; how many of the seeds ran
    elsewhere is in the column `left_out`.
    """
    settings = group_seeds(rows)
    failed = group_seeds(rows, FAILED)
    both = [*settings, *failed]
    columns = sorted({name for s in both for name in s.rows[0]["settings"]} - {"training.seed"})
    metrics = sorted({name for s in settings for name in s.rows[0].get("test") or {}})
    measured = [
        *(f"validation.{name}" for name in metrics),
        *(f"test.{name}" for name in metrics),
        *("memory", "time", "speed"),
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    spread = [f"{name}.std" for name in measured]
    head = ["dataset", "items", "seeds", "status", "failure", "at_once", "device"]
    writer.writerow([*head, "memory_measured", "left_out", *columns, *measured, *spread])
    alike = {
        dataset: iter(comparable([s for s in settings if s.dataset == dataset]))
        for dataset in datasets_of(settings)
    }
    for setting in [*(next(alike[s.dataset]) for s in settings), *failed]:
        most = max((row.get("at_once") or 0 for row in setting.rows), default=0) or None
        where = next((found for row in setting.rows if (found := conditions_of(row))), None)
        first = setting.rows[0]
        gone = sum(conditions_of(row) is None for row in setting.rows)
        writer.writerow(
            [
                *(setting.dataset, setting.items, len(setting.rows), first["status"]),
                *((first.get("failure") or {}).get("kind"), most),
                *(where and where.device, where and where.memory),
                None if first["status"] == FAILED else gone,
                *map(setting.value, columns),
                *map(setting.mean, measured),
                *map(setting.spread, measured),
            ]
        )
    return out.getvalue()


def chosen_lines(table: ComparisonTable) -> Iterator[str]:
    """The settings that validation chose, in words."""
    for dataset, setting, words in table.chosen:
        yield f"{dataset}: {words} ({plural(len(setting.rows), 'seed')})"


def caveats(table: ComparisonTable) -> Iterator[str]:
    """Sentences that a reader of the table needs."""
    counts = {len(setting.rows) for _, setting, _ in table.chosen}
    if len(counts) > 1:
        yield f"Not all columns have as many seeds: {min(counts)} to {max(counts)}."
    if shared_device(setting for _, setting, _ in table.chosen):
        yield "Runs shared the device, or may have: times compare only roughly, and are not ranked."
    if is_resident(setting for _, setting, _ in table.chosen):
        yield f"{WHOLE_PROCESS} It is not ranked."
    yield from table.left_out


def make_markdown(comparisons: Sequence[Comparison]) -> str:
    """The tables of all comparisons, with the settings that were chosen, as Markdown."""
    parts = []
    for comparison in comparisons:
        parts.append(f"## {comparison.sweep.title}\n\n{count_runs([comparison])}\n")
        tables = [view for view in comparison.sweep.figures if view.kind == "table"]
        for view in tables or [FigureSpec("table")]:
            groups = comparison.groups_of(view)
            if not groups:
                continue
            made = make_table(groups, view)
            parts.append(to_markdown(made))
            told = "Chosen by validation NDCG@10: " + "; ".join(chosen_lines(made)) + "."
            parts.append(" ".join([*caveats(made), told]) + "\n")
        if comparison.sweep.measure == "steps":
            parts += _memory_markdown(comparison.groups)
        for name, row in name_failed(comparison.rows):
            parts.append(f"- {name}: {row['failure']['kind']}\n")
    return "\n".join(parts)


def _memory_markdown(groups: Sequence[SeedGroup]) -> Iterator[str]:
    """Peak memory of measured steps: rows for losses and their settings, columns for datasets."""
    names, alike = datasets_of(groups), comparable(groups)
    lines = ["| loss | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for loss in LOSSES:
        ours = [group for group in alike if group.loss == loss]
        differing = varied(ours)
        found: dict[str, dict[str, str]] = {}
        for group in sorted(ours, key=lambda group: group.mean("memory") or 0.0):
            if group.mean("memory") is not None:  # of two that have one name, the larger
                cells = found.setdefault(describe(group, differing), {})
                cells[group.dataset] = group.show("memory", show_memory)
        for label, cells in sorted(found.items()):
            row = [cells.get(name, show_memory(None)) for name in names]
            lines.append(f"| {label} | " + " | ".join(row) + " |")
    yield "\n".join(lines) + "\n"
    told = [*([WHOLE_PROCESS] if is_resident(alike) else []), *left_out(groups)]
    if told:
        yield " ".join(told) + "\n"
