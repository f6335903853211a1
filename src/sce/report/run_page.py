"""The page of a run, finished or not. Any number may be missing: the run may be young."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

from sce.data.new_items import tell_added
from sce.data.prepared import PreparedDataset
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError
from sce.evaluation.evaluate import KS
from sce.evaluation.metrics import METRICS, too_few
from sce.experiments.store import lookup
from sce.models.registry import BACKBONES
from sce.recommend import Recommender
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
from sce.report.frame import SCORE, Show, measured_on, name_loss, name_metric, number
from sce.report.pages import render
from sce.report.record import METRIC, PHASES, RANKERS, SHOWN, Record, Sample, draw_samples
from sce.training.run import Run, caveat
from sce.training.start import tell_start
from sce.units import (
    plural,
    show_count,
    show_digits,
    show_duration,
    show_memory,
    show_metric,
    show_share,
)

_DEPTHS = {
    "ndcg": "How high each user's held-out item stands; 1 is always first",
    "cov": "Share of the catalogue that is recommended to somebody",
}
_STOPPED = {
    "patience": "training stopped because validation no longer improved",
    "epochs": "training ran to its last epoch",
}
_EPOCH_COLUMNS: dict[str, tuple[tuple[str, ...], Show]] = {
    name: (keys, course.show) for course in COURSES.values() for name, keys in course.lines.items()
} | {f"{phase} peak": (("memory_mib", phase), show_memory) for phase in PHASES}


def make_page(
    run: Run, *, data: Path | None = None, device: str = "cpu", titles: Vocabulary | None = None
) -> str:
    """Make the page of a run, which says why anything is missing.

    `data` is where its dataset lies now, if it was moved; sample recommendations are computed on
    the `device`, and show these titles instead of the run's.
    """
    counts: Mapping[str, Any] = {}
    samples: list[Sample] = []
    unread = ""
    try:
        dataset = run.load_dataset(data, verify=False)
    except InputError as error:
        if data is not None:
            raise
        unread = told = f"The dataset could not be read: {error}."
    else:
        counts, (samples, told) = dataset.counts, _samples(run, dataset, device, titles)
    record = Record.read(run)
    return render(
        "run.html",
        f"{run.path.resolve().name}: a training run of sce",
        written=datetime.now(),
        run=run,
        headline=_headline(record),
        figures_of=draw_run(record),
        metrics=[
            _metrics(record, split)
            for split in ("test", "validation")
            if record.metric(split, METRIC) is not None
        ],
        apart=_apart(record),
        measured=" ".join(measured_on([record.result])),
        samples=samples,
        told=told,
        shown=SHOWN,
        order=_order(counts.get("order")),
        unread=unread,
        steps=list(_steps(counts)),
        settings=list(
            _flatten({**run.config, **({"derived": run.derived} if run.derived else {})})
        ),
        epochs=_epochs(record),
    )


def _samples(
    run: Run, dataset: PreparedDataset, device: str, titles: Vocabulary | None
) -> tuple[list[Sample], str]:
    """Samples and a sentence about them, or why there are none."""
    if not len(dataset.test):
        return [], "The dataset has no test users to recommend for."
    try:
        recommender = Recommender.load(run, device)
    except InputError as error:
        return [], f"There are no recommendations to show: {error}."
    if titles is not None:
        recommender = replace(recommender, titles=titles)
    return draw_samples(recommender, dataset)


def _headline(record: Record) -> dict[str, Any]:
    split, best = record.split, record.result["best_epoch"]
    value, other = (record.metric(split, METRIC, of) for of in RANKERS)
    users = number(record.result, "users", split)
    told = f"popularity ({show_metric(other)})"
    factor = f"{show_digits(value / other)}× {told}" if value is not None and other else None
    if factor and users is not None and too_few(users, value or 0.0, other or 0.0):
        factor = f"too few users to tell from {told}"
    done = max((one["epoch"] for one in record.epochs), default=0)
    start, added = (record.run.config.get(name) for name in ("start", "added"))
    items = show_count(record.run.dataset.n_items)
    model, loss = record.run.model, name_loss(record.run.loss)
    backbone = BACKBONES[model].label if model in BACKBONES else model
    clauses = [
        f"{backbone} trained with {loss} on a catalogue of {items} items",
        f"measured on {show_count(users)} {split} users" if users else "",
        tell_start(start) if start else "",
        f"items added to {added['run']} without training: {tell_added(added)}" if added else "",
        f"the weights kept are those of epoch {best} of {done}" if best is not None else "",
        "longer training may do better" if best == done and record.ended and value else "",
        _STOPPED.get(str(record.result.get("stopped")), ""),
    ]
    notice = ""
    if warning := caveat(record.run):
        notice = f"{warning[:1].upper()}{warning[1:]}. Test metrics are there when it ends."
    elif record.run.dataset.split == "none":
        notice = "All of the log was trained on (split none): there is nothing to measure by."
    seconds = [value for _, value in record.course("seconds", "training")]
    speed = number(record.result, "tokens_per_second")
    tiles = [
        *((f"{split} {name_metric(name)}", show_metric(record.metric(split, name)))
          for name in ("hr@10", "cov@10")),
        (f"training time, {plural(len(seconds), 'epoch')}", show_duration(sum(seconds) or None)),
        *((f"peak memory of {phase}", show_memory(number(record.result, "memory_mib", phase)))
          for phase in PHASES),
        ("tokens per second in training", show_count(speed)),
    ]  # fmt: skip
    return {
        "value": None if value is None else show_metric(value),
        "missing": "Not measured" if record.run.dataset.split == "none" else "No evaluation yet",
        "split": split,
        "factor": factor,
        "better": value is not None and other is not None and value > other,
        "sentence": f"{'; '.join(filter(None, clauses))}.",
        "notice": notice,
        "tiles": [(name, value) for name, value in tiles if value != "–"],
    }


def _metrics(record: Record, split: str) -> dict[str, Any]:
    """Every metric at every depth, the model beside popularity."""
    rankers = [of for of in RANKERS if record.metric(split, METRIC, of) is not None]
    shown = [key for key in METRICS if record.metric(split, f"{key}@10") is not None]
    rows = []
    for k in KS:
        cells: list[tuple[str, bool]] = []
        for key in shown:
            values = [record.metric(split, f"{key}@{k}", of) for of in rankers]
            best = max((value for value in values if value is not None), default=None)
            cells += [(show_metric(one), one is not None and one == best) for one in values]
        rows.append((k, cells))
    return {
        "name": f"Metrics on {split} events, the model beside popularity",
        "split": split,
        "rankers": rankers,
        "metrics": [METRICS[key].label for key in shown],
        "rows": rows,
    }


def _apart(record: Record) -> dict[str, Any]:
    """Metrics at depth 10 apart for popular and rare targets, if they were measured."""
    found: Mapping[str, Any] = lookup(record.result, "by_popularity", record.split) or {}
    names = [f"{key}@10" for key, metric in METRICS.items() if metric.gain]
    return {
        "name": f"The same apart for popular and rare targets on {record.split} events",
        "heads": ["targets", "users", *map(name_metric, names)],
        "rows": [
            [kind, show_count(part.get("users")), *(show_metric(part.get(n)) for n in names)]
            for kind, part in found.items()
        ],
    }


def _steps(counts: Mapping[str, Any]) -> Iterator[list[str]]:
    """The dataset's counts after each step of preparing."""
    for tally in [*counts.get("steps", ()), counts.get("train"), counts.get("test")]:
        if isinstance(tally, Mapping):
            found = [number(tally, key) for key in ("users", "items", "interactions")]
            users, items, events = found
            density = events / users / items if users and items and events else None
            yield [str(tally.get("name", "")), *map(show_count, found), show_share(density)]


def _order(found: Any) -> str:
    """A sentence of what preparing found about the order of events."""
    if not isinstance(found, Mapping):
        return ""
    words = [f"{name} {value}" for name, value in found.items() if isinstance(value, str | int)]
    told = [one for one in words if not one.startswith("warning ")]
    warning = found.get("warning")
    return f"Order of events: {', '.join(told)}." + (f" Beware: {warning}." if warning else "")


def _epochs(record: Record) -> dict[str, Any]:
    """Every number of every epoch that any epoch has."""
    known = {
        title: (keys, show)
        for title, (keys, show) in _EPOCH_COLUMNS.items()
        if record.course(*keys)
    }
    rows = [
        [str(one["epoch"]), *(show(number(one, *keys)) for keys, show in known.values())]
        for one in record.epochs
    ]
    best = str(record.result["best_epoch"])
    return {"heads": ["epoch", *known], "rows": rows if known else [], "best": best}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "–" if value is None else str(value)


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
