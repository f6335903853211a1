"""The charts of a run's page, by its sections."""

from collections.abc import Mapping
from typing import Any

import altair as alt
import polars as pl

from sce.evaluation.evaluate import KS
from sce.report.charts import COURSES, Course, in_words
from sce.report.drawing import (
    EPOCHS,
    HEIGHT,
    INK,
    PALETTE,
    PAPER,
    SOFT,
    WIDTH,
    Axis,
    Curve,
    Figure,
    Point,
    colours,
    draw_curves,
)
from sce.report.frame import SCORE, name_metric
from sce.report.record import METRIC, RANKERS, Record
from sce.units import show_metric

_DEPTHS = {
    "ndcg": "How high each user's held-out item stands; 1 is always first",
    "cov": "Share of the catalogue that is recommended to somebody",
}


def draw_run(record: Record) -> Mapping[str, list[Figure]]:
    """The figures that a run has the numbers for, by section."""
    found: dict[str, list[Figure]] = {"Learning": [], "Quality": []}
    for name, course in COURSES.items():
        marks = _marks(record) if name == SCORE else []
        figure = _over_epochs(record, course, marks)
        if course.section and figure is not None:
            found.setdefault(course.section, []).append(figure)
    drawn = (_by_depth(record, metric, text) for metric, text in _DEPTHS.items())
    found["Quality"] = [figure for figure in drawn if figure is not None]
    return found


def _over_epochs(record: Record, course: Course, also: list[alt.Chart]) -> Figure | None:
    """Numbers over the epochs that have them, a curve for each line."""
    title, lines, show, axis, text, _ = course
    found = [(name, record.course(*keys)) for name, keys in lines.items()]
    curves = [
        Curve(name, [Point(x, y, f"epoch {x}\n{name} {show(y)}") for x, y in values], colour)
        for (name, values), colour in zip(found, PALETTE, strict=False)
        if values
    ]
    if not curves:
        return None
    drawn = draw_curves(curves, EPOCHS, axis, also=also)
    return Figure(title[:1].upper() + title[1:], text, in_words(curves, title, show), drawn)


def _marks(record: Record) -> list[alt.Chart]:
    """The best epoch as a ring, popularity as a line across."""
    layers = []
    popularity = record.metric("validation", METRIC, "popularity")
    if popularity is not None:
        data = pl.DataFrame({"y": [popularity], "label": [f"popularity {show_metric(popularity)}"]})
        level = alt.Chart(data).encode(y="y:Q")
        text = level.mark_text(align="right", dy=-7, color=SOFT, fontSize=11.5)
        layers.append(level.mark_rule(color=SOFT, strokeDash=[5, 4]))
        layers.append(text.encode(x=alt.value(WIDTH), text="label:N"))
    epoch, value = record.result["best_epoch"], record.metric("validation", METRIC)
    if epoch is not None and value is not None:
        label = f"best: {show_metric(value)} at epoch {epoch}"
        data = pl.DataFrame({"x": [epoch], "y": [value], "label": [label]})
        place = alt.Chart(data).encode(y="y:Q")
        ring = place.mark_point(filled=True, fill=PAPER, stroke=INK, strokeWidth=2, size=90)
        text = place.mark_text(align="right", dy=-13, color=INK, fontWeight=600)
        layers.append(ring.encode(x="x:Q", opacity=alt.value(1)))
        layers.append(text.encode(x=alt.value(WIDTH), text="label:N"))
    return layers


def _by_depth(record: Record, metric: str, text: str) -> Figure | None:
    """One metric at every depth, the model beside popularity, as bars."""
    bars: list[dict[str, Any]] = [
        {"name": of, "k": str(k), "value": value, "label": f"{value:.3f}"}
        for of in RANKERS for k in KS
        if (value := record.metric(record.split, f"{metric}@{k}", of)) is not None
    ]  # fmt: skip
    if not bars:
        return None
    frame = pl.DataFrame(bars)
    rankers = frame["name"].unique(maintain_order=True).to_list()
    axis = Axis(f"{name_metric(metric)}@k", zero=True).encode(frame["value"].to_list())
    base = alt.Chart(frame).encode(
        x=alt.X("k:N", sort=None, title="k", axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("name:N", sort=rankers), y=alt.Y("value:Q", **axis),
    )  # fmt: skip
    colour = colours(list(zip(rankers, PALETTE, strict=False)), "square")
    labels = base.mark_text(dy=-6, fontSize=10, color=SOFT).encode(text="label:N")
    words = [f"{one['name']} {show_metric(one['value'])} at {one['k']}" for one in bars]
    return Figure(
        f"{name_metric(metric)}@k on {record.split} events",
        text,
        f"{', '.join(words)}.",
        (base.mark_bar().encode(color=colour) + labels).properties(width=WIDTH, height=HEIGHT),
    )
