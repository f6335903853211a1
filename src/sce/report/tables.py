"""Tables of sweeps for pages, Markdown and CSV: the best in bold, the second underlined."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sce.experiments.figure_spec import MEASURES, FigureSpec
from sce.experiments.store import FAILED, Row, lookup
from sce.report import frame
from sce.report.frame import TEST, Group, SeedGroup, Show, name_metric
from sce.units import plural, show_duration, show_memory, show_spread

FIRST, SECOND = 1, 2
APART = "by_popularity.test.{}.ndcg@10"
NO_END = "the best epoch was the last, or the first with too few after it"


class Cell(NamedTuple):
    """A value, its spread over seeds, and its place among the best."""

    text: str
    spread: str = ""
    place: int = 0  # FIRST, SECOND, or neither


class Line(NamedTuple):
    """A row of the table."""

    dataset: str
    name: str
    cells: Sequence[Cell]
    change: str


class Duel(NamedTuple):
    """The compared column's setting on a dataset, and its rival: the best other by validation.

    Every comparison that is drawn from a table is between these two.
    """

    name: str
    ours: SeedGroup
    rival: str
    theirs: SeedGroup
    differ: str  # settings of model and training that differ, and not by a choice of validation

    @property
    def sides(self) -> list[tuple[str, SeedGroup]]:
        """The two, with their names."""
        return [(self.name, self.ours), (self.rival, self.theirs)]

    @property
    def unconverged(self) -> int:
        """Runs that show no end of learning."""
        return frame.unconverged(self.ours) + frame.unconverged(self.theirs)

    def doubt(self, measure: str = TEST) -> str:
        """Why the two do not compare in a measure; empty: they do."""
        if self.differ:
            return "other settings"
        if worse := [name for name, one in self.sides if frame.above(one, measure)]:
            return f"{' and '.join(worse)} worse than popularity"
        return "not converged" if self.unconverged and "test." in measure else ""

    def change(self, measure: str) -> str:
        """The difference in a measure, or why there is none to tell."""
        if doubt := self.doubt(measure):
            return doubt
        change = frame.show_change(
            frame.relative(self.ours.mean(measure), self.theirs.mean(measure))
        )
        single = "test." in measure and any(len(one.rows) == 1 for _, one in self.sides)
        return f"{change} ({self.rival}{', one seed' if single else ''})"


@dataclass
class ComparisonTable:
    """The setting that validation chose for each column, and its test metrics."""

    heads: list[str]
    lines: list[Line] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)  # the settings, in words
    groups: list[SeedGroup] = field(default_factory=list)  # the same, with their runs
    duels: list[Duel] = field(default_factory=list)
    caveats: list[str] = field(default_factory=list)  # sentences that a reader needs


def make_table(groups: Sequence[SeedGroup], spec: FigureSpec) -> ComparisonTable:
    """Choose the setting of each column by validation, and put their test metrics side by side."""
    named, differing = frame.group_by(groups, spec.by), frame.varied(groups, across=True)
    columns = [frame.name_group(spec.by, group, named) for group in named]
    judged = _judged(list(named))
    datasets = frame.datasets_of(groups)
    # What others published is for the dataset that they had.
    published = [one for one in spec.published if one.get("dataset", datasets[0]) in datasets]
    table = ComparisonTable(["data", "", *columns])
    table.heads += [str(one.get("name", "published")) for one in published]
    table.heads += [] if judged is None else [f"{columns[judged]} against best other by validation"]
    unfinished, notes = [], []
    for dataset in datasets:
        found = [[one for one in of if one.dataset == dataset] for of in named.values()]
        picked = [frame.best(members) for members in found]
        real = [one for one in picked if one is not None]
        table.groups += real
        rows = [row for one in real for row in one.rows]
        tried = [[one, *of] if one else [] for one, of in zip(picked, found, strict=True)]
        duel = _duel(columns, tried, judged, spec)
        table.duels += [duel] if duel else []
        if len(real) > 2 and (differ := _differ(tried, spec)):
            notes.append(f"Columns on {dataset} also differ in: {differ}.")
        for name, one in zip(columns, picked, strict=True):
            if one is None:
                continue
            words = f"{frame.describe(one, differing)} ({plural(len(one.rows), 'seed')})"
            table.chosen.append(f"{dataset}: {words}")
            unfinished += [f"{dataset} {name}"] if frame.unconverged(one) else []
            if popular := frame.above(one):
                worse = f"Worse than popularity ({show_score(popular)}) on test events"
                notes.append(f"{worse}: {dataset} {name}.")
            if frame.is_exact(one):
                whole = "every bucket held the whole catalogue"
                notes.append(f"{name} was exact cross-entropy on {dataset}: {whole}.")
        for name, measure, show, higher in _measured(spec):
            fair = frame.is_ranked(measure, rows)
            cells = _rank(picked, measure, show, higher=higher, fair=fair)
            for other in published:
                here = other if other.get("dataset", dataset) == dataset else {}
                cells.append(Cell(show(here.get(measure.removeprefix("test.")))))
            change = duel.change(measure) if duel and fair else ""
            if any(cell.text != "–" for cell in cells):
                table.lines.append(Line(dataset, name, cells, change))
    seeds = {len(one.rows) for one in table.groups}
    if len(seeds) > 1:
        many = f"{min(seeds)} to {max(seeds)}"
        table.caveats.append(f"Not all columns have as many seeds: {many}.")
    if unfinished:
        table.caveats.append(f"Not converged, as {NO_END}: {', '.join(unfinished)}; train longer.")
    table.caveats += notes
    return table


def _judged(names: Sequence[Group]) -> int | None:
    """The column that is compared with the others: the one of SCE, or the second of two."""
    ours = [place for place, group in enumerate(names) if "sce" in group]
    if len(ours) == 1 < len(names):
        return ours[0]
    return 1 if len(names) == 2 else None


def _duel(
    columns: Sequence[str],
    tried: Sequence[Sequence[SeedGroup]],
    judged: int | None,
    spec: FigureSpec,
) -> Duel | None:
    others = [n for n, found in enumerate(tried) if found and n != judged]
    if judged is None or not tried[judged] or not others or tried[judged][0].mean(TEST) is None:
        return None
    rival = max(others, key=lambda n: tried[n][0].score)
    ours, theirs = tried[judged], tried[rival]
    differ = _differ([ours, theirs], spec)
    return Duel(columns[judged], ours[0], columns[rival], theirs[0], differ)


def _differ(tried: Sequence[Sequence[SeedGroup]], spec: FigureSpec) -> str:
    """The settings that differ and ought not to; columns of one loss may in what they are by."""
    known = [found for found in tried if found]
    return frame.other_settings(known, spec.by if len({one.loss for one, *_ in known}) == 1 else ())


def _measured(spec: FigureSpec) -> Iterator[tuple[str, str, Show, bool]]:
    """The rows of a table: title, what is measured, how it is shown, whether more is better."""
    for metric in spec.metrics:
        same = metric == "ndcg@1" and "hr@1" not in spec.metrics
        yield "NDCG@1, HR@1" if same else name_metric(metric), f"test.{metric}", show_score, True
    for kind in ("popular", "rare"):
        yield f"NDCG@10, {kind} targets", APART.format(kind), show_score, True
    yield MEASURES["memory"].label, "memory", show_memory, False
    yield MEASURES["time"].label, "time", show_duration, False


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
        Cell(*show_spread(value, spread, show), places.get(show(value), 0))
        for value, spread in zip(values, spreads, strict=True)
    ]


def all_settings(groups: Sequence[SeedGroup]) -> tuple[list[str], list[list[str]]]:
    """Heads, and a row for each setting, on each dataset the best by validation first.

    Columns without a value are left out.
    """
    names, order = frame.varied(groups), frame.datasets_of(groups)
    ranked = sorted(groups, key=lambda one: (order.index(one.dataset), -one.score))
    rows = [["data", *frame.TOLD], *([one.dataset, *frame.tell(one, names)] for one in ranked)]
    known = [n for n in range(len(rows[0])) if any(row[n] != "–" for row in rows[1:])]
    heads, *rows = ([row[n] for n in known] for row in rows)
    return heads, rows


def to_csv(rows: Sequence[Row]) -> str:
    """Every setting with its means and spreads, finished or failed: a line each, for other tools.

    Memory, time and speed are of the runs on the device that is named; sizes of the loss that were
    not set, as they followed from the data.
    """
    rows = frame.comparable(rows)[0]
    groups = [*frame.group_seeds(rows), *frame.group_seeds(rows, FAILED)]
    settings = sorted({name for one in groups for name in one.rows[0]["settings"]})
    metrics = sorted({name for one in groups for name in one.rows[0].get("test") or {}})
    measured = [f"{split}.{name}" for split in ("validation", "test") for name in metrics]
    measured += [APART.format(kind) for kind in ("popular", "rare")]
    measured += ["memory", "time", "speed"]
    lines: list[dict[str, Any]] = []
    for one in groups:
        first = one.rows[0]
        device = next((row for row in one.rows if row.get("device")), first)
        lines.append(
            {
                "dataset": one.dataset,
                "items": one.value("items"),
                "seeds": len(one.rows),
                "status": first["status"],
                "failure": lookup(first, "failure", "kind"),
                "at_once": max(row.get("at_once") or 0 for row in one.rows) or None,
                "device": device.get("device"),
                "memory_measured": device.get("memory_measured"),
                **{name: one.value(name) for name in settings if name != "training.seed"},
                **{
                    f"loss.{name}": value
                    for name, value in (first.get("derived") or {}).items()
                    if f"loss.{name}" in settings and one.value(f"loss.{name}") is None
                },
                **{name: one.mean(name) for name in measured},
                **{f"{name}.std": one.spread(name) for name in measured},
            }
        )
    out = io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]) if lines else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()
