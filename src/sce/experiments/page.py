"""A comparison as one self-contained HTML page, and its figures as files."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.resources import files

from sce import __version__
from sce.experiments.charts import Drawn
from sce.experiments.comparison import (
    Comparison,
    all_rows,
    count_runs,
    is_verdict,
    name_failed,
)
from sce.experiments.conditions import is_resident, left_out, measure_alike
from sce.experiments.figures import make_figures
from sce.experiments.frames import as_figure, as_file
from sce.experiments.rows import FAILED, Row
from sce.experiments.summary import (
    LOSSES,
    Setting,
    datasets_of,
    describe,
    group_settings,
    relative,
    show_change,
    varied,
    with_spread,
)
from sce.experiments.tables import caveats, chosen_lines, make_table, show_score, to_html
from sce.experiments.views import View
from sce.report.document import make_document
from sce.report.markup import Markup, element, join
from sce.report.parts import figures, folded, notice, section, table, tiles
from sce.units import plural, show_duration, show_memory, show_metric


def make_page(comparisons: Sequence[Comparison], *, written: datetime) -> str:
    """Make the page.

    Args:
        comparisons: Its parts, in order.
        written: The time that the page bears.
    """
    rows = all_rows(comparisons)
    title = comparisons[0].sweep.title if len(comparisons) == 1 else "Losses side by side"
    body = join(
        element(
            "header",
            element("p", "Comparison of training runs", class_="eyebrow"),
            element("h1", title),
            element("p", count_runs(comparisons), class_="lead"),
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
                name, count = f"{comparison.sweep.name}-{_key(drawn)}", 1
                while (file := f"{name}{f'-{count}' if count > 1 else ''}.svg") in found:
                    count += 1  # two figures may have one title
                found[file] = as_file(drawn, style)
    return found


def _part(comparison: Comparison, number: int) -> Markup:
    parts: list[Markup] = []
    alone: list[Markup] = []  # views of a single figure stand side by side
    for place, view in enumerate(comparison.sweep.views):
        settings = comparison.settings_of(view)
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
                        "underlined. Validation NDCG@10 chose each column's setting, among those "
                        "with the most seeds. "
                        + " ".join([*caveats(made), *_popularity(comparison.rows)]),
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
    if not parts and comparison.settings:
        parts.append(notice("No run of this sweep has measured what its figures show."))
    elif not parts:
        parts.append(notice("No run of this sweep has finished yet."))
    return section(comparison.sweep.title, *parts)


def _popularity(rows: Sequence[Row]) -> Iterator[str]:
    """What recommending the most popular items reaches."""
    found = {
        row["dataset"]["name"]: row["popularity"]["test"]["ndcg@10"]
        for row in rows
        if row.get("popularity")
    }
    told = ", ".join(f"{show_metric(value)} on {name}" for name, value in found.items())
    if told:
        yield f"Popularity reaches NDCG@10 {told}."


def _together(drawn: Sequence[Markup]) -> list[Markup]:
    made = figures(drawn)
    return [] if made is None else [made]


def _figures_of(comparison: Comparison, view: View) -> Iterator[Drawn]:
    if view.kind != "table":
        yield from make_figures(comparison.settings, view)


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


def _verdicts(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, str]]:
    """SCE against the best other loss on each dataset: the numbers to be read from afar."""
    for comparison in comparisons:
        view = next(filter(is_verdict, comparison.sweep.views), None)
        settings = [] if view is None else comparison.settings_of(view)
        if view is None or not settings:
            continue
        for dataset, ours, other in make_table(settings, view).duels:
            rival = LOSSES.get(other.loss, other.loss)
            text = f"{dataset}: NDCG@10 of SCE ({with_spread(ours, 'test.ndcg@10', show_score)}) "
            text += f"over {rival} ({with_spread(other, 'test.ndcg@10', show_score)}), the best "
            text += f"other by validation{_how_sure(ours, other)}"
            saved = relative(ours.mean("memory"), other.mean("memory"))
            if saved is not None and not is_resident([ours, other]):
                text += f"; memory {show_change(saved)}"
            values = [s.mean("test.ndcg@10") for s in (ours, other)]
            yield text, show_change(relative(*values))
        return


def _how_sure(ours: Setting, other: Setting) -> str:
    """What the spread over seeds says of a difference."""
    means = [s.mean("test.ndcg@10") for s in (ours, other)]
    spreads = [s.spread("test.ndcg@10") for s in (ours, other)]
    if means[0] is None or means[1] is None:
        return ""
    known = [spread for spread in spreads if spread is not None]
    if len(known) < len(spreads):
        return "; a single seed has no spread"
    within = abs(means[0] - means[1]) < max(known)
    return "; the difference is within the spread of seeds" if within else ""


def _failures(rows: Sequence[Row]) -> Markup | None:
    failed = name_failed(rows)
    if not failed:
        return None
    head = element("tr", [element("th", name, scope="col") for name in ("run", "what", "why")])
    body = [
        element(
            "tr",
            element("th", name, scope="row"),
            element("td", row["failure"]["kind"], class_="text"),
            element("td", row["failure"]["message"], class_="text"),
        )
        for name, row in failed
    ]
    name = f"{plural(len(failed), 'run')} that failed"
    return section("Runs that failed", folded(name, table(name, [head], body)))


def _everything(comparisons: Sequence[Comparison]) -> Markup:
    settings = group_settings(all_rows(comparisons))
    names = varied(settings)
    heads = ("data", "setting", "seeds", "test NDCG@10", "validation", "peak memory", "time")
    head = element("tr", [element("th", name, scope="col") for name in heads])
    body, apart = [], []
    for dataset in datasets_of(settings):
        here = [s for s in settings if s.dataset == dataset]
        apart += [f"{dataset}: {sentence}" for sentence in left_out(here)]
        for setting in sorted(measure_alike(here), key=lambda s: -s.score):
            cells = [
                str(len(setting.rows)),
                with_spread(setting, "test.ndcg@10", show_score),
                with_spread(setting, "validation.ndcg@10", show_score),
                with_spread(setting, "memory", show_memory),
                with_spread(setting, "time", show_duration),
            ]
            body.append(
                element(
                    "tr",
                    element("th", dataset, scope="row"),
                    element("td", describe(setting, names), class_="text"),
                    [element("td", cell) for cell in cells],
                )
            )
    many = f"All {len(body):,} settings, best validation first"
    name = many if len(body) != 1 else "The one setting"
    told = element("p", " ".join(apart), class_="quiet") if apart else None
    return folded(name, table(name, [head], body, wide=True), told)


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


def _key(drawn: Drawn) -> str:
    return re.sub(r"[^a-z0-9]+", "-", drawn.caption.title.lower()).strip("-")


def _read(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
