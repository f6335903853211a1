"""A comparison as one self-contained HTML page, and its figures as files."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files

from sce import __version__
from sce.experiments.charts import Drawn, as_figure, as_file
from sce.experiments.figures import make_figures
from sce.experiments.place import Sweep
from sce.experiments.rows import FAILED, Row
from sce.experiments.summary import (
    LOSSES,
    Setting,
    best,
    datasets_of,
    describe,
    group_settings,
    relative,
    show_change,
    varied,
)
from sce.experiments.tables import chosen_lines, make_table, to_html, to_markdown
from sce.experiments.views import View
from sce.report.document import make_document
from sce.report.formatting import show_duration, show_memory, show_metric
from sce.report.markup import Markup, element, join
from sce.report.parts import figures, folded, notice, plural, section, table, tiles


@dataclass(frozen=True)
class Comparison:
    """A sweep and the rows of its runs."""

    sweep: Sweep
    rows: Sequence[Row]

    @property
    def settings(self) -> list[Setting]:
        """The finished runs, over seeds."""
        return group_settings(self.rows)

    @property
    def failed(self) -> list[Row]:
        """The runs that came to nothing."""
        return [row for row in self.rows if row["status"] == FAILED]


def make_page(comparisons: Sequence[Comparison], *, written: datetime) -> str:
    """Make the page.

    Args:
        comparisons: Its parts, in order.
        written: The time that the page bears.
    """
    rows = _all_rows(comparisons)
    title = comparisons[0].sweep.title if len(comparisons) == 1 else "Losses side by side"
    body = join(
        element(
            "header",
            element("p", "Comparison of training runs", class_="eyebrow"),
            element("h1", title),
            element("p", _sentence(rows), class_="lead"),
            tiles(list(_verdicts(comparisons))),
        ),
        element(
            "main",
            [_part(comparison, number) for number, comparison in enumerate(comparisons)],
            _failures(rows),
            section("Everything measured", _everything(comparisons), _circumstances(rows)),
        ),
        element("footer", f"Page written by sce {__version__} on {written:%Y-%m-%d at %H:%M}."),
    )
    style = _read("sce.report", "page.css") + _read("sce.experiments", "compare.css")
    return make_document(title, body, style=style, script=_read("sce.experiments", "compare.js"))


def make_files(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """The figures as SVG, by the names of files."""
    style, found = _read("sce.experiments", "figure.css"), {}
    for comparison in comparisons:
        for view in comparison.sweep.views:
            for drawn in _figures_of(comparison, view):
                found[f"{comparison.sweep.name}-{_key(drawn)}.svg"] = as_file(drawn, style)
    return found


def make_markdown(comparisons: Sequence[Comparison]) -> str:
    """The tables, and what was chosen for them, as Markdown."""
    parts = []
    for comparison in comparisons:
        parts.append(f"## {comparison.sweep.title}\n\n{_sentence(comparison.rows)}\n")
        tables = [view for view in comparison.sweep.views if view.kind == "table"]
        for view in tables or [View("table")]:
            settings = _of(comparison, view)
            if comparison.sweep.measure == "steps" or not settings:
                continue
            made = make_table(settings, view)
            parts.append(to_markdown(made))
            parts.append("Chosen by validation NDCG@10: " + "; ".join(chosen_lines(made)) + ".\n")
        if comparison.sweep.measure == "steps":
            parts.append(_memory_markdown(comparison.settings))
        for row in comparison.failed:
            parts.append(f"- {_name_of(row)}: {row['failure']['kind']}\n")
    return "\n".join(parts)


def _memory_markdown(settings: Sequence[Setting]) -> str:
    """Peak memory of measured steps: a row for each loss, a column for each dataset."""
    names = datasets_of(settings)
    lines = ["| loss | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for loss, shown in LOSSES.items():
        peaks = [
            max(
                (s.mean("memory") or 0.0 for s in settings if (s.loss, s.dataset) == (loss, name)),
                default=None,
            )
            for name in names
        ]
        if any(peaks):
            lines.append(f"| {shown} | " + " | ".join(map(show_memory, peaks)) + " |")
    return "\n".join(lines) + "\n"


def _part(comparison: Comparison, number: int) -> Markup:
    parts: list[Markup] = []
    alone: list[Markup] = []  # views of a single figure stand side by side
    for place, view in enumerate(comparison.sweep.views):
        settings = _of(comparison, view)
        if view.kind == "table":
            if settings:
                made = make_table(settings, view)
                chosen = element(
                    "ul",
                    [element("li", line) for line in chosen_lines(made)],
                    class_="chosen-list",
                )
                parts.append(to_html(made, view.title or comparison.sweep.title))
                parts.append(
                    element(
                        "p",
                        "Test events; mean over seeds ± standard deviation. Best bold, second "
                        "underlined. Validation NDCG@10 chose each column's setting."
                        + _popularity(comparison.rows),
                        class_="quiet",
                    )
                )
                parts.append(folded("Settings that were chosen", chosen))
            continue
        drawn = [
            as_figure(one, f"{number}-{place}-{n}")
            for n, one in enumerate(_figures_of(comparison, view))
        ]
        if len(drawn) == 1:
            alone += drawn
        else:
            parts += _together(alone) + _together(drawn)
            alone = []
    parts += _together(alone)
    timed = any(view.kind == "pareto" and view.x == "time" for view in comparison.sweep.views)
    if parts and timed:
        parts.append(_about_time(comparison.rows))
    if not parts:
        parts.append(notice("No run of this sweep has finished yet."))
    return section(comparison.sweep.title, *parts)


def _popularity(rows: Sequence[Row]) -> str:
    """What recommending the most popular items reaches."""
    found = {
        row["dataset"]["name"]: row["popularity"]["test"]["ndcg@10"]
        for row in rows
        if row.get("popularity")
    }
    told = ", ".join(f"{show_metric(value)} on {name}" for name, value in found.items())
    return f" Popularity reaches NDCG@10 {told}." if told else ""


def _together(drawn: Sequence[Markup]) -> list[Markup]:
    made = figures(drawn)
    return [] if made is None else [made]


def _figures_of(comparison: Comparison, view: View) -> Iterator[Drawn]:
    if view.kind != "table":
        yield from make_figures(comparison.settings, view)


def _of(comparison: Comparison, view: View) -> list[Setting]:
    return [s for s in comparison.settings if not view.losses or s.loss in view.losses]


def _about_time(rows: Sequence[Row]) -> Markup:
    most = [row.get("at_once") for row in rows if row["status"] != FAILED]
    known = [count for count in most if count is not None]
    if len(known) == len(most) and max(known, default=1) == 1:
        return element("p", "Every run had the device to itself.", class_="quiet")
    words = f"Up to {max(known)} runs shared the device" if known else "It is not known how many"
    words += (
        ": these times are longer than those of a run alone, and compare only roughly."
        if known
        else " runs shared the device: these times compare only roughly."
    )
    return element("p", words, class_="quiet")


def is_verdict(view: View) -> bool:
    """Whether it puts all losses side by side, in numbers."""
    return view.kind == "table" and view.by == ("loss.name",) and not view.losses


def _verdicts(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, str]]:
    """SCE against the best other loss on each dataset: the numbers to be read from afar."""
    for comparison in comparisons:
        if not any(map(is_verdict, comparison.sweep.views)):
            continue
        for dataset in datasets_of(comparison.settings):
            here = [s for s in comparison.settings if s.dataset == dataset]
            ours = best(s for s in here if s.loss == "sce")
            other = best(s for s in here if s.loss != "sce")
            if ours is None or other is None:
                continue
            values = [s.mean("test.ndcg@10") for s in (ours, other)]
            peaks = [s.mean("memory") for s in (ours, other)]
            rival = LOSSES.get(other.loss, other.loss)
            text = f"{dataset}: NDCG@10 of SCE ({show_metric(values[0])}) over {rival}"
            text += f" ({show_metric(values[1])}), the best other; memory "
            text += show_change(relative(*peaks))
            yield text, show_change(relative(*values))
        return


def _failures(rows: Sequence[Row]) -> Markup | None:
    failed = [row for row in rows if row["status"] == FAILED]
    if not failed:
        return None
    head = element("tr", [element("th", name, scope="col") for name in ("run", "what", "why")])
    body = [
        element(
            "tr",
            element("th", _name_of(row), scope="row"),
            element("td", row["failure"]["kind"], class_="text"),
            element("td", row["failure"]["message"], class_="text"),
        )
        for row in failed
    ]
    name = f"{plural(len(failed), 'run')} that failed"
    return section("Runs that failed", folded(name, table(name, [head], body)))


def _everything(comparisons: Sequence[Comparison]) -> Markup:
    settings = group_settings(_all_rows(comparisons))
    names = varied(settings)
    heads = ("data", "setting", "seeds", "test NDCG@10", "validation", "peak memory", "time")
    head = element("tr", [element("th", name, scope="col") for name in heads])
    body = []
    for dataset in datasets_of(settings):
        here = [s for s in settings if s.dataset == dataset]
        for setting in sorted(here, key=lambda s: -s.score):
            spread = setting.spread("test.ndcg@10")
            wide = "" if spread is None else f" ± {show_metric(spread)}"
            cells = [
                str(len(setting.rows)),
                show_metric(setting.mean("test.ndcg@10")) + wide,
                show_metric(setting.mean("validation.ndcg@10")),
                show_memory(setting.mean("memory")),
                show_duration(setting.mean("time")),
            ]
            body.append(
                element(
                    "tr",
                    element("th", dataset, scope="row"),
                    element("td", describe(setting, names), class_="text"),
                    [element("td", cell) for cell in cells],
                )
            )
    name = f"All {plural(len(body), 'setting')}, best validation first"
    return folded(name, table(name, [head], body, wide=True))


def _circumstances(rows: Sequence[Row]) -> Markup:
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
    return element("p", " ".join(word for word in words if word), class_="quiet")


def _sentence(rows: Sequence[Row]) -> str:
    names = {row["dataset"]["name"] for row in rows}
    failed: dict[str, int] = {}
    for row in rows:
        if row["status"] == FAILED:
            kind = row["failure"]["kind"]
            failed[kind] = failed.get(kind, 0) + 1
    words = f"{plural(len(rows), 'run')} on {plural(len(names), 'dataset')}"
    told = [f"{count} {kind}" for kind, count in failed.items()]
    return words + (f"; of these, {', '.join(told)}." if told else ", all finished.")


def _name_of(row: Row) -> str:
    settings: Mapping[str, object] = row["settings"]
    loss = LOSSES.get(str(settings["loss.name"]), str(settings["loss.name"]))
    return f"{row['dataset']['name']}, {loss}, seed {row['seed']} ({row['key']})"


def _all_rows(comparisons: Sequence[Comparison]) -> list[Row]:
    return list({row["key"]: row for one in comparisons for row in one.rows}.values())


def _key(drawn: Drawn) -> str:
    return re.sub(r"[^a-z0-9]+", "-", drawn.caption.title.lower()).strip("-")


def _read(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
