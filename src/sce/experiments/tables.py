"""Tables as the paper's: a column for each loss, the best in bold, the second underlined."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sce.experiments.summary import (
    Setting,
    Show,
    best,
    datasets_of,
    describe,
    group_by,
    name_group,
    relative,
    show_change,
    varied,
)
from sce.experiments.views import View
from sce.report.formatting import show_duration, show_memory
from sce.report.markup import Child, Markup, element
from sce.report.parts import table as scrolling

_METRICS = {"ndcg": "NDCG", "hr": "HR", "mrr": "MRR", "cov": "COV"}
FIRST, SECOND = 1, 2


@dataclass(frozen=True)
class Cell:
    """A value, its spread over seeds, and whether it is among the best."""

    value: float | None
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
    """What was chosen of each column, and what it reached."""

    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    change: str  # what the last column says
    chosen: tuple[tuple[str, str, int], ...]  # dataset, setting, seeds


def make_table(settings: Sequence[Setting], view: View) -> ComparisonTable:
    """Choose the setting of each column by validation, and put their test metrics side by side."""
    names = list(group_by(settings, view.by))
    columns = [name_group(view.by, group) for group in names]
    columns += [str(one.get("name", "published")) for one in view.published]
    differing = varied(settings)
    lines: list[Line] = []
    chosen: list[tuple[str, str, int]] = []
    for dataset in datasets_of(settings):
        groups = group_by([s for s in settings if s.dataset == dataset], view.by)
        picked = [best(groups.get(name, ())) for name in names]
        chosen += [
            (dataset, describe(one, differing), len(one.rows)) for one in picked if one is not None
        ]
        judged = _judged(names, view)
        rival = _rival(picked, judged)
        for metric in view.metrics:
            values = [None if s is None else s.mean(f"test.{metric}") for s in picked]
            spreads = [None if s is None else s.spread(f"test.{metric}") for s in picked]
            values += [one.get(metric) for one in view.published]
            spreads += [None] * len(view.published)
            kind, _, depth = metric.partition("@")
            cells = _rank(values, spreads, _show_metric, higher=True)
            title = f"{_METRICS.get(kind, kind)}@{depth}"
            lines.append(Line(dataset, title, cells, _change(values, judged)))
        for title, name, show in (
            ("peak training memory", "memory", show_memory),
            ("training time", "time", show_duration),
        ):
            values = [None if s is None else s.mean(name) for s in picked]
            spreads = [None] * len(values)
            padding = [None] * len(view.published)
            cells = _rank([*values, *padding], [*spreads, *padding], show, higher=False)
            change = ""
            if judged is not None and rival is not None:
                change = show_change(relative(values[judged], values[rival]))
                change += f" ({columns[rival]})" if len(names) > 2 else ""
            lines.append(Line(dataset, title, cells, change))
    return ComparisonTable(
        tuple(columns), tuple(lines), _title_of_change(names, view), tuple(chosen)
    )


def _show_metric(value: float | None) -> str:
    """To four places always, as what stands in one column is compared."""
    return "–" if value is None else f"{value:.4f}"


def _judged(names: Sequence[tuple[object, ...]], view: View) -> int | None:
    """Which column is compared with the others: SCE's, or the second of two."""
    if view.by == ("loss.name",):
        return names.index(("sce",)) if ("sce",) in names and len(names) > 1 else None
    return 1 if len(names) == 2 else None


def _title_of_change(names: Sequence[tuple[object, ...]], view: View) -> str:
    judged = _judged(names, view)
    if judged is None:
        return ""
    if view.by == ("loss.name",):
        return "SCE over best other"
    return f"{name_group(view.by, names[1])} over {name_group(view.by, names[0])}"


def _rival(picked: Sequence[Setting | None], judged: int | None) -> int | None:
    """The best other column, by validation: whose cost is compared."""
    others = [(s.score, -n) for n, s in enumerate(picked) if s is not None and n != judged]
    return -max(others)[1] if others else None


def _change(values: Sequence[float | None], judged: int | None) -> str:
    if judged is None:
        return ""
    others = [v for n, v in enumerate(values) if n != judged and v is not None]
    return show_change(relative(values[judged], max(others, default=None)))


def _rank(
    values: Sequence[float | None],
    spreads: Sequence[float | None],
    show: Show,
    *,
    higher: bool,
) -> tuple[Cell, ...]:
    # Compared as they are shown: what looks equal is equal.
    order = sorted({v for v in values if v is not None}, reverse=higher)
    shown: list[str] = list(dict.fromkeys(show(value) for value in order))
    cells = []
    for value, spread in zip(values, spreads, strict=True):
        text = show(value)
        place = shown.index(text) + 1 if value is not None and len(shown) > 1 else 0
        wide = "" if spread is None else show(spread)
        cells.append(Cell(value, text, wide, place if place <= SECOND else 0))
    return tuple(cells)


def to_markdown(table: ComparisonTable) -> str:
    """As Markdown."""
    heads = ["data", "", *table.columns, *([table.change] if table.change else [])]
    rows = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
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


def to_html(table: ComparisonTable, title: str) -> Markup:
    """As HTML."""
    heads = ["data", "", *table.columns, *([table.change] if table.change else [])]
    head = element("tr", [element("th", name, scope="col") for name in heads])
    body, before = [], ""
    for line in table.lines:
        first = line.dataset != before
        count = sum(other.dataset == line.dataset for other in table.lines)
        cells: list[Child] = []
        if first:
            cells.append(element("th", line.dataset, scope="rowgroup", rowspan=count))
        cells.append(element("th", line.name, scope="row"))
        cells += [_html_cell(cell) for cell in line.cells]
        if table.change:
            cells.append(element("td", element("em", line.change)))
        body.append(element("tr", *cells, class_="begins" if first else None))
        before = line.dataset
    return scrolling(title, [head], body, wide=True)


def _html_cell(cell: Cell) -> Markup:
    names = {FIRST: "best", SECOND: "second"}
    spread = element("small", f" ± {cell.spread}") if cell.spread else None
    return element("td", element("span", cell.text), spread, class_=names.get(cell.place))


def to_csv(settings: Sequence[Setting]) -> str:
    """Every setting with its means and spreads: a line each, for other tools."""
    columns = sorted({name for s in settings for name in s.rows[0]["settings"]} - {"training.seed"})
    metrics = sorted({name for s in settings for name in s.rows[0].get("test") or {}})
    measured = [
        *(f"validation.{name}" for name in metrics),
        *(f"test.{name}" for name in metrics),
        *("memory", "time", "speed"),
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    spread = [f"{name}.std" for name in measured]
    writer.writerow(["dataset", "items", "seeds", "at_once", *columns, *measured, *spread])
    for setting in settings:
        values = [*map(setting.mean, measured), *map(setting.spread, measured)]
        most = max((row.get("at_once") or 0 for row in setting.rows), default=0) or None
        given = [setting.value(name) for name in columns]
        writer.writerow([setting.dataset, setting.items, len(setting.rows), most, *given, *values])
    return out.getvalue()


def chosen_lines(table: ComparisonTable) -> Iterator[str]:
    """What validation chose, in words."""
    for dataset, setting, seeds in table.chosen:
        yield f"{dataset}: {setting} ({seeds} seed{'s' if seeds > 1 else ''})"
